"""Opening ops whose inner graph works in place on C and Numba."""

from pytensor.compile.rewriting import inline_ofg_node
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.rewriting.basic import register_specialize

from pytensor_ml.base import LayerOp


def inline_for_inplace(op_type: type[LayerOp]) -> None:
    """Let backends that mutate buffers put the inner graph of ``op_type`` in place of the op.

    PyTensor excludes rewrites tagged "inplace" for JAX and MLX, which keep the op.
    """

    def inline(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
        return inline_ofg_node(node)

    register_specialize(
        node_rewriter([op_type])(inline), "inplace", name=f"inline_{op_type.__name__}"
    )
