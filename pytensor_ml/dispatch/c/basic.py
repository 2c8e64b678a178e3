"""How an op finds its C kernel."""

from functools import singledispatch
from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.link.c.op import COp

from pytensor_ml.base import LayerOp


@singledispatch
def c_funcify(op: Op, node: Apply) -> list[Variable] | None:
    """Return variables that replace the outputs of ``node``, or None to run the inner graph.

    Register an implementation by the class of the op.
    """
    return None


class CKernel(COp):
    """An op that computes in the subclass's C code what a ``layer_op`` does.

    PyTensor pickles an op into the key of its compiled module, and unpickles the keys of all
    modules in each process: a key must not hold ``layer_op``, nor the functions compiled of it.
    """

    __props__ = ("kind", "settings")

    def __init__(self, layer_op: LayerOp):
        self.kind = type(layer_op)
        self.settings = tuple(layer_op._props_dict().items())
        self.layer_op = layer_op

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__props__}

    def make_node(self, *inputs: Variable) -> Apply:
        return Apply(self, list(inputs), [kind() for kind in self.layer_op.output_types])

    def infer_shape(self, node: Apply, shapes: Any) -> Any:
        return self.layer_op.infer_shape(node, shapes)

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        self.layer_op.perform(node, inputs, outputs)
