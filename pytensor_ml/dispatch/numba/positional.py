"""Numba kernels of rotary embeddings."""

from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.dispatch.numba.basic import (
    apart,
    empty_like_heads,
    kernel_key,
    memory,
    place,
    register_kernel,
    with_whole_vectors,
)
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

    # Otherwise a table for each batch row and head, or axes to be merged.
    is_plain = x.type.ndim == 4 and n_batch_axes < 2

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
        angles = np.ascontiguousarray(table).reshape((n_batch, n_steps, n_pairs, 2))
        cos, sin = parts_of_table(angles, dtype, sign)
        if is_plain:
            return rotate(with_whole_vectors(x), cos, sin, is_half)
        heads = np.ascontiguousarray(x).reshape((n_batch, n_heads, n_steps, n_channels))
        return np.ascontiguousarray(rotate(heads[::1], cos, sin, is_half)).reshape(x.shape)

    key = kernel_key(type(op), op.pairing, op.inverse, n_batch_axes, x.type.ndim, dtype.name)
    return apply_rotary, key


@numba_njit
def parts_of_table(angles: Array, dtype: Any, sign: int) -> Any:
    """Return cosines and sines, these times a sign."""
    shape = angles.shape[:3]
    cos, sin = np.empty(shape, dtype), np.empty(shape, dtype)
    for b in range(shape[0]):
        for s in range(shape[1]):
            for i in range(shape[2]):
                cos[b, s, i] = angles[b, s, i, 0]
                sin[b, s, i] = angles[b, s, i, 1] * sign
    return cos, sin


@apart
@numba_njit
def rotate(x: Array, cos: Array, sin: Array, is_half: bool) -> Array:
    """Rotate heads by the angles of their batch rows, or all by the same."""
    y = empty_like_heads(x, x.shape[3])
    n_batch, n_heads, n_steps, _ = x.shape
    n_parts = count_parts(n_batch * n_steps, 2 * x.nbytes)
    # In the order of the memory, unless heads are too few to share out.
    by_heads = x.strides[1] > x.strides[2] and n_batch * n_heads >= n_parts
    n_items = n_batch * (n_heads if by_heads else n_steps)
    rotate_in_threads(n_items, n_parts, x, cos, sin, is_half, by_heads, y)
    return y


@numba_njit
def rotate_steps(
    first: int,
    stop: int,
    x: Array,
    cos: Array,
    sin: Array,
    is_half: bool,
    by_heads: bool,
    y: Array,
) -> None:
    n_heads, n_steps, n_channels = x.shape[1:]
    n_outer, n_inner = (n_heads, n_steps) if by_heads else (n_steps, n_heads)
    n, n_rotated = np.uintp(cos.shape[2]), np.uintp(2 * cos.shape[2])
    xs, ys, coss, sins = memory(x), memory(y), memory(cos), memory(sin)
    two, one = np.uintp(2), np.uintp(1)
    for item in range(first, stop):
        b, outer = item // n_outer, item % n_outer
        for inner in range(n_inner):
            h, s = (outer, inner) if by_heads else (inner, outer)
            at = np.uintp(((b * n_steps if len(cos) > 1 else 0) + s) * cos.shape[2])
            at_x, at_y = place(x, b, h, s), place(y, b, h, s)
            if is_half:
                for i in range(n):
                    left, right = xs[at_x + i], xs[at_x + n + i]
                    ys[at_y + i] = left * coss[at + i] - right * sins[at + i]
                    ys[at_y + n + i] = right * coss[at + i] + left * sins[at + i]
            else:
                for i in range(n):
                    left, right = xs[at_x + two * i], xs[at_x + two * i + one]
                    ys[at_y + two * i] = left * coss[at + i] - right * sins[at + i]
                    ys[at_y + two * i + one] = right * coss[at + i] + left * sins[at + i]
            for i in range(n_rotated, np.uintp(n_channels)):
                ys[at_y + i] = xs[at_x + i]


rotate_in_threads = in_threads(rotate_steps)
