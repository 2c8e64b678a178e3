"""JAX kernel of embeddings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.link.jax.dispatch.basic import jax_funcify

from pytensor_ml.dispatch.jax.half import widened
from pytensor_ml.layers.embedding import EmbeddingLayer


@jax_funcify.register(EmbeddingLayer)
def jax_funcify_embedding(op: EmbeddingLayer, **kwargs: Any) -> Callable[..., jax.Array]:
    # JAX cannot raise, and would take the table's last row for what is beyond it.
    def embedding(ids: jax.Array, W: jax.Array) -> jax.Array:
        ids = jnp.asarray(ids)
        # The number of rows need not fit into ids of 8 or 16 bits.
        ids = ids.astype("int32") if ids.dtype.itemsize < 4 else ids
        has_row = (ids >= 0) & (ids < W.shape[0])
        rows = widened(W[ids]) if W.dtype == jnp.uint16 else W[ids]
        return jnp.where(has_row[..., None], rows, jnp.nan)

    return embedding
