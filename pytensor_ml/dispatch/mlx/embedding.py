"""MLX kernel of embeddings."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pytensor.link.mlx.dispatch.basic import mlx_funcify

from pytensor_ml.dispatch.mlx.half import widened
from pytensor_ml.layers.embedding import EmbeddingLayer


@mlx_funcify.register(EmbeddingLayer)
def mlx_funcify_embedding(op: EmbeddingLayer, **kwargs: Any) -> Callable[..., mx.array]:
    # MLX cannot raise, and would read beyond the table.
    def embedding(ids: mx.array, W: mx.array) -> mx.array:
        # The number of rows need not fit into ids of 8 or 16 bits.
        ids = ids.astype(mx.int32) if ids.itemsize < 4 else ids
        has_row = (ids >= 0) & (ids < W.shape[0])
        rows = W[mx.where(has_row, ids, 0)]
        rows = widened(rows) if W.dtype == mx.uint16 else rows
        zero = mx.array(0, rows.dtype)
        # Not mx.nan, for which Metal has no literal.
        return mx.where(has_row[..., None], rows, zero / zero)

    return embedding
