"""What holds for every op on JAX."""

from pytensor.compile.builders import OpFromGraph
from pytensor.link.jax.dispatch import jax_funcify

from pytensor_ml.base import LayerOp


def has_kernel(op: LayerOp) -> bool:
    """Return whether a kernel runs in the place of the inner graph of ``op``."""
    return jax_funcify.dispatch(type(op)) is not jax_funcify.dispatch(OpFromGraph)
