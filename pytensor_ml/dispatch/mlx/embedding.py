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
        has_row = (ids >= 0) & (ids < W.shape[0])
        rows = W[mx.where(has_row, ids, 0)]
        rows = widened(rows) if W.dtype == mx.uint16 else rows
        return mx.where(has_row[..., None], rows, mx.array(mx.nan, rows.dtype))

    return embedding
