"""Numba kernels of rotary embeddings."""

from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.dispatch.numba.basic import apart, empty, kernel_key, register_kernel
from pytensor_ml.dispatch.numba.threads import count_parts, in_threads
from pytensor_ml.layers.positional import (
    POSITION_BITS,
    ApplyRotary,
    IntegerRotaryTable,
    RotaryTable,
    integer_rotary_theta,
)
from pytensor_ml.layers.rotary_scaling import DIGITS, TWO_PI, scaled_frequencies

Array = np.ndarray

LAST_POSITION = 2**POSITION_BITS - 1
RADIANS = 2 * np.pi / 2.0**64


def has_known_frequencies(op: RotaryTable) -> bool:
    """Return whether the frequencies do not depend on the length at hand."""
    return dict(op.scaling)["rope_type"] not in ("dynamic", "longrope")


@register_kernel(RotaryTable, covers=has_known_frequencies)
def numba_funcify_rotary_table(op: RotaryTable, node: Apply, **kwargs: Any) -> Any:
    frequencies, attention_factor = scaled_frequencies(
        rotary_dim=op.rotary_dim, base=op.base, scaling=op.scaling, length=1
    )
    return table_kernel(op, node, frequencies, float(attention_factor))


@register_kernel(IntegerRotaryTable)
def numba_funcify_integer_rotary_table(op: IntegerRotaryTable, node: Apply, **kwargs: Any) -> Any:
    theta = integer_rotary_theta(op.dim, op.effective_dim, op.base)
    return table_kernel(op, node, [Decimal(float(f)) for f in theta], 1.0)


def table_kernel(
    op: RotaryTable | IntegerRotaryTable,
    node: Apply,
    frequencies: Sequence[Decimal],
    amplitude: float,
) -> Any:
    """Make the kernel of a table whose frequencies are known, in radians a position.

    Turns are kept as fractions of 96 bits, whose products with a position wrap around as angles
    do, so that no digits are needed.
    """
    with localcontext(prec=DIGITS):
        turns = [int(f / TWO_PI % 1 * 2**96) for f in frequencies]
    high = np.array([t >> 32 for t in turns], "uint64")
    low = np.array([t & (2**32 - 1) for t in turns], "uint64")
    dtype = np.dtype(node.outputs[0].type.dtype)

    @numba_njit
    def rotary_table(positions: Array) -> Array:
        table = np.empty((positions.size, len(high), 2), dtype)
        fill_table(np.ascontiguousarray(positions).reshape(-1), high, low, amplitude, table)
        return table.reshape((*positions.shape, len(high), 2))

    ndim = node.inputs[0].type.ndim
    return rotary_table, kernel_key(type(op), turns, amplitude, dtype.name, ndim)


@apart
@numba_njit
def fill_table(positions: Array, high: Array, low: Array, amplitude: float, table: Array) -> None:
    for i in range(len(positions)):
        position = np.int64(positions[i])
        distance = np.uint64(abs(position))
        sign = amplitude if position >= 0 else -amplitude
        is_known = -LAST_POSITION - 1 <= position <= LAST_POSITION
        for j in range(len(high)):
            fraction = distance * high[j] + ((distance * low[j]) >> np.uint64(32))
            angle = np.int64(fraction) * RADIANS if is_known else np.nan
            table[i, j, 0] = amplitude * np.cos(angle)
            table[i, j, 1] = sign * np.sin(angle)


@register_kernel(ApplyRotary, covers=lambda op: op.has_aligned_table)
def numba_funcify_apply_rotary(op: ApplyRotary, node: Apply, **kwargs: Any) -> Any:
    x, table = node.inputs
    n_batch_axes = table.type.ndim - 3
    sign = -1 if op.inverse else 1
    dtype = np.result_type(x.type.dtype, table.type.dtype)
    is_half = op.pairing == "half"

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
        y = empty(rows.shape, rows.dtype)
        cos = np.empty((n_batch, n_steps, n_pairs), dtype)
        sin = np.empty((n_batch, n_steps, n_pairs), dtype)
        # Not by slices: assigning to one takes Numba ten seconds to compile.
        for b in range(n_batch):
            for s in range(n_steps):
                for i in range(n_pairs):
                    cos[b, s, i] = angles[b, s, i, 0]
                    sin[b, s, i] = angles[b, s, i, 1] * sign
        n_items = n_batch * n_heads
        n_parts = count_parts(n_items, 2 * x.nbytes)
        rotate_in_threads(n_items, n_parts, rows, cos, sin, is_half, y)
        return y.reshape(x.shape)

    key = kernel_key(type(op), op.pairing, op.inverse, n_batch_axes, x.type.ndim, dtype.name)
    return apply_rotary, key


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


@numba_njit
def rotate_heads(
    first: int, stop: int, x: Array, cos: Array, sin: Array, is_half: bool, y: Array
) -> None:
    for item in range(first, stop):
        b, h = item // x.shape[1], item % x.shape[1]
        if is_half:
            rotate_halves(x[b, h], cos[b], sin[b], y[b, h])
        else:
            rotate_neighbors(x[b, h], cos[b], sin[b], y[b, h])


rotate_in_threads = in_threads(rotate_heads)
