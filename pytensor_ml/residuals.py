"""What a graph's pullback reads of its forward pass."""

from collections.abc import Sequence
from typing import Any

from pytensor.compile.builders import infer_shape
from pytensor.gradient import DisconnectedType, grad
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import graph_replace
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.basic import as_tensor, stack
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i


def pull_back(
    inputs: Sequence[Variable], outputs: Sequence[Any], cotangents: Sequence[Variable]
) -> list[Variable]:
    """Return each input's cotangent, of disconnected type where there is none.

    Parameters
    ----------
    inputs, outputs : sequence of Variable
        The graph.
    cotangents : sequence of Variable
        One for each output, of disconnected type where the output has no influence.
    """
    # Of copies: one output may be made of another, whose own cotangent is not all of it then.
    known = {
        output.copy(): cotangent
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if not isinstance(cotangent.type, DisconnectedType)
    }
    found: Any = grad(
        cost=None,
        wrt=list(inputs),
        known_grads=known,
        disconnected_inputs="ignore",
        return_disconnected="disconnected",
        null_gradients="return",
    )
    return list(found)


def shapes_of_inputs(
    graph: Sequence[Variable], inputs: Sequence[Variable], lengths: Sequence[Sequence[Variable]]
) -> dict[Variable, Variable]:
    """Return what stands for each shape that ``graph`` asks for, made of the inputs' lengths."""
    found: dict[Variable, Variable] = {}
    for v in ancestors(graph):
        op = None if v.owner is None else v.owner.op
        if isinstance(op, Shape | Shape_i) and v.owner.inputs[0] not in inputs:
            [shape] = infer_shape([v.owner.inputs[0]], inputs, lengths)
            found[v] = as_tensor(shape[op.i]) if isinstance(op, Shape_i) else stack(shape)
    return found


def find_residuals(
    inputs: Sequence[Variable], gradients: Sequence[Variable], cotangents: Sequence[Variable]
) -> list[Variable]:
    """Return what ``gradients`` read of the forward pass, ``inputs`` aside.

    Views and shapes are not among it, but what they are of, and neither is what follows element by
    element from the rest: to make them again costs less than to keep them.
    """
    nodes = list(toposort(list(gradients)))
    dependent = set(cotangents)
    for node in nodes:
        if not dependent.isdisjoint(node.inputs):
            dependent.update(node.outputs)
    read = [
        v
        for node in nodes
        if not dependent.isdisjoint(node.inputs)
        for v in node.inputs
        if v not in dependent
    ]
    of_shapes = _of_shapes_alone(nodes)
    found: set[Variable] = set()
    seen = set(inputs)
    while read:
        v = read.pop()
        if v in seen or isinstance(v, Constant):
            continue
        seen.add(v)
        if v.owner is not None and (_is_view(v.owner) or v in of_shapes):
            read += v.owner.inputs
        else:
            found.add(v)

    def follows(wanted: Variable) -> bool:
        known = {*inputs, *found} - {wanted}
        for node in nodes:
            is_cheap = (
                isinstance(node.op, Elemwise) or _is_view(node) or node.outputs[0] in of_shapes
            )
            if is_cheap and all(v in known or isinstance(v, Constant) for v in node.inputs):
                known.update(node.outputs)
        return wanted in known

    ordered = [v for node in nodes for v in node.outputs if v in found]
    for v in reversed(ordered):
        if follows(v):
            found.remove(v)
    return [v for v in ordered if v in found]


def merged(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> list[Variable]:
    """Return ``outputs`` with one node for all that are equal."""
    fgraph = FunctionGraph(list(inputs), list(outputs), clone=False)
    MergeOptimizer().rewrite(fgraph)
    return list(fgraph.outputs)


def on_stand_ins(
    outputs: Sequence[Variable], residuals: Sequence[Variable]
) -> tuple[list[Variable], list[Variable]]:
    """Return stand-ins for ``residuals``, and ``outputs`` made of them."""
    stand_ins = [v.type() for v in residuals]
    replaced = graph_replace(
        list(outputs), dict(zip(residuals, stand_ins, strict=True)), strict=False
    )
    return stand_ins, replaced


def _is_view(node: Apply) -> bool:
    return bool(getattr(node.op, "view_map", None))


def _of_shapes_alone(nodes: Sequence[Apply]) -> set[Variable]:
    """Return what is made of shapes and constants, of nodes in their order."""
    found: set[Variable] = set()
    for node in nodes:
        if isinstance(node.op, Shape | Shape_i) or all(
            v in found or isinstance(v, Constant) for v in node.inputs
        ):
            found.update(node.outputs)
    return found
