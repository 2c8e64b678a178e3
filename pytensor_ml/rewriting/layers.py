"""Rewrites that specialize layers for prediction."""

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter

from pytensor_ml.base import BlockOp
from pytensor_ml.layers.dropout import DropoutLayer


@node_rewriter([DropoutLayer])
def remove_dropout(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    """Replace dropout by its input."""
    return [node.inputs[0]]


@node_rewriter([BlockOp])
def specialize_block(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Specialize a block's inner graph and drop the inputs that this leaves without use."""
    op = node.op
    inner = op.fgraph.unfreeze()
    n_nodes = len(inner.apply_nodes)
    prediction_rewrites.rewrite(inner)
    if len(inner.apply_nodes) == n_nodes:
        return None
    kept = [i for i, v in enumerate(inner.inputs) if inner.clients[v]]
    specialized = BlockOp(
        [inner.inputs[i] for i in kept],
        list(inner.outputs),
        update_map={write: kept.index(read) for write, read in op.update_map().items()},
        name=op.name,
    )
    return specialized(*(node.inputs[i] for i in kept), return_list=True)


prediction_rewrites = dfs_rewriter(remove_dropout, specialize_block)
