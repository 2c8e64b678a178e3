"""Products of matrices for Numba kernels, by SciPy's BLAS in our threads.

Numba's own ``numpy.dot`` takes Python's lock, to look for that BLAS, which a thread must not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import alloca_once_value, get_or_insert_function
from numba.extending import get_cython_function_address, intrinsic, overload
from pytensor.link.numba.dispatch.basic import numba_njit
from scipy.linalg import cython_blas

from pytensor_ml.dispatch.numba.basic import apart
from pytensor_ml.dispatch.numba.threads import LEAST_BYTES, count_threads, in_threads

Array = np.ndarray

for name in ("sgemm", "dgemm", "sgemv", "dgemv"):
    capsule = cython_blas.__pyx_capi__[name]
    # Its name is its signature; PyCapsule has no other way to tell.
    if ", int *" not in repr(capsule):
        raise NotImplementedError(
            "These Numba kernels need a SciPy whose BLAS has 32-bit integers; this one has "
            f"{capsule!r}. Compile for another backend."
        )
    address = get_cython_function_address("scipy.linalg.cython_blas", name)
    binding.add_symbol(f"pytensor_ml_{name}", address)

# Rows or columns that a part has at least, and a multiple of; OpenBLAS computes 16 or so at once.
TILE = 32

# Multiplications that take as long as another thread takes to begin.
LEAST_PRODUCTS = 2**20

INT = ir.IntType(32)
CHAR = ir.IntType(8)


def _call_blas(context: Any, builder: Any, name: str, kind: Any, arguments: Any) -> None:
    """Call a function of Fortran with characters, integers, floats and addresses."""
    prefix = {types.float32: "s", types.float64: "d"}[kind]
    pointers = []
    for argument, as_type in arguments:
        if as_type is None:
            pointers.append(builder.inttoptr(argument, CHAR.as_pointer()))
        else:
            value = builder.trunc(argument, as_type) if as_type in (INT, CHAR) else argument
            pointers.append(builder.bitcast(alloca_once_value(builder, value), CHAR.as_pointer()))
    function_type = ir.FunctionType(ir.VoidType(), [x.type for x in pointers])
    function = get_or_insert_function(builder.module, function_type, f"pytensor_ml_{prefix}{name}")
    builder.call(function, pointers)


def _gemm(
    typing_context: Any,
    transposed_a: Any,
    transposed_b: Any,
    m: Any,
    n: Any,
    k: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    beta: Any,
    c: Any,
    c_stride: Any,
) -> Any:
    """Add a product to beta times what is in its place; all in Fortran's order of axes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        scalar = context.get_value_type(beta)
        one = ir.Constant(scalar, 1.0)
        kinds = [CHAR, CHAR, INT, INT, INT, scalar, None, INT, None, INT, scalar, None, INT]
        _call_blas(
            context, builder, "gemm", beta, zip([*values[:5], one, *values[5:]], kinds, strict=True)
        )
        return context.get_dummy_value()

    kinds = [types.intp] * 12
    kinds[9] = beta
    return types.void(*kinds), generate


def _gemv(
    typing_context: Any,
    transposed: Any,
    m: Any,
    n: Any,
    unit: Any,
    a: Any,
    a_stride: Any,
    x: Any,
    y: Any,
) -> Any:
    """Add a matrix's product with a vector to y; in Fortran's order of axes, ``unit`` being 1."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        scalar = context.get_value_type(unit)
        transposed, m, n, alpha, a, a_stride, x, y = values
        one = ir.Constant(ir.IntType(64), 1)
        arguments = [transposed, m, n, alpha, a, a_stride, x, one, alpha, y, one]
        kinds = [CHAR, INT, INT, scalar, None, INT, None, INT, scalar, None, INT]
        _call_blas(context, builder, "gemv", unit, zip(arguments, kinds, strict=True))
        return context.get_dummy_value()

    kinds = [types.intp] * 8
    kinds[3] = unit
    return types.void(*kinds), generate


gemm: Any = intrinsic(_gemm)
gemv: Any = intrinsic(_gemv)


def in_memory(x: Any) -> Any:
    """A matrix as an array to keep, an address, a stride, and whether the columns lie in rows."""


@overload(in_memory)
def overload_in_memory(x: Any) -> Callable:
    def rows(x: Any) -> Any:
        return x, x.ctypes.data, max(x.shape[1], 1), False

    def columns(x: Any) -> Any:
        return x, x.ctypes.data, max(x.shape[0], 1), True

    def any_order(x: Any) -> Any:
        kept = np.empty((0, 0), x.dtype)
        size = x.itemsize
        if x.strides[1] == size and x.strides[0] % size == 0 and x.strides[0] >= x.shape[1] * size:
            return kept, x.ctypes.data, max(x.strides[0] // size, 1), False
        if x.strides[0] == size and x.strides[1] % size == 0 and x.strides[1] >= x.shape[0] * size:
            return kept, x.ctypes.data, max(x.strides[1] // size, 1), True
        kept = np.ascontiguousarray(x)
        return kept, kept.ctypes.data, max(x.shape[1], 1), False

    return {"C": rows, "F": columns}.get(x.layout, any_order)


@numba_njit
def flag(transposed: bool) -> int:
    return ord("T") if transposed else ord("N")


@numba_njit
def part_of_product(
    first: int,
    stop: int,
    by_rows: bool,
    m: int,
    n: int,
    k: int,
    a: int,
    a_stride: int,
    a_transposed: bool,
    b: int,
    b_stride: int,
    b_transposed: bool,
    beta: Any,
    c: int,
    c_stride: int,
    size: int,
) -> None:
    first, stop = first * TILE, min(stop * TILE, m if by_rows else n)
    if by_rows:
        m = stop - first
        a += first * (1 if a_transposed else a_stride) * size
        c += first * c_stride * size
    else:
        n = stop - first
        b += first * (b_stride if b_transposed else 1) * size
        c += first * size
    # Fortran's columns are our rows, so it forms the transpose.
    gemm(
        flag(b_transposed),
        flag(a_transposed),
        n,
        m,
        k,
        b,
        b_stride,
        a,
        a_stride,
        beta,
        c,
        c_stride,
    )


parts_of_product = in_threads(part_of_product)


@apart
@numba_njit
def product_in_parts(
    m: int,
    n: int,
    k: int,
    a: int,
    a_stride: int,
    a_transposed: bool,
    b: int,
    b_stride: int,
    b_transposed: bool,
    beta: Any,
    c: int,
    c_stride: int,
    size: int,
) -> None:
    by_rows = m >= n
    n_items = -(-max(m, n) // TILE)
    # One part a thread, as each prepares the other operand.
    n_parts = max(min(count_threads(), n_items), 1) if m * n * k >= LEAST_PRODUCTS else 1
    parts_of_product(
        n_items,
        n_parts,
        by_rows,
        m,
        n,
        k,
        a,
        a_stride,
        a_transposed,
        b,
        b_stride,
        b_transposed,
        beta,
        c,
        c_stride,
        size,
    )


@apart
@numba_njit
def multiply(a: Array, b: Array, c: Array, keep: int = 0) -> None:
    """Fill ``c`` (m, n), whose rows lie in memory one by one, with ``keep * c + a @ b``."""
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or c.shape != (m, n):
        raise ValueError("A product of matrices got shapes that do not match.")
    if m == 0 or n == 0:
        return
    if k == 0:
        if keep == 0:
            c[:] = 0
        return
    kept_a, at_a, a_stride, a_transposed = in_memory(a)
    kept_b, at_b, b_stride, b_transposed = in_memory(b)
    product_in_parts(
        m,
        n,
        k,
        at_a,
        a_stride,
        a_transposed,
        at_b,
        b_stride,
        b_transposed,
        c.dtype.type(keep),
        c.ctypes.data,
        c.strides[0] // c.itemsize,
        c.itemsize,
    )
    # Numba frees what it does not see used.
    kept_a.size, kept_b.size  # noqa: B018


@numba_njit
def part_of_vector_product(
    first: int,
    stop: int,
    n_parts: int,
    n_in: int,
    n_out: int,
    x: int,
    weight: int,
    stride: int,
    transposed: bool,
    unit: Any,
    y: int,
    size: int,
) -> None:
    for part in range(first, stop):
        n = n_out if transposed else n_in
        low, high = part * n // n_parts, (part + 1) * n // n_parts
        at = weight + low * stride * size
        if transposed:
            gemv(ord("T"), n_in, high - low, unit, at, stride, x, y + low * size)
        else:
            own_y = y + part * n_out * size
            gemv(ord("N"), n_out, high - low, unit, at, stride, x + low * size, own_y)


vector_product_in_threads = in_threads(part_of_vector_product)


@apart
@numba_njit
def multiply_vector(x: Array, W: Array, y: Array) -> None:
    """Fill the vector ``y`` with ``x @ W``, of which ``x`` and ``y`` lie in memory in one piece."""
    n_in, n_out = W.shape
    if len(x) != n_in or len(y) != n_out:
        raise ValueError("A product of matrices got shapes that do not match.")
    kept, at, stride, transposed = in_memory(W)
    n_parts = max(min(count_threads(), W.size * W.itemsize // LEAST_BYTES, n_in, n_out), 1)
    # Each thread reads whole rows, as the memory is faster then, and has a sum of its own.
    sums = np.zeros((1 if transposed else n_parts, n_out), x.dtype)
    if n_in > 0 and n_out > 0:
        vector_product_in_threads(
            n_parts,
            n_parts,
            n_parts,
            n_in,
            n_out,
            x.ctypes.data,
            at,
            stride,
            transposed,
            x.dtype.type(1),
            sums.ctypes.data,
            x.itemsize,
        )
    # Numba frees what it does not see used.
    kept.size  # noqa: B018
    for i in range(n_out):
        total = sums[0, i]
        for part in range(1, len(sums)):
            total += sums[part, i]
        y[i] = total
