"""Numba kernels of the norms.

The loops work on matrices of rows, so that they are compiled once a dtype whatever the rank.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_funcify_and_cache_key, numba_njit

from pytensor_ml.dispatch.numba.basic import (
    apart,
    empty,
    kernel_key,
    memory,
    register_kernel,
    rows_of,
    sum_of_rows,
)
from pytensor_ml.dispatch.numba.threads import count_parts, in_threads
from pytensor_ml.layers.norm import (
    LayerNormLayer,
    LayerNormPullback,
    PreciseSum,
    RMSNormLayer,
    RMSNormPullback,
    ZeroCenteredRMSNormLayer,
)

Array = np.ndarray

# With leave to add up in lanes, which nothing else needs.
FASTMATH = {"contract", "nsz", "reassoc"}

# So many terms are added up in the dtype of the rows.
BLOCK: Any = np.uintp(512)

# A sum over rows leaves their dtype after so many.
RECENT = 16

# Means from here on have lost nothing that counts, should some products be too small for the dtype.
LEAST_MEAN = 1e-30


@register_kernel(PreciseSum)
def numba_funcify_precise_sum(op: PreciseSum, node: Apply, **kwargs: Any) -> Any:
    x = node.inputs[0]
    total = pt.sum(x, axis=op.axes, dtype=x.type.dtype, acc_dtype="float64").owner
    return numba_funcify_and_cache_key(total.op, node=total, **kwargs)


@register_kernel(RMSNormLayer)
@register_kernel(ZeroCenteredRMSNormLayer)
def numba_funcify_rms_norm(
    op: RMSNormLayer | ZeroCenteredRMSNormLayer, node: Apply, **kwargs: Any
) -> tuple[Callable, str]:
    epsilon = op.epsilon
    offset = int(isinstance(op, ZeroCenteredRMSNormLayer))

    if len(node.inputs) == 1:

        @numba_njit
        def rms_norm(x: Array) -> Array:
            return rms_norm_rows(rows_of(x), ones(x), epsilon).reshape(x.shape)

    else:

        @numba_njit
        def rms_norm(x: Array, parameter: Array) -> Array:
            factor = multiplier(x, parameter, offset)
            return rms_norm_rows(rows_of(x), factor, epsilon).reshape(x.shape)

    return rms_norm, cache_key(op, node)


@register_kernel(RMSNormPullback)
def numba_funcify_rms_norm_pullback(
    op: RMSNormPullback, node: Apply, **kwargs: Any
) -> tuple[Callable, str]:
    epsilon, offset = op.epsilon, op.offset

    if len(node.inputs) == 2:

        @numba_njit
        def rms_norm_pullback(x: Array, dy: Array) -> Any:
            dx, _ = rms_norm_pullback_rows(rows_of(x), rows_of(dy), ones(x), epsilon)
            return dx.reshape(x.shape)

    else:

        @numba_njit
        def rms_norm_pullback(x: Array, dy: Array, parameter: Array) -> Any:
            factor = multiplier(x, parameter, offset)
            dx, dfactor = rms_norm_pullback_rows(rows_of(x), rows_of(dy), factor, epsilon)
            return dx.reshape(x.shape), dfactor.astype(parameter.dtype)

    return rms_norm_pullback, cache_key(op, node)


@register_kernel(LayerNormLayer)
def numba_funcify_layer_norm(
    op: LayerNormLayer, node: Apply, **kwargs: Any
) -> tuple[Callable, str]:
    epsilon = op.epsilon

    if len(node.inputs) == 1:

        @numba_njit
        def layer_norm(x: Array) -> Array:
            scale = ones(x)
            return layer_norm_rows(rows_of(x), scale - scale, scale, epsilon).reshape(x.shape)

    else:

        @numba_njit
        def layer_norm(x: Array, loc: Array, scale: Array) -> Array:
            loc, scale = multiplier(x, loc, 0), multiplier(x, scale, 0)
            return layer_norm_rows(rows_of(x), loc, scale, epsilon).reshape(x.shape)

    return layer_norm, cache_key(op, node)


@register_kernel(LayerNormPullback)
def numba_funcify_layer_norm_pullback(
    op: LayerNormPullback, node: Apply, **kwargs: Any
) -> tuple[Callable, str]:
    epsilon = op.epsilon

    if len(node.inputs) == 2:

        @numba_njit
        def layer_norm_pullback(x: Array, dy: Array) -> Any:
            dx, _, _ = layer_norm_pullback_rows(rows_of(x), rows_of(dy), ones(x), epsilon)
            return dx.reshape(x.shape)

    else:

        @numba_njit
        def layer_norm_pullback(x: Array, dy: Array, loc: Array, scale: Array) -> Any:
            factor = multiplier(x, scale, 0)
            dx, dloc, dscale = layer_norm_pullback_rows(rows_of(x), rows_of(dy), factor, epsilon)
            return dx.reshape(x.shape), dloc.astype(loc.dtype), dscale.astype(scale.dtype)

    return layer_norm_pullback, cache_key(op, node)


def cache_key(op: Any, node: Apply) -> str:
    """Return a key made of what the kernels read, which the width is not."""
    offset = getattr(op, "offset", None)
    return kernel_key(type(op), op.epsilon, offset, len(node.inputs))


@numba_njit
def ones(x: Array) -> Array:
    return np.ones(x.shape[-1], x.dtype)


@numba_njit
def multiplier(x: Array, parameter: Array, offset: int) -> Array:
    """Return ``offset + parameter`` in the dtype of ``x``."""
    if len(parameter) != x.shape[-1]:
        raise ValueError("A norm got an input whose last axis is not as wide as its parameter.")
    made = np.empty(len(parameter), x.dtype)
    for i in range(len(made)):
        made[i] = x.dtype.type(offset) + x.dtype.type(parameter[i])
    return made


@apart
@numba_njit
def rms_norm_rows(x: Array, scale: Array, epsilon: float) -> Array:
    y = empty(x.shape, x.dtype)
    rms_norm_in_threads(len(x), count_parts(len(x), 2 * x.nbytes), x, scale, epsilon, y)
    return y


@numba_njit(error_model="numpy", fastmath=FASTMATH)
def scale_and_square(
    x: Array, at: int, factor: Any, scale: Array, y: Array, at_next: int, n: int
) -> float:
    """Fill a row of ``y`` from that of ``x``, and return the sum of squares of the next.

    To read a row takes as long as to write one, and can be done meanwhile.
    """
    xx = 0.0
    for start in range(np.uintp(0), n, BLOCK):
        part = x.dtype.type(0)
        for i in range(start, min(start + BLOCK, n)):
            y[at + i] = x[at + i] * factor * scale[i]
            part += x[at_next + i] * x[at_next + i]
        xx += np.float64(part)
    return xx


@numba_njit(error_model="numpy", fastmath=FASTMATH)
def rms_norm_part(first: int, stop: int, x: Array, scale: Array, epsilon: float, y: Array) -> None:
    n = np.uintp(x.shape[1])
    xs, ys, scales = memory(x), memory(y), memory(scale)
    xx = 0.0
    for row in range(first, stop):
        at = np.uintp(row) * n
        if not LEAST_MEAN * n < xx < np.inf:
            xx = 0.0
            for i in range(n):
                xx += np.float64(xs[at + i]) * np.float64(xs[at + i])
        r = x.dtype.type(1 / np.sqrt(xx / n + epsilon))
        at_next = at + n if row + 1 < stop else at
        xx = scale_and_square(xs, at, r, scales, ys, at_next, n)


rms_norm_in_threads = in_threads(rms_norm_part)


@apart
@numba_njit
def rms_norm_pullback_rows(x: Array, dy: Array, scale: Array, epsilon: float) -> Any:
    if dy.shape != x.shape:
        raise ValueError("A norm got a gradient of another shape than its input.")
    dx = empty(x.shape, x.dtype)
    n_parts = count_parts(len(x), 3 * x.nbytes)
    # A row a thread: where it would add to, others do too.
    dscales = np.zeros((n_parts, x.shape[1]))
    per_part = -(-len(x) // n_parts)
    rms_norm_pullback_in_threads(n_parts, n_parts, x, dy, scale, epsilon, per_part, dx, dscales)
    return dx, sum_of_rows(dscales)


@numba_njit(error_model="numpy", fastmath=FASTMATH)
def sums_of_row(x: Array, dy: Array, scale: Array, at: int, n: int) -> Any:
    """Return the sums of x^2 and of x times the gradient of the normalized row."""
    xx, gx = 0.0, 0.0
    for start in range(np.uintp(0), n, BLOCK):
        part_xx, part_gx = x.dtype.type(0), x.dtype.type(0)
        for i in range(start, min(start + BLOCK, n)):
            part_xx += x[at + i] * x[at + i]
            part_gx += dy[at + i] * scale[i] * x[at + i]
        xx += np.float64(part_xx)
        gx += np.float64(part_gx)
    if not (LEAST_MEAN * n < xx < np.inf and LEAST_MEAN * n < abs(gx) < np.inf):
        xx, gx = 0.0, 0.0
        for i in range(n):
            xx += np.float64(x[at + i]) * np.float64(x[at + i])
            gx += np.float64(dy[at + i] * scale[i]) * np.float64(x[at + i])
    return xx, gx


@numba_njit(error_model="numpy", fastmath=FASTMATH)
def rms_norm_pullback_part(
    part: int,
    _: int,
    x: Array,
    dy: Array,
    scale: Array,
    epsilon: float,
    per_part: int,
    dx: Array,
    dscales: Array,
) -> None:
    n = np.uintp(x.shape[1])
    stop = min((part + 1) * per_part, len(x))
    recent = np.zeros(x.shape[1], x.dtype)
    xs, dys, scales, dxs, recents = memory(x), memory(dy), memory(scale), memory(dx), memory(recent)
    for row in range(part * per_part, stop):
        at = np.uintp(row) * n
        xx, gx = sums_of_row(xs, dys, scales, at, n)
        rms = np.sqrt(xx / n + epsilon)
        r, mean = x.dtype.type(1 / rms), x.dtype.type(gx / rms / n)
        for i in range(n):
            normalized = xs[at + i] * r
            recents[i] += dys[at + i] * normalized
            dxs[at + i] = r * (dys[at + i] * scales[i] - normalized * mean)
        if row % RECENT == RECENT - 1 or row == stop - 1:
            for i in range(x.shape[1]):
                dscales[part, i] += recent[i]
                recent[i] = 0


rms_norm_pullback_in_threads = in_threads(rms_norm_pullback_part)


@numba_njit(error_model="numpy")
def center(x: Array, centered: Array) -> None:
    """Fill ``centered`` with a row minus its mean, then minus the mean of what rounding left."""
    total = 0.0
    for i in range(len(x)):
        total += np.float64(x[i])
    mean = total / len(x)
    total = 0.0
    for i in range(len(x)):
        centered[i] = np.float64(x[i]) - mean
        total += centered[i]
    rest = total / len(x)
    # A loop of its own, as fastmath would join the two means into one that is rounded.
    for i in range(len(x)):
        centered[i] -= rest


@apart
@numba_njit(error_model="numpy")
def layer_norm_rows(x: Array, loc: Array, scale: Array, epsilon: float) -> Array:
    rows, n = x.shape
    y = empty(x.shape, x.dtype)
    d = np.empty(n)
    for row in range(rows):
        center(x[row], d)
        dd = 0.0
        for i in range(n):
            dd += d[i] * d[i]
        r = 1 / np.sqrt(dd / n + epsilon)
        for i in range(n):
            y[row, i] = x.dtype.type(d[i] * r) * scale[i] + loc[i]
    return y


@apart
@numba_njit(error_model="numpy")
def layer_norm_pullback_rows(x: Array, dy: Array, scale: Array, epsilon: float) -> Any:
    rows, n = x.shape
    if dy.shape != x.shape:
        raise ValueError("A norm got a gradient of another shape than its input.")
    dx = empty(x.shape, x.dtype)
    dloc = np.zeros(n)
    dscale = np.zeros(n)
    d = np.empty(n)
    for row in range(rows):
        center(x[row], d)
        dd = 0.0
        g_sum = 0.0
        gd = 0.0
        for i in range(n):
            g = np.float64(dy[row, i] * scale[i])
            dd += d[i] * d[i]
            g_sum += g
            gd += g * d[i]
        r = 1 / np.sqrt(dd / n + epsilon)
        root = x.dtype.type(r)
        g_mean = x.dtype.type(g_sum / n)
        gd_mean = x.dtype.type(gd * r / n)
        for i in range(n):
            normalized = x.dtype.type(d[i] * r)
            dloc[i] += dy[row, i]
            dscale[i] += dy[row, i] * normalized
            dx[row, i] = root * (dy[row, i] * scale[i] - g_mean - normalized * gd_mean)
    return dx, dloc, dscale
