"""What holds for every op on Numba."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from numba.core.caching import FunctionCache
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key
from pytensor.link.numba.dispatch.compile_ops import numba_funcify_OpFromGraph

from pytensor_ml.base import BlockOp, LayerOp
from pytensor_ml.dispatch.numba.linking import call_by_symbol


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


def register_kernel[F: Callable[..., Any]](op_type: type[LayerOp]) -> Callable[[F], F]:
    """Register what makes the kernel of ``op_type`` and the kernel's cache key."""

    def register(make: F) -> F:
        def funcify(op: LayerOp, node: Apply, **kwargs: Any) -> Any:
            refuse_float16(op, node)
            return compiled_apart(*make(op, node=node, **kwargs))

        register_funcify_and_cache_key(op_type)(funcify)
        return make

    return register


@numba_njit
def rows_of(x: np.ndarray) -> np.ndarray:
    """Return ``x`` as a matrix of the vectors along its last axis."""
    n_rows = 1
    # Numba cannot type a loop over the empty tuple.
    if x.ndim > 1:
        for length in x.shape[:-1]:
            n_rows *= length
    return np.ascontiguousarray(x).reshape((n_rows, x.shape[-1]))


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
        cache_key=f"{key}_fastmath{int(config.numba__fastmath)}",
    )
    function._cache = FunctionCache(stand_in)
    return function


def numba_funcify_block(op: BlockOp, **kwargs: Any) -> Any:
    return compiled_apart(*numba_funcify_OpFromGraph(op, **kwargs))


register_funcify_and_cache_key(BlockOp)(numba_funcify_block)
register_kernel(LayerOp)(numba_funcify_OpFromGraph)
