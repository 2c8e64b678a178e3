"""JAX kernel of affine maps."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.tensor.elemwise import DimShuffle

from pytensor_ml.dispatch.jax.half import widened
from pytensor_ml.layers.linear import LinearLayer


@jax_funcify.register(LinearLayer)
def jax_funcify_linear(op: LinearLayer, node: Apply, **kwargs: Any) -> Callable[..., jax.Array]:
    made_by = node.inputs[1].owner
    is_transposed = (
        made_by is not None
        and isinstance(made_by.op, DimShuffle)
        and made_by.op.new_order == (1, 0)
    )

    def linear(X: jax.Array, W: jax.Array, *b: jax.Array) -> jax.Array:
        W = widened(W) if W.dtype == jnp.uint16 else W
        if is_transposed and prod(X.shape[:-1]) == 1:
            # XLA would copy the whole table to transpose it, in five times the time.
            product = (W.T @ X.reshape(-1)).reshape((*X.shape[:-1], W.shape[1]))
        else:
            product = X @ W
        return product + b[0] if b else product

    return linear
