"""Types, props and constants as JSON values."""

import base64
import binascii
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pytensor.graph.basic import Constant
from pytensor.graph.type import Type
from pytensor.scalar.basic import ScalarConstant, ScalarType
from pytensor.tensor.random.type import RandomGeneratorType
from pytensor.tensor.type import TensorType
from pytensor.tensor.type_other import NoneConst, NoneTypeT
from pytensor.tensor.variable import TensorConstant

DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
# Longer constants are written as bytes.
LONGEST_LISTED = 1000


def entry_of(container: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return an entry of a JSON object after checking that it is there and of its kind."""
    if not isinstance(container, dict):
        raise ValueError(f"{where} is {_brief(container)}, where an object belongs")
    if key not in container:
        raise ValueError(f"{where} has no entry {key!r}, without which it has no meaning")
    value = container[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        expected = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{where}.{key} is {_brief(value)}, where {expected} belongs")
    return value


def check_keys(container: Mapping[str, Any], allowed: Iterable[str], where: str) -> None:
    """Raise if a JSON object has entries that nothing reads."""
    if unknown := sorted(set(container) - set(allowed)):
        raise ValueError(
            f"{where} has the unexpected entries {', '.join(unknown)}, which would be lost; it "
            f"takes {', '.join(allowed) or 'none'}"
        )


def _brief(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def type_to_json(graph_type: Type) -> dict[str, Any]:
    """Return a JSON value of a type."""
    if isinstance(graph_type, TensorType):
        return {"kind": "tensor", "dtype": graph_type.dtype, "shape": list(graph_type.shape)}
    if isinstance(graph_type, ScalarType):
        return {"kind": "scalar", "dtype": graph_type.dtype}
    if isinstance(graph_type, RandomGeneratorType):
        return {"kind": "random_generator"}
    if isinstance(graph_type, NoneTypeT):
        return {"kind": "none"}
    raise ValueError(
        f"A variable has the type {graph_type}, for which files have no form. Use a tensor."
    )


def type_from_json(value: Any, where: str) -> Any:
    """Return the type that a JSON value describes."""
    kind = entry_of(value, "kind", str, where)
    if kind == "random_generator":
        return RandomGeneratorType()
    if kind == "none":
        return NoneConst.type
    if kind not in ("tensor", "scalar"):
        raise ValueError(f"{where} is of the unknown kind {kind!r}")
    dtype = entry_of(value, "dtype", str, where)
    if dtype not in DTYPES:
        raise ValueError(f"{where} has the dtype {dtype!r}; known are {', '.join(sorted(DTYPES))}")
    if kind == "scalar":
        return ScalarType(dtype)
    shape = entry_of(value, "shape", list, where)
    if len(shape) > 32:
        raise ValueError(f"{where} has {len(shape)} axes; at most 32 are known")
    if not all(n is None or (type(n) is int and n >= 0) for n in shape):
        raise ValueError(
            f"{where} has the shape {_brief(str(shape))}, where whole numbers from 0 on belong, or "
            "null if a length is open"
        )
    return TensorType(dtype, shape=tuple(shape))


def number_to_json(value: float) -> Any:
    """Return a JSON value of a float; JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else {"__float__": str(value)}


def number_from_json(value: Any, where: str) -> Any:
    """Return the number that a JSON value stands for."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        if value["__float__"] not in ("nan", "inf", "-inf"):
            raise ValueError(f"{where} is {_brief(value['__float__'])}, not nan, inf or -inf")
        return float(value["__float__"])
    if type(value) is int and abs(value) >= 2**128:
        raise ValueError(f"{where} is {_brief(value)}, larger than any number of a network")
    if type(value) not in (bool, int, float) or not math.isfinite(value):
        raise ValueError(f"{where} is {_brief(value)}, where a number belongs")
    return value


def prop_to_json(value: Any) -> Any:
    """Return a JSON value of an op's prop."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return number_to_json(value)
    if isinstance(value, tuple):
        return {"__tuple__": [prop_to_json(v) for v in value]}
    if isinstance(value, list):
        return [prop_to_json(v) for v in value]
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"__slice__": [prop_to_json(v) for v in parts]}
    raise TypeError(
        f"it is {value!r}, and only numbers, strings, None, tuples and slices can be written"
    )


def prop_from_json(value: Any, where: str) -> Any:
    """Return the prop that a JSON value stands for."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, list):
        return [prop_from_json(v, where) for v in value]
    if isinstance(value, dict) and set(value) == {"__tuple__"}:
        return tuple(prop_from_json(v, where) for v in entry_of(value, "__tuple__", list, where))
    if isinstance(value, dict) and set(value) == {"__slice__"}:
        parts = entry_of(value, "__slice__", list, where)
        if len(parts) != 3:
            raise ValueError(f"{where} is a slice of {len(parts)} parts, where 3 belong")
        return slice(*(prop_from_json(v, where) for v in parts))
    number = number_from_json(value, where)
    if math.isnan(number):
        raise ValueError(f"{where} is NaN, by which an op would differ from itself")
    return number


def constant_to_json(constant: Constant, listed: bool) -> Any:
    """Return a JSON value of a constant's data, as numbers or else as bytes."""
    if isinstance(constant.type, NoneTypeT):
        return None
    array = np.asarray(constant.data)
    if not listed or array.dtype.kind == "c":
        data = array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()
        return {"base64": base64.b64encode(data).decode()}
    return _nested(array.tolist())


def _nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_nested(v) for v in value]
    return number_to_json(value) if isinstance(value, float) else value


def constant_from_json(graph_type: Any, value: Any, where: str) -> Constant:
    """Return the constant of a type that a JSON value describes."""
    if isinstance(graph_type, NoneTypeT):
        return NoneConst
    if not isinstance(graph_type, TensorType | ScalarType):
        raise ValueError(f"{where} is a constant of the type {graph_type}, which has none")
    recorded = graph_type.shape if isinstance(graph_type, TensorType) else ()
    shape = tuple(n for n in recorded if n is not None)
    if len(shape) < len(recorded):
        raise ValueError(f"{where} is a constant of open shape {recorded}; give all of its lengths")
    array = _array_from_json(value, shape, np.dtype(graph_type.dtype), where)
    if isinstance(graph_type, ScalarType):
        return ScalarConstant(graph_type, array[()])
    return TensorConstant(graph_type, array)


def _array_from_json(value: Any, shape: tuple[int, ...], dtype: np.dtype, where: str) -> np.ndarray:
    if isinstance(value, dict) and set(value) == {"base64"}:
        text = entry_of(value, "base64", str, where)
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where}.base64 is not valid base64: {error}") from error
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{where} holds {len(data)} bytes, but {dtype} of shape {shape} takes "
                f"{math.prod(shape) * dtype.itemsize}"
            )
        return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape).astype(dtype)
    numbers = [value]
    for length in shape:
        if not all(isinstance(v, list) and len(v) == length for v in numbers):
            raise ValueError(f"{where} does not hold numbers in the shape {shape} that it claims")
        numbers = [number for v in numbers for number in v]
    numbers = [number_from_json(number, where) for number in numbers]
    kinds = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}.get(dtype.kind, ())
    if not all(type(number) in kinds for number in numbers):
        raise ValueError(f"{where} holds numbers that {dtype} cannot hold")
    try:
        with np.errstate(over="ignore"):
            array = np.array(numbers, dtype)
    except OverflowError as error:
        raise ValueError(f"{where} holds numbers that {dtype} cannot hold: {error}") from error
    if dtype.kind == "f" and (np.isinf(array) != np.isinf(np.array(numbers, float))).any():
        raise ValueError(f"{where} holds numbers that {dtype} cannot hold")
    return array.reshape(shape)


def with_runs(numbers: list[int]) -> list[Any]:
    """Return the numbers with a pair (first, length) for each run of at least three."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number >= 0 and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return [
        part for first, n in runs for part in ([[first, n]] if n > 2 else range(first, first + n))
    ]


def without_runs(references: list[Any]) -> list[Any]:
    """Return the numbers that :func:`with_runs` made shorter; what is neither stays as it is."""
    parts = (range(r[0], sum(r)) if is_pair(r) else [r] for r in references)
    return [number for part in parts for number in part]


def is_pair(value: Any) -> bool:
    """Whether a value is two numbers that are not negative."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(n) is int and n >= 0 for n in value)
    )
