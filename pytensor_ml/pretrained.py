"""Whole networks as files: the graph in ``config.json``, the values in ``model.safetensors``."""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable, shared
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import io_toposort
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType

from pytensor_ml.checkpoint import (
    check_keys_match,
    digest_of,
    fill,
    generator_from_json,
    generator_to_json,
    remove_leftovers,
    state_names,
    sync_folder,
    tensors_of,
    write_safetensors,
    written_atomically,
)
from pytensor_ml.models import load_causal_lm
from pytensor_ml.models.loading.safetensors import (
    LONGEST_JSON,
    MOST_JSON_VALUES,
    SafetensorsCheckpoint,
    most_values,
    read_json,
    read_metadata,
)
from pytensor_ml.params import NonTrainableParameter, TrainableParameter, non_trainable, trainable
from pytensor_ml.pytensorf.collect import (
    Outputs,
    as_output_list,
    collect_data_inputs,
    collect_shared_variables,
)
from pytensor_ml.serialize import deserialize_graph, serialize_graph
from pytensor_ml.serialize.allowed import INITIALIZERS, qualified_name
from pytensor_ml.serialize.read import item, read_initializer
from pytensor_ml.serialize.values import check_keys, entry_of, prop_to_json, type_from_json
from pytensor_ml.state import Initializer, ZeroInitializer

type Network = tuple[list[Variable], Variable | list[Variable]]

CONFIG_FILENAME = "config.json"
WEIGHTS_FILENAME = "model.safetensors"
GRAPH_FORMAT = "pytensor_ml.graph"
# The latest; graphs that the version of the published package can hold are written as that one.
GRAPH_FORMAT_VERSION = 5
PUBLISHED_VERSION = 4

_DIGEST = "weights"

# How many bytes of values a config without weights may ask for, however short it is.
MOST_DRAWN_BYTES = 2**31


def save_network(
    outputs: Variable | Sequence[Variable],
    path: str | Path,
    *,
    inputs: Sequence[Variable] | None = None,
) -> None:
    """Write the graph of a network to a JSON file, without the values of its parameters.

    The states of random generators are written with it. The file is the old one or the new one at
    any time, even if the process is killed.

    Parameters
    ----------
    outputs : Variable or sequence of Variable
        Outputs of the network.
    path : str or Path
        The file.
    inputs : sequence of Variable, optional
        Data inputs in calling order. Default is those the graph has.

    Raises
    ------
    ValueError
        If the graph has something that a file cannot hold, such as an op or an initializer that
        :mod:`pytensor_ml.serialize` does not know.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from pytensor_ml.layers import Input, Linear
    >>> from pytensor_ml.pretrained import load_network, save_network
    >>> y = Linear("fc", n_in=4, n_out=2)(Input("x", shape=(None, 4)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_network(y, Path(folder, "config.json"))
    ...     [x], y = load_network(Path(folder, "config.json"))
    >>> x.name, y.type.shape
    ('x', (None, 2))
    """
    _write_config(_config_of(outputs, inputs), Path(path))


def load_network(path: str | Path, *, restore_rng: bool = False) -> Network:
    """Build the network that :func:`save_network` wrote, its parameters drawn anew.

    Trainable parameters hold draws of their initializers, other state holds zeros.

    Parameters
    ----------
    path : str or Path
        The file.
    restore_rng : bool
        Whether random generators go on from the states saved; otherwise their seeds are fresh.

    Returns
    -------
    inputs : list of Variable
        Data inputs in calling order.
    outputs : Variable or list of Variable
        A list unless there is one output.

    Raises
    ------
    FileNotFoundError
        If there is no file.
    ValueError
        If the file is no network of a known version, is damaged, or names what files may not name.
        Nothing that it names is imported or called.
    """
    path = Path(path)
    config = _read_config(path)
    with _naming(path):
        saved = _read_inputs(config)
        _check_drawn_size(saved)
        return _build(config, saved, [_make_input(s, _draw(s), restore_rng) for s in saved])


def save_pretrained(
    outputs: Variable | Sequence[Variable],
    directory: str | Path,
    *,
    inputs: Sequence[Variable] | None = None,
) -> None:
    """Write a network, its graph and the values of its parameters, to a folder.

    The folder loads as the old network or as the new one at any time, even if the process is
    killed. Two processes must not write to it at once.

    Parameters
    ----------
    outputs : Variable or sequence of Variable
        Outputs of the network.
    directory : str or Path
        The folder; it is made if need be, and other files in it are left alone.
    inputs : sequence of Variable, optional
        Data inputs in calling order. Default is those the graph has.

    Raises
    ------
    ValueError
        As for :func:`save_network` and :func:`~pytensor_ml.checkpoint.save_state`.

    Examples
    --------
    >>> import tempfile
    >>> from pytensor_ml.layers import Input, Linear
    >>> from pytensor_ml.pretrained import from_pretrained, save_pretrained
    >>> fc = Linear("fc", n_in=4, n_out=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(fc(Input("x", shape=(None, 4))), folder)
    ...     _, y = from_pretrained(folder)
    >>> bool((y.owner.inputs[1].get_value() == fc.W.get_value()).all())
    True
    """
    config = _config_of(outputs, inputs)
    tensors = tensors_of(state_names(collect_shared_variables(outputs)))
    config[_DIGEST] = digest = digest_of(tensors)
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"{folder} is a file, so the two files of a network cannot be put there. Pass a folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Two files cannot be replaced at once. The new weights lie beside the old ones until the
    # config that names them has replaced the old config, which is the moment of the switch.
    beside = folder / f"model.{digest}.safetensors"
    with written_atomically(beside) as file:
        write_safetensors(file, tensors, {"format": "np", _DIGEST: digest})
    _write_config(config, folder / CONFIG_FILENAME)
    os.replace(beside, folder / WEIGHTS_FILENAME)
    sync_folder(folder)
    remove_leftovers(folder, r"model\.[0-9a-f]{16}\.safetensors(\.[0-9a-f]{16}\.tmp)?")


def from_pretrained(
    directory: str | Path,
    source_format: Literal["auto", "pytensor", "huggingface"] = "auto",
    *,
    restore_rng: bool = False,
    variant: str | None = None,
) -> Network:
    """Load a network, its graph and the values of its parameters.

    Parameters
    ----------
    directory : str or Path
        A folder that :func:`save_pretrained` wrote, a folder as transformers writes it, or a GGUF
        file. For the latter two see :func:`~pytensor_ml.models.load_causal_lm`.
    source_format : "auto", "pytensor" or "huggingface"
        Which of them it is; by default the config tells.
    restore_rng : bool
        Whether random generators go on from the states saved; otherwise their seeds are fresh.
    variant : str, optional
        Which weights to take of a folder that holds several, as in ``model.fp16.safetensors``.

    Returns
    -------
    inputs : list of Variable
        Data inputs in calling order.
    outputs : Variable or list of Variable
        A list unless there is one output.

    Raises
    ------
    FileNotFoundError
        If the folder or a file in it is missing.
    ValueError
        As for :func:`load_network` and :func:`~pytensor_ml.checkpoint.load_state`.
    """
    path = Path(directory)
    if source_format not in ("auto", "pytensor", "huggingface"):
        raise ValueError(
            f"source_format is {source_format!r}, which says of no format how to load {path}. Pass "
            "'auto', 'pytensor' or 'huggingface'."
        )
    if source_format == "auto":
        is_part = path.is_file() and path.name in (CONFIG_FILENAME, WEIGHTS_FILENAME)
        config = (path.parent if is_part else path) / CONFIG_FILENAME
        is_own = (path.is_dir() or config.is_file()) and _is_own(read_json(config))
        if is_own and is_part:
            raise ValueError(
                f"{path} is one of the two files of a network that save_pretrained wrote. Pass "
                f"their folder, {path.parent}."
            )
        source_format = "pytensor" if is_own else "huggingface"
    if source_format == "huggingface":
        return _load_published(path, variant)
    if variant is not None:
        raise ValueError(
            f"variant is {variant!r}, but {path} is a folder of save_pretrained, which has one "
            "file of weights. Leave it out."
        )
    return _load_own(path, restore_rng)


def _load_published(path: Path, variant: str | None) -> Network:
    model = load_causal_lm(path if variant is None else path / f"model.{variant}.safetensors")
    if isinstance(model, tuple):
        return model
    token_ids = pt.tensor("token_ids", dtype="int64", shape=(None, None))
    return [token_ids], model(token_ids)


# A load takes much less time than the training between two saves.
_MOST_TRIES = 100


def _load_own(folder: Path, restore_rng: bool) -> Network:
    """Load a folder, again if another process has replaced the network in the meantime."""

    def seen() -> tuple[bytes | None, list[str]]:
        config = folder / CONFIG_FILENAME
        return (
            config.read_bytes() if config.is_file() else None,
            sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")),
        )

    for _ in range(_MOST_TRIES):
        before = seen() if folder.is_dir() else None
        try:
            network = _load_folder(folder, restore_rng)
        except (OSError, ValueError):
            if before is None or seen() == before:
                raise
        else:
            if seen() == before:
                return network
    raise OSError(
        f"Another process replaced the network in {folder} during each of {_MOST_TRIES} tries to "
        "load it. Load it when that process writes less often."
    )


def _load_folder(folder: Path, restore_rng: bool) -> Network:
    path = folder / CONFIG_FILENAME
    config = _read_config(path)
    checkpoint = SafetensorsCheckpoint(_weights_of(folder, config))
    with _naming(path):
        saved = _read_inputs(config)
        variables = [_make_input(s, _placeholder(s), restore_rng) for s in saved]
        network = _build(config, saved, variables)
    # In the order in which they were numbered when they were saved.
    state = [v for v in collect_shared_variables(network[1]) if not isinstance(v.type, RandomType)]
    held = checkpoint.keys()
    _guess_layers(state, held)
    names = state_names(state)
    for variable, name in names.items():
        # An open length is known from the weights alone.
        if None in variable.type.shape and name in held:
            value = np.broadcast_to(np.zeros((), variable.type.dtype), checkpoint.shape(name))
            if variable.type.is_valid_value(value):
                variable.set_value(value, borrow=True)
    check_keys_match(checkpoint.name, set(names.values()), held)
    fill(names, checkpoint)
    return network


def _weights_of(folder: Path, config: dict[str, Any]) -> Path:
    weights, digest = folder / WEIGHTS_FILENAME, config.get(_DIGEST)
    if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{16}", digest)):
        return weights
    # Still there if the process was killed before it could give them their usual name.
    beside = folder / f"model.{digest}.safetensors"
    weights = beside if beside.is_file() else weights
    held = read_metadata(weights).get(_DIGEST, digest)
    if held != digest:
        raise ValueError(
            f"{weights} bears the mark {held[:100]!r}, but {folder / CONFIG_FILENAME} belongs to "
            f"weights of the mark {digest!r}. Copy both files of one network again."
        )
    return weights


def _config_of(outputs: Outputs, inputs: Sequence[Variable] | None) -> dict[str, Any]:
    listed = as_output_list(outputs)
    data = collect_data_inputs(listed) if inputs is None else list(inputs)
    # Those of a block are neighbors, so that its node can refer to all of them at once.
    read = (v for node in io_toposort([], listed) for v in node.inputs)
    found = dict.fromkeys(v for v in read if isinstance(v, SharedVariable))
    state = list(found | dict.fromkeys(collect_shared_variables(listed)))
    if given := set(data) & set(state):
        raise ValueError(
            f"The shared variables {given} are given as data inputs, but they have values. Leave "
            "them out: they are saved anyway."
        )
    graph = serialize_graph([*data, *state], listed)
    return {
        "format": GRAPH_FORMAT,
        "format_version": GRAPH_FORMAT_VERSION if "ops" in graph else PUBLISHED_VERSION,
        **graph,
        "input_meta": [
            *({"name": v.name, "kind": "data"} for v in data),
            *map(_meta_of, state),
        ],
        "n_outputs": len(listed),
    }


def _meta_of(variable: SharedVariable) -> dict[str, Any]:
    if isinstance(variable.type, RandomType):
        state = generator_to_json(variable.get_value(borrow=True))
        return {"name": variable.name, "kind": "rng", "rng_state": state}
    kind = next((kind for kind, made in _KINDS.items() if type(variable) is made), "shared")
    meta: dict[str, Any] = {"name": variable.name, "kind": kind}
    if (layer_name := getattr(variable, "layer_name", None)) is not None:
        meta["layer_name"] = layer_name
    if (law := getattr(variable, "initializer", None)) is not None:
        meta["initializer"] = _initializer_to_json(law, variable.name)
    if None in variable.type.shape:
        meta["shape"] = list(variable.get_value(borrow=True).shape)
    return meta


def _initializer_to_json(law: Initializer, parameter: str | None) -> dict[str, Any]:
    name = next((name for name, kind in INITIALIZERS.items() if kind is type(law)), None)
    if name is None:
        raise ValueError(
            f"{parameter} is drawn by {qualified_name(type(law))}, which files may not name, "
            "so it could not be loaded. Pass the class to "
            "pytensor_ml.serialize.register_initializer before saving and before loading."
        )
    return {"class": name, "props": {p: prop_to_json(getattr(law, p)) for p in law.__props__}}


def _write_config(config: dict[str, Any], path: Path) -> None:
    text = json.dumps(config, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > LONGEST_JSON or most_values(text) > MOST_JSON_VALUES:
        raise ValueError(
            f"The graph would take {len(text)} bytes and about {most_values(text)} values in "
            f"{path}, and loading reads at most {LONGEST_JSON} and {MOST_JSON_VALUES}. Hold large "
            "constants in a non_trainable parameter, and call equal blocks with call_as_block."
        )
    with written_atomically(path) as file:
        file.write(text)


def _is_own(config: dict[str, Any]) -> bool:
    return config.get("format") == GRAPH_FORMAT


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not _is_own(config):
        raise ValueError(
            f"{path} does not describe a network of the format {GRAPH_FORMAT}. Load a folder of "
            "transformers, or a GGUF file, with from_pretrained."
        )
    version = config.get("format_version")
    known = {PUBLISHED_VERSION: "ops" not in config, GRAPH_FORMAT_VERSION: "ops" in config}
    if type(version) is not int or not known.get(version, False):
        raise ValueError(
            f"{path} is of format version {version!r} or not of the form of that version; known "
            f"are {', '.join(map(str, known))}. Load it with the version of pytensor_ml that wrote "
            "it, or save the network again."
        )
    return config


class _SavedInput(NamedTuple):
    name: str | None
    kind: str
    type: Any
    layer_name: str | None
    initializer: Initializer | None
    generator: np.random.Generator | None
    shape: tuple[int, ...]


_KINDS: dict[str, type] = {
    "trainable": TrainableParameter,
    "non_trainable": NonTrainableParameter,
}
_META = ("name", "kind", "layer_name", "initializer", "rng_state", "shape")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors that name an entry of it."""
    try:
        yield
    except ValueError as error:
        # Some faults have their own fix.
        fix = (
            "" if str(error).endswith(".") else ". Fetch the file again, or save the network again."
        )
        raise ValueError(f"{path} was not loaded: {error}{fix}") from error


def _read_inputs(config: dict[str, Any]) -> list[_SavedInput]:
    metas = entry_of(config, "input_meta", list, "the config")
    types = entry_of(config, "inputs", list, "the config")
    if "types" in config:
        listed = entry_of(config, "types", list, "the config")
        types = [item(listed, t, f"inputs[{i}]", "type") for i, t in enumerate(types)]
    if len(metas) != len(types):
        raise ValueError(f"input_meta has {len(metas)} entries, but there are {len(types)} inputs")
    return [
        _read_input(meta, type_from_json(graph_type, f"inputs[{i}]"), f"input_meta[{i}]")
        for i, (meta, graph_type) in enumerate(zip(metas, types, strict=True))
    ]


def _read_input(meta: Any, graph_type: Any, where: str) -> _SavedInput:
    kind = entry_of(meta, "kind", str, where)
    check_keys(meta, _META, where)
    if kind not in ("data", "rng", "shared", *_KINDS):
        raise ValueError(f"{where} is of the unknown kind {kind!r}")
    name = entry_of(meta, "name", (str, type(None)), where)
    if kind == "data":
        return _SavedInput(name, kind, graph_type, None, None, None, ())
    if kind == "rng":
        if not isinstance(graph_type, RandomType):
            raise ValueError(f"{where} is a generator, but its type is {graph_type}")
        state = entry_of(meta, "rng_state", dict, where)
        generator = generator_from_json(state, f"{where}.rng_state")
        return _SavedInput(name, kind, graph_type, None, None, generator, ())
    if not isinstance(graph_type, TensorType):
        raise ValueError(f"{where} has a value, but its type is {graph_type}")
    law = meta.get("initializer")
    shape = meta.get("shape", [n or 0 for n in graph_type.shape])
    known = type_from_json(
        {"kind": "tensor", "dtype": graph_type.dtype, "shape": shape}, f"{where}.shape"
    )
    if None in known.shape or not graph_type.is_super(known):
        raise ValueError(f"{where} has the shape {shape}, which {graph_type} does not allow")
    return _SavedInput(
        name,
        kind,
        graph_type,
        entry_of({"layer_name": None, **meta}, "layer_name", (str, type(None)), where),
        None if law is None else read_initializer(law, f"{where}.initializer"),
        None,
        known.shape,
    )


def _make_input(saved: _SavedInput, value: Any, restore_rng: bool) -> Variable:
    if saved.kind == "data":
        return saved.type(name=saved.name)
    if saved.kind == "rng":
        return shared(saved.generator if restore_rng else np.random.default_rng(), saved.name)
    shape = saved.type.shape
    if saved.kind == "trainable":
        return trainable(
            value,
            saved.name,
            shape,
            initializer=saved.initializer,
            layer_name=saved.layer_name,
        )
    if saved.kind == "non_trainable":
        return non_trainable(value, saved.name, shape, layer_name=saved.layer_name)
    return shared(value, saved.name, shape=shape, borrow=True)


def _placeholder(saved: _SavedInput) -> np.ndarray | None:
    """Return a value that takes no memory, for a parameter which weights are going to fill."""
    if saved.kind in ("data", "rng"):
        return None
    return np.broadcast_to(np.zeros((), saved.type.dtype), saved.shape)


def _draw(saved: _SavedInput) -> np.ndarray | None:
    if saved.kind in ("data", "rng"):
        return None
    law = saved.initializer or ZeroInitializer()
    try:
        return law.sample(saved.shape, saved.type.dtype, np.random.default_rng())
    except Exception as error:
        raise ValueError(f"{saved.name} cannot be drawn by its initializer: {error}") from error


def _check_drawn_size(saved: Sequence[_SavedInput]) -> None:
    drawn = [s for s in saved if s.kind not in ("data", "rng")]
    size = sum(math.prod(s.shape) * np.dtype(s.type.dtype).itemsize for s in drawn)
    if size > MOST_DRAWN_BYTES:
        largest = max(drawn, key=lambda s: math.prod(s.shape))
        raise ValueError(
            f"the parameters, such as {largest.name} of shape {largest.shape}, would take {size} "
            f"bytes, and a config without weights may ask for {MOST_DRAWN_BYTES}. Load both by "
            "from_pretrained, or raise pytensor_ml.pretrained.MOST_DRAWN_BYTES"
        )


def _build(
    config: dict[str, Any], saved: Sequence[_SavedInput], variables: Sequence[Variable]
) -> Network:
    n_outputs = entry_of(config, "n_outputs", int, "the config")
    _, outputs = deserialize_graph(config, variables)
    if n_outputs != len(outputs):
        raise ValueError(f"n_outputs is {n_outputs}, but there are {len(outputs)} outputs")
    data = [v for v, s in zip(variables, saved, strict=True) if s.kind == "data"]
    return data, outputs[0] if n_outputs == 1 else outputs


def _guess_layers(state: Sequence[Any], keys: set[str]) -> None:
    """Find the layers of parameters of one name, which the published package does not write."""
    for variable in state:
        name = variable.name
        if name is None or getattr(variable, "layer_name", "") is not None:
            continue
        ends = [i for i, letter in enumerate(name) if letter == "_"]
        variable.layer_name = next(
            (name[:i] for i in ends if f"{name[:i]}_1{name[i:]}" in keys), None
        )
