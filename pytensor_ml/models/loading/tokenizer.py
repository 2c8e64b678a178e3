"""Tokens from text and back, with the vocabulary that a model's files hold."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pytensor_ml.models.loading.gguf import GGUFCheckpoint, GGUFFile
from pytensor_ml.models.loading.safetensors import read_json

# Codes of `tokenizer.ggml.token_type`.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4


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
        if kind not in _VOCABULARIES:
            raise ValueError(
                f"{file.path} has a vocabulary of the kind {kind!r}, which is not supported: its "
                "tokens would be wrong. Supported are 'gpt2' (byte-level BPE) and 'llama' "
                "(SentencePiece BPE). Load a folder with tokenizer.json instead."
            )
        backend, starts = _VOCABULARIES[kind](file)

        def token_of(end: str, wanted: bool) -> list[int]:
            if not file.metadata.get(f"tokenizer.ggml.add_{end}_token", wanted):
                return []
            return [file.require(f"tokenizer.ggml.{end}_token_id", int)]

        ends = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
        return cls(
            backend,
            eos_ids=(file.require(end, int) for end in ends if end in file.metadata),
            prefix=token_of("bos", starts),
            suffix=token_of("eos", False),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read ``tokenizer.json``, and the end tokens from the configs beside it.

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
            If that file cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist, so text cannot be turned into tokens. Put the model's "
                "tokenizer.json there."
            )
        tokenizers = import_tokenizers()
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{path} does not hold a tokenizer: {error}. Fetch the file again."
            ) from error
        eos_ids: set[int] = set()
        for config in (folder / "generation_config.json", folder / "config.json"):
            if config.is_file():
                ids = read_json(config).get("eos_token_id")
                eos_ids.update([ids] if isinstance(ids, int) else ids or [])
        return cls(backend, eos_ids=eos_ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, in which special tokens may be spelled out."""
        return [*self._prefix, *self._backend.encode(text).ids, *self._suffix]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

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


def _byte_level_bpe(file: GGUFFile) -> tuple[Any, bool]:
    """Return what a vocabulary of bytes and merges does, and whether a token starts each text."""
    name = file.require("tokenizer.ggml.pre", str)
    if name not in _SPLITS:
        raise ValueError(
            f"{file.path} splits text by the rule {name!r}, which is not known here: its tokens "
            f"would be wrong. Supported are: {', '.join(_SPLITS)}. Load a folder with "
            "tokenizer.json instead."
        )
    split = _SPLITS[name]
    tokens = file.require("tokenizer.ggml.tokens", list)
    merges = file.require("tokenizer.ggml.merges", list)
    tokenizers = import_tokenizers()
    try:
        model = tokenizers.models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=split.whole_first,
        )
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(
            f"{file.path} has merges that do not fit its vocabulary: {error}. Fetch or convert "
            "the file again."
        ) from error
    backend = tokenizers.Tokenizer(model)
    if split.composed:
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = split.build(tokenizers)
    backend.decoder = tokenizers.decoders.ByteLevel()
    _add_tokens(backend, tokens, file.metadata.get("tokenizer.ggml.token_type", []))
    return backend, split.starts


def _sentencepiece_bpe(file: GGUFFile) -> tuple[Any, bool]:
    """Return what a vocabulary of scored pieces does, and whether a token starts each text [1]_.

    References
    ----------
    .. [1] Kudo and Richardson (2018). SentencePiece: A simple and language independent subword
       tokenizer and detokenizer for Neural Text Processing. arXiv:1808.06226.
    """
    tokens, scores, types = (
        file.require(f"tokenizer.ggml.{key}", list) for key in ("tokens", "scores", "token_type")
    )
    if not len(tokens) == len(scores) == len(types):
        raise ValueError(
            f"{file.path} has {len(tokens)} tokens, {len(scores)} scores and {len(types)} token "
            "types, so it is not known which belong together. Fetch or convert the file again."
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
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizers = import_tokenizers()
    normalizers = tokenizers.normalizers
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: i for i, token in enumerate(tokens)},
            _merges_of_scores(
                {
                    token: score
                    for token, score, code in zip(tokens, scores, types, strict=True)
                    if code == _NORMAL
                },
                file.path,
            ),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [
            *([normalizers.Prepend(_SPACE)] if prefixed else []),
            normalizers.Replace(" ", _SPACE),
        ]
    )
    _add_tokens(backend, tokens, types)
    added = frozenset(token.content for token in backend.get_added_tokens_decoder().values())
    backend.decoder = tokenizers.decoders.Decoder.custom(_PieceDecoder(added, prefixed))
    return backend, True


# How SentencePiece writes a space.
_SPACE = "\u2581"
# The names of tokens that stand for bytes of characters that have no token.
_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _merges_of_scores(scores: dict[str, float], path: Path) -> list[tuple[str, str]]:
    """Return each split of a piece into two others, those that make the best piece first."""
    splits = [
        (piece[:i], piece[i:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for i in range(1, len(piece))
        if piece[:i] in scores and piece[i:] in scores
    ]
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


_VOCABULARIES: dict[str, Callable[[GGUFFile], tuple[Any, bool]]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}


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
