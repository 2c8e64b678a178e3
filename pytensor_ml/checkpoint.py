"""Values of shared variables in safetensors files."""

import hashlib
import json
import os
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.tensor.random.type import RandomType

from pytensor_ml.models.loading.keys import Checkpoint, KeyMap
from pytensor_ml.models.loading.safetensors import (
    DTYPES,
    SafetensorsCheckpoint,
    is_unicode,
    read_metadata,
    without_duplicates,
)

_FORMAT_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items() if name != "BF16"}

_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}
# numpy trusts the positions and reads beyond its buffers where they are larger.
_LARGEST_STATES = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "uinteger": 2**32 - 1}


def save_state(shared_variables: Sequence[SharedVariable], path: str | Path) -> None:
    """Write the values of shared variables to a safetensors file, by name.

    The file is the old one or the new one at any time, even if the process is killed. Variables of
    one name are numbered in the order given. The state of a random generator goes into the file's
    metadata.

    Parameters
    ----------
    shared_variables : sequence of SharedVariable
        What to save; each has a name.
    path : str or Path
        The file.

    Raises
    ------
    ValueError
        If a variable has no name, two would be saved under one, or the format has no such dtype.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from pytensor_ml.checkpoint import load_state, save_state
    >>> from pytensor_ml.layers import Linear
    >>> fc = Linear("fc", n_in=4, n_out=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state([fc.W, fc.b], Path(folder, "state.safetensors"))
    ...     load_state([fc.W, fc.b], Path(folder, "state.safetensors"))
    """
    names = state_names(shared_variables)
    metadata = {
        f"rng/{name}": json.dumps(generator_to_json(variable.get_value(borrow=True)))
        for variable, name in names.items()
        if isinstance(variable.type, RandomType)
    }
    tensors = tensors_of(names)
    with written_atomically(Path(path)) as file:
        write_safetensors(file, tensors, metadata)


def load_state(
    shared_variables: Sequence[SharedVariable],
    path: str | Path,
    name_map: Mapping[str, str] | None = None,
    *,
    allow_narrowing: bool = False,
) -> None:
    """Fill shared variables from a safetensors file, by name, or raise before any is changed.

    Parameters
    ----------
    shared_variables : sequence of SharedVariable
        What to fill; those of one name in the order in which they were saved.
    path : str or Path
        The file.
    name_map : mapping from str to str, optional
        Keys of the file for variables that have another name there.
    allow_narrowing : bool
        Whether a value may be rounded to a variable's dtype, such as float32 to float16. One beyond
        the dtype's range is an error all the same.

    Raises
    ------
    FileNotFoundError
        If there is no file.
    ValueError
        If keys are missing or left over, shapes differ, a dtype would be narrowed, or the file is
        damaged. All such faults are listed. To fill what a file has and leave the rest, use
        :meth:`~pytensor_ml.models.loading.KeyMap.load_partial`.
    """
    renamed: dict[str, SharedVariable] = {}
    for variable, name in state_names(shared_variables).items():
        key = (name_map or {}).get(name, name)
        key = f"rng/{key}" if isinstance(variable.type, RandomType) else key
        if key in renamed:
            raise ValueError(
                f"Both {renamed[key].name} and {variable.name} would be filled from {key!r}. Map "
                "each name to a key of its own."
            )
        renamed[key] = variable
    path = Path(path)
    checkpoint = SafetensorsCheckpoint(path)
    metadata = read_metadata(path)
    check_keys_match(
        path, set(renamed), checkpoint.keys() | {key for key in metadata if key.startswith("rng/")}
    )
    states = {}
    for key, variable in renamed.items():
        if not isinstance(variable.type, RandomType):
            continue
        state = _parsed_state(metadata[key], f"{path}'s {key}")
        states[variable] = generator_from_json(state, f"{path}'s {key}")
        kinds = [type(g.bit_generator) for g in (states[variable], variable.get_value(borrow=True))]
        if kinds[0] is not kinds[1]:
            raise ValueError(
                f"{path} holds a state of {kinds[0].__name__} for {variable.name}, which draws "
                f"from {kinds[1].__name__}. Build the network with the generator it was saved with."
            )
    tensors = {v: key for key, v in renamed.items() if v not in states}
    fill(tensors, checkpoint, allow_narrowing=allow_narrowing)
    for variable, generator in states.items():
        variable.set_value(generator, borrow=True)


def check_keys_match(path: str | Path, expected: set[str], found: set[str]) -> None:
    """Raise if a file lacks something that is to be filled from it, or has something else."""
    if found != expected:
        raise ValueError(
            f"{path} does not hold what is to be filled; nothing was loaded. Missing from the "
            f"file: {_listing(expected - found)}. In the file and filling nothing: "
            f"{_listing(found - expected)}. Pass the variables that were saved, or a name_map; to "
            "fill what is there and leave the rest, use pytensor_ml.models.KeyMap.load_partial."
        )


def fill(
    names: Mapping[SharedVariable, str], checkpoint: Checkpoint, *, allow_narrowing: bool = False
) -> None:
    """Fill each variable from the tensor of its name, or raise before any is changed."""
    keys = KeyMap()
    for variable, name in names.items():
        keys.bind(variable, name)
    keys.load(checkpoint, allow_narrowing=allow_narrowing)


def state_names(shared_variables: Sequence[SharedVariable]) -> dict[SharedVariable, str]:
    """Return the name of each variable in files, where each has one of its own.

    Those of one name are numbered: Linear_1_W and Linear_2_W for the W of two layers called
    Linear, and w_1 and w_2 for variables that know no layer.
    """
    variables = list(dict.fromkeys(shared_variables))
    counts = Counter(v.name for v in variables)
    seen: dict[str, int] = defaultdict(int)
    names: dict[SharedVariable, str] = {}
    for variable in variables:
        name, layer = variable.name, getattr(variable, "layer_name", None)
        if not name:
            raise ValueError(
                f"The shared variable {variable} of type {variable.type} has no name, by which a "
                "file would know it. Name it before saving or loading."
            )
        if counts[name] > 1:
            seen[name] += 1
            is_of_layer = layer is not None and name.startswith(f"{layer}_")
            name = (
                f"{layer}_{seen[name]}_{name.removeprefix(f'{layer}_')}"
                if is_of_layer
                else f"{name}_{seen[name]}"
            )
        names[variable] = name
    if taken := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise ValueError(
            f"Several variables would be called {', '.join(taken)} in the file once those of one "
            "name are numbered. Give the layers names that differ."
        )
    return names


def tensors_of(names: Mapping[SharedVariable, str]) -> dict[str, np.ndarray]:
    """Return the arrays that variables hold, by name, after checking that files can hold them."""
    tensors = {}
    for variable, name in names.items():
        if isinstance(variable.type, RandomType):
            continue
        array = np.asarray(variable.get_value(borrow=True))
        if name == "__metadata__" or not is_unicode(name):
            raise ValueError(
                f"A variable is called {name!r}, which no tensor of a safetensors file can be. "
                "Give it another name before saving."
            )
        if array.dtype not in _FORMAT_NAMES:
            raise ValueError(
                f"{name} holds {array.dtype}, which safetensors files have no form for. Split or "
                f"cast it to one of {', '.join(map(str, _FORMAT_NAMES))}."
            )
        tensors[name] = array
    return tensors


def write_safetensors(
    file: IO[bytes], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file, without a second copy of contiguous tensors."""
    # Not by the library: it writes to a hidden file, which stays if the process is killed.
    # The largest first, so that each starts at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in ordered:
        header[name] = {
            "dtype": _FORMAT_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for _, array in ordered:
        file.write(_data_of(array))


def digest_of(tensors: Mapping[str, np.ndarray]) -> str:
    """Return a short text that differs where tensors differ."""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(tensors.items()):
        digest.update(f"{name!r} {array.dtype.str} {array.shape}\n".encode())
        digest.update(_data_of(array))
    return digest.hexdigest()


def _data_of(array: np.ndarray) -> memoryview:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return memoryview(little.reshape(-1).view("u1"))


@contextmanager
def written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Write to a file that becomes ``path`` when all of it has reached the disk.

    What a killed process left is removed by the next that writes the same file; two must not do so
    at once.
    """
    # A link goes on pointing at the file that it points at.
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path.parent} to write {path.name} into. Make it first."
        )
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder, so no file can have its name. Pass the path of a file in it."
        )
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    remove_leftovers(path.parent, rf"{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove the files of a folder whose whole name matches a pattern."""
    for name in os.listdir(folder):
        if re.fullmatch(pattern, name):
            (folder / name).unlink(missing_ok=True)


def generator_to_json(generator: np.random.Generator) -> dict[str, Any]:
    """Return a JSON value of a random generator."""
    state = generator.bit_generator.state
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise ValueError(
            f"A generator draws from {state['bit_generator']}, which files have no form for. Use "
            f"one of {', '.join(_BIT_GENERATORS)}."
        )
    return _state_to_json(state)


def _state_to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _state_to_json(v) for name, v in value.items()}
    if isinstance(value, np.ndarray):
        return {"__array__": value.tolist(), "dtype": value.dtype.name}
    return value if isinstance(value, str) else int(value)


def generator_from_json(value: Any, where: str) -> np.random.Generator:
    """Return the random generator that a JSON value describes."""
    name = value.get("bit_generator") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in _BIT_GENERATORS:
        raise ValueError(
            f"{where} is the state of no known generator; known are {', '.join(_BIT_GENERATORS)}."
        )
    bit_generator = _BIT_GENERATORS[name](0)
    bit_generator.state = _state_from_json(value, bit_generator.state, where)
    return np.random.Generator(bit_generator)


def _state_from_json(value: Any, like: Any, where: str) -> Any:
    """Return a state of the form of ``like``, one that numpy made."""
    if isinstance(like, Mapping):
        if not isinstance(value, dict) or value.keys() != like.keys():
            raise ValueError(f"{where} does not have just the entries {', '.join(like)}.")
        return {
            name: _state_from_json(value[name], v, f"{where}.{name}") for name, v in like.items()
        }
    if isinstance(like, str):
        return like
    if isinstance(like, np.ndarray):
        numbers = value.get("__array__") if isinstance(value, dict) else None
        if not (isinstance(numbers, list) and len(numbers) == len(like)) or not all(
            type(n) is int and 0 <= n <= np.iinfo(like.dtype).max for n in numbers
        ):
            raise ValueError(f"{where} does not hold {len(like)} numbers of dtype {like.dtype}.")
        return np.array(numbers, like.dtype)
    largest = _LARGEST_STATES.get(where.rpartition(".")[2], 2**128 - 1)
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"{where} is no whole number from 0 to {largest}.")
    return value


def _parsed_state(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} does not hold valid JSON: {error}") from error


def _listing(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "none"
