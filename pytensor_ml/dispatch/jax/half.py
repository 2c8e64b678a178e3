"""JAX kernel of float16 words."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from pytensor.link.jax.dispatch.basic import jax_funcify

from pytensor_ml.layers.half import Widen


@jax_funcify.register(Widen)
def jax_funcify_widen(op: Widen, **kwargs: Any) -> Callable[..., jax.Array]:
    return widened


def widened(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.float16).astype(jnp.float32)
