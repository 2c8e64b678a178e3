"""The layers of modern decoders as PyTensor symbolic ops."""

import pytensor_ml.dispatch as dispatch
import pytensor_ml.rewriting as rewriting
from pytensor_ml.checkpoint import load_state, save_state
from pytensor_ml.pretrained import from_pretrained, load_network, save_network, save_pretrained
from pytensor_ml.pytensorf import function, to_jax

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "dispatch",
    "from_pretrained",
    "function",
    "load_network",
    "load_state",
    "rewriting",
    "save_network",
    "save_pretrained",
    "save_state",
    "to_jax",
]
