"""JAX kernels of the norms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.link.jax.dispatch.basic import jax_funcify

from pytensor_ml.layers.norm import PreciseSum


@jax_funcify.register(PreciseSum)
def jax_funcify_precise_sum(op: PreciseSum, **kwargs: Any) -> Callable[[jax.Array], jax.Array]:
    # XLA's sum is precise. PyTensor rewrites a sum over all axes to accumulate in float64, which
    # JAX warns about.
    def precise_sum(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=op.axes)

    return precise_sum
