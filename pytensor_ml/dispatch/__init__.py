"""Kernels that stand in for an op's inner graph on one backend and change nothing else.

``dispatch/<backend>/<family>.py`` registers the kernels of ``layers/<family>.py``, each on its
backend's own dispatch: ``jax_funcify``, ``mlx_funcify``, ``register_funcify_and_cache_key`` for
Numba, and :func:`~pytensor_ml.dispatch.c.basic.c_funcify` for C, where PyTensor has none. An op
without a registration runs its inner graph.

Importing the package registers two rewrites and imports no backend. PyTensor runs the first in
every compilation; it imports the kernels of the backend that the compilation is for, which that
compilation imports anyway. The second asks ``c_funcify`` about each op of a graph compiled to C.
PyTensor's own rewrite of inner graphs is kept from those that a kernel stands in for.
"""

from importlib import import_module
from typing import Any

from pytensor.compile.mode import optdb
from pytensor.compile.rewriting import rewrite_ofg_inner_graph
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import get_active_mode, graph_rewriter, node_rewriter
from pytensor.link.jax.linker import JAXLinker
from pytensor.link.mlx.linker import MLXLinker
from pytensor.link.numba.linker import NumbaLinker
from pytensor.tensor.rewriting.basic import register_specialize

from pytensor_ml.base import LayerOp

KERNELS = {
    NumbaLinker: "pytensor_ml.dispatch.numba",
    JAXLinker: "pytensor_ml.dispatch.jax",
    MLXLinker: "pytensor_ml.dispatch.mlx",
}


def import_kernels(fgraph: FunctionGraph) -> None:
    """Import the kernels of the backend that ``fgraph`` is being compiled for."""
    linker = get_active_mode(fgraph).linker
    for kind, module in KERNELS.items():
        if isinstance(linker, kind):
            import_module(module)


def leave_to_kernels(linker_type: type, module: str) -> None:
    """Let PyTensor optimize for a linker only the inner graphs that are run."""
    optimize = rewrite_ofg_inner_graph.dispatch(linker_type)

    def rewrite(linker: Any, op: Any, node: Apply, inner: FunctionGraph, *, mode: Any) -> None:
        if not (isinstance(op, LayerOp) and import_module(module).basic.has_kernel(op)):
            optimize(linker, op, node, inner, mode=mode)

    rewrite_ofg_inner_graph.register(linker_type)(rewrite)


def use_c_kernel(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Replace an op that has a C kernel."""
    from pytensor_ml.dispatch.c.basic import c_funcify

    return c_funcify(node.op, node=node)


for kind, module in KERNELS.items():
    leave_to_kernels(kind, module)
optdb.register(
    "pytensor_ml_import_kernels", graph_rewriter(import_kernels), "minimum_compile", position=-0.5
)
register_specialize(
    node_rewriter([LayerOp])(use_c_kernel), "cxx_only", name="pytensor_ml_use_c_kernel"
)
