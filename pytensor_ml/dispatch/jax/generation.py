"""JAX kernels of generation."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from pytensor.link.jax.dispatch.basic import jax_funcify

from pytensor_ml.generation import CacheWrite


@jax_funcify.register(CacheWrite)
def jax_funcify_cache_write(op: CacheWrite, **kwargs: Any) -> Callable[..., jax.Array]:
    def cache_write(cache: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(cache, new, slot, axis=2)

    return cache_write
