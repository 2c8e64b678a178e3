"""Tokens from text and back, with the vocabulary that a model's files hold."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from pytensor_ml.models.loading.gguf import GGUFCheckpoint, GGUFFile
from pytensor_ml.models.loading.safetensors import most_values, read_json, without_duplicates

# Codes of `tokenizer.ggml.token_type`.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_LAST_TYPE = 6
# So that what is refused takes about a second. Tokens of published vocabularies have fewer than
# 200 characters; Gemma's has 262,144 of them, with 1.5 million characters, which make 515,000
# merges, and its tokenizer.json 33 MB with 1.9 million values.
_LONGEST_TOKEN = 512
_MOST_TOKENS = 2**19
_MOST_CHARACTERS = 3_000_000
_MOST_MERGES = 2**20
_LONGEST_JSON = 48_000_000
_MOST_JSON_VALUES = 2_500_000


class Tokenizer:
    """Turns text into token ids and back.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
        What does the work.
    eos_ids : iterable of int
        Ids after which a model has nothing more to say.
    prefix : iterable of int
        Ids that start every text, beyond those that ``backend`` adds itself.
    suffix : iterable of int
        Ids that end every text, likewise.
    """

    def __init__(
        self,
        backend: Any,
        *,
        eos_ids: Iterable[int] = (),
        prefix: Iterable[int] = (),
        suffix: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        self.eos_ids = frozenset(eos_ids)

    @classmethod
    def open(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a GGUF file, or of a folder with ``tokenizer.json``."""
        if Path(path).is_file() and Path(path).suffix not in (".json", ".safetensors"):
            return cls.from_gguf(path)
        return cls.from_folder(path if Path(path).is_dir() else Path(path).parent)

    @classmethod
    def from_gguf(cls, source: str | Path | GGUFFile | GGUFCheckpoint) -> "Tokenizer":
        """Build the tokenizer that a GGUF file describes.

        A SentencePiece vocabulary that puts a space before a text puts one after each special or
        added token too, as the programs do that GGUF files are made for.

        Parameters
        ----------
        source : path, GGUFFile or GGUFCheckpoint
            File with a vocabulary of byte-level BPE or of SentencePiece BPE.

        Raises
        ------
        ImportError
            If ``tokenizers`` or ``gguf`` is not installed.
        ValueError
            If the vocabulary is of another kind, splits text in a way that is not known, or lacks
            what its kind needs.
        """
        if isinstance(source, GGUFCheckpoint):
            file = source.file
        else:
            file = source if isinstance(source, GGUFFile) else GGUFFile(source)
        kind = file.require("tokenizer.ggml.model", str)
        if kind not in ("gpt2", "llama"):
            raise ValueError(
                f"{file.path} has a vocabulary of the kind {kind!r:.100}, which is not supported: "
                "its tokens would be wrong. Supported are 'gpt2' (byte-level BPE) and 'llama' "
                "(SentencePiece BPE). Load a folder with tokenizer.json instead."
            )
        split = _read_split(file) if kind == "gpt2" else None
        tokens = _read_tokens(file)

        def ids_of(*names: str) -> list[int]:
            found = (file.token_id(name, len(tokens)) for name in names)
            return [token_id for token_id in found if token_id is not None]

        def token_of(end: str, wanted: bool) -> list[int]:
            if not _read_flag(file, f"add_{end}_token", wanted):
                return []
            file.require(f"tokenizer.ggml.{end}_token_id", int)
            return ids_of(end)

        # What is quickly refused, before what takes long.
        eos_ids = ids_of("eos", "eot", "eom")
        prefix = token_of("bos", wanted=split is None or split.starts)
        suffix = token_of("eos", wanted=False)
        backend = (
            _sentencepiece_bpe(file, tokens)
            if split is None
            else _byte_level_bpe(file, tokens, split)
        )
        return cls(backend, eos_ids=eos_ids, prefix=prefix, suffix=suffix)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read ``tokenizer.json``, and the end tokens from the configs beside it.

        Texts are neither cut nor padded, whatever that file says.

        Parameters
        ----------
        folder : path
            Folder as transformers writes it.

        Raises
        ------
        ImportError
            If ``tokenizers`` is not installed.
        FileNotFoundError
            If the folder has no ``tokenizer.json``.
        ValueError
            If that file cannot be read or is of a kind that is not supported, or a config names an
            end token that there cannot be.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist, so text cannot be turned into tokens. Put the model's "
                "tokenizer.json there."
            )
        tokenizers = import_tokenizers()
        eos_ids: set[int] = set()
        for config in (folder / "generation_config.json", folder / "config.json"):
            if config.is_file():
                eos_ids |= _read_eos_ids(config)
        data = _read_tokenizer_json(path)
        with _library_errors(f"{path} does not hold a tokenizer"):
            backend = tokenizers.Tokenizer.from_buffer(data)
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, eos_ids=eos_ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, in which special tokens may be spelled out."""
        if not isinstance(text, str):
            raise TypeError(f"encode got {text!r:.100}, which has no tokens. Pass a text.")
        with _library_errors("The tokenizer cannot be used: encoding a text failed"):
            ids = self._backend.encode(text).ids
        return [*self._prefix, *ids, *self._suffix]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ids = list(ids)
        if not all(0 <= token_id < 2**32 for token_id in ids):
            raise ValueError(f"decode got {ids!s:.100}, not all ids of tokens, which go from 0 on.")
        with _library_errors("The tokenizer cannot be used: decoding tokens failed"):
            text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def stream(self, context: Iterable[int] = ()) -> "StreamDecoder":
        """Return a decoder that takes one token at a time, those that follow ``context``."""
        return StreamDecoder(self.decode, context)


class StreamDecoder:
    """Gives the text of tokens as they come, never a part of a character.

    Parameters
    ----------
    decode : callable
        Text of a list of ids; a replacement character stands for bytes that form no character.
    context : iterable of int
        Ids of the text before, which is not given again: a text's first token may lose a space
        that the same token keeps after others.

    Examples
    --------
    >>> from pytensor_ml.models.loading import StreamDecoder
    >>> stream = StreamDecoder(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [stream.push(byte) for byte in "né".encode()], stream.flush()
    (['n', '', 'é'], '')
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Iterable[int] = ()) -> None:
        self._decode = decode
        self._context = list(context)
        self._pending: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes."""
        self._pending.append(token_id)
        text = self._text()
        # An unfinished character is decoded as one or more replacement characters at the end.
        complete = text.rstrip("\ufffd")
        new = complete[self._given :]
        self._given += len(new)
        if complete == text:
            self._context, self._pending, self._given = self._pending, [], 0
        return new

    def flush(self) -> str:
        """Return what is left at the end, replacement characters for unfinished ones."""
        rest = self._text()[self._given :]
        self._context, self._pending, self._given = [], [], 0
        return rest

    def _text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]


def _read_tokenizer_json(path: Path) -> bytes:
    """Return what a file holds, none of which ends the program when the library parses it."""
    size = path.stat().st_size
    data = path.read_bytes() if size <= _LONGEST_JSON else b""
    if size > _LONGEST_JSON or (count := most_values(data)) > _MOST_JSON_VALUES:
        found = f"{size} bytes" if size > _LONGEST_JSON else f"about {count} values of JSON"
        raise ValueError(
            f"{path} has {found}, and at most {_LONGEST_JSON} bytes and {_MOST_JSON_VALUES} values "
            "are read, since no tokenizer needs as many. Fetch the file again."
        )
    try:
        json.loads(data.decode(), object_pairs_hook=_check_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold a tokenizer: {error}. Fetch the file again, or load a GGUF file."
        ) from error
    return data


def _check_object(pairs: list[tuple[str, Any]]) -> None:
    entry = without_duplicates(pairs)
    # At these the library panics, where no exception can always be made of it. No decoder that is
    # supported has them; the prefix only matters to merges.
    if entry.get("type") == "Precompiled":
        raise ValueError("it has a normalizer of the type 'Precompiled', which is not supported")
    prefix = entry.get("continuing_subword_prefix")
    if isinstance(prefix, str) and prefix and entry.get("type") != "WordPiece":
        raise ValueError(
            f"it has a continuing_subword_prefix of {prefix!r:.100}, which is not supported"
        )


@contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Make a ValueError of what ``tokenizers`` raises, which is Exception itself, or a panic."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{problem}: {error!s:.500}. Fetch or convert the file again.") from error


def _read_eos_ids(path: Path) -> set[int]:
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(
            f"{path} has eos_token_id = {value!r:.100}, where an id from 0 on, a list of ids or "
            "null is supported: generation would not end. Take the file that belongs to the model."
        )
    return set(ids)


def _read_split(file: GGUFFile) -> "_Split":
    name = file.require("tokenizer.ggml.pre", str)
    if name not in _SPLITS:
        raise ValueError(
            f"{file.path} splits text by the rule {name!r:.100}, which is not known here: its "
            f"tokens would be wrong. Supported are: {', '.join(_SPLITS)}. Load a folder with "
            "tokenizer.json instead."
        )
    return _SPLITS[name]


def _read_tokens(file: GGUFFile) -> list[str]:
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    counts = len(tokens), max(map(len, tokens), default=0), sum(map(len, tokens))
    most = _MOST_TOKENS, _LONGEST_TOKEN, _MOST_CHARACTERS
    if any(count > limit for count, limit in zip(counts, most, strict=True)):
        raise ValueError(
            f"{file.path} has {counts[0]} tokens of up to {counts[1]} characters, {counts[2]} in "
            f"all, in tokenizer.ggml.tokens; at most {most[0]} of {most[1]}, {most[2]} in all, are "
            "read, since no vocabulary needs as many. Fetch or convert the file again."
        )
    return tokens


def _read_numbers(
    file: GGUFFile, name: str, n_tokens: int, valid: Callable[[np.ndarray], Any], told: str
) -> list[Any]:
    """Return a number for each token, or raise if one is not valid, as is ``told``."""
    values = file.require(f"tokenizer.ggml.{name}", np.ndarray)
    if len(values) != n_tokens:
        raise ValueError(
            f"{file.path} has {n_tokens} tokens and {len(values)} numbers in tokenizer.ggml.{name}"
            ", so it is not known which belong together. Fetch or convert the file again."
        )
    if not np.all(valid(values)):
        raise ValueError(
            f"{file.path} has tokenizer.ggml.{name} that are not all {told}, so it is not known "
            "what the tokens do. Fetch or convert the file again."
        )
    return values.tolist()


def _read_types(file: GGUFFile, n_tokens: int) -> list[int]:
    return _read_numbers(
        file,
        "token_type",
        n_tokens,
        valid=lambda types: (types.dtype.kind in "iu") & (types >= 0) & (types <= _LAST_TYPE),
        told=f"whole numbers from 0 to {_LAST_TYPE}",
    )


def _read_flag(file: GGUFFile, name: str, default: bool) -> bool:
    key = f"tokenizer.ggml.{name}"
    return file.require(key, bool) if key in file.metadata else default


def _ids_of(tokens: list[str], path: Path) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        [(token, count)] = Counter(tokens).most_common(1)
        raise ValueError(
            f"{path} has {count} tokens {token!r} in tokenizer.ggml.tokens, so it is not known "
            "which id that text has. Fetch or convert the file again."
        )
    return ids


def _byte_level_bpe(file: GGUFFile, tokens: list[str], split: "_Split") -> Any:
    """Return what a vocabulary of bytes and merges does."""
    merges = file.require("tokenizer.ggml.merges", list)
    has_types = "tokenizer.ggml.token_type" in file.metadata
    types = _read_types(file, len(tokens)) if has_types else []
    ids = _ids_of(tokens, file.path)
    tokenizers = import_tokenizers()
    with _library_errors(f"{file.path} has merges that do not fit its vocabulary"):
        model = tokenizers.models.BPE(
            ids,
            [tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=split.whole_first,
        )
    backend = tokenizers.Tokenizer(model)
    if split.composed:
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = split.build(tokenizers)
    backend.decoder = tokenizers.decoders.ByteLevel()
    _add_tokens(backend, tokens, types)
    return backend


def _sentencepiece_bpe(file: GGUFFile, tokens: list[str]) -> Any:
    """Return what a vocabulary of scored pieces does [1]_.

    References
    ----------
    .. [1] Kudo and Richardson (2018). SentencePiece: A simple and language independent subword
       tokenizer and detokenizer for Neural Text Processing. arXiv:1808.06226.
    """
    types = _read_types(file, len(tokens))
    scores = _read_numbers(
        file,
        "scores",
        len(tokens),
        valid=lambda scores: (scores.dtype.kind == "f") & np.isfinite(scores),
        told="finite numbers with a fraction",
    )
    # Text is searched for these before its spaces are replaced.
    tokens = [
        token.replace(_SPACE, " ") if code == _USER_DEFINED else token
        for token, code in zip(tokens, types, strict=True)
    ]
    unknown = next((tokens[i] for i, code in enumerate(types) if code == _UNKNOWN), None)
    has_bytes = _BYTES.keys() <= set(tokens)
    if unknown is None and not has_bytes:
        raise ValueError(
            f"{file.path} has neither a token for each byte (<0x00> to <0xFF>) nor one of the type "
            "'unknown', so characters outside its vocabulary would be lost. Convert the model to "
            "GGUF again."
        )
    prefixed = _read_flag(file, "add_space_prefix", True)
    merges = _merges_of_scores(
        {
            token: score
            for token, score, code in zip(tokens, scores, types, strict=True)
            if code == _NORMAL
        },
        file.path,
    )
    ids = _ids_of(tokens, file.path)
    tokenizers = import_tokenizers()
    normalizers = tokenizers.normalizers
    with _library_errors(f"{file.path} has merges that do not fit its vocabulary"):
        model = tokenizers.models.BPE(
            ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes
        )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [
            *([normalizers.Prepend(_SPACE)] if prefixed else []),
            normalizers.Replace(" ", _SPACE),
        ]
    )
    _add_tokens(backend, tokens, types)
    added = frozenset(token.content for token in backend.get_added_tokens_decoder().values())
    backend.decoder = tokenizers.decoders.Decoder.custom(_PieceDecoder(added, prefixed))
    return backend


# How SentencePiece writes a space.
_SPACE = "\u2581"
# The names of tokens that stand for bytes of characters that have no token.
_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _merges_of_scores(scores: dict[str, float], path: Path) -> list[tuple[str, str]]:
    """Return each split of a piece into two others, those that make the best piece first."""
    # The pieces themselves, which need no memory as parts.
    pieces = {piece: piece for piece in scores}
    found = (
        (left, right)
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for i in range(1, len(piece))
        if (left := pieces.get(piece[:i])) and (right := pieces.get(piece[i:]))
    )
    splits = list(islice(found, _MOST_MERGES + 1))
    if len(splits) > _MOST_MERGES:
        raise ValueError(
            f"{path} has pieces in tokenizer.ggml.tokens that others make in more than "
            f"{_MOST_MERGES} ways, which no vocabulary needs. Fetch or convert the file again."
        )
    made = {left + right for left, right in splits}
    if len(made) > 1 and len({scores[piece] for piece in made}) == 1:
        raise ValueError(
            f"{path} gives each of its {len(made)} compound pieces the score "
            f"{scores[made.pop()]}, so it is not known which are preferred and the tokens would be "
            "wrong. Load a folder with tokenizer.json instead."
        )
    return splits


class _PieceDecoder(NamedTuple):
    """The inverse of SentencePiece's spaces and bytes, called by ``tokenizers``.

    ``added`` are the tokens that are found in text as they are; ``prefixed`` tells whether a space
    was put before the text after each of them, and at the start.
    """

    added: frozenset[str]
    prefixed: bool

    def decode_chain(self, tokens: list[str]) -> list[str]:
        text = b""
        starts = self.prefixed
        for token in tokens:
            if token in self.added:
                text += token.encode()
                starts = self.prefixed
                continue
            piece = _BYTES.get(token, token.replace(_SPACE, " ").encode())
            text += piece.removeprefix(b" ") if starts else piece
            starts = False
        return [text.decode(errors="replace")]


def _add_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Have tokens that are not made of text found before anything else."""
    special = (_UNKNOWN, _CONTROL)
    backend.add_tokens(
        [
            import_tokenizers().AddedToken(token, special=code in special, normalized=False)
            for token, code in zip(tokens, types, strict=False)
            if code in (*special, _USER_DEFINED)
        ]
    )


def _gpt2(tokenizers: Any) -> Any:
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm(tokenizers: Any) -> Any:
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    return tokenizers.pre_tokenizers.Sequence([digits, _gpt2(tokenizers)])


def _llama3(tokenizers: Any, digits: str = "{1,3}") -> Any:
    rules = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}" + digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    pre_tokenizers = tokenizers.pre_tokenizers
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex("|".join(rules)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _qwen2(tokenizers: Any) -> Any:
    return _llama3(tokenizers, digits="")


class _Split(NamedTuple):
    """How text is split before merging, and what goes with it in the models that split so.

    With ``whole_first``, what a split gives is not merged where it is a token as a whole;
    ``composed`` puts text into Unicode's composed form; ``starts`` tells whether a first token is
    put before a text where the file does not say.
    """

    build: Callable[[Any], Any]
    whole_first: bool = False
    composed: bool = False
    starts: bool = False


# By the names that GGUF files give them.
_SPLITS = {
    "gpt-2": _Split(_gpt2),
    "smollm": _Split(_smollm),
    "llama-bpe": _Split(_llama3, whole_first=True, starts=True),
    "qwen2": _Split(_qwen2, composed=True),
}


def import_tokenizers() -> ModuleType:
    """Return the ``tokenizers`` library, or raise with the command that installs it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "Turning text into tokens needs the tokenizers library, which is not installed. Run "
            "python -m pip install gguf tokenizers"
        ) from error
    return tokenizers
