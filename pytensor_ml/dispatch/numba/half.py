"""Numba kernels of float16 words."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, overload
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.dispatch.numba.basic import empty, kernel_key, register_kernel
from pytensor_ml.dispatch.numba.products import multiply, multiply_vector
from pytensor_ml.dispatch.numba.threads import count_parts, count_threads, in_threads
from pytensor_ml.layers.half import Widen

Array = np.ndarray

# A processor works on too few lines of the memory at once to hide how long each takes, as words
# are many to a line; so they are asked for this far ahead.
BYTES_AHEAD = 2**14
LINE_BYTES = 64

# For so few rows reading words again costs less than writing their values and reading those.
FEW_ROWS = 4


@register_kernel(Widen)
def numba_funcify_widen(op: Widen, node: Apply, **kwargs: Any) -> Any:
    @numba_njit
    def widen(words: Array) -> Array:
        return widened(np.ascontiguousarray(words).reshape(words.size)).reshape(words.shape)

    return widen, kernel_key(type(op), node.inputs[0].type.ndim)


def _float_of_word(typing_context: Any, word: Any) -> Any:
    """Return the float32 of a float16's word."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def _prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the line of memory at an address, which need not be anything's."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        ask = get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag]),
            "llvm.prefetch.p0i8",
        )
        # To read, to be kept, data.
        builder.call(ask, [builder.inttoptr(values[0], pointer), flag(0), flag(2), flag(1)])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


float_of_word: Any = intrinsic(_float_of_word)
prefetch: Any = intrinsic(_prefetch)


def as_float(x: Any) -> Any:
    """The float that an entry of a weight is; compiled by its dtype."""


@overload(as_float)
def overload_as_float(x: Any) -> Callable:
    def widen(x: Any) -> Any:
        return float_of_word(x)

    def keep(x: Any) -> Any:
        return x

    return widen if x == types.uint16 else keep


@numba_njit
def widened(words: Array) -> Array:
    """Return the values of a vector of words."""
    values = empty(words.shape, np.float32)
    for i in range(len(words)):
        values[i] = float_of_word(words[i])
    return values


@numba_njit
def prefetch_row(words: Array, row: int, first: int, stop: int) -> None:
    """Ask for part of a row of a matrix, or what is in its place, that lies some way ahead."""
    start = words.ctypes.data + row * words.shape[1] * words.itemsize + BYTES_AHEAD
    for byte in range(first * words.itemsize, stop * words.itemsize, LINE_BYTES):
        prefetch(np.uintp(start + byte))


@numba_njit(fastmath={"contract", "reassoc"})
def inner_products(first: int, stop: int, x: Array, words: Array, y: Array) -> None:
    """Fill part of ``y`` with the inner products of ``x`` with rows."""
    for row in range(first, stop):
        prefetch_row(words, row, 0, len(x))
        total = np.float32(0)
        for i in range(len(x)):
            total += x[i] * float_of_word(words[row, i])
        y[row] = total


@numba_njit(fastmath={"contract"})
def weighted_sum(first: int, stop: int, x: Array, words: Array, y: Array) -> None:
    """Fill part of ``y`` with that of the sum of the rows, each times an entry of ``x``."""
    # Slices, as LLVM vectorizes no loop whose index might be below 0.
    part = y[first:stop]
    part[:] = 0
    whole = len(words) - len(words) % 4
    for row in range(0, whole, 4):
        for ahead in range(row, row + 4):
            prefetch_row(words, ahead, first, stop)
        a, b = words[row, first:stop], words[row + 1, first:stop]
        c, d = words[row + 2, first:stop], words[row + 3, first:stop]
        for j in range(len(part)):
            part[j] += (
                x[row] * float_of_word(a[j])
                + x[row + 1] * float_of_word(b[j])
                + x[row + 2] * float_of_word(c[j])
                + x[row + 3] * float_of_word(d[j])
            )
    for row in range(whole, len(words)):
        a = words[row, first:stop]
        for j in range(len(part)):
            part[j] += x[row] * float_of_word(a[j])


inner_products_in_threads = in_threads(inner_products)
weighted_sum_in_threads = in_threads(weighted_sum)


def multiply_by_weight(rows: Array, W: Array, made: Array) -> None:
    """Fill ``made`` with the product of rows with a weight; compiled by the dtype of the weight."""


@overload(multiply_by_weight)
def overload_multiply_by_weight(rows: Any, W: Any, made: Any) -> Callable:
    def by_words(rows: Any, W: Any, made: Any) -> Any:
        if len(rows) > FEW_ROWS:
            if W.strides[0] == W.itemsize:
                columns = widened(np.ascontiguousarray(W.T).reshape(W.size)).reshape(W.T.shape)
                multiply(rows, columns.T, made)
            else:
                values = widened(np.ascontiguousarray(W).reshape(W.size)).reshape(W.shape)
                multiply(rows, values, made)
        elif W.strides[0] == W.itemsize:
            columns = np.ascontiguousarray(W.T)
            n_parts = count_parts(W.shape[1], W.size * W.itemsize)
            for i in range(len(rows)):
                inner_products_in_threads(W.shape[1], n_parts, rows[i], columns, made[i])
        else:
            words = np.ascontiguousarray(W)
            # Few, as the parts of a row that a thread reads lie apart.
            n_parts = min(count_threads(), count_parts(W.shape[1], W.size * W.itemsize))
            for i in range(len(rows)):
                weighted_sum_in_threads(W.shape[1], n_parts, rows[i], words, made[i])

    def by_floats(rows: Any, W: Any, made: Any) -> Any:
        if len(rows) == 1:
            multiply_vector(rows[0], W, made[0])
        else:
            multiply(rows, W, made)

    return by_words if W.dtype == types.uint16 else by_floats
