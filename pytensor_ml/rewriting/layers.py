"""Rewrites that specialize layers for prediction."""

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter

from pytensor_ml.base import BlockOp, LayerOp
from pytensor_ml.pytensorf.collect import as_output_list


def specialize_layer(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Replace an op that acts otherwise in training."""
    return node.op.for_prediction(list(node.inputs))


def specialize_block(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Specialize a block's inner graph and drop the inputs that this leaves without use."""
    op = node.op
    inner = op.fgraph.unfreeze()
    prediction_rewrites.rewrite(inner)
    if inner.freeze() == op.fgraph:
        return None
    kept = [i for i, v in enumerate(inner.inputs) if inner.clients[v]]
    specialized = BlockOp(
        [inner.inputs[i] for i in kept],
        list(inner.outputs),
        update_map={write: kept.index(read) for write, read in op.update_map().items()},
        recompute=op.recompute,
        name=op.name,
    )
    return as_output_list(specialized(*(node.inputs[i] for i in kept)))


prediction_rewrites = dfs_rewriter(
    node_rewriter([LayerOp])(specialize_layer), node_rewriter([BlockOp])(specialize_block)
)
