"""Numba kernels of affine maps, compiled once for all widths."""

from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.dispatch.numba.basic import (
    apart,
    empty,
    has_one_dtype,
    kernel_key,
    register_kernel,
    rows_of,
    sum_of_rows,
)
from pytensor_ml.dispatch.numba.half import multiply_by_weight
from pytensor_ml.dispatch.numba.products import multiply
from pytensor_ml.layers.linear import LinearLayer, LinearPullback

Array = np.ndarray


def is_covered(op: LinearLayer) -> bool:
    """Return whether all have one dtype, or the weight is of words and the others of float32."""
    dtypes = [kind.dtype for kind in (*op.input_types, *op.output_types)]
    weight = dtypes.pop(1)
    covered = ({"float32"},) if weight == "uint16" else ({"float32"}, {"float64"})
    return {*dtypes, weight} - {"uint16"} in covered


@register_kernel(LinearLayer, covers=is_covered)
def numba_funcify_linear(op: LinearLayer, node: Apply, **kwargs: Any) -> Any:
    if len(node.inputs) == 2:

        @numba_njit
        def linear(X: Array, W: Array) -> Array:
            return product(rows_of(X), W).reshape((*X.shape[:-1], W.shape[1]))

    else:

        @numba_njit
        def linear(X: Array, W: Array, b: Array) -> Array:
            return (product(rows_of(X), W) + b).reshape((*X.shape[:-1], W.shape[1]))

    return linear, kernel_key(type(op), len(node.inputs))


@register_kernel(LinearPullback, covers=has_one_dtype)
def numba_funcify_linear_pullback(op: LinearPullback, node: Apply, **kwargs: Any) -> Any:
    if len(node.inputs) == 3:

        @numba_njit
        def linear_pullback(X: Array, W: Array, g: Array) -> Any:
            return gradients(X, W, rows_of(g))

    else:

        @numba_njit
        def linear_pullback(X: Array, W: Array, g: Array, b: Array) -> Any:
            rows = rows_of(g)
            return *gradients(X, W, rows), sum_of_rows(rows)

    return linear_pullback, kernel_key(type(op), len(node.inputs))


@apart
@numba_njit
def product(rows: Array, W: Array) -> Array:
    if rows.shape[1] != W.shape[0]:
        raise ValueError("An affine map got an input that does not fit its weight.")
    made = empty((rows.shape[0], W.shape[1]), rows.dtype)
    multiply_by_weight(rows, W, made)
    return made


@numba_njit
def multiplied(x: Array, y: Array) -> Array:
    made = empty((x.shape[0], y.shape[1]), x.dtype)
    multiply(x, y, made)
    return made


@apart
@numba_njit
def gradients(X: Array, W: Array, g: Array) -> Any:
    if X.shape[-1] != W.shape[0] or g.shape[1] != W.shape[1] or X.size != len(g) * W.shape[0]:
        raise ValueError("An affine map got an input or a gradient that does not fit its weight.")
    if X.size == 0:
        return np.zeros_like(X), np.zeros_like(W)
    return multiplied(g, W.T).reshape(X.shape), multiplied(rows_of(X).T, g)
