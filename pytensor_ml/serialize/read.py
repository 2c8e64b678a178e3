"""JSON to graphs, trusting nothing that it says."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytensor.scalar as ps
from pytensor.compile.builders import OpFromGraph, SymbolicOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.scalar.basic import ScalarType
from pytensor.scan.op import Scan, ScanInfo
from pytensor.tensor.basic import Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.type import TensorType

from pytensor_ml.base import BlockOp, BlockWithResiduals
from pytensor_ml.serialize.allowed import (
    DEFAULT_PROPS,
    GRAPH_OPS,
    GROWING_OPS,
    INITIALIZERS,
    LARGEST_PROP,
    LONGEST_AXIS,
    MOST_INNER_INPUTS,
    MOST_REFERENCES,
    MOST_ROUNDS,
    OPS,
    REDUCTIONS,
    SCALAR_OPS,
    SMALLER_PROPS,
    UNBOUNDED_PROPS,
    as_published,
)
from pytensor_ml.serialize.values import (
    DTYPES,
    check_keys,
    constant_from_json,
    entry_of,
    is_pair,
    prop_from_json,
    type_from_json,
    without_runs,
)
from pytensor_ml.state import Initializer

# Values of at most so many numbers may be computed while a graph is built.
_FEW = 64


class GraphReader:
    """Reads graphs that :class:`~pytensor_ml.serialize.write.GraphWriter` wrote."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._types = [
            type_from_json(value, f"types[{i}]") for i, value in _entries(document, "types")
        ]
        self._constants = [
            self._constant(value, f"constants[{i}]") for i, value in _entries(document, "constants")
        ]
        self._ops: list[Op] = []
        self._typed: dict[Any, Op] = {}
        self._references = self._rounds = 0
        for i, value in _entries(document, "ops"):
            self._ops.append(self._op(value, f"ops[{i}]"))

    def input_types(self, graph: Mapping[str, Any]) -> list[Any]:
        """Return the types of a graph's inputs."""
        return [self._type(number, f"inputs[{i}]") for i, number in _entries(graph, "inputs")]

    def outputs(
        self, graph: Mapping[str, Any], inputs: Sequence[Variable], where: str = "the graph"
    ) -> list[Variable]:
        """Build a graph on ``inputs`` and return its outputs."""
        variables: list[Variable] = list(inputs)
        # What stands in for each variable while PyTensor infers types. It computes values that
        # decide a shape at once, and a file could let that take all memory.
        stand_ins: list[Variable] = list(inputs)

        def look_up(number: Any, among: list[Variable], place: str) -> Variable:
            if type(number) is not int:
                raise ValueError(f"{place} is {number!r}, where the number of a variable belongs")
            if number < 0:
                return item(self._constants, -1 - number, place, "constant")
            return item(among, number, place, "variable")

        for i, node in _entries(graph, "nodes", where):
            place = f"{where}'s nodes[{i}]"
            if not (isinstance(node, list) and len(node) == 3):
                raise ValueError(f"{place} does not hold an op, its inputs and its types")
            op_number, references, type_numbers = node
            if not (isinstance(references, list) and isinstance(type_numbers, list)):
                raise ValueError(f"{place} holds no list of inputs and list of types")
            self._references += sum(r[1] if is_pair(r) else 1 for r in references)
            self._references += len(type_numbers)
            if self._references > MOST_REFERENCES:
                raise ValueError(
                    f"{place} and the nodes before it have over {MOST_REFERENCES} inputs "
                    "and outputs"
                )
            numbers = without_runs(references)
            op = item(self._ops, op_number, f"{place}'s op", "op")
            types = [self._type(t, f"{place}'s types") for t in type_numbers]
            stand_in = self._apply(
                op, [look_up(r, stand_ins, place) for r in numbers], types, place
            )
            # The types are the recorded ones, which may say less of a shape than the inferred.
            outputs = [recorded() for recorded in types]
            Apply(stand_in.op, [look_up(r, variables, place) for r in numbers], outputs)
            variables += outputs
            stand_ins += [
                out if _is_cheap(stand_in, out) else recorded()
                for out, recorded in zip(stand_in.outputs, types, strict=True)
            ]
        return [
            look_up(number, variables, f"{where}'s outputs[{i}]")
            for i, number in _entries(graph, "outputs", where)
        ]

    def _type(self, number: Any, where: str) -> Any:
        return item(self._types, number, where, "type")

    def _constant(self, value: Any, where: str) -> Constant:
        if not (isinstance(value, list) and len(value) == 2):
            raise ValueError(f"{where} does not hold a type and a value")
        return constant_from_json(self._type(value[0], f"{where}'s type"), value[1], where)

    def _apply(self, op: Any, inputs: list[Variable], types: list[Any], where: str) -> Apply:
        if isinstance(op, Split) and op.len_splits != len(types):
            raise ValueError(f"{where} splits into {op.len_splits} but has {len(types)} outputs")
        if isinstance(op, GROWING_OPS):
            lengths = [n or 0 for x in inputs for n in getattr(x.type, "shape", ())]
            if max(lengths, default=0) > LONGEST_AXIS:
                raise ValueError(
                    f"{where} gives {op} an axis of {max(lengths)}, and its graph would grow with "
                    f"it; at most {LONGEST_AXIS} are allowed"
                )
        self._count_rounds(op, inputs, where)
        try:
            node = self._node(op, inputs)
        except Exception as error:
            raise ValueError(f"{where} has inputs that {op} does not take: {error}") from error
        if node.inputs != inputs:
            raise ValueError(
                f"{where} has inputs that {op} takes only once they are converted, to "
                f"{', '.join(str(x.type) for x in node.inputs)}"
            )
        found = [out.type for out in node.outputs]
        if len(found) != len(types) or not all(map(_says_no_more, types, found)):
            raise ValueError(
                f"{where} claims outputs of the types {', '.join(map(str, types))}, but {node.op} "
                f"gives {', '.join(map(str, found))}"
            )
        return node

    def _count_rounds(self, op: Any, inputs: list[Variable], where: str) -> None:
        if _call_of(op, inputs) in self._typed:
            return
        self._rounds += sum(getattr(op, prop, 0) for prop in SMALLER_PROPS)
        if self._rounds > MOST_ROUNDS:
            raise ValueError(
                f"{where} and the nodes before it select the best {self._rounds} experts and "
                f"groups, counting equal routers once; at most {MOST_ROUNDS} are loaded. Give "
                "mixtures equal settings and input types, or a smaller top_k."
            )

    def _node(self, op: Any, inputs: list[Variable]) -> Apply:
        if not isinstance(op, SymbolicOp):
            return op.make_node(*inputs)
        # Such an op has a graph for the types it is called with; equal calls share it.
        key = _call_of(op, inputs)
        if key not in self._typed:
            outputs: Any = as_published(op, inputs)(*inputs, return_list=True)
            self._typed[key] = outputs[0].owner.op
        return self._typed[key].make_node(*inputs)

    def _op(self, value: Any, where: str) -> Any:
        family = entry_of(value, "family", str, where)
        read = {
            "blockwise": self._blockwise,
            "careduce": _reduction,
            "elemwise": _elemwise,
            "inner_graph": self._graph_op,
            "leaf": _simple_op,
            "scalar": _scalar_op,
            "scalar_cast": _scalar_op,
            "scan": self._scan,
        }
        if family not in read:
            raise ValueError(f"{where} is of the unknown family {family!r}")
        try:
            return read[family](value, where)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{where} does not describe an op: {error}") from error

    def _blockwise(self, value: dict[str, Any], where: str) -> Blockwise:
        check_keys(value, ["family", "core_op"], where)
        core = entry_of(value, "core_op", dict, where)
        if core.get("family") != "leaf":
            raise ValueError(f"{where}.core_op is of the family {core.get('family')!r}, not a leaf")
        return Blockwise(_simple_op(core, f"{where}.core_op"))

    def _inner(self, value: dict[str, Any], where: str) -> tuple[list[Variable], list[Variable]]:
        graph = entry_of(value, "inner", dict, where)
        check_keys(graph, ["inputs", "nodes", "outputs"], f"{where}.inner")
        n_inputs = len(entry_of(graph, "inputs", list, f"{where}.inner"))
        if n_inputs > MOST_INNER_INPUTS:
            raise ValueError(
                f"{where} takes {n_inputs} inputs, and at most {MOST_INNER_INPUTS} are allowed"
            )
        inputs = [graph_type() for graph_type in self.input_types(graph)]
        return inputs, self.outputs(graph, inputs, f"{where}.inner")

    def _graph_op(self, value: dict[str, Any], where: str) -> OpFromGraph:
        check_keys(value, ["family", "type", "inline", "name", "props", "inner"], where)
        kind = _allowed(GRAPH_OPS, entry_of(value, "type", str, where), f"{where}.type")
        name = entry_of(value, "name", (str, type(None)), where)
        inline = entry_of(value, "inline", bool, where)
        props = entry_of(value, "props", dict, where)
        inputs, outputs = self._inner(value, where)
        if not issubclass(kind, BlockOp):
            check_keys(props, [], f"{where}.props")
            return kind(inputs, outputs, inline=inline, name=name)
        has_residuals = issubclass(kind, BlockWithResiduals)
        check_keys(
            props, ["update_map", "recompute", *["n_outputs"] * has_residuals], f"{where}.props"
        )
        options = {}
        if has_residuals:
            n_outputs = entry_of(props, "n_outputs", int, f"{where}.props")
            item(outputs, n_outputs - 1, f"{where}.props.n_outputs", "output")
            options["n_outputs"] = n_outputs
        recompute = entry_of({"recompute": False, **props}, "recompute", bool, f"{where}.props")
        place = f"{where}.props.update_map"
        pairs = prop_from_json(props.get("update_map", {"__tuple__": []}), place)
        if not isinstance(pairs, tuple) or not all(map(is_pair, pairs)):
            raise ValueError(f"{place} does not hold pairs of an output and an input")
        if any(len({pair[end] for pair in pairs}) < len(pairs) for end in (0, 1)):
            raise ValueError(f"{place} has an output or an input twice, so an update would be lost")
        for write, read in pairs:
            new = item(outputs, write, place, "output")
            old = item(inputs, read, place, "input")
            if not _says_no_more(old.type, new.type):
                raise ValueError(f"{where} updates a state of type {old.type} to {new.type}")
        return kind(
            inputs,
            outputs,
            update_map=dict(pairs),
            recompute=recompute,
            inline=inline,
            name=name,
            **options,
        )

    def _scan(self, value: dict[str, Any], where: str) -> Scan:
        options = {"truncate_gradient": int, "allow_gc": bool, "strict": bool}
        check_keys(value, ["family", "inner", "info", "name", *options], where)
        info = entry_of(value, "info", dict, where)
        parts = [field.name for field in fields(ScanInfo)]
        check_keys(info, parts, f"{where}.info")
        numbers = {
            field: _bounded(field, prop_from_json(info.get(field), f"{where}.info"), where)
            for field in parts
        }
        inputs, outputs = self._inner(value, where)
        return Scan(
            inputs,
            outputs,
            ScanInfo(**numbers),
            name=entry_of(value, "name", (str, type(None)), where),
            profile=False,
            **{name: entry_of(value, name, kind, where) for name, kind in options.items()},
        )


def _call_of(op: Any, inputs: list[Variable]) -> tuple[Any, ...]:
    return id(op), *(x.type for x in inputs)


def read_initializer(value: Any, where: str) -> Initializer:
    """Return the initializer that a JSON value describes."""
    check_keys(value if isinstance(value, dict) else {}, ["class", "props"], where)
    kind = _allowed(INITIALIZERS, entry_of(value, "class", str, where), f"{where}.class")
    return _rebuilt(kind, entry_of(value, "props", dict, where), where)


def _entries(container: Any, key: str, where: str = "the graph") -> "enumerate[Any]":
    return enumerate(entry_of(container, key, list, where))


def item[T](items: Sequence[T], number: Any, where: str, what: str) -> T:
    if type(number) is not int or not 0 <= number < len(items):
        raise ValueError(
            f"{where} refers to {what} {number!r}, but only 0 to {len(items) - 1} come before it"
        )
    return items[number]


def _allowed[T](table: Mapping[str, T], name: str, where: str) -> T:
    if name not in table:
        raise ValueError(
            f"{where} names {name[:100]!r}, which files may not name here; nothing was imported. "
            "If it is a class of your own, pass it to register_op or register_initializer of "
            "pytensor_ml.serialize first."
        )
    return table[name]


def _rebuilt(kind: Any, values: dict[str, Any], where: str) -> Any:
    """Return ``kind(**props)`` if the props are exactly those that it declares."""
    declared = getattr(kind, "__props__", None) or ()
    check_keys(values, declared, f"{where}.props")
    props = dict(DEFAULT_PROPS.get(kind, {}))
    for name, value in values.items():
        place = f"{where}.props.{name}"
        props[name] = _bounded(name, prop_from_json(value, place), place)
    if missing := sorted(set(declared) - set(props)):
        raise ValueError(f"{where}.props lacks {', '.join(missing)}")
    try:
        return kind(**props)
    except Exception as error:
        raise ValueError(f"{where}.props do not fit {kind.__name__}: {error}") from error


def _bounded(name: str, value: Any, where: str) -> Any:
    largest = SMALLER_PROPS.get(name, LARGEST_PROP)
    if isinstance(value, tuple | list):
        for part in value:
            _bounded(name, part, where)
    elif type(value) is int and abs(value) > largest and name not in UNBOUNDED_PROPS:
        raise ValueError(f"{where} is {value}; at most {largest} is allowed")
    return value


def _simple_op(value: dict[str, Any], where: str) -> Any:
    check_keys(value, ["family", "type", "props"], where)
    kind = _allowed(OPS, entry_of(value, "type", str, where), f"{where}.type")
    props = entry_of(value, "props", dict, where)
    if kind.__module__.startswith(("pytensor.", "pytensor_ml.")):
        _check_texts(props, f"{where}.props")
    op = _rebuilt(kind, props, where)
    if isinstance(op, RandomVariable):
        for prop in ("name", "signature"):
            own, given = getattr(kind, prop, None), getattr(op, prop)
            if own is not None and given != own:
                raise ValueError(
                    f"{where} is a {kind.__name__} of the {prop} {given!r}, not {own!r}"
                )
    return op


def _check_texts(value: Any, where: str) -> None:
    """Raise if a prop holds a text that could be code: some are compiled."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_texts(part, where)
    elif isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_(),> .-]{0,200}", value):
        raise ValueError(f"{where} holds the text {value[:100]!r}, which no op here has")


def _scalar_op(value: Any, where: str) -> Any:
    if entry_of(value, "family", str, where) == "scalar_cast":
        check_keys(value, ["family", "dtype"], where)
        dtype = entry_of(value, "dtype", str, where)
        if dtype not in DTYPES:
            raise ValueError(f"{where} casts to the unknown dtype {dtype[:100]!r}")
        return getattr(ps, f"convert_to_{dtype}")
    check_keys(value, ["family", "type"], where)
    return _allowed(SCALAR_OPS, entry_of(value, "type", str, where), f"{where}.type")


def _elemwise(value: dict[str, Any], where: str) -> Elemwise:
    check_keys(value, ["family", "scalar_op"], where)
    return Elemwise(_scalar_op(value["scalar_op"], f"{where}.scalar_op"))


def _reduction(value: dict[str, Any], where: str) -> Any:
    check_keys(value, ["family", "type", "axis", "props"], where)
    kind = _allowed(REDUCTIONS, entry_of(value, "type", str, where), f"{where}.type")
    props = value.get("props", {})
    check_keys(props, ["dtype", "acc_dtype", "initial", "no_zeros_in_input"], f"{where}.props")
    options = {
        name: entry_of(props, name, bool if name.endswith(("l", "t")) else str, f"{where}.props")
        for name in props
    }
    axis = _bounded("axis", prop_from_json(value.get("axis"), f"{where}.axis"), where)
    return kind(axis=axis, **options)


def _says_no_more(recorded: Any, inferred: Any) -> bool:
    """Whether all that one type tells is known of the other too."""
    return bool(recorded.is_super(inferred))


def _is_cheap(node: Apply, out: Variable) -> bool:
    """Whether PyTensor may compute a variable to find out a shape."""
    if isinstance(node.op, HasInnerGraph) or not isinstance(out.type, TensorType | ScalarType):
        return False
    return math.prod(_FEW + 1 if n is None else n for n in out.type.shape) <= _FEW
