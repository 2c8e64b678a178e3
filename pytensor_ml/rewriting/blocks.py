"""A rewrite that lets a block's forward pass leave what its pullback reads."""

from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import graph_rewriter

from pytensor_ml.base import BlockWithResiduals


def keep_residuals(fgraph: FunctionGraph) -> None:
    """Take the outputs of blocks from their twins that have residuals, where there are such."""
    twins = [node for node in fgraph.toposort() if isinstance(node.op, BlockWithResiduals)]
    for twin in twins:
        equal = [
            node
            for node, _ in fgraph.clients[twin.inputs[0]]
            if node.inputs == twin.inputs and twin.op.can_replace(node.op)
        ]
        for node in dict.fromkeys(equal):
            fgraph.replace_all(
                list(zip(node.outputs, twin.outputs, strict=False)), reason="keep_residuals"
            )


# Where equal nodes are one already, and nothing has been rewritten yet.
optdb.register(
    "pytensor_ml_keep_residuals",
    graph_rewriter(keep_residuals),
    "fast_run",
    "fast_compile",
    position=0.01,
)
