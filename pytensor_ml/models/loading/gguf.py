"""Reading GGUF files [1]_ as if transformers had written them.

References
----------
.. [1] GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
import struct
from math import prod
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
        File of an architecture in ``SUPPORTED``.

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
        if architecture not in SUPPORTED:
            raise ValueError(
                f"{path} holds a model of architecture {architecture!r}, whose tensors have no "
                f"known meaning here. Supported are: {', '.join(SUPPORTED)}."
            )
        self._family = SUPPORTED[architecture]
        self._source = _source_names(self.file, architecture)
        self._config = _read_config(self.file, architecture)

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
        source = self._source[key]
        values = self.file.read(source)
        if self._family.permuted:
            part = source.split(".")[-2]
            if part == "attn_q":
                return half_from_adjacent(values, self._config["num_attention_heads"])
            if part == "attn_k":
                return half_from_adjacent(values, self._config["num_key_value_heads"])
        return values


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


class _Family(NamedTuple):
    """How files of an architecture differ from transformers' checkpoints.

    ``names`` maps a tensor's name, without block number and suffix, to transformers'. ``permuted``
    tells whether q and k rows are stored for adjacent pairing.
    """

    builder: str
    model_type: str
    names: dict[str, str]
    permuted: bool


SUPPORTED = {
    "llama": _Family(
        builder="LlamaForCausalLM",
        model_type="llama",
        names={
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
        },
        permuted=True,
    )
}


# One divisor a rotary frequency, for all blocks; in transformers' checkpoints the config has them.
_ROTARY_DIVISORS = "rope_freqs.weight"


def _source_names(file: "GGUFFile", architecture: str) -> dict[str, str]:
    names = {}
    for name in file.tensors.keys() - {_ROTARY_DIVISORS}:
        match = re.fullmatch(r"(blk\.)?(?:(?<=\.)(\d+)\.)?(\w+)\.(weight|bias)", name)
        target = match and SUPPORTED[architecture].names.get((match[1] or "") + match[3])
        if match is None or target is None:
            raise ValueError(
                f"{file.path} holds the tensor {name}, which the architecture {architecture} has "
                "no layer for here, so the model would not be the one that was trained. Load the "
                "safetensors checkpoint that this file was made from."
            )
        names[f"{target.format(match[2])}.{match[4]}"] = name
    return names


def _read_config(file: "GGUFFile", architecture: str) -> dict[str, Any]:
    def number(key: str, kind: type = int, default: int | None = None) -> Any:
        name = f"{architecture}.{key}"
        if default is not None and name not in file.metadata:
            return default
        value = file.require(name, kind)
        if value <= 0:
            raise ValueError(
                f"{file.path} has {name} = {value}, with which there is no model. Convert the "
                "model to GGUF again."
            )
        return value

    width, heads = number("embedding_length"), number("attention.head_count")
    kv_heads = number("attention.head_count_kv", default=heads)
    head_dim = number("attention.key_length", default=width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, default=head_dim) != head_dim:
            raise ValueError(
                f"{file.path} has {architecture}.{key} = {number(key)} and heads of width "
                f"{head_dim}; only equal ones are supported. Load the safetensors checkpoint that "
                "this file was made from."
            )
    experts = file.metadata.get(f"{architecture}.expert_count", 0)
    if experts:
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
    # The specification gives no default for the base, so a file without one is not guessed at.
    theta = number("rope.freq_base", float)
    max_positions = number("context_length")
    scaling = _read_rope_scaling(file, architecture)
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
    family = SUPPORTED[architecture]
    config = {
        "architectures": [family.builder],
        "model_type": family.model_type,
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", float),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta} | scaling,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": max_positions,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "sliding_window": file.metadata.get(f"{architecture}.attention.sliding_window") or None,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return config


def _read_rotary_divisors(file: "GGUFFile", head_dim: int) -> list[float]:
    divisors = file.read(_ROTARY_DIVISORS)
    if divisors.shape != (head_dim // 2,):
        raise ValueError(
            f"{file.path} has {_ROTARY_DIVISORS} of shape {divisors.shape} and heads of width "
            f"{head_dim}, whose {head_dim // 2} pairs need one divisor each: positions would be "
            "rotated wrongly. Convert the model to GGUF again."
        )
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ValueError(
            f"{file.path} has {_ROTARY_DIVISORS} = {divisors}, which are not all finite and "
            "positive, so some pairs would have no frequency. Fetch or convert the file again."
        )
    return divisors.tolist()


def _read_rope_scaling(file: "GGUFFile", architecture: str) -> dict[str, Any]:
    prefix = f"{architecture}.rope.scaling."
    scaling = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    scaling.pop("finetuned", None)
    # Files from before the scaling keys.
    linear = file.metadata.get(f"{architecture}.rope.scale_linear")
    if linear is not None:
        scaling = {"type": "linear", "factor": linear} | scaling
    kind = scaling.pop("type", "none")
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
    }.get(str(kind), {})
    unknown = sorted(set(scaling) - set(names))
    if unknown or not names:
        raise ValueError(
            f"{file.path} scales its rotary frequencies by the kind {kind!r} with "
            f"{', '.join(sorted(scaling)) or 'no numbers'}, which is not supported: positions "
            "would be rotated wrongly. Supported are none, linear (factor) and yarn (factor, "
            "original_context_length, yarn_beta_fast, yarn_beta_slow)."
        )
    for key in sorted({"factor", "original_context_length"} & names.keys() - scaling.keys()):
        file.require(prefix + key, float)
    return {"rope_type": kind} | {names[key]: value for key, value in scaling.items()}


class GGUFTensor(NamedTuple):
    """Where a tensor lies: ``kind`` is its quantization, ``offset`` is that in the file."""

    kind: Any
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GGUFFile:
    """The metadata and tensors of a GGUF file, under the file's own names.

    The header is read here rather than by ``gguf.GGUFReader``, which makes an array of each string
    (seconds for a vocabulary) and does not check counts against the file's length.

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
                f"{path} is not a GGUF file: it starts with {start!r} instead of b'GGUF'. Pass a "
                "GGUF file, or a folder with config.json and safetensors."
            )
        self._data = np.memmap(self.path, mode="r")
        header = _Header(self.path, self._data)
        version = header.number("I", "version")
        if version not in (2, 3):
            big_endian = version % 0x10000 == 0
            raise ValueError(
                f"{path} is {'a big-endian GGUF file' if big_endian else f'GGUF version {version}'}"
                "; versions 2 and 3, little-endian, are supported. Convert it again."
            )
        n_tensors = header.number("Q", "number of tensors")
        n_fields = header.number("Q", "number of metadata fields")
        self.metadata = {}
        for _ in range(n_fields):
            key = header.text("a metadata field's name")
            self.metadata[key] = header.value(header.number("I", key), key)
        self.tensors = dict(self._read_tensor(header) for _ in range(n_tensors))
        self._place_tensors(header.offset, n_tensors)

    def require(self, key: str, kind: type) -> Any:
        """Return a metadata value, or raise if the file has none of this kind."""
        if key not in self.metadata:
            raise ValueError(
                f"{self.path} has no metadata field {key}, and any value put in its place would be "
                "a guess. Convert the model to GGUF again, or set the field in the file."
            )
        value = self.metadata[key]
        if not isinstance(value, kind):
            raise ValueError(
                f"{self.path} has {key} = {value!r:.100}, where one {kind.__name__} is supported. "
                "Load a model of that kind, or convert this one to GGUF again."
            )
        return value

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as float32."""
        tensor = self.tensors[name]
        data = self._data[tensor.offset : tensor.offset + tensor.n_bytes]
        rows = np.asarray(data).reshape(*tensor.shape[:-1], -1)
        return self._gguf.quants.dequantize(rows, tensor.kind).reshape(tensor.shape)

    def _read_tensor(self, header: "_Header") -> tuple[str, GGUFTensor]:
        name = header.text("a tensor's name")
        n_dims = header.number("I", name)
        # The file lists the fastest dimension first.
        shape = tuple(header.number("Q", name) for _ in range(n_dims))[::-1]
        code = header.number("I", name)
        offset = header.number("Q", name)
        try:
            kind = self._gguf.GGMLQuantizationType(code)
            block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
            self._gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ValueError(
                f"{self.path} holds {name} in the quantization {code} ({error}), which cannot be "
                "turned into float32. Update the gguf library, or convert the model to a common "
                "quantization such as Q8_0."
            ) from error
        if not shape or 0 in shape or shape[-1] % block:
            raise ValueError(
                f"{self.path} is damaged: {name} has shape {shape}, which blocks of {block} "
                "values do not fill. Fetch or convert the file again."
            )
        return name, GGUFTensor(kind, shape, offset, prod(shape) // block * block_bytes)

    def _place_tensors(self, header_end: int, n_tensors: int) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(
                f"{self.path} is damaged: its general.alignment is {alignment!r}. Fetch or convert "
                "the file again."
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
_ARRAY = 9


class _Header:
    """Reads one value after the other; ``what`` names it in an error."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.offset = 4
        self._data = memoryview(data)

    def take(self, size: int, what: str) -> memoryview:
        end = self.offset + size
        if end > len(self._data):
            raise ValueError(
                f"{self.path} is cut short: {what} ends at byte {end}, the file at "
                f"{len(self._data)}. Fetch it again."
            )
        piece = self._data[self.offset : end]
        self.offset = end
        return piece

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str) -> str:
        raw = bytes(self.take(self.number("Q", what), what))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is damaged: {what} is not UTF-8 ({error}). Fetch or convert the file "
                "again."
            ) from error

    def value(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind == _TEXT:
            return self.text(what)
        item = self.number("I", what) if kind == _ARRAY else None
        length = self.number("Q", what) if kind == _ARRAY else 0
        if item in _NUMBERS:
            dtype = np.dtype(_NUMBERS[item]).newbyteorder("<")
            return np.frombuffer(self.take(length * dtype.itemsize, what), dtype).tolist()
        if item == _TEXT:
            return [self.text(what) for _ in range(length)]
        raise ValueError(
            f"{self.path} is damaged: {what} has the type {kind if item is None else item}, which "
            "the format does not define here. Fetch or convert the file again."
        )


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
