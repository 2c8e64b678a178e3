"""What holds for every op on MLX."""

from pytensor.compile.builders import OpFromGraph
from pytensor.link.mlx.dispatch import mlx_funcify

from pytensor_ml.base import LayerOp


def has_kernel(op: LayerOp) -> bool:
    """Return whether a kernel runs in the place of the inner graph of ``op``."""
    return mlx_funcify.dispatch(type(op)) is not mlx_funcify.dispatch(OpFromGraph)
