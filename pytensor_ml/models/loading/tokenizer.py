"""Tokens from text and back, with the vocabulary that a model's files hold."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from pytensor_ml.models.loading.gguf import GGUFCheckpoint, GGUFFile
from pytensor_ml.models.loading.safetensors import read_json

# Codes of `tokenizer.ggml.token_type`.
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
    """

    def __init__(
        self, backend: Any, *, eos_ids: Iterable[int] = (), prefix: Iterable[int] = ()
    ) -> None:
        self._backend = backend
        self._prefix = list(prefix)
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

        Parameters
        ----------
        source : path, GGUFFile or GGUFCheckpoint
            File with a byte-level BPE vocabulary.

        Raises
        ------
        ImportError
            If ``tokenizers`` or ``gguf`` is not installed.
        ValueError
            If the vocabulary is of another kind or splits text in a way that is not known.
        """
        if isinstance(source, GGUFCheckpoint):
            file = source.file
        else:
            file = source if isinstance(source, GGUFFile) else GGUFFile(source)
        kind = file.require("tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise ValueError(
                f"{file.path} has a vocabulary of the kind {kind!r}"
                f"{' (SentencePiece)' if kind == 'llama' else ''}, which is not supported yet: its "
                "tokens would be wrong. Supported is 'gpt2' (byte-level BPE). Load a folder with "
                "tokenizer.json instead."
            )
        split = file.require("tokenizer.ggml.pre", str)
        if split not in _PRE_TOKENIZERS:
            raise ValueError(
                f"{file.path} splits text by the rule {split!r}, which is not known here: its "
                f"tokens would be wrong. Supported are: {', '.join(_PRE_TOKENIZERS)}. Load a "
                "folder with tokenizer.json instead."
            )
        tokens = file.require("tokenizer.ggml.tokens", list)
        merges = file.require("tokenizer.ggml.merges", list)
        types = file.metadata.get("tokenizer.ggml.token_type", [])
        tokenizers = import_tokenizers()
        try:
            model = tokenizers.models.BPE(
                {token: i for i, token in enumerate(tokens)},
                [tuple(merge.split(" ", 1)) for merge in merges],
            )
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{file.path} has merges that do not fit its vocabulary: {error}. Fetch or convert "
                "the file again."
            ) from error
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = _PRE_TOKENIZERS[split](tokenizers.pre_tokenizers)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_tokens(
            [
                tokenizers.AddedToken(token, special=code == _CONTROL, normalized=False)
                for token, code in zip(tokens, types, strict=False)
                if code in (_CONTROL, _USER_DEFINED)
            ]
        )
        ends = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
        starts = file.metadata.get("tokenizer.ggml.add_bos_token", False)
        return cls(
            backend,
            eos_ids=(file.require(end, int) for end in ends if end in file.metadata),
            prefix=[file.require("tokenizer.ggml.bos_token_id", int)] if starts else (),
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
        return [*self._prefix, *self._backend.encode(text).ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def stream(self) -> "StreamDecoder":
        """Return a decoder that takes one token at a time."""
        return StreamDecoder(self.decode)


class StreamDecoder:
    """Gives the text of tokens as they come, never a part of a character.

    Parameters
    ----------
    decode : callable
        Text of a list of ids; a replacement character stands for bytes that form no character.

    Examples
    --------
    >>> from pytensor_ml.models.loading import StreamDecoder
    >>> stream = StreamDecoder(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [stream.push(byte) for byte in "né".encode()], stream.flush()
    (['n', '', 'é'], '')
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # Tokens before the pending ones are kept: some vocabularies strip a text's first space.
        self._context: list[int] = []
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


def _gpt2(pre_tokenizers: Any) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm(pre_tokenizers: Any) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2(pre_tokenizers)]
    )


# How text is split before merging, by the name that GGUF files give it.
_PRE_TOKENIZERS: dict[str, Callable[[Any], Any]] = {"gpt-2": _gpt2, "smollm": _smollm}


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
