"""Whole models, and loading published ones."""

from pathlib import Path

import numpy as np
from pytensor.configdefaults import config

import pytensor_ml.models.architectures as architectures
from pytensor_ml.models.causal_lm import CausalLM
from pytensor_ml.models.decoder import DecoderOptions, register_decoder
from pytensor_ml.models.loading import (
    GGUFCheckpoint,
    KeyMap,
    SafetensorsCheckpoint,
    Tokenizer,
    architecture_name,
    bind_layer_norm,
    bind_linear,
    build_from_config,
    build_model,
    open_checkpoint,
    register_builder,
    register_gguf,
)
from pytensor_ml.state import Initializer, initial_values_from

__all__ = [
    "CausalLM",
    "DecoderOptions",
    "GGUFCheckpoint",
    "KeyMap",
    "SafetensorsCheckpoint",
    "Tokenizer",
    "architecture_name",
    "architectures",
    "bind_layer_norm",
    "bind_linear",
    "build_from_config",
    "load_causal_lm",
    "open_checkpoint",
    "register_builder",
    "register_decoder",
    "register_gguf",
]


def load_causal_lm(path: str | Path) -> CausalLM:
    """Load a language model from a file or folder, in float32 whatever floatX is.

    Parameters
    ----------
    path : str or Path
        A GGUF file, or a folder with ``config.json`` and safetensors.

    Returns
    -------
    CausalLM
        The model, its parameters filled.

    Raises
    ------
    ValueError
        If the architecture is not supported, a tensor is missing or has another shape, or the file
        holds tensors that the model has no place for.
    """
    checkpoint = open_checkpoint(path)
    with config.change_flags(floatX="float32"), initial_values_from(_PlaceholderInitializer()):
        try:
            model, keys = build_model(checkpoint.config)
        except ValueError as error:
            raise ValueError(f"{path} was not loaded: {error}") from error
    # Older versions of transformers saved the frequencies, which follow from the config.
    surplus = [key for key in keys.load(checkpoint) if not key.endswith("rotary_emb.inv_freq")]
    if surplus:
        raise ValueError(
            f"{path} holds tensors that the model has no place for, so its output would be wrong: "
            f"{', '.join(surplus)}. The file is of a variant that is not supported."
        )
    return model


class _PlaceholderInitializer(Initializer):
    """Zeros that take no memory, whatever sizes a config names; the weights replace them."""

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)
