import importlib
import json
import re
import sys
import tracemalloc

import gguf
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from gguf import GGMLQuantizationType as Kind
from pytensor.compile.mode import Mode

import pytensor_ml.models
from pytensor_ml.layers.rotary_scaling import rotary_frequencies
from pytensor_ml.models import load_causal_lm
from pytensor_ml.models.loading import GGUFCheckpoint, KeyMap
from pytensor_ml.models.loading import gguf as loading_gguf
from pytensor_ml.params import trainable

N_Q, N_KV, HEAD_DIM, WIDTH, HIDDEN, VOCAB = 4, 2, 8, 24, 40, 11
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


# A model as transformers holds it, and the name that each tensor has in a GGUF file.
MODEL = {
    "token_embd.weight": ("model.embed_tokens.weight", normal(VOCAB, WIDTH)),
    "output_norm.weight": ("model.norm.weight", normal(WIDTH)),
} | {
    f"blk.{i}.{name}": (f"model.layers.{i}.{target}", normal(*shape))
    for i in (0, 10)
    for name, target, shape in [
        ("attn_norm.weight", "input_layernorm.weight", (WIDTH,)),
        ("attn_q.weight", "self_attn.q_proj.weight", (N_Q * HEAD_DIM, WIDTH)),
        ("attn_q.bias", "self_attn.q_proj.bias", (N_Q * HEAD_DIM,)),
        ("attn_k.weight", "self_attn.k_proj.weight", (N_KV * HEAD_DIM, WIDTH)),
        ("attn_k.bias", "self_attn.k_proj.bias", (N_KV * HEAD_DIM,)),
        ("attn_v.weight", "self_attn.v_proj.weight", (N_KV * HEAD_DIM, WIDTH)),
        ("attn_v.bias", "self_attn.v_proj.bias", (N_KV * HEAD_DIM,)),
        ("attn_output.weight", "self_attn.o_proj.weight", (WIDTH, N_Q * HEAD_DIM)),
        ("ffn_norm.weight", "post_attention_layernorm.weight", (WIDTH,)),
        ("ffn_gate.weight", "mlp.gate_proj.weight", (HIDDEN, WIDTH)),
        ("ffn_up.weight", "mlp.up_proj.weight", (HIDDEN, WIDTH)),
        ("ffn_down.weight", "mlp.down_proj.weight", (WIDTH, HIDDEN)),
    ]
}
METADATA = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": WIDTH,
    "feed_forward_length": HIDDEN,
    "attention.head_count": N_Q,
    "attention.head_count_kv": N_KV,
    "attention.key_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 0.25,
    "rope.freq_base": 5000.0,
}


def adjacent_from_half(rows):
    """Put row i of each head's first half before row i of its second."""
    heads = rows.reshape(-1, HEAD_DIM, *rows.shape[1:])
    order = [channel for i in range(HEAD_DIM // 2) for channel in (i, i + HEAD_DIM // 2)]
    return heads[:, order].reshape(rows.shape)


def as_stored(model=MODEL):
    return {
        name: adjacent_from_half(values) if ".attn_q." in name or ".attn_k." in name else values
        for name, (_, values) in model.items()
    }


def write(path, tensors=None, architecture="llama", tokenizer=None, **metadata):
    """Write a GGUF file; a tensor is an array or a pair of raw bytes and their kind."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | metadata).items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for key, value in (tokenizer or {}).items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"tokenizer.ggml.{key}", value)
    for name, values in (as_stored() if tensors is None else tensors).items():
        data, kind = values if isinstance(values, tuple) else (values, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_tensor_comes_under_transformers_name_and_order(tmp_path):
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf"))
    assert checkpoint.keys() == {target for target, _ in MODEL.values()}
    for target, values in MODEL.values():
        assert checkpoint.shape(target) == values.shape
        assert checkpoint.dtype(target) == checkpoint.read(target).dtype == "float32"
        np.testing.assert_array_equal(checkpoint.read(target), values, target)


def test_reordering_keeps_scores():
    """Half rotation of the reordered rows scores as adjacent rotation of the stored ones."""
    positions, base = np.array([3, 17]), 1e4
    angles = positions[:, None] * base ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    x = RNG.normal(size=(2, WIDTH))

    def scores(q, k, pair):
        def rotated(rows, n_heads):
            heads = (x @ rows.T).reshape(2, n_heads, HEAD_DIM)
            first, second = pair(heads)
            turned = (first + 1j * second) * np.exp(1j * angles)[:, None]
            return np.repeat(turned, N_Q // n_heads, axis=1)

        return np.einsum("qhi,khi->hqk", rotated(q, N_Q), rotated(k, N_KV).conj()).real

    q, k = RNG.normal(size=(N_Q * HEAD_DIM, WIDTH)), RNG.normal(size=(N_KV * HEAD_DIM, WIDTH))
    stored = scores(q, k, lambda heads: (heads[..., ::2], heads[..., 1::2]))
    reordered = scores(
        loading_gguf.half_from_adjacent(q, N_Q),
        loading_gguf.half_from_adjacent(k, N_KV),
        lambda heads: (heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]),
    )
    np.testing.assert_allclose(reordered, stored, rtol=0, atol=1e-12)


def test_rows_of_other_families_keep_their_order(tmp_path):
    stored = as_stored()
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", architecture="qwen2"))
    for name, (target, _) in MODEL.items():
        np.testing.assert_array_equal(checkpoint.read(target), stored[name], target)


def test_config(tmp_path):
    path = write(tmp_path / "m.gguf", tokenizer={"bos_token_id": 1, "eos_token_id": 2})
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": N_Q,
        "num_key_value_heads": N_KV,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 0.25,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "attention_out_bias": False,
        "sliding_window": None,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert GGUFCheckpoint(path).config == expected


def test_what_a_file_may_leave_out(tmp_path):
    model = {name: values for name, values in as_stored().items() if not name.endswith("bias")}
    model["output.weight"] = normal(VOCAB, WIDTH)
    left_out = {"attention.head_count_kv": None, "attention.key_length": None}
    path = write(tmp_path / "m.gguf", model, **left_out)
    checkpoint = GGUFCheckpoint(path)
    told = {
        "num_key_value_heads": N_Q,
        "head_dim": WIDTH // N_Q,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    assert {key: checkpoint.config[key] for key in told} == told
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), model["output.weight"])


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.finetuned": 1}, {"rope_type": "default"}),
        (
            {
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.yarn_beta_fast": 30.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 30.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, expected):
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", **metadata))
    assert checkpoint.config["rope_parameters"] == {"rope_theta": 5000.0} | expected


def test_rotary_divisors(tmp_path):
    divisors = np.array([1, 1.5, 3.25, 8], "float32")
    path = write(tmp_path / "m.gguf", as_stored() | {"rope_freqs.weight": divisors})
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.keys() == {target for target, _ in MODEL.values()}
    scaling = checkpoint.config["rope_parameters"]
    assert json.loads(json.dumps(scaling)) == scaling
    for length in (1, 64, 65, 1 << 20):
        frequencies, attention_factor = rotary_frequencies(
            rotary_dim=HEAD_DIM, scaling=scaling, length=length
        )
        expected = 5000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / divisors
        np.testing.assert_allclose(frequencies, expected, rtol=1e-14)
        assert attention_factor == 1


def test_rotary_divisors_reach_the_model(tmp_path):
    tensors = {
        name: values
        for name, values in as_stored().items()
        if ".10." not in name and not name.endswith("bias")
    }
    tensors["rope_freqs.weight"] = np.array([1, 1.5, 3.25, 8], "float32")
    path = write(tmp_path / "m.gguf", tensors, block_count=1)
    rotary, position = load_causal_lm(path).stack.rotary, 7
    angles = position * 5000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles /= tensors["rope_freqs.weight"]
    # What the file says is in the graph, so that interpreting it is enough.
    mode = Mode(linker="py", optimizer=None)
    with pytensor.config.change_flags(mode=mode, cxx=""):
        [row] = rotary.table(pt.constant([position])).eval()
    np.testing.assert_allclose(
        row,
        np.stack([np.cos(angles), np.sin(angles)], axis=-1),
        rtol=0,
        atol=3e-7,
    )


def test_biases_reach_the_model(tmp_path):
    tensors = {name: values for name, values in as_stored().items() if ".10." not in name}
    path = write(tmp_path / "m.gguf", tensors, block_count=1)
    attention = load_causal_lm(path).stack.blocks[0].attention
    assert attention.q_proj.b is not None
    assert attention.out_proj.b is None
    tensors["blk.0.attn_output.bias"] = normal(WIDTH)
    path = write(tmp_path / "with_bias.gguf", tensors, block_count=1)
    attention = load_causal_lm(path).stack.blocks[0].attention
    np.testing.assert_array_equal(
        attention.out_proj.b.get_value(), tensors["blk.0.attn_output.bias"]
    )


@pytest.mark.parametrize(
    ("divisors", "metadata", "told"),
    [
        ([1, 2, 3], {}, r"shape \(3,\).*width 8.*4 pairs"),
        ([[1, 2], [3, 4]], {}, r"shape \(2, 2\).*width 8.*4 pairs"),
        ([1, 2, 0, 4], {}, "not all finite and positive"),
        ([1, np.inf, 3, 4], {}, "not all finite and positive"),
        (
            [1, 2, 3, 4],
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            "twice, by the kind 'linear'",
        ),
    ],
)
def test_rotary_divisors_that_cannot_be_followed(tmp_path, divisors, metadata, told):
    tensors = as_stored() | {"rope_freqs.weight": np.array(divisors, "float32")}
    path = write(tmp_path / "m.gguf", tensors, **metadata)
    with pytest.raises(ValueError, match=rf"(?s)m\.gguf.*{told}"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"rope.freq_base": None}, r"llama\.rope\.freq_base"),
        ({"block_count": None}, r"llama\.block_count"),
        ({"rope.scaling.type": "longrope"}, "'longrope'"),
        ({"rope.scaling.factor": 4.0}, "'none' with factor"),
        ({"rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.factor"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            r"llama\.rope\.scaling\.original_context_length",
        ),
        (
            {
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 4.0,
                "rope.scaling.attn_factor": 2.0,
            },
            "attn_factor",
        ),
        ({"rope.dimension_count": 4}, r"llama\.rope\.dimension_count = 4.*width 8"),
        ({"attention.value_length": 4}, r"llama\.attention\.value_length = 4.*width 8"),
        ({"attention.head_count_kv": [2, 1]}, r"head_count_kv = array\(\[2, 1\].*one int"),
        ({"attention.head_count": 0}, "head_count = 0"),
        ({"block_count": 27}, r"llama\.block_count = 27 and 26 tensors"),
        ({"block_count": True}, "block_count = True.*one int"),
        ({"rope.freq_base": np.inf}, r"llama\.rope\.freq_base = inf"),
        ({"rope.freq_base": np.nan}, r"llama\.rope\.freq_base = nan"),
        ({"rope.scale_linear": np.nan}, r"llama\.rope\.scale_linear = nan"),
        ({"rope.scale_linear": 0.0}, r"llama\.rope\.scale_linear = 0\.0"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": np.nan},
            r"llama\.rope\.scaling\.factor = nan",
        ),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": "4"},
            r"llama\.rope\.scaling\.factor = '4'.*one int or float",
        ),
        ({"rope.scaling.type": [1, 2]}, r"llama\.rope\.scaling\.type = array.*one text"),
        ({"rope.freq_base": "1" * 999}, r"freq_base = '1{10,50}\.\.\.1{10,50}', where"),
        ({f"key_{i}": "1" * 99 for i in range(99)}, r"key_0 = .{486}, which a model"),
        ({"rope.freq_base": "1e4"}, "freq_base = '1e4'.*one float"),
        ({"expert_count": 8}, "8 experts"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale = 0\.5, which.*without"),
    ],
)
def test_metadata_that_cannot_be_followed(tmp_path, metadata, told):
    path = write(tmp_path / "m.gguf", **metadata)
    with pytest.raises(ValueError, match=rf"m\.gguf.*{told}"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("blk.0.rope_freqs.weight", "no layer"),
        ("blk.0.attn_q_norm.weight", "no layer"),
        ("blk.0.token_embd.weight", "no layer"),
        ("attn_q.weight", "no layer"),
        ("token_embd.scales", "no layer"),
    ],
)
def test_a_tensor_without_a_place_is_never_ignored(tmp_path, name, told):
    path = write(tmp_path / "m.gguf", as_stored() | {name: normal(4)})
    with pytest.raises(ValueError, match=rf"m\.gguf.*{name}.*{told}"):
        GGUFCheckpoint(path)


def test_rotary_divisors_are_read_once_their_shape_fits(tmp_path):
    tensors = as_stored() | {"rope_freqs.weight": np.zeros(1 << 20, "float16")}
    path = write(tmp_path / "m.gguf", tensors)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"m\.gguf.*shape \(1048576,\)"):
        GGUFCheckpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


@pytest.mark.parametrize("token_id", [-1, VOCAB, 1.5])
@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
def test_ids_of_no_token(tmp_path, name, token_id):
    path = write(tmp_path / "m.gguf", tokenizer={name: token_id})
    with pytest.raises(ValueError, match=rf"m\.gguf has tokenizer\.ggml\.{name} = {token_id}"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize("pattern", [0, ["a"], [1, 0], [True], [True, False, True]])
def test_which_blocks_of_gemma_3_slide_is_said_for_each(tmp_path, pattern):
    options = {"attention.sliding_window": 4, "attention.sliding_window_pattern": pattern}
    path = write(tmp_path / "m.gguf", architecture="gemma3", **options)
    with pytest.raises(ValueError, match=r"m\.gguf has gemma3\.attention\.sliding_window_pattern"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = as_stored()
    del tensors[name]
    path = write(tmp_path / "m.gguf", tensors)
    with pytest.raises(ValueError, match=rf"m\.gguf.*{name}"):
        GGUFCheckpoint(path)


def test_a_key_map_takes_a_file(tmp_path):
    checkpoint, keys = GGUFCheckpoint(write(tmp_path / "m.gguf")), KeyMap()
    norm = trainable(np.zeros(WIDTH, "float32"), name="norm")
    keys.bind(norm, "model.norm.weight")
    assert len(keys.load(checkpoint)) == len(MODEL) - 1
    np.testing.assert_array_equal(norm.get_value(), MODEL["output_norm.weight"][1])
    keys.bind(trainable(np.zeros(1, "float32"), name="other"), "model.layers.2.weight")
    with pytest.raises(ValueError, match=r"(?s)m\.gguf.*missing.*model\.layers\.2\.weight"):
        keys.load(checkpoint)


def q8_0_block(scale, values):
    return np.float16(scale).tobytes() + np.array(values, "i1").tobytes()


def test_quantized_rows_are_read_in_place(tmp_path):
    integers = RNG.integers(-127, 128, (3, 2, 32))
    scales = np.array([[0.5, 2.0], [1.0, 0.25], [-4.0, 8.0]])
    blocks = b"".join(
        q8_0_block(scales[row, block], integers[row, block]) for row in range(3) for block in (0, 1)
    )
    tensors = as_stored() | {
        "token_embd.weight": (np.frombuffer(blocks, np.uint8).reshape(3, 68), Kind.Q8_0),
        "output_norm.weight": np.array([1, 2, -0.5], "float16"),
        "blk.0.attn_norm.weight": (np.array([0x3F80, 0x41FD], "<u2").view("u1"), Kind.BF16),
    }
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", tensors))
    for key, expected in {
        "model.embed_tokens.weight": (scales[..., None] * integers).reshape(3, 64),
        "model.norm.weight": [1, 2, -0.5],
        "model.layers.0.input_layernorm.weight": [1.0, 31.625],
    }.items():
        assert checkpoint.read(key).dtype == "float32"
        assert checkpoint.shape(key) == np.shape(expected)
        np.testing.assert_array_equal(checkpoint.read(key), expected)


def test_only_what_is_read_takes_memory(tmp_path):
    tensors = as_stored() | {"token_embd.weight": np.zeros((1 << 14, 1 << 8), "float16")}
    path = write(tmp_path / "m.gguf", tensors)
    tracemalloc.start()
    checkpoint = GGUFCheckpoint(path)
    checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def test_other_architectures_are_named_beside_the_supported(tmp_path):
    path = write(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ValueError, match=r"m\.gguf.*'mamba'.*Supported are: gemma3, llama"):
        GGUFCheckpoint(path)


class TestBrokenFiles:
    @pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 some zip file", b"GGML 1234567"])
    def test_not_gguf(self, tmp_path, content):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"m\.gguf is not a GGUF file") as error:
            GGUFCheckpoint(path)
        assert repr(content[:8]) in str(error.value)

    def test_no_file(self, tmp_path):
        for path in (tmp_path, tmp_path / "nothing.gguf"):
            with pytest.raises(FileNotFoundError, match=path.name):
                GGUFCheckpoint(path)

    def test_cut_short_anywhere(self, tmp_path):
        path = tmp_path / "m.gguf"
        whole = write(path, {"token_embd.weight": normal(2, 4), "output_norm.weight": normal(3)})
        whole = whole.read_bytes()
        # What follows the last tensor is padding.
        end = len(whole) - 32 + 3 * 4
        for length in (*range(8, end, 7), end - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=r"m\.gguf is cut short"):
                GGUFCheckpoint(path)

    def header(self, fields=b"", n_fields=0, tensors=b"", n_tensors=0, version=3):
        counts = np.array([n_tensors, n_fields], "<u8").tobytes()
        return b"GGUF" + np.uint32(version).tobytes() + counts + fields + tensors

    def field(self, name, kind, value):
        return self.text(name) + np.uint32(kind).tobytes() + value

    def text(self, raw):
        return np.uint64(len(raw)).tobytes() + raw

    def tensor(self, name, shape, kind, offset):
        return (
            self.text(name)
            + np.uint32(len(shape)).tobytes()
            + np.array(shape, "<u8").tobytes()
            + np.uint32(kind).tobytes()
            + np.uint64(offset).tobytes()
        )

    def refuse(self, tmp_path, content, told):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"m\.gguf.*{told}"):
            GGUFCheckpoint(path)

    @pytest.mark.parametrize(
        ("version", "told"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")]
    )
    def test_other_versions(self, tmp_path, version, told):
        self.refuse(tmp_path, self.header(version=version), told)

    @pytest.mark.parametrize("item", [0, 6, 8, 12])
    def test_arrays_and_texts_beyond_the_file(self, tmp_path, item):
        huge = np.uint32(item).tobytes() + np.uint64(1 << 20).tobytes()
        self.refuse(
            tmp_path, self.header(self.field(b"key", 9, huge), 1) + bytes(99), "cut short: key"
        )
        self.refuse(tmp_path, self.header(np.uint64(1 << 62).tobytes(), 1), "cut short")

    @pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 2])
    def test_more_than_any_model_has_is_refused_unread(self, tmp_path, count):
        content = self.header(n_fields=count) + bytes(99)
        self.refuse(tmp_path, content, f"announces {count} metadata fields")
        content = self.header(n_tensors=count) + bytes(99)
        self.refuse(tmp_path, content, f"announces {count} tensors")
        texts = np.uint32(8).tobytes() + np.uint64(count + 1).tobytes()
        content = self.header(self.field(b"key", 9, texts), 1) + bytes(99)
        self.refuse(tmp_path, content, rf"announces {count + 1} texts in key")

    def test_long_texts(self, tmp_path):
        long = self.text(b"a" * (1 << 20))
        content = self.header(self.field(b"key", 8, long), 1)
        self.refuse(tmp_path, content, r"no metadata field general\.architecture")
        longer = self.text(b"a" * (1 << 20) + b"b")
        content = self.header(self.field(b"key", 8, longer), 1)
        self.refuse(tmp_path, content, "1048577 bytes in key")
        many = np.uint32(8).tobytes() + np.uint64(64).tobytes() + 64 * long
        content = self.header(self.field(b"key", 9, many), 1)
        self.refuse(tmp_path, content, "texts up to key.*more than 67108864 bytes")

    @pytest.mark.parametrize("name", [b"a" * 257, b"a" * 500_000, b"a\x1b[31m", b"a\nb"])
    def test_names_that_cannot_be(self, tmp_path, name):
        shown = rf"can be called {re.escape(repr(name[:20].decode())[:-1])}.{{0,100}}\. Fetch"
        content = self.header(self.field(name, 0, b"1"), 1)
        self.refuse(tmp_path, content, f"no metadata field {shown}")
        tensor = self.tensor(name, (4,), Kind.F32, 0)
        content = self.header(tensors=tensor, n_tensors=1) + bytes(99)
        self.refuse(tmp_path, content, f"no tensor {shown}")

    def test_a_field_given_twice(self, tmp_path):
        fields = self.field(b"key", 0, b"1") + self.field(b"key", 0, b"2")
        self.refuse(tmp_path, self.header(fields, 2), "field key twice")

    def test_arrays_of_numbers_take_no_memory(self, tmp_path):
        array = np.uint32(0).tobytes() + np.uint64(1 << 24).tobytes() + bytes(1 << 24)
        content = self.header(self.field(b"key", 9, array), 1)
        tracemalloc.start()
        self.refuse(tmp_path, content, r"no metadata field general\.architecture")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1e6

    def test_values_of_unknown_types_and_text_of_no_encoding(self, tmp_path):
        self.refuse(tmp_path, self.header(self.field(b"key", 13, bytes(8)), 1), "key.*type 13")
        nested = np.uint32(9).tobytes() + np.uint64(1).tobytes()
        self.refuse(tmp_path, self.header(self.field(b"key", 9, nested), 1), "key.*type 9")
        self.refuse(
            tmp_path, self.header(self.field(b"key", 8, self.text(b"\xff")), 1), "key is not UTF-8"
        )

    @pytest.mark.parametrize(
        ("shape", "kind", "told"),
        [
            ((4,), 99, "quantization 99"),
            ((4,), Kind.I32, "quantization 26"),
            ((), Kind.F32, r"shape \(\)"),
            ((4, 0), Kind.F32, r"shape \(0, 4\)"),
            ((48, 2), Kind.Q8_0, r"shape \(2, 48\)"),
            ((1 << 40, 1 << 40), Kind.F32, "cut short: name"),
            ((1,) * 5, Kind.F32, "name has 5 dimensions"),
        ],
    )
    def test_tensors_that_cannot_be(self, tmp_path, shape, kind, told):
        tensor = self.tensor(b"name", shape, kind, 0)
        self.refuse(tmp_path, self.header(tensors=tensor, n_tensors=1) + bytes(999), told)

    def test_tensors_that_overlap_or_share_a_name(self, tmp_path):
        first, second = self.tensor(b"a", (4,), 0, 0), self.tensor(b"b", (4,), 0, 8)
        for pair in (first + second, second + first):
            content = self.header(tensors=pair, n_tensors=2) + bytes(99)
            self.refuse(tmp_path, content, "damaged: b starts")
        content = self.header(tensors=first + first, n_tensors=2) + bytes(99)
        self.refuse(tmp_path, content, "2 tensors, but only 1")

    @pytest.mark.parametrize(
        ("kind", "value", "told"),
        [
            (4, bytes(4), "0"),
            (4, b"\7\0\0\0", "7"),
            (5, b"\xf8" + 3 * b"\xff", "-8"),
            (6, np.float32(32).tobytes(), "32.0"),
            (7, b"\1", "True"),
            (8, np.uint64(2).tobytes() + b"32", "'32'"),
        ],
    )
    def test_alignments_that_cannot_be(self, tmp_path, kind, value, told):
        field = self.field(b"general.alignment", kind, value)
        self.refuse(tmp_path, self.header(field, 1), f"alignment is {told}")


def test_the_library_is_named_when_it_is_not_installed(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"python -m pip install gguf tokenizers"):
        GGUFCheckpoint(path)


def test_loading_imports_neither_extra(monkeypatch):
    for extra in ("gguf", "tokenizers"):
        monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.setattr(pytensor_ml.models, "loading", pytensor_ml.models.loading)
    for name in [name for name in sys.modules if name.startswith(loading_gguf.__package__)]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module(loading_gguf.__package__).GGUFCheckpoint is not GGUFCheckpoint
