"""What a graph's pullback reads of its forward pass."""

from collections.abc import Sequence
from typing import Any

from pytensor.compile.builders import infer_shape
from pytensor.gradient import DisconnectedType, grad
from pytensor.graph.basic import Constant, Variable
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
    found: dict[Variable, None] = {}
    seen = set(inputs)
    while read:
        v = read.pop(0)
        if v in seen or isinstance(v, Constant):
            continue
        seen.add(v)
        if v.owner is not None and (_is_view(v) or _is_of_shapes(v)):
            read += v.owner.inputs
        else:
            found[v] = None

    def is_kept(v: Variable) -> bool:
        return v in found or v in inputs or isinstance(v, Constant) or follows(v)

    def follows(v: Variable) -> bool:
        is_cheap = v.owner is not None and (
            isinstance(v.owner.op, Elemwise) or _is_view(v) or _is_of_shapes(v)
        )
        return is_cheap and all(map(is_kept, v.owner.inputs))

    for v in [v for node in reversed(nodes) for v in node.outputs if v in found]:
        del found[v]
        if not follows(v):
            found[v] = None
    return [v for node in nodes for v in node.outputs if v in found]


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


def _is_view(v: Variable) -> bool:
    return bool(getattr(v.owner.op, "view_map", None))


def _is_of_shapes(v: Variable) -> bool:
    shapes = [a for a in ancestors([v]) if a.owner is not None and _is_shape(a)]
    roots = [a for a in ancestors([v], blockers=shapes) if a.owner is None]
    return all(isinstance(root, Constant) for root in roots)


def _is_shape(v: Variable) -> bool:
    return isinstance(v.owner.op, Shape | Shape_i)
