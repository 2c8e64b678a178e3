"""C kernel of embeddings."""

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor import as_tensor

from pytensor_ml.dispatch.c.basic import c_funcify
from pytensor_ml.layers.embedding import EmbeddingLayer
from pytensor_ml.layers.half import floats_of


@c_funcify.register(EmbeddingLayer)
def c_funcify_embedding(op: EmbeddingLayer, node: Apply) -> list[Variable] | None:
    ids, W = (as_tensor(x) for x in node.inputs)
    # Indexing counts ids below 0 from the end of the table, and checks the others itself.
    message = "An embedding got an id below 0, which its table has no row for."
    checked = as_tensor(CheckAndRaise(IndexError, message)(ids, pt.all(pt.ge(ids, 0))))
    return [floats_of(W[checked])]
