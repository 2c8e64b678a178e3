"""Numba kernels of rotary embeddings."""

from hashlib import sha256
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit
from pytensor.link.numba.dispatch.compile_ops import numba_funcify_OpFromGraph

from pytensor_ml.dispatch.numba.basic import register_kernel
from pytensor_ml.layers.positional import ApplyRotary

Array = np.ndarray


@register_kernel(ApplyRotary)
def numba_funcify_apply_rotary(op: ApplyRotary, node: Apply, **kwargs: Any) -> Any:
    if not op.has_aligned_table:
        return numba_funcify_OpFromGraph(op, node=node, **kwargs)
    x, table = node.inputs
    n_batch_axes = table.type.ndim - 3
    sign = -1 if op.inverse else 1
    dtype = np.result_type(x.type.dtype, table.type.dtype)
    rotate_rows = rotate_halves if op.pairing == "half" else rotate_neighbors

    @numba_njit
    def apply_rotary(x: Array, table: Array) -> Array:
        n_steps, n_channels = x.shape[-2:]
        n_batch, n_heads = 1, 1
        for axis in range(n_batch_axes):
            n_batch *= x.shape[axis]
        for axis in range(n_batch_axes, x.ndim - 2):
            n_heads *= x.shape[axis]
        n_pairs = table.shape[-2]
        if table.size != n_batch * n_steps * n_pairs * 2 or 2 * n_pairs > n_channels:
            raise ValueError("A rotary table's shape does not go with that of what it rotates.")
        rows = np.ascontiguousarray(x).reshape((n_batch, n_heads, n_steps, n_channels))
        angles = np.ascontiguousarray(table).reshape((n_batch, n_steps, n_pairs, 2))
        y = np.empty(rows.shape, rows.dtype)
        cos = np.empty((n_steps, n_pairs), dtype)
        sin = np.empty((n_steps, n_pairs), dtype)
        for b in range(n_batch):
            # Not by slices: assigning to one takes Numba ten seconds to compile.
            for s in range(n_steps):
                for i in range(n_pairs):
                    cos[s, i] = angles[b, s, i, 0]
                    sin[s, i] = angles[b, s, i, 1] * sign
            for h in range(n_heads):
                rotate_rows(rows[b, h], cos, sin, y[b, h])
        return y.reshape(x.shape)

    read = (op.pairing, op.inverse, n_batch_axes, x.type.ndim, dtype.name, 1)
    return apply_rotary, sha256(str((type(op), *read)).encode()).hexdigest()


@numba_njit
def rotate_halves(x: Array, cos: Array, sin: Array, y: Array) -> None:
    n_steps, n_pairs = cos.shape
    for s in range(n_steps):
        for i in range(n_pairs):
            y[s, i] = x[s, i] * cos[s, i] - x[s, n_pairs + i] * sin[s, i]
        for i in range(n_pairs):
            y[s, n_pairs + i] = x[s, n_pairs + i] * cos[s, i] + x[s, i] * sin[s, i]
        for i in range(2 * n_pairs, x.shape[1]):
            y[s, i] = x[s, i]


@numba_njit
def rotate_neighbors(x: Array, cos: Array, sin: Array, y: Array) -> None:
    n_steps, n_pairs = cos.shape
    for s in range(n_steps):
        for i in range(n_pairs):
            first, second = x[s, 2 * i], x[s, 2 * i + 1]
            y[s, 2 * i] = first * cos[s, i] - second * sin[s, i]
            y[s, 2 * i + 1] = second * cos[s, i] + first * sin[s, i]
        for i in range(2 * n_pairs, x.shape[1]):
            y[s, i] = x[s, i]
