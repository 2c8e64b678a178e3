"""What holds for every op on Numba."""

import marshal
import sys
from collections.abc import Callable
from hashlib import sha256
from math import factorial, log
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numba.core.caching import FunctionCache
from numba.core.typing import signature
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array, populate_array
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key
from pytensor.link.numba.dispatch.compile_ops import numba_funcify_OpFromGraph

from pytensor_ml import __version__
from pytensor_ml.base import BlockOp, LayerOp
from pytensor_ml.dispatch.memory import keep_freed_memory
from pytensor_ml.dispatch.numba.linking import call_by_symbol

keep_freed_memory()


def refuse_float16(op: LayerOp, node: Apply) -> None:
    """Raise if ``node`` has a float16 variable, also inside, which Numba cannot compile."""
    inner = [variable for inner_node in op.fgraph.apply_nodes for variable in inner_node.outputs]
    for variable in [*node.inputs, *node.outputs, *inner]:
        if getattr(variable.type, "dtype", None) == "float16":
            raise NotImplementedError(
                f"{type(op).__name__} has the float16 variable {variable}, and PyTensor's Numba "
                "backend has no float16. Compile for C, JAX or MLX (mode='CVM', 'JAX' or 'MLX'), "
                "or cast to float32 first."
            )


# By the type of the op, for which ops there is a kernel.
_covered: dict[type, Callable[[Any], bool]] = {}


def register_kernel[F: Callable[..., Any]](
    op_type: type[LayerOp], covers: Callable[[Any], bool] = lambda op: True
) -> Callable[[F], F]:
    """Register what makes the kernel of ``op_type`` and the kernel's cache key.

    The source of its module and of the kernels here need not be in the key. Ops that it does not
    cover run their inner graphs.
    """

    def register(make: F) -> F:
        source = source_of(make)

        def funcify(op: LayerOp, node: Apply, **kwargs: Any) -> Any:
            refuse_float16(op, node)
            if not has_kernel(op):
                return compiled_apart(*numba_funcify_OpFromGraph(op, node=node, **kwargs))
            function, key = make(op, node=node, **kwargs)
            return compiled_apart(function, None if key is None else kernel_key(key, source))

        _covered[op_type] = covers
        register_funcify_and_cache_key(op_type)(funcify)
        return make

    return register


SOURCES = sha256(
    b"".join(
        path.read_bytes()
        for path in (
            Path(__file__).parents[1] / "threads.py",
            *sorted(Path(__file__).parent.glob("*.py")),
        )
    )
).hexdigest()


def source_of(function: Any) -> str:
    """Return what tells code from what it was: what Numba has cached outlives a change of it."""
    code = function.__code__
    path = Path(code.co_filename)
    own = path.read_bytes() if path.is_file() else marshal.dumps(code)
    return kernel_key(own, SOURCES, __version__)


def has_kernel(op: LayerOp) -> bool:
    """Return whether a kernel runs in the place of the inner graph of ``op``."""
    return type(op) in _covered and _covered[type(op)](op)


def has_one_dtype(op: LayerOp) -> bool:
    """Return whether all inputs and outputs of ``op`` are of one dtype."""
    return len({kind.dtype for kind in (*op.input_types, *op.output_types)}) == 1


def exp(x: Any) -> Any:
    """The exponential of what is not above 0, or NaN; LLVM vectorizes a loop of it in float32."""


LANES = 16

LOG_2 = log(2)
LOG_2_HIGH = np.float32(355 / 512)
LOG_2_LOW = np.float32(LOG_2 - 355 / 512)
INVERSE_LOG_2 = np.float32(1 / LOG_2)
LOWEST = np.float32(-87)
C2, C3, C4, C5, C6, C7 = (np.float32(1 / factorial(i)) for i in range(2, 8))


@overload(exp, jit_options={"fastmath": {"contract", "nsz"}})
def overload_exp(x: Any) -> Callable:
    def exp_float64(x: Any) -> Any:
        return np.exp(x)

    def exp_float32(x: Any) -> Any:
        one, half = np.float32(1), np.float32(0.5)
        n = np.floor(max(x, LOWEST) * INVERSE_LOG_2 + half)
        r = (max(x, LOWEST) - n * LOG_2_HIGH) - n * LOG_2_LOW
        tail = C2 + r * (C3 + r * (C4 + r * (C5 + r * (C6 + r * C7))))
        power_of_2 = np.int32((np.int32(n) + 127) << 23).view(np.float32)
        y = (one + (r + r * r * tail)) * power_of_2
        return np.float32(0) if x < LOWEST else y

    return exp_float32 if x == types.float32 else exp_float64


# What NumPy asks of Linux for arrays of this size, whose small pages take longer to come than to be
# filled.
HUGE_BYTES = 2**22
MADV_HUGEPAGE = 14
PAGE_BYTES = 4096


def ask_for_huge_pages(x: Any) -> Any:
    """Let large pages back a new array if it is large; compiled for what the system has."""


@overload(ask_for_huge_pages)
def overload_ask_for_huge_pages(x: Any) -> Callable:
    madvise: Any = types.ExternalFunction(
        "madvise", signature(types.int32, types.uintp, types.uintp, types.int32)
    )

    def ask(x: Any) -> Any:
        if x.nbytes >= HUGE_BYTES:
            start = (x.ctypes.data + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
            madvise(start, x.ctypes.data + x.nbytes - start, MADV_HUGEPAGE)

    def do_nothing(x: Any) -> Any:
        pass

    return ask if sys.platform == "linux" else do_nothing


@numba_njit
def empty(shape: Any, dtype: Any) -> np.ndarray:
    """Return a new array for what may be large."""
    made = np.empty(shape, dtype)
    ask_for_huge_pages(made)
    return made


def _memory(typing_context: Any, x: Any) -> Any:
    """Return what begins where ``x`` does as a vector without an end, which keeps nothing alive.

    A view of each row would cost more than a row: Numba counts references. Where indices are
    unsigned, LLVM vectorizes loops of it.
    """
    made_type = types.Array(x.dtype, 1, "C")

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        array = make_array(x)(context, builder, values[0])
        made = make_array(made_type)(context, builder)
        size = context.get_abi_sizeof(context.get_data_type(x.dtype))
        length, stride = (context.get_constant(types.intp, n) for n in (2**48, size))
        populate_array(made, array.data, [length], [stride], stride, None)
        return made._getvalue()

    return made_type(x), generate


memory: Any = intrinsic(_memory)


@numba_njit
def place(x: np.ndarray, b: int, h: int, s: int) -> Any:
    """Return where in ``memory(x)`` the vector ``x[b, h, s]`` begins."""
    return np.uintp((b * x.strides[0] + h * x.strides[1] + s * x.strides[2]) // x.itemsize)


@numba_njit
def with_whole_vectors(x: np.ndarray) -> np.ndarray:
    """Return heads, or a copy of them, whose vectors lie in memory in one piece each."""
    is_aligned = (x.strides[0] | x.strides[1] | x.strides[2]) % x.itemsize == 0
    if x.strides[3] == x.itemsize and is_aligned:
        return x[::1]
    return np.ascontiguousarray(x)[::1]


@numba_njit
def empty_like_heads(x: np.ndarray, n_channels: int) -> np.ndarray:
    """Return a new array of heads, which lie in memory by token if those of ``x`` do."""
    n_batch, n_heads, n_steps = x.shape[:3]
    if x.strides[1] < x.strides[2]:
        by_token = empty((n_batch, n_steps, n_heads, n_channels), x.dtype)
        return by_token.transpose((0, 2, 1, 3))
    return empty((n_batch, n_heads, n_steps, n_channels), x.dtype)[::1]


@numba_njit
def rows_of(x: np.ndarray) -> np.ndarray:
    """Return ``x`` as a matrix of the vectors along its last axis."""
    n_rows = 1
    # Numba cannot type a loop over the empty tuple.
    if x.ndim > 1:
        for length in x.shape[:-1]:
            n_rows *= length
    return np.ascontiguousarray(x).reshape((n_rows, x.shape[-1]))


@numba_njit(error_model="numpy")
def sigmoid(x: Any) -> Any:
    one = type(x)(1)
    small = exp(-abs(x))
    return (one if x >= 0 else small) / (one + small)


@numba_njit
def largest(x: np.ndarray) -> Any:
    """Return the largest of a vector, -inf if it is empty, regardless of NaN."""
    # A compiler may not reorder comparisons, so they are written in lanes that it can vectorize.
    lanes = np.full(LANES, -np.inf, x.dtype)
    whole = len(x) - len(x) % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = x[i + lane] if x[i + lane] > lanes[lane] else lanes[lane]
    high = x.dtype.type(-np.inf)
    for lane in range(LANES):
        high = lanes[lane] if lanes[lane] > high else high
    for i in range(whole, len(x)):
        high = x[i] if x[i] > high else high
    return high


def kernel_key(*read: Any) -> str:
    """Return what tells a kernel from others in Numba's cache, made of all that it reads."""
    return sha256(str(read).encode()).hexdigest()


def compiled_apart(function: Any, key: str | None) -> tuple[Any, str | None]:
    """Return ``function`` as a library of its own, and ``key`` as it is.

    A function without a key is returned as it is: it cannot be cached, so neither could its caller.
    """
    if key is None:
        return function, key
    return call_by_symbol(cached_as(function, f"{key}_apart")), key


def apart(function: Any) -> Callable[..., Any]:
    """Compile a function of ``numba.njit``, no closure, once for all compiled code that calls it.

    What is not apart is copied into each of its callers, and optimized again there.
    """
    return call_by_symbol(cached_by_source(function))


def cached_by_source(function: Any) -> Any:
    """Let Numba cache a function by its name and the sources that it may depend on."""
    return cached_as(function, kernel_key(function.py_func.__name__, source_of(function.py_func)))


# What PyTensor made of ``numba_njit`` for the functions of these modules.
FASTMATH_OF_MODULES = bool(config.numba__fastmath)


def fastmath_key() -> str:
    """Return what tells by which leave to reorder a kernel, and what it calls, were compiled."""
    return f"fastmath{int(config.numba__fastmath)}{int(FASTMATH_OF_MODULES)}"


def cached_as(function: Any, key: str) -> Any:
    """Let Numba cache ``function``, a closure or not, by ``key`` and the types of arguments alone.

    Numba's cache takes closures for other functions in each process, and a wrapper for it would
    make Numba compile everything twice.
    """
    if not config.numba__cache:
        return function
    name = function.py_func.__name__
    stand_in = compile_numba_function_src(
        f"def {name}(): pass",
        name,
        {"__name__": __name__},
        cache_key=f"{key}_{fastmath_key()}",
    )
    function._cache = FunctionCache(stand_in)
    return function


@apart
@numba_njit
def sum_of_rows(x: np.ndarray) -> np.ndarray:
    """Return the sum of all rows, added up in float64: there may be many."""
    total = np.zeros(x.shape[1])
    for row in range(len(x)):
        for i in range(len(total)):
            total[i] += x[row, i]
    return total.astype(x.dtype)


def numba_funcify_block(op: BlockOp, **kwargs: Any) -> Any:
    return compiled_apart(*numba_funcify_OpFromGraph(op, **kwargs))


def numba_funcify_layer_op(op: LayerOp, node: Apply, **kwargs: Any) -> Any:
    refuse_float16(op, node)
    return compiled_apart(*numba_funcify_OpFromGraph(op, node=node, **kwargs))


register_funcify_and_cache_key(BlockOp)(numba_funcify_block)
register_funcify_and_cache_key(LayerOp)(numba_funcify_layer_op)
