"""Numba kernels of losses."""

from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.dispatch.numba.basic import (
    apart,
    empty,
    exp,
    kernel_key,
    largest,
    register_kernel,
    rows_of,
)
from pytensor_ml.dispatch.numba.threads import count_parts, in_threads
from pytensor_ml.loss import CrossEntropyLayer, CrossEntropyPullback

Array = np.ndarray


@register_kernel(CrossEntropyLayer)
def numba_funcify_cross_entropy(op: CrossEntropyLayer, node: Apply, **kwargs: Any) -> Any:
    smoothing, ignored = op.label_smoothing, op.ignore_index

    @numba_njit
    def cross_entropy(logits: Array, ids: Array) -> Any:
        rows, classes = rows_of(logits), flat_ids(logits, ids)
        losses, log_sums = losses_of_rows(rows, classes, smoothing)
        if ignored is not None:
            for row in range(len(rows)):
                if classes[row] == ignored:
                    losses[row] = 0
        return losses.reshape(ids.shape), log_sums.reshape(ids.shape)

    return cross_entropy, kernel_key(type(op), smoothing, ignored)


def is_of_one_dtype(op: CrossEntropyPullback) -> bool:
    """Return whether the logits, the sums and the gradient have one dtype."""
    logits, _, log_sums, g = op.input_types
    return len({kind.dtype for kind in (logits, log_sums, g)}) == 1


@register_kernel(CrossEntropyPullback, covers=is_of_one_dtype)
def numba_funcify_cross_entropy_pullback(
    op: CrossEntropyPullback, node: Apply, **kwargs: Any
) -> Any:
    smoothing, ignored = op.label_smoothing, op.ignore_index

    @numba_njit
    def cross_entropy_pullback(logits: Array, ids: Array, log_sums: Array, g: Array) -> Array:
        rows, classes = rows_of(logits), flat_ids(logits, ids)
        if log_sums.shape != ids.shape or g.shape != ids.shape:
            raise ValueError("A cross entropy got a gradient of another shape than its losses.")
        sums, factors = np.ascontiguousarray(log_sums).ravel(), np.ascontiguousarray(g).ravel()
        gradient = gradients_of_rows(rows, classes, sums, factors, smoothing)
        if ignored is not None:
            for row in range(len(rows)):
                if classes[row] == ignored:
                    gradient[row] = 0
        return gradient.reshape(logits.shape)

    return cross_entropy_pullback, kernel_key(type(op), smoothing, ignored)


@numba_njit
def flat_ids(logits: Array, ids: Array) -> Array:
    if ids.shape != logits.shape[:-1]:
        raise ValueError("A cross entropy got targets whose shape does not go with its logits.")
    return np.ascontiguousarray(ids).ravel()


@apart
@numba_njit
def losses_of_rows(logits: Array, ids: Array, smoothing: float) -> Any:
    losses, log_sums = np.empty(len(ids), logits.dtype), np.empty(len(ids), logits.dtype)
    # An exponential takes the time of some bytes.
    n_parts = count_parts(len(ids), 2 * logits.nbytes)
    losses_in_threads(len(ids), n_parts, logits, ids, smoothing, losses, log_sums)
    return losses, log_sums


@numba_njit(error_model="numpy")
def losses_part(
    first: int,
    stop: int,
    logits: Array,
    ids: Array,
    smoothing: float,
    losses: Array,
    log_sums: Array,
) -> None:
    dtype = logits.dtype.type
    n = logits.shape[1]
    logits, ids = logits[first:stop], ids[first:stop]
    losses, log_sums = losses[first:stop], log_sums[first:stop]
    for row in range(len(ids)):
        high = largest(logits[row])
        shift = high if np.isfinite(high) else dtype(0)
        total, shifted = 0.0, 0.0
        if np.isfinite(high):
            for j in range(n):
                total += np.float64(exp(logits[row, j] - shift))
        else:
            for j in range(n):
                total += np.float64(np.exp(logits[row, j]))
        if smoothing:
            for j in range(n):
                shifted += np.float64(logits[row, j] - shift)
        log_sum = dtype(np.log(total))
        chosen = logits[row, ids[row]] - shift if 0 <= ids[row] < n else dtype(np.nan)
        losses[row] = log_sum - dtype(1 - smoothing) * chosen
        if smoothing:
            losses[row] -= dtype(smoothing / n) * dtype(shifted)
        log_sums[row] = log_sum + shift


losses_in_threads = in_threads(losses_part)


@apart
@numba_njit
def gradients_of_rows(
    logits: Array, ids: Array, log_sums: Array, g: Array, smoothing: float
) -> Array:
    gradient = empty(logits.shape, logits.dtype)
    n_parts = count_parts(len(ids), 3 * logits.nbytes)
    gradients_in_threads(len(ids), n_parts, logits, ids, log_sums, g, smoothing, gradient)
    return gradient


@numba_njit(error_model="numpy")
def gradients_part(
    first: int,
    stop: int,
    logits: Array,
    ids: Array,
    log_sums: Array,
    g: Array,
    smoothing: float,
    gradient: Array,
) -> None:
    dtype = logits.dtype.type
    n = logits.shape[1]
    share, rest = dtype(smoothing / n), dtype(1 - smoothing)
    logits, ids, log_sums = logits[first:stop], ids[first:stop], log_sums[first:stop]
    g, gradient = g[first:stop], gradient[first:stop]
    for row in range(len(ids)):
        for j in range(n):
            gradient[row, j] = (exp(logits[row, j] - log_sums[row]) - share) * g[row]
        own = ids[row]
        if 0 <= own < n:
            gradient[row, own] = (exp(logits[row, own] - log_sums[row]) - share - rest) * g[row]


gradients_in_threads = in_threads(gradients_part)
