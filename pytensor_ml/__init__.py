"""The layers of modern decoders as PyTensor symbolic ops."""

from importlib.metadata import version

import pytensor_ml.dispatch as dispatch
from pytensor_ml.pytensorf import function

__version__ = version("pytensor_ml")

__all__ = ["__version__", "dispatch", "function"]
