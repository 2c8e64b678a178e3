"""A linker for graphs of many blocks."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import (
    numba_funcify_and_cache_key,
    numba_njit,
    numba_typify,
)
from pytensor.link.numba.linker import NumbaLinker
from pytensor.link.utils import raise_with_op

from pytensor_ml.base import BlockOp
from pytensor_ml.dispatch.numba.basic import cached_as, fastmath_key, kernel_key

# Numba takes seconds for each hundred arrays that a function takes, more than in proportion.
MAX_ARRAYS = 64


class BlockwiseNumbaLinker(NumbaLinker):
    """PyTensor's Numba linker, except that graphs of blocks with many arrays run node by node.

    What is compiled is then the node, once for all equal ones, so that the time of compiling does
    not grow with the number of blocks. A node costs some microseconds more to call.

    A whole graph is cached without the wrapper that PyTensor's linker compiles around it, which
    takes Numba as long as the graph.
    """

    def fgraph_convert(self, fgraph: FunctionGraph, *args: Any, **kwargs: Any) -> Any:
        return numba_funcify_and_cache_key(fgraph, *args, **kwargs)

    def jit_compile(self, fn: Any) -> Any:
        function, key = fn
        run = numba_njit(function.py_func, final_function=True, no_cfunc_wrapper=True)
        return run if key is None else cached_as(run, f"{key}_whole")

    def create_jitable_thunk(
        self,
        compute_map: dict[Variable, list[bool]],
        order: Sequence[Apply],
        input_storage: Sequence[list[Any]],
        output_storage: Sequence[list[Any]],
        storage_map: dict[Variable, list[Any]],
    ) -> tuple[list[Any], list[Apply], Any]:
        fgraph = cast(FunctionGraph, self.fgraph)
        n_arrays = len(fgraph.inputs) + len(fgraph.outputs)
        if n_arrays <= MAX_ARRAYS or not any(isinstance(node.op, BlockOp) for node in order):
            return super().create_jitable_thunk(
                compute_map, order, input_storage, output_storage, storage_map
            )
        run = NodeByNode(fgraph, order, storage_map)
        return [run], [order[-1]], run


class NodeByNode:
    """The nodes of a graph compiled one by one, called in their order."""

    lazy = False

    def __init__(
        self,
        fgraph: FunctionGraph,
        order: Sequence[Apply],
        storage_map: dict[Variable, list[Any]],
    ):
        for variable, cell in storage_map.items():
            if isinstance(variable, Constant):
                cell[0] = numba_typify(cell[0], variable=variable)
        last_use = {v: node for node in order for v in (*node.outputs, *node.inputs)}
        kept = {*fgraph.inputs, *fgraph.outputs}
        spent: dict[Apply, list[Any]] = {node: [] for node in order}
        for variable, node in last_use.items():
            if variable not in kept and not isinstance(variable, Constant):
                spent[node].append(storage_map[variable])
        blocks: dict[Any, Any] = {}
        compiled: dict[str, Any] = {}
        self.fgraph = fgraph
        self.inputs = [storage_map[v] for v in fgraph.inputs]
        self.outputs = [storage_map[v] for v in fgraph.outputs]
        self.steps = [
            Step(
                node,
                _function_of(node, blocks, compiled),
                [storage_map[v] for v in node.inputs],
                [storage_map[v] for v in node.outputs],
                spent[node],
            )
            for node in order
        ]

    def __call__(self) -> None:
        for node, function, inputs, outputs, spent in self.steps:
            try:
                results = function(*[cell[0] for cell in inputs])
            except Exception:
                raise_with_op(self.fgraph, node, SimpleNamespace(inputs=inputs, outputs=outputs))
            if len(outputs) == 1:
                outputs[0][0] = results
            else:
                for cell, result in zip(outputs, results, strict=True):
                    cell[0] = result
            for cell in spent:
                cell[0] = None


class Step(NamedTuple):
    """A node, its function, the cells of its inputs and outputs, and those to empty after it."""

    node: Apply
    function: Callable[..., Any]
    inputs: list[list[Any]]
    outputs: list[list[Any]]
    spent: list[list[Any]]


def _function_of(node: Apply, blocks: dict[Any, Any], compiled: dict[str, Any]) -> Any:
    """Return a function that Python can call, the same for nodes of one cache key and types."""
    function, key = numba_funcify_and_cache_key(node.op, node=node, ofg_memo=blocks)
    names = ", ".join(f"x{i}" for i in range(len(node.inputs)))
    if key is not None:
        # Some functions are made for the dtype of their node, which PyTensor's key does not tell.
        types = tuple(v.type for v in (*node.inputs, *node.outputs))
        key = kernel_key(key, "called", types, fastmath_key())
        if key in compiled:
            return compiled[key]
    called = compile_numba_function_src(
        f"def {function.__name__}({names}): return function({names})",
        function.__name__,
        {"function": function, "__name__": __name__},
        cache_key=key,
    )
    is_cached = key is not None and config.numba__cache
    run = numba_njit(called, final_function=True, no_cfunc_wrapper=True, cache=is_cached)
    if key is not None:
        compiled[key] = run
    return run
