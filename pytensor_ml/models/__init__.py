"""Whole models, and loading published ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config as config_flags

import pytensor_ml.models.architectures as architectures
from pytensor_ml.models.causal_lm import CausalLM
from pytensor_ml.models.decoder import DecoderOptions, register_decoder
from pytensor_ml.models.halving import halve_weights
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
from pytensor_ml.pytensorf import collect_shared_variables
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
    "halve_weights",
    "load_causal_lm",
    "open_checkpoint",
    "register_builder",
    "register_decoder",
    "register_gguf",
    "save_causal_lm",
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
    with config_flags.change_flags(floatX="float32"), initial_values_from(_Placeholder()):
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


def save_causal_lm(model: CausalLM, folder: str | Path, *, config: dict[str, Any]) -> None:
    """Write a language model as transformers does: ``config.json`` and ``model.safetensors``.

    Parameters
    ----------
    model : CausalLM
        What :func:`load_causal_lm` or ``build_model`` has made.
    folder : str or Path
        Where to; made if there is none. Files that it holds under these names are replaced.
    config : dict
        What the model was made from: ``open_checkpoint(path).config``, or what ``build_model`` got.
        That of a GGUF file has no ``model_type``, which transformers' Auto classes go by.

    Raises
    ------
    ValueError
        If the config describes a model with other parameters, or weights are halved.

    Examples
    --------
    >>> from pytensor_ml.models import load_causal_lm, open_checkpoint, save_causal_lm
    >>> def to_float32(path, folder):
    ...     model = load_causal_lm(path)
    ...     save_causal_lm(model, folder, config=open_checkpoint(path).config)
    """
    # That module reads files by what lies in this package.
    from pytensor_ml.checkpoint import write_safetensors, written_atomically

    ids = pt.tensor("ids", shape=(None, None), dtype="int64")
    parameters = collect_shared_variables(model(ids))
    values = {str(v.name): np.asarray(v.get_value(borrow=True)) for v in parameters}
    if halved := [name for name, value in values.items() if value.dtype == "uint16"]:
        raise ValueError(
            f"{halved[0]} is halved, and transformers would take its words for numbers. Save the "
            "model before halve_weights."
        )
    with config_flags.change_flags(floatX="float32"), initial_values_from(_Placeholder()):
        _, keys = build_model(config)
    bound = keys.keys()
    known = {str(keys.parameter_for(key).name) for key in bound}
    if surplus := sorted(values.keys() - known):
        raise ValueError(
            f"The config describes a model without {', '.join(surplus)}, which would be lost. Pass "
            "the config that the model was made from."
        )
    tensors = keys.tensors(values)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    [dtype] = {array.dtype.name for array in tensors.values()}
    config = {key: value for key, value in config.items() if key != "torch_dtype"}
    with written_atomically(folder / "model.safetensors") as file:
        # Without this entry transformers reads no tensors.
        write_safetensors(file, tensors, {"format": "pt"})
    with written_atomically(folder / "config.json") as file:
        file.write(json.dumps({**config, "dtype": dtype}, indent=2).encode())


class _Placeholder(Initializer):
    """Zeros that take no memory, whatever sizes a config names; the weights replace them."""

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)
