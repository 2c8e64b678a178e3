"""Numba kernel of embeddings."""

from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.dispatch.numba.basic import kernel_key, register_kernel
from pytensor_ml.dispatch.numba.half import as_float
from pytensor_ml.layers.embedding import EmbeddingLayer

Array = np.ndarray


@register_kernel(EmbeddingLayer)
def numba_funcify_embedding(op: EmbeddingLayer, node: Apply, **kwargs: Any) -> Any:
    dtype = np.dtype(node.outputs[0].type.dtype)

    # PyTensor's indexing does not check bounds on Numba and would read beyond the table.
    @numba_njit
    def embedding(ids: Array, W: Array) -> Array:
        flat = ids.ravel()
        rows = np.empty((len(flat), W.shape[1]), dtype)
        for i in range(len(flat)):
            if flat[i] < 0 or flat[i] >= W.shape[0]:
                raise IndexError("An embedding got an id that its table has no row for.")
            for j in range(W.shape[1]):
                rows[i, j] = as_float(W[flat[i], j])
        return rows.reshape((*ids.shape, W.shape[1]))

    return embedding, kernel_key(type(op), node.inputs[0].type.ndim, dtype.name)
