"""Reading safetensors files, one or sharded, with the ``config.json`` beside them."""

import json
import os
from collections import Counter
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pytensor_ml.models.loading.keys import Checkpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

# The format's names; bfloat16, which numpy has not, is widened from its words.
DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "F64": "<f8",
}
# Of JSON, so that it is parsed in a second and 100 MB.
LONGEST_JSON = 16_000_000
MOST_JSON_VALUES = 2**18
_LONGEST_SHOWN = 500


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of a safetensors file, or of a folder with one file or an index of shards.

    All is checked at once but numbers, any of which is valid; values are views of mapped files.

    Parameters
    ----------
    folder_or_file : path
        Folder with ``model.safetensors`` or ``model.safetensors.index.json``, or one file.

    Raises
    ------
    FileNotFoundError
        If there is no such file, or a shard is missing.
    ValueError
        If a file is not in the safetensors format or contradicts the index.
    """

    def __init__(self, folder_or_file: str | Path) -> None:
        path = Path(folder_or_file)
        self.name = str(path)
        self._folder = path if path.is_dir() else path.parent
        self._entries = _read_folder(path) if path.is_dir() else read_header(path)
        for key, entry in self._entries.items():
            if entry.dtype == "BOOL" and not _holds_truths(entry):
                raise ValueError(
                    f"{entry.path} is damaged: {key} is of truth values and holds bytes "
                    "other than 0 and 1. Fetch or write the file again."
                )

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self._folder / CONFIG)

    def keys(self) -> set[str]:
        return set(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._entries[key].shape

    def dtype(self, key: str) -> np.dtype:
        entry = self._entries[key]
        return np.dtype("float32" if entry.dtype == "BF16" else DTYPES[entry.dtype])

    def read(self, key: str) -> np.ndarray:
        entry = self._entries[key]
        array = np.memmap(
            entry.path, DTYPES[entry.dtype], mode="r", offset=entry.offset, shape=entry.shape
        )
        return widen_bfloat16(array) if entry.dtype == "BF16" else np.asarray(array)


def widen_bfloat16(words: np.ndarray) -> np.ndarray:
    """Return the float32 array whose upper halves are the 16-bit ``words``."""
    return (words.astype(np.uint32) << 16).view(np.float32)


class Entry(NamedTuple):
    """Where a tensor lies: ``shape`` numbers of the format's ``dtype`` from byte ``offset`` on."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def _holds_truths(entry: Entry) -> bool:
    left = prod(entry.shape)
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        # In parts, since nothing tells yet that the tensor is wanted.
        while part := file.read(min(left, 2**20)):
            left -= len(part)
            if part.strip(b"\0\1"):
                return False
    return True


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of one file by name, after checking that each lies within it."""
    header, length = _read_json_header(path)
    size = path.stat().st_size
    header.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    end = 0
    for name, first, last, entry in sorted(
        (_parse_entry(path, name, value, 8 + length) for name, value in header.items()),
        key=lambda found: found[1:3],
    ):
        if last > size - 8 - length:
            raise ValueError(
                f"{path} is cut short: {name} takes bytes {first} to {last} of the data, which has "
                f"{size - 8 - length}. Fetch the file again."
            )
        if first != end:
            problem = "overlaps the tensor before it" if first < end else "leaves a hole before it"
            raise ValueError(
                f"{path} is damaged: {name} starts at byte {first} of the data and the tensor "
                f"before it ends at {end}, so it {problem}. Fetch or write the file again."
            )
        end = last
        entries[name] = entry
    if end != size - 8 - length:
        raise ValueError(
            f"{path} is damaged: its tensors end at byte {end} of the data, which has "
            f"{size - 8 - length}. Fetch or write the file again."
        )
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts that one file holds beside its tensors."""
    header, _ = _read_json_header(path)
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(
            f"{path} is damaged: its __metadata__ is no map from names to texts. Fetch or write "
            "the file again."
        )
    return metadata


def _read_json_header(path: Path) -> tuple[dict[str, Any], int]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} {_is_no_file(path)}, so there are no "
            "weights to load. Pass a safetensors file or a folder that holds one."
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if length > size - 8:
            raise ValueError(
                f"{path} is not a safetensors file or is cut short: it has {size} bytes, and its "
                f"first ones ({start!r}) announce a header of {length}. Pickles are not read: "
                "convert the weights to safetensors, or fetch the file again."
            )
        _check_length(length, path)
        text = file.read(length)
    return _parse_json(text, path), length


def _parse_entry(path: Path, name: str, value: Any, start: int) -> tuple[str, int, int, Entry]:
    if len(name) > _LONGEST_SHOWN or not is_unicode(name):
        raise ValueError(
            f"{path} is damaged: no tensor can be called {_brief(ascii(name))}. Fetch or write the "
            "file again."
        )
    try:
        dtype, shape, (first, last) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: the entry of {name}, {_brief(value)}, has no dtype, shape "
            "and two data_offsets. Fetch or write the file again."
        ) from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{path} holds {name} as {_brief(repr(dtype))}, which is not read here. Convert it to "
            f"one of {', '.join(DTYPES)}."
        )
    numbers = [*shape, first, last] if isinstance(shape, list) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(
            f"{path} is damaged: {name} has shape {_brief(shape)} and data_offsets "
            f"{_brief([first, last])}, where only whole numbers from 0 on make sense. Fetch or "
            "write the file again."
        )
    # What numpy can address, which an axis of length 0 does not tell.
    if len(shape) > 32 or prod(n or 1 for n in shape) >= 2**60:
        raise ValueError(
            f"{path} holds {name} in the shape {_brief(shape)}, which no array can have. "
            "Fetch or write the file again."
        )
    needed = prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if last - first != needed:
        raise ValueError(
            f"{path} is damaged: {name} of shape {tuple(shape)} and dtype {dtype} takes "
            f"{needed} bytes, but its data_offsets {_brief([first, last])} hold "
            f"{_brief(last - first)}. Fetch or write the file again."
        )
    return name, first, last, Entry(path, dtype, tuple(shape), start + first)


def _read_folder(folder: Path) -> dict[str, Entry]:
    # The one that transformers takes where both are there.
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        found = sorted(file.name for file in folder.glob("*.safetensors"))
        raise FileNotFoundError(
            f"{folder} has neither {WEIGHTS} nor {INDEX} (it has these safetensors files: "
            f"{', '.join(found) or 'none'}), so there are no weights to load. Pass one of the "
            "files, or add the index of the shards."
        )
    index = folder / INDEX
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(v, str) for v in shard_of.values()):
        raise ValueError(
            f"{index} has no `weight_map` from tensor to file name. Fetch or write the index again."
        )
    shards = {name: folder / name for name in sorted(set(shard_of.values()))}
    for name in shards:
        if not _is_file_name(name):
            raise ValueError(
                f"{index} names the file {_brief(ascii(name))}, which no file can be called. Fetch "
                "or write the index again."
            )
    absent = [name for name, path in shards.items() if not os.path.lexists(path)]
    if absent:
        raise FileNotFoundError(
            f"{index} names shards that do not exist: {', '.join(absent[:20])}"
            f"{f' and {len(absent) - 20} others' if len(absent) > 20 else ''}. Fetch them too."
        )
    for name, path in shards.items():
        if not _is_inside(path, folder):
            raise ValueError(
                f"{index} names the file {name!r}, which lies outside the folder (at "
                f"{os.path.realpath(path)}), so that a model could read any file. "
                "Put the shards into the folder and name them without a path."
            )
    entries: dict[str, Entry] = {}
    keys_of: dict[str, set[str]] = {name: set() for name in shards}
    for key, name in shard_of.items():
        keys_of[name].add(key)
    for name, path in shards.items():
        held, listed = read_header(path), keys_of[name]
        for key in sorted(listed ^ held.keys()):
            problem = "does not hold" if key in listed else "holds, unlike the index,"
            raise ValueError(
                f"{index} and its shards do not belong together: {name} {problem} {key}. Fetch the "
                "index and the shards of one model."
            )
        entries |= held
    return entries


def _is_no_file(path: Path) -> str:
    if path.is_dir():
        return "is a folder"
    return "is no ordinary file" if path.exists() else "does not exist"


def _is_file_name(name: str) -> bool:
    return len(name) <= 255 and "\0" not in name and is_unicode(name)


def _is_inside(path: Path, folder: Path) -> bool:
    # The Hugging Face cache keeps a model as snapshots/<revision>/ with links to ../../blobs/.
    folder = Path(os.path.realpath(folder))
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(folder.parent.parent / "blobs")
    return any(Path(os.path.realpath(path)).is_relative_to(home) for home in homes)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} {_is_no_file(path)}, so what the model is "
            "stays unknown. Pass the config.json or the folder that holds it; a file of weights "
            "alone is read by load_state."
        )
    _check_length(path.stat().st_size, path)
    return _parse_json(path.read_bytes(), path)


def _check_length(length: int, path: Path) -> None:
    if length > LONGEST_JSON:
        raise ValueError(
            f"{path} has {length} bytes of JSON, and at most {LONGEST_JSON} are read, since no "
            "model needs as many. Fetch or write it again."
        )


def _parse_json(data: bytes, path: Path) -> dict[str, Any]:
    if (count := most_values(data)) > MOST_JSON_VALUES:
        raise ValueError(
            f"{path} has about {count} values of JSON, and at most {MOST_JSON_VALUES} are read, "
            "since no model needs as many. Fetch or write it again."
        )
    try:
        parsed = json.loads(data.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold valid JSON where it should: {error}. Fetch or write it again."
        ) from error
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{path} holds a JSON {type(parsed).__name__} where an object belongs. Fetch or write "
            "it again."
        )
    return parsed


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, or raise if it has a name twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_brief(name)} appears twice")
    return result


def most_values(text: bytes) -> int:
    """Return a number that a JSON text cannot have more values than."""
    return 1 + sum(map(text.count, (b",", b"[", b"{")))


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a pair of surrogates, which JSON can escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
