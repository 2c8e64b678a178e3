"""JAX kernels of rotary embeddings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.link.jax.dispatch.basic import jax_funcify

from pytensor_ml.layers.positional import ApplyRotary


@jax_funcify.register(ApplyRotary)
def jax_funcify_apply_rotary(op: ApplyRotary, **kwargs: Any) -> Callable[..., jax.Array]:
    def apply_rotary(x: jax.Array, table: jax.Array) -> jax.Array:
        n_pairs, head_axes = table.shape[-2], x.ndim - (table.ndim - 1)
        table = jnp.expand_dims(table, tuple(range(table.ndim - 3, table.ndim - 3 + head_axes)))
        jnp.broadcast_shapes(x.shape[:-1], table.shape[:-2])
        dtype = jnp.result_type(x, table, jnp.float32)
        cos, sin = table[..., 0].astype(dtype), table[..., 1].astype(dtype)
        if op.inverse:
            sin = -sin
        # With slices of a step of two, as in the inner graph, XLA is several times slower.
        axis, shape = (-2, (2, n_pairs)) if op.pairing == "half" else (-1, (n_pairs, 2))
        pairs = x[..., : 2 * n_pairs].astype(dtype).reshape(*x.shape[:-1], *shape)
        first, second = jnp.moveaxis(pairs, axis, 0)
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis)
        rotated = rotated.reshape(*x.shape[:-1], 2 * n_pairs).astype(x.dtype)
        return jnp.concatenate([rotated, x[..., 2 * n_pairs :]], axis=-1)

    return apply_rotary
