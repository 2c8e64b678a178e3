"""Graphs to JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import Op, io_connection_pattern
from pytensor.graph.traversal import io_toposort
from pytensor.scalar.basic import Cast, ScalarOp
from pytensor.scan.op import Scan
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise

from pytensor_ml.base import BlockOp
from pytensor_ml.serialize.allowed import (
    GRAPH_OPS,
    OPS,
    REDUCTIONS,
    SCALAR_OPS,
    qualified_name,
)
from pytensor_ml.serialize.values import (
    LONGEST_LISTED,
    constant_to_json,
    prop_to_json,
    type_to_json,
    with_runs,
)

# What each op that a graph defines must not have: no file could hold it.
_UNWRITTEN: dict[str, Any] = {
    "pullback_overrides": None,
    "pushforward_overrides": None,
    "destroy_map": {},
}


class GraphWriter:
    """Writes graphs whose types, ops and constants are listed once for all of them."""

    def __init__(self) -> None:
        self.types: list[Any] = []
        self.ops: list[Any] = []
        self.constants: list[Any] = []
        self._known: dict[Any, int] = {}

    def graph(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> dict[str, Any]:
        """Return the graph from ``inputs`` to ``outputs``.

        Its variables are counted: the inputs first, then the outputs of node after node. The
        constants of all graphs are counted down from -1. A pair stands for as many variables as its
        second number says, the first of which is its first.
        """
        number = {v: i for i, v in enumerate(inputs)}

        def reference(v: Variable) -> int:
            if v in number:
                return number[v]
            if isinstance(v, Constant):
                return -1 - self._constant(v)
            raise ValueError(
                f"The graph reads {v}, which is not among its inputs, so a file of it would lack "
                "something. Pass all of its inputs, shared variables included."
            )

        nodes = []
        for node in io_toposort(inputs, outputs):
            references = with_runs([reference(v) for v in node.inputs])
            try:
                op = self._op(node.op, node.inputs)
                types = [self._type(v.type) for v in node.outputs]
            except TypeError as error:
                raise ValueError(f"{node} cannot be saved: {error}.") from error
            nodes.append([op, references, types])
            number |= {v: len(number) + i for i, v in enumerate(node.outputs)}
        return {
            "inputs": [self._type(v.type) for v in inputs],
            "nodes": nodes,
            "outputs": [reference(v) for v in outputs],
        }

    def _listed(self, key: Any, table: list[Any], value: Any) -> int:
        if key not in self._known:
            self._known[key] = len(table)
            table.append(value)
        return self._known[key]

    def _type(self, graph_type: Any) -> int:
        return self._listed(("type", graph_type), self.types, type_to_json(graph_type))

    def _constant(self, constant: Constant) -> int:
        array = np.asarray(constant.data)
        value = constant_to_json(constant, listed=array.size <= LONGEST_LISTED)
        # Bytes tell 0 from -0.
        key = ("constant", constant.type, None if array.dtype == object else array.tobytes())
        return self._listed(key, self.constants, [self._type(constant.type), value])

    def _op(self, op: Op, inputs: Sequence[Variable]) -> int:
        # Equal ops are written once. Those that a graph defines are recognized before that graph
        # is written again.
        if ("op", op) in self._known:
            return self._known["op", op]
        entry = self._graph_op(op) or self._simple_op(op, inputs)
        index = self._listed(("op as written", frozen(entry)), self.ops, entry)
        return self._known.setdefault(("op", op), index)

    def _graph_op(self, op: Any) -> dict[str, Any] | None:
        if isinstance(op, Scan):
            return {
                "family": "scan",
                "inner": self.graph(*_ends_of(op.fgraph)),
                "info": {f.name: prop_to_json(getattr(op.info, f.name)) for f in fields(op.info)},
                "truncate_gradient": op.truncate_gradient,
                "name": op.name,
                "allow_gc": op.allow_gc,
                "strict": op.strict,
            }
        if GRAPH_OPS.get(qualified_name(type(op))) is not type(op):
            return None
        for attribute, none in _UNWRITTEN.items():
            if getattr(op, attribute) != none:
                raise TypeError(f"it has {attribute}, which a file cannot hold")
        # PyTensor keeps here what it has found out, too.
        if op._connection_pattern not in (None, io_connection_pattern(*_ends_of(op.fgraph))):
            raise TypeError("it has a connection pattern that its graph has not")
        props = {}
        if isinstance(op, BlockOp):
            props = {
                "update_map": prop_to_json(tuple(op.update_map().items())),
                "recompute": op.recompute,
                "n_outputs": getattr(op, "n_outputs", None),
            }
        return {
            "family": "inner_graph",
            "type": qualified_name(type(op)),
            "inline": op.is_inline,
            "name": op.name,
            "props": {k: v for k, v in props.items() if v not in (None, False, {"__tuple__": []})},
            "inner": self.graph(*_ends_of(op.fgraph)),
        }

    def _simple_op(self, op: Any, inputs: Sequence[Variable]) -> dict[str, Any]:
        name = qualified_name(type(op))
        if isinstance(op, ScalarOp):
            return _scalar_op(op)
        if type(op) is Elemwise:
            if op.inplace_pattern:
                raise TypeError("it works in place, so it belongs to a compiled graph")
            return {"family": "elemwise", "scalar_op": _scalar_op(op.scalar_op)}
        if type(op) is Blockwise:
            return {"family": "blockwise", "core_op": self._simple_op(op.core_op, inputs)}
        if REDUCTIONS.get(name) is type(op):
            entry = {"family": "careduce", "type": name, "axis": prop_to_json(op.axis)}
            if REDUCTIONS[name](axis=op.axis).make_node(*inputs).op != op:
                # What the axis does not tell, by the names that the class takes.
                options = [p for p in ("dtype", "acc_dtype") if name.endswith(("Sum", "Prod"))]
                options += [p for p in ("initial", "no_zeros_in_input") if hasattr(op, p)]
                entry["props"] = {p: prop_to_json(getattr(op, p)) for p in options}
            return entry
        registered = next((n for n, kind in OPS.items() if kind is type(op)), None)
        if registered is None:
            raise TypeError(
                f"files may not name {name}, so it could not be loaded; pass the class to "
                "pytensor_ml.serialize.register_op before saving and before loading"
            )
        props = {p: getattr(op, p) for p in getattr(op, "__props__", None) or ()}
        return {
            "family": "leaf",
            "type": registered,
            "props": {p: _checked_prop(p, value) for p, value in props.items()},
        }


def _ends_of(fgraph: Any) -> tuple[list[Variable], list[Variable]]:
    return list(fgraph.inputs), list(fgraph.outputs)


def _checked_prop(name: str, value: Any) -> Any:
    try:
        return prop_to_json(value)
    except TypeError as error:
        raise TypeError(f"its prop {name} has no form in a file: {error}") from error


def _scalar_op(op: ScalarOp) -> dict[str, Any]:
    if isinstance(op, Cast):
        return {"family": "scalar_cast", "dtype": op.o_type.dtype}
    name = type(op).__name__
    if SCALAR_OPS.get(name) != op:
        raise TypeError(f"the scalar op {op} has no form in a file")
    return {"family": "scalar", "type": name}


def frozen(value: Any) -> Any:
    """Return a hashable equivalent of a JSON value that tells 1 from 1.0 and 0.0 from -0.0."""
    if isinstance(value, Mapping):
        return tuple((key, frozen(v)) for key, v in value.items())
    if isinstance(value, list):
        return tuple(map(frozen, value))
    return type(value), repr(value)
