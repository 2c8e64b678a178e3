"""Reading GGUF files [1]_ as if transformers had written them.

References
----------
.. [1] GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import re
import reprlib
import struct
import sys
from collections.abc import Callable, Mapping
from math import inf, prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from pytensor_ml.models.loading.keys import Checkpoint


class GGUFCheckpoint(Checkpoint):
    """A GGUF file under transformers' names, each tensor dequantized to float32 when it is read.

    Parameters
    ----------
    path : path
        File of an architecture that :func:`register_gguf` knows.

    Raises
    ------
    ImportError
        If the ``gguf`` library is not installed.
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is not GGUF, is cut short, or holds a model that cannot be reproduced.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self.file = GGUFFile(path)
        architecture = self.file.require("general.architecture", str)
        if architecture not in _families:
            raise ValueError(
                f"{path} holds a model of architecture {_shown(architecture)}, whose tensors have "
                f"no known meaning here. Supported are: {', '.join(sorted(_families))}. Others can "
                "be added with register_gguf."
            )
        self._family = _families[architecture]
        self._source = _source_names(self.file, architecture)
        self._config = _read_config(GGUFSettings(self.file, architecture), self._family)

    @property
    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def keys(self) -> set[str]:
        return set(self._source)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.file.tensors[self._source[key]].shape

    def dtype(self, key: str) -> np.dtype:
        return np.dtype("float32")

    def read(self, key: str) -> np.ndarray:
        values = self.file.read(self._source[key])
        restore = self._family.restore
        return values if restore is None else restore(key, values, self._config)


type ConfigOfGGUF = Callable[["GGUFSettings", dict[str, Any]], dict[str, Any]]
type Restore = Callable[[str, np.ndarray, dict[str, Any]], np.ndarray]


class _Family(NamedTuple):
    """What :func:`register_gguf` was given."""

    builder: str
    names: Mapping[str, str]
    config: ConfigOfGGUF | None
    restore: Restore | None


_families: dict[str, _Family] = {}

# A tensor's name, without block number and suffix, and transformers' name of it.
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "model.layers.{}.input_layernorm",
    "blk.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.ffn_down": "model.layers.{}.mlp.down_proj",
}


def register_gguf(
    architecture: str,
    builder: str,
    *,
    names: Mapping[str, str] = TENSOR_NAMES,
    config: ConfigOfGGUF | None = None,
    restore: Restore | None = None,
) -> None:
    """Make the GGUF files of an architecture readable.

    Parameters
    ----------
    architecture : str
        Name as files give it in ``general.architecture``.
    builder : str
        Name of the builder (:func:`~pytensor_ml.models.loading.registry.register_builder`).
    names : mapping
        transformers' name of each tensor, with {} for the number of the block, by the file's name
        without "blk." number and suffix.
    config : callable, optional
        Makes entries of the config from the file's :class:`GGUFSettings` and the entries that all
        families have, over which they take precedence.
    restore : callable, optional
        Makes a tensor of transformers' from its name there, the file's values and the config, where
        the two store it differently.
    """
    _families[architecture] = _Family(builder, names, config, restore)


class GGUFSettings:
    """The metadata of a GGUF file that concerns its architecture; what nothing reads is an error.

    Parameters
    ----------
    file : GGUFFile
        The file.
    architecture : str
        What the names of the settings start with in the file.
    """

    def __init__(self, file: "GGUFFile", architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._prefix = f"{architecture}."
        self._unread = {
            key.removeprefix(self._prefix) for key in file.metadata if key.startswith(self._prefix)
        }

    def optional(self, key: str, kind: type | tuple[type, ...] = int) -> Any:
        """Return a setting of this kind, or None if the file has none."""
        self._unread.discard(key)
        name = self._prefix + key
        return self.file.require(name, kind) if name in self.file.metadata else None

    def number(
        self, key: str, kind: type | tuple[type, ...] = int, default: float | None = None
    ) -> Any:
        """Return a setting that is a positive number, or raise if there is none and no default."""
        value = self.optional(key, kind)
        if value is None:
            value = self.file.require(self._prefix + key, kind) if default is None else default
        if not 0 < value < inf:
            raise ValueError(
                f"{self.file.path} has {self._prefix}{key} = {value}, with which there is no "
                "model. Convert the model to GGUF again."
            )
        return value

    def group(self, prefix: str) -> dict[str, Any]:
        """Return all settings whose names start with a prefix, without it."""
        keys = {key for key in self._unread if key.startswith(prefix)}
        self._unread -= keys
        return {key.removeprefix(prefix): self.file.metadata[self._prefix + key] for key in keys}

    def check_all_read(self) -> None:
        """Raise if the file has a setting that may change the output and nothing asked for."""
        unread = sorted(self._prefix + key for key in self._unread - _INERT)
        if unread:
            given = ", ".join(f"{key} = {_shown(self.file.metadata[key])}" for key in unread)
            raise ValueError(
                f"{self.file.path} has {given:.500}, which a model of this architecture is built "
                "without here, so its output could be wrong. Load the safetensors checkpoint that "
                "this file was made from."
            )


# Settings that repeat what tensors show, or concern converters.
_INERT = {"expert_used_count", "tensor_data_layout", "vocab_size"}


def half_from_adjacent(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder rows that rotate in adjacent pairs into rows that rotate in pairs of two halves.

    Parameters
    ----------
    rows : ndarray
        Weight (n_heads * head_dim, n_in) or bias (n_heads * head_dim,) of a projection.
    n_heads : int
        Number of heads that this projection makes.

    Returns
    -------
    ndarray
        The rows so ordered that channels 2i and 2i + 1 of each head become i and i + head_dim / 2.
    """
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


# One divisor a rotary frequency, for all blocks; in transformers' checkpoints the config has them.
_ROTARY_DIVISORS = "rope_freqs.weight"


def _source_names(file: "GGUFFile", architecture: str) -> dict[str, str]:
    names = {}
    for name in file.tensors.keys() - {_ROTARY_DIVISORS}:
        match = re.fullmatch(r"(blk\.)?(?:(?<=\.)(\d+)\.)?(\w+)\.(weight|bias)", name)
        target = match and _families[architecture].names.get((match[1] or "") + match[3])
        if match is None or target is None:
            raise ValueError(
                f"{file.path} holds the tensor {name}, which the architecture {architecture} has "
                "no layer for here, so the model would not be the one that was trained. Load the "
                "safetensors checkpoint that this file was made from."
            )
        names[f"{target.format(match[2])}.{match[4]}"] = name
    return names


def _read_config(settings: GGUFSettings, family: _Family) -> dict[str, Any]:
    file, architecture = settings.file, settings.architecture
    n_layers, n_tensors = settings.number("block_count"), len(file.tensors)
    if n_layers > n_tensors:
        raise ValueError(
            f"{file.path} has {architecture}.block_count = {n_layers} and {n_tensors} tensors, so "
            "most blocks would stay empty. Fetch or convert the file again."
        )
    width, heads = settings.number("embedding_length"), settings.number("attention.head_count")
    kv_heads = settings.number("attention.head_count_kv", default=heads)
    head_dim = settings.number("attention.key_length", default=width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := settings.number(key, default=head_dim)) != head_dim:
            raise ValueError(
                f"{file.path} has {architecture}.{key} = {other} and heads of width "
                f"{head_dim}; only equal ones are supported. Load the safetensors checkpoint that "
                "this file was made from."
            )
    if experts := settings.optional("expert_count"):
        raise ValueError(
            f"{file.path} holds a mixture of {experts} experts, which is not supported for the "
            f"architecture {architecture}. Load a dense model."
        )
    for tensor in ("token_embd.weight", "output_norm.weight"):
        if tensor not in file.tensors:
            raise ValueError(
                f"{file.path} has no tensor {tensor}, which a {architecture} model needs. Fetch "
                "the file again, or load a file that holds the whole model."
            )
    max_positions = settings.number("context_length")
    scaling = _read_rope_scaling(settings)
    if _ROTARY_DIVISORS in file.tensors:
        if scaling["rope_type"] != "default":
            raise ValueError(
                f"{file.path} scales its rotary frequencies twice, by the kind "
                f"{scaling['rope_type']!r} and by {_ROTARY_DIVISORS}, which is not supported: "
                "positions would be rotated wrongly. Load the safetensors checkpoint that this "
                "file was made from."
            )
        divisors = _read_rotary_divisors(file, head_dim)
        scaling = {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": max_positions,
            "attention_factor": 1.0,
        }
    config = {
        "architectures": [family.builder],
        "hidden_size": width,
        "intermediate_size": settings.number("feed_forward_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon", float),
        # The specification gives no default for the base, so a file without one is not guessed at.
        "rope_parameters": {"rope_theta": settings.number("rope.freq_base", float)} | scaling,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = file.token_id(name, config["vocab_size"])
    if family.config is not None:
        config |= family.config(settings, config)
    settings.check_all_read()
    return config


def _read_rotary_divisors(file: "GGUFFile", head_dim: int) -> list[float]:
    shape = file.tensors[_ROTARY_DIVISORS].shape
    if shape != (head_dim // 2,):
        raise ValueError(
            f"{file.path} has {_ROTARY_DIVISORS} of shape {shape} and heads of width "
            f"{head_dim}, whose {head_dim // 2} pairs need one divisor each: positions would be "
            "rotated wrongly. Convert the model to GGUF again."
        )
    divisors = file.read(_ROTARY_DIVISORS)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ValueError(
            f"{file.path} has {_ROTARY_DIVISORS} = {divisors}, which are not all finite and "
            "positive, so some pairs would have no frequency. Fetch or convert the file again."
        )
    return divisors.tolist()


def _read_rope_scaling(settings: GGUFSettings) -> dict[str, Any]:
    kind = settings.optional("rope.scaling.type", str)
    scaling = settings.group("rope.scaling.")
    scaling.pop("finetuned", None)
    given = set(scaling)
    # Files from before the scaling keys.
    if settings.optional("rope.scale_linear", float) is not None:
        scaling = {"factor": settings.number("rope.scale_linear", float)} | scaling
        kind = kind or "linear"
    kind = kind or "none"
    if kind == "none" and not scaling:
        return {"rope_type": "default"}
    if kind == "linear":
        # Says where scaling began, which a linear scaling does not depend on.
        scaling.pop("original_context_length", None)
    names = {
        "linear": {"factor": "factor"},
        "yarn": {
            "factor": "factor",
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        },
    }.get(kind, {})
    unknown = sorted(set(scaling) - set(names))
    if unknown or not names:
        raise ValueError(
            f"{settings.file.path} scales its rotary frequencies by the kind {_shown(kind)} with "
            f"{', '.join(sorted(scaling)) or 'no numbers':.500}, which is not supported: positions "
            "would be rotated wrongly. Supported are none, linear (factor) and yarn (factor, "
            "original_context_length, yarn_beta_fast, yarn_beta_slow)."
        )
    needed = {"factor", "original_context_length"} - scaling.keys()
    for key in sorted(names.keys() & (needed | given)):
        settings.number(f"rope.scaling.{key}", (int, float))
    return {"rope_type": kind} | {names[key]: value for key, value in scaling.items()}


class GGUFTensor(NamedTuple):
    """Where a tensor lies: ``kind`` is its quantization, ``offset`` is that in the file."""

    kind: Any
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GGUFFile:
    """The metadata and tensors of a GGUF file, under the file's own names.

    Numbers and texts are Python's, arrays of texts lists, and arrays of numbers NumPy's. The header
    is read here rather than by ``gguf.GGUFReader``, which makes an array of each string (seconds
    for a vocabulary) and does not check counts against the file's length.

    Parameters
    ----------
    path : path
        File to open; its tensors stay on disk until they are read.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._gguf = import_gguf()
        if not self.path.is_file():
            raise FileNotFoundError(f"{path} is not a file, so there is no model to load.")
        with self.path.open("rb") as file:
            start = file.read(8)
            if start[:4] != b"GGUF":
                raise ValueError(
                    f"{path} is not a GGUF file: it starts with {start!r} instead of b'GGUF'. Pass "
                    "a GGUF file, or a folder with config.json and safetensors."
                )
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = np.frombuffer(mapped, np.uint8)
        header = _Header(self.path, mapped)
        version = header.number("I", "version")
        if version not in (2, 3):
            big_endian = version % 0x10000 == 0
            raise ValueError(
                f"{path} is {'a big-endian GGUF file' if big_endian else f'GGUF version {version}'}"
                "; versions 2 and 3, little-endian, are supported. Convert it again."
            )
        n_tensors = header.count("tensors", _MOST_TENSORS)
        n_fields = header.count("metadata fields", _MOST_FIELDS)
        self.metadata = {}
        for _ in range(n_fields):
            key = header.name("metadata field")
            if key in self.metadata:
                raise ValueError(
                    f"{path} is damaged: it has the metadata field {key} twice, and which is meant "
                    "is not known. Fetch or convert the file again."
                )
            self.metadata[key] = header.value(header.number("I", key), key)
        self._block_sizes: dict[int, tuple[Any, int, int]] = {}
        self.tensors = dict(self._read_tensor(header) for _ in range(n_tensors))
        self._place_tensors(header.offset, n_tensors)

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a metadata value, or raise if the file has none of this kind."""
        if key not in self.metadata:
            raise ValueError(
                f"{self.path} has no metadata field {key}, and any value put in its place would be "
                "a guess. Convert the model to GGUF again, or set the field in the file."
            )
        value = self.metadata[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # A truth value is no number here.
        if type(value) not in kinds:
            wanted = " or ".join(_KINDS.get(kind, kind.__name__) for kind in kinds)
            raise ValueError(
                f"{self.path} has {key} = {_shown(value)}, where one {wanted} is supported. "
                "Load a model of that kind, or convert this one to GGUF again."
            )
        return value

    def token_id(self, name: str, n_tokens: int) -> int | None:
        """Return the id of bos, eos or another token that the file names, or None."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.metadata:
            return None
        token_id: int = self.require(key, int)
        if not 0 <= token_id < n_tokens:
            raise ValueError(
                f"{self.path} has {key} = {token_id}, which none of its {n_tokens} tokens has. "
                "Fetch or convert the file again."
            )
        return token_id

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as float32."""
        tensor = self.tensors[name]
        data = self._data[tensor.offset : tensor.offset + tensor.n_bytes]
        rows = np.asarray(data).reshape(*tensor.shape[:-1], -1)
        return self._gguf.quants.dequantize(rows, tensor.kind).reshape(tensor.shape)

    def _read_tensor(self, header: "_Header") -> tuple[str, GGUFTensor]:
        name = header.name("tensor")
        n_dims = header.number("I", name)
        if n_dims > _MOST_DIMS:
            raise ValueError(
                f"{self.path} is damaged: {name} has {n_dims} dimensions, and the format has at "
                f"most {_MOST_DIMS}. Fetch or convert the file again."
            )
        # The file lists the fastest dimension first.
        shape = tuple(header.number("Q", name) for _ in range(n_dims))[::-1]
        code = header.number("I", name)
        offset = header.number("Q", name)
        try:
            if code not in self._block_sizes:
                kind = self._gguf.GGMLQuantizationType(code)
                block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
                self._gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
                self._block_sizes[code] = kind, block, block_bytes
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ValueError(
                f"{self.path} holds {name} in the quantization {code} ({error}), which cannot be "
                "turned into float32. Update the gguf library, or convert the model to a common "
                "quantization such as Q8_0."
            ) from error
        kind, block, block_bytes = self._block_sizes[code]
        if not shape or 0 in shape or shape[-1] % block:
            raise ValueError(
                f"{self.path} is damaged: {name} has shape {shape}, which blocks of {block} "
                "values do not fill. Fetch or convert the file again."
            )
        return name, GGUFTensor(kind, shape, offset, prod(shape) // block * block_bytes)

    def _place_tensors(self, header_end: int, n_tensors: int) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment % 8:
            raise ValueError(
                f"{self.path} is damaged: its general.alignment is {_shown(alignment)}, not a "
                "positive multiple of 8. Fetch or convert the file again."
            )
        if len(self.tensors) < n_tensors:
            raise ValueError(
                f"{self.path} is damaged: it names {n_tensors} tensors, but only "
                f"{len(self.tensors)} different ones. Fetch or convert the file again."
            )
        start = -(-header_end // alignment) * alignment
        end = start
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            placed = tensor._replace(offset=start + tensor.offset)
            if placed.offset + placed.n_bytes > self._data.size:
                raise ValueError(
                    f"{self.path} is cut short: {name} ends at byte "
                    f"{placed.offset + placed.n_bytes}, the file at {self._data.size}. Fetch it "
                    "again."
                )
            if placed.offset < end:
                raise ValueError(
                    f"{self.path} is damaged: {name} starts at byte {placed.offset}, inside the "
                    f"tensor before it, which ends at {end}. Fetch or convert the file again."
                )
            end = placed.offset + placed.n_bytes
            self.tensors[name] = placed


# Codes of the types of metadata values.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT = 8
_LENGTH = struct.Struct("<Q")
_ARRAY = 9
_KINDS = {str: "text", list: "array of texts", np.ndarray: "array of numbers"}
# So that a header is read in a second and 100 MB. Published files have at most some 60 fields, 2000
# tensors, names of 64 bytes, 100 kB in a text, and 800,000 texts, which take 50 MB.
_MOST_FIELDS = 2**12
_MOST_TENSORS = 2**13
_LONGEST_NAME = 2**8
_LONGEST_TEXT = 2**20
_MOST_TEXTS = 2**20
_MEMORY_OF_TEXTS = 2**26
# Of the format.
_MOST_DIMS = 4


class _Header:
    """Reads one value after the other; ``what`` names it in an error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.offset = 4
        self._data = data
        self._texts_left = _MOST_TEXTS
        self._memory_left = _MEMORY_OF_TEXTS

    def take(self, size: int, what: str) -> int:
        start = self.offset
        self.offset += size
        if self.offset > len(self._data):
            raise ValueError(
                f"{self.path} is cut short: {what} ends at byte {self.offset}, the file at "
                f"{len(self._data)}. Fetch it again."
            )
        return start

    def number(self, code: str, what: str) -> Any:
        start = self.take(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self._data, start)[0]

    def count(self, what: str, most: int) -> int:
        number: int = self.number("Q", f"the number of {what}")
        if number > most:
            raise ValueError(
                f"{self.path} announces {number} {what}, and at most {most} are read, since no "
                "model needs as many. Fetch or convert the file again."
            )
        return number

    def name(self, of: str) -> str:
        [name] = self.texts(1, f"a {of}'s name")
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ValueError(
                f"{self.path} is damaged: no {of} can be called {_shown(name)}. Fetch or convert "
                "the file again."
            )
        return name

    def texts(self, count: int, what: str) -> list[str]:
        texts = []
        for _ in range(count):
            [length] = _LENGTH.unpack_from(self._data, self.take(8, what))
            start = self.take(length, what)
            if length > _LONGEST_TEXT:
                raise ValueError(
                    f"{self.path} has a text of {length} bytes in {what}, and at most "
                    f"{_LONGEST_TEXT} are read, since no model needs as many. Fetch or convert the "
                    "file again."
                )
            try:
                text = self._data[start : self.offset].decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.path} is damaged: {what} is not UTF-8 ({error}). Fetch or convert the "
                    "file again."
                ) from error
            self._memory_left -= sys.getsizeof(text)
            if self._memory_left < 0:
                raise ValueError(
                    f"{self.path} has texts up to {what} that take more than {_MEMORY_OF_TEXTS} "
                    "bytes, which no model needs. Fetch or convert the file again."
                )
            texts.append(text)
        return texts

    def value(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind == _TEXT:
            return self.texts(1, what)[0]
        item = self.number("I", what) if kind == _ARRAY else None
        if item in _NUMBERS:
            length = self.number("Q", what)
            dtype = np.dtype(_NUMBERS[item]).newbyteorder("<")
            start = self.take(length * dtype.itemsize, what)
            return np.frombuffer(self._data, dtype, length, start)
        if item == _TEXT:
            length = self.count(f"texts in {what}", self._texts_left)
            self._texts_left -= length
            return self.texts(length, what)
        raise ValueError(
            f"{self.path} is damaged: {what} has the type {kind if item is None else item}, which "
            "the format does not define here. Fetch or convert the file again."
        )


_shown = reprlib.Repr(maxstring=100, maxother=100).repr


def import_gguf() -> ModuleType:
    """Return the ``gguf`` library, or raise with the command that installs it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ImportError(
            "Reading a GGUF file needs the gguf library, which is not installed. Run "
            "python -m pip install gguf tokenizers"
        ) from error
    return gguf
