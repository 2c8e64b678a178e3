"""Between the published package's form of a graph, format version 4, and ours, version 5.

Version 4 spells every op out at each node, and refers to variables by objects.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pytensor_ml.base import BlockOp
from pytensor_ml.layers.attention import AttentionLayer, AttentionPullback
from pytensor_ml.serialize.allowed import DEFAULT_PROPS, GRAPH_OPS, OPS, qualified_name
from pytensor_ml.serialize.values import check_keys, entry_of, prop_to_json, without_runs
from pytensor_ml.serialize.write import frozen

_DEEPEST = 50
_ATTENTION = {qualified_name(AttentionLayer), qualified_name(AttentionPullback)}


def to_version_4(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what version 4 has for a version 5 graph, or None if it would not be the same."""
    types, ops, constants = (document[table] for table in ("types", "ops", "constants"))
    graphs = [document, *(op["inner"] for op in ops if "inner" in op)]
    uses = [op for graph in graphs for op, _, _ in graph["nodes"]]
    for i, op in enumerate(ops):
        is_block = issubclass(GRAPH_OPS.get(op.get("type", ""), object), BlockOp)
        is_option = op["family"] == "careduce" and "props" in op
        if is_block or is_option or ("inner" in op and uses.count(i) > 1):
            return None
    if any(isinstance(value, dict) and "base64" in value for _, value in constants):
        return None
    if any(map(partial(_selects_keys, document), graphs)):
        return None

    def op_of(index: int) -> dict[str, Any]:
        op = ops[index]
        if "inner" in op:
            return {**op, "inner": graph_of(op["inner"])}
        defaults = DEFAULT_PROPS.get(OPS.get(op.get("type", "")), {})
        if op["family"] != "leaf" or not defaults:
            return op
        written = {name: prop_to_json(value) for name, value in defaults.items()}
        if any(op["props"][name] != value for name, value in written.items()):
            return op
        return {**op, "props": {k: v for k, v in op["props"].items() if k not in written}}

    def constant_of(index: int) -> dict[str, Any]:
        type_index, value = constants[index]
        kept = {} if types[type_index]["kind"] == "none" else {"value": value}
        return {"const": {"type": types[type_index], **kept}}

    def graph_of(graph: Mapping[str, Any]) -> dict[str, Any]:
        variables: list[dict[str, Any]] = [{"input": i} for i in range(len(graph["inputs"]))]

        def reference(number: int) -> dict[str, Any]:
            return variables[number] if number >= 0 else constant_of(-1 - number)

        nodes = []
        for i, (op, references, node_types) in enumerate(graph["nodes"]):
            nodes.append(
                {
                    "op": op_of(op),
                    "inputs": [reference(number) for number in without_runs(references)],
                    "outputs": [types[t] for t in node_types],
                }
            )
            variables += [{"node": i, "out": out} for out in range(len(node_types))]
        return {
            "inputs": [types[t] for t in graph["inputs"]],
            "nodes": nodes,
            "outputs": [reference(number) for number in graph["outputs"]],
        }

    return graph_of(document)


def _selects_keys(document: Mapping[str, Any], graph: Mapping[str, Any]) -> bool:
    """Whether a mask tells which keys are seen, where version 4 adds what the mask holds."""
    types = list(graph["inputs"])
    for op, references, node_types in graph["nodes"]:
        if document["ops"][op].get("type") in _ATTENTION:
            masks = without_runs(references)[3:]
            kinds = [types[m] if m >= 0 else document["constants"][-1 - m][0] for m in masks]
            if any(document["types"][kind]["dtype"] == "bool" for kind in kinds):
                return True
        types += node_types
    return False


def from_version_4(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return the version 5 form of a version 4 graph; errors name what is wrong with it."""
    upgrade = _Upgrade()
    return {
        **upgrade.graph(graph, "the graph", 0),
        "types": upgrade.types,
        "ops": upgrade.ops,
        "constants": upgrade.constants,
    }


class _Upgrade:
    def __init__(self) -> None:
        self.types: list[Any] = []
        self.ops: list[Any] = []
        self.constants: list[Any] = []
        self._known: dict[Any, int] = {}

    def graph(self, graph: Any, where: str, depth: int) -> dict[str, Any]:
        if depth > _DEEPEST:
            raise ValueError(f"{where} lies more than {_DEEPEST} graphs deep")
        input_types = entry_of(graph, "inputs", list, where)
        # Number of the first output of each node.
        firsts: list[int] = []
        counts: list[int] = []
        # Type of each variable.
        types = [self._type(value) for value in input_types]

        def reference(value: Any, place: str) -> int:
            kind = next(iter(value), None) if isinstance(value, dict) else None
            if kind == "const":
                check_keys(value, ["const"], place)
                constant = entry_of(value, "const", dict, place)
                check_keys(constant, ["type", "value"], f"{place}.const")
                type_index = self._type(entry_of(constant, "type", dict, f"{place}.const"))
                return -1 - self._add(self.constants, [type_index, constant.get("value")])
            if kind == "input":
                check_keys(value, ["input"], place)
                number = entry_of(value, "input", int, place)
                if not 0 <= number < len(input_types):
                    raise ValueError(
                        f"{place} reads input {number} of a graph of {len(input_types)} inputs"
                    )
                return number
            check_keys(value if isinstance(value, dict) else {}, ["node", "out"], place)
            node, out = (entry_of(value, key, int, place) for key in ("node", "out"))
            if not (0 <= node < len(firsts) and 0 <= out < counts[node]):
                raise ValueError(
                    f"{place} reads output {out} of node {node}, which does not exist or does not "
                    "come before it"
                )
            return firsts[node] + out

        def references(values: list[Any], place: str) -> list[int]:
            return [reference(value, f"{place}[{i}]") for i, value in enumerate(values)]

        nodes: list[Any] = []
        for i, node in enumerate(entry_of(graph, "nodes", list, where)):
            place = f"{where}'s nodes[{i}]"
            op = self._op(entry_of(node, "op", dict, place), f"{place}.op", depth)
            inputs = references(entry_of(node, "inputs", list, place), f"{place}.inputs")
            made = [self._type(t) for t in entry_of(node, "outputs", list, place)]
            check_keys(node, ["op", "inputs", "outputs"], place)
            if self.ops[op].get("type") in _ATTENTION and len(inputs) == 4:
                # There, a mask is added whatever it holds.
                kind = types[inputs[3]] if inputs[3] >= 0 else self.constants[-1 - inputs[3]][0]
                if cast := self._cast_to_float(self.types[kind], inputs[3]):
                    nodes.append(cast)
                    inputs = [*inputs[:3], len(types)]
                    types += cast[2]
            nodes.append([op, inputs, made])
            firsts.append(len(types))
            counts.append(len(made))
            types += made
        outputs = entry_of(graph, "outputs", list, where)
        return {
            "inputs": types[: len(input_types)],
            "nodes": nodes,
            "outputs": references(outputs, f"{where}'s outputs"),
        }

    def _op(self, op: Any, where: str, depth: int) -> int:
        if "inner" in op:
            op = {**op, "inner": self.graph(op["inner"], f"{where}.inner", depth + 1)}
        return self._add(self.ops, op)

    def _cast_to_float(self, kind: Any, number: int) -> list[Any] | None:
        if not isinstance(kind, dict) or str(kind.get("dtype")).startswith("float"):
            return None
        cast = {"family": "scalar_cast", "dtype": "float32"}
        op = self._add(self.ops, {"family": "elemwise", "scalar_op": cast})
        return [op, [number], [self._type({**kind, "dtype": "float32"})]]

    def _type(self, value: Any) -> int:
        return self._add(self.types, value)

    def _add(self, table: list[Any], value: Any) -> int:
        key = (id(table), frozen(value))
        if key not in self._known:
            self._known[key] = len(table)
            table.append(value)
        return self._known[key]
