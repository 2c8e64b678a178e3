"""Loading published checkpoints: which tensor fills which parameter, and the file formats."""

from pytensor_ml.models.loading.binding import bind_layer_norm, bind_linear, bind_norm
from pytensor_ml.models.loading.gguf import TENSOR_NAMES, GGUFCheckpoint, register_gguf
from pytensor_ml.models.loading.keys import Checkpoint, KeyMap
from pytensor_ml.models.loading.registry import (
    architecture_name,
    build_from_config,
    build_model,
    open_checkpoint,
    register_builder,
)
from pytensor_ml.models.loading.safetensors import SafetensorsCheckpoint
from pytensor_ml.models.loading.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "TENSOR_NAMES",
    "Checkpoint",
    "GGUFCheckpoint",
    "KeyMap",
    "SafetensorsCheckpoint",
    "StreamDecoder",
    "Tokenizer",
    "architecture_name",
    "bind_layer_norm",
    "bind_linear",
    "bind_norm",
    "build_from_config",
    "build_model",
    "open_checkpoint",
    "register_builder",
    "register_gguf",
]
