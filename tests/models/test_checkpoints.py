"""Every family's checkpoints give the logits of the implementation they were made with."""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from safetensors.numpy import load_file, save_file

from pytensor_ml.layers import Embedding, Input
from pytensor_ml.models import (
    CausalLM,
    halve_weights,
    load_causal_lm,
    open_checkpoint,
    save_causal_lm,
)
from pytensor_ml.models.loading import GGUFCheckpoint, build_model, registry
from pytensor_ml.models.loading import gguf as loading_gguf
from pytensor_ml.pytensorf import function

GOLDEN = Path(__file__).parents[1] / "golden"
DOCS = Path(__file__).parents[2] / "docs"
# That of plain Llama is in test_llama, compiled.
TINY = [
    "llama_mqa_yarn",
    "llama_tied_llama3_rope",
    "mistral_window",
    "mistral_no_window",
    "qwen2_bias",
    "qwen2_window",
    "qwen3_head_dim",
    "qwen3_window",
    "gemma3_text",
    "gemma3_old_config",
]


def graph_of(model):
    ids = Input("ids", shape=(None, None), dtype="int64")
    valid = Input("valid", shape=(None, None), dtype="bool")
    return [ids, valid], model(ids, valid)


def compute_with_numpy(inputs, outputs, *values):
    """Run a graph as it was built, on no backend: in a moment, where a compiler takes seconds."""
    mode = Mode(linker="py", optimizer=None)
    with pytensor.config.change_flags(mode=mode, cxx=""):
        return pytensor.function(inputs, outputs, mode=mode)(*values)


def assert_golden(name, full, padded):
    expected = np.load(GOLDEN / name / "expected.npz")
    real = expected["attention_mask"].astype(bool)
    np.testing.assert_allclose(full, expected["logits"], rtol=0, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(
        np.asarray(padded)[real], expected["logits_padded"][real], rtol=0, atol=1e-4, err_msg=name
    )


def assert_gives_golden_logits(name, path):
    expected = np.load(GOLDEN / name / "expected.npz")
    ids, real = expected["input_ids"], expected["attention_mask"].astype(bool)
    inputs, logits = graph_of(load_causal_lm(path))
    full, padded = (
        compute_with_numpy(inputs, logits, ids, valid) for valid in (np.ones_like(real), real)
    )
    assert_golden(name, full, padded)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(name):
    assert_gives_golden_logits(name, GOLDEN / name)


def test_one_checkpoint_of_each_family_compiles_to_them():
    names = ["mistral_window", "qwen2_bias", "qwen3_head_dim", "gemma3_text"]
    graphs = [graph_of(load_causal_lm(GOLDEN / name)) for name in names]
    run = function([x for inputs, _ in graphs for x in inputs], [logits for _, logits in graphs])
    expected = [np.load(GOLDEN / name / "expected.npz") for name in names]
    masks = [values["attention_mask"].astype(bool) for values in expected]
    full, padded = (
        run(*(x for i, e in enumerate(expected) for x in (e["input_ids"], valid[i])))
        for valid in (np.ones_like(masks), masks)
    )
    for name, *logits in zip(names, full, padded, strict=True):
        assert_golden(name, *logits)


def parameters_of(path):
    checkpoint = open_checkpoint(path)
    _, keys = build_model(checkpoint.config)
    assert keys.load(checkpoint) == []
    return {key: keys.parameter_for(key).get_value() for key in keys.keys()}  # noqa: SIM118


def save_sharded(tensors, folder):
    shards = [sorted(tensors)[::2], sorted(tensors)[1::2]]
    weight_map = {}
    for i, keys in enumerate(shards):
        name = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in keys}, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save_float16(tensors, folder):
    halves = {key: values.astype("float16") for key, values in tensors.items()}
    save_file(halves, folder / "model.safetensors")


def save_bfloat16(tensors, folder):
    header, data = {}, b""
    for key, values in tensors.items():
        start = len(data)
        data += (values.view("uint32") >> 16).astype("uint16").tobytes()
        offsets = [start, len(data)]
        header[key] = {"dtype": "BF16", "shape": values.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    length = len(text).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + text + data)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("save", "rounded"),
    [
        (save_sharded, lambda values: values),
        (save_float16, lambda values: values.astype("float16").astype("float32")),
        (save_bfloat16, lambda values: (values.view("uint32") & 0xFFFF0000).view("float32")),
    ],
)
@pytest.mark.parametrize("name", ["llama_tied_llama3_rope", "qwen2_bias", "gemma3_text"])
def test_a_checkpoint_saved_otherwise_has_the_same_weights(tmp_path, name, save, rounded):
    shutil.copy(GOLDEN / name / "config.json", tmp_path)
    save(load_file(GOLDEN / name / "model.safetensors"), tmp_path)
    found, expected = parameters_of(tmp_path), parameters_of(GOLDEN / name)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].dtype == "float32"
        np.testing.assert_array_equal(found[key], rounded(values), err_msg=key)


def adjacent_from_half(rows, n_heads):
    """Put row i of each head's first half before row i of its second."""
    heads = np.split(rows, n_heads)
    return np.concatenate(
        [
            np.stack(np.split(head, 2), axis=1).reshape(head.shape)  # (half, 2, ...)
            for head in heads
        ]
    )


def llama3_divisors(head_dim, scaling):
    """Return what the tensor rope_freqs holds: how much slower each pair turns."""
    wavelengths = 2 * np.pi * scaling["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / scaling["factor"] + kept)).astype("float32")


def write_gguf(path, name, architecture, *, plus_one=False, permuted=False, **changes):
    """Write a golden checkpoint as converters do, under the names that the gguf library has.

    ``changes`` are further fields, each written by the writer's method of that name.
    """
    config = json.loads((GOLDEN / name / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    rope = config["rope_parameters"]
    fields = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "head_count": heads,
        "head_count_kv": kv_heads,
        "key_length": head_dim,
        "value_length": head_dim,
        "layer_norm_rms_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_freq_base": rope.get("full_attention", rope)["rope_theta"],
    }
    tensors = load_file(GOLDEN / name / "model.safetensors")
    if rope.get("rope_type") == "yarn":
        fields |= {
            "rope_scaling_type": gguf.RopeScalingType.YARN,
            "rope_scaling_factor": rope["factor"],
            "rope_scaling_orig_ctx_len": rope["original_max_position_embeddings"],
        }
    writer = gguf.GGUFWriter(path, architecture)
    for field, value in (fields | changes).items():
        getattr(writer, f"add_{field}")(value)
    [kind] = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for key, values in tensors.items():
        if permuted and (".q_proj." in key or ".k_proj." in key):
            values = adjacent_from_half(values, heads if ".q_proj." in key else kv_heads)
        if plus_one and key.endswith("norm.weight"):
            values = values + np.float32(1)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), values)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(head_dim, rope))
    # A file of more blocks than the checkpoint has something of each.
    for block in range(config["num_hidden_layers"], changes.get("block_count", 0)):
        writer.add_tensor(f"blk.{block}.attn_norm.weight", np.ones(4, "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_gqa", {"architecture": "llama", "permuted": True}),
        ("llama_mqa_yarn", {"architecture": "llama", "permuted": True}),
        ("llama_tied_llama3_rope", {"architecture": "llama", "permuted": True}),
        ("mistral_window", {"architecture": "llama", "permuted": True, "sliding_window": 4}),
        ("mistral_no_window", {"architecture": "llama", "permuted": True}),
        ("qwen2_bias", {"architecture": "qwen2"}),
        ("qwen3_head_dim", {"architecture": "qwen3"}),
        (
            "gemma3_text",
            {
                "architecture": "gemma3",
                "plus_one": True,
                "sliding_window": 4,
                "sliding_window_pattern": [True, False, True],
            },
        ),
    ],
)
def test_gguf_files_give_the_same_logits(tmp_path, name, options):
    assert_gives_golden_logits(name, write_gguf(tmp_path / "model.gguf", name, **options))


def gemma3_gguf(path, **changes):
    options = {"plus_one": True, "sliding_window": 512} | changes
    return GGUFCheckpoint(write_gguf(path, "gemma3_text", "gemma3", **options))


@pytest.mark.compiles_nothing
def test_what_gguf_files_of_gemma_3_leave_out(tmp_path):
    config = gemma3_gguf(tmp_path / "m.gguf", block_count=13).config
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    assert slides == [True] * 5 + [False] + [True] * 5 + [False, True]
    assert config["sliding_window"] == 512
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 16
    assert config["final_logit_softcapping"] is None
    assert config["rope_parameters"] == {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4},
    }


@pytest.mark.compiles_nothing
def test_what_gguf_files_of_gemma_3_may_say(tmp_path):
    config = gemma3_gguf(
        tmp_path / "m.gguf",
        block_count=62,
        sliding_window_pattern=3,
        rope_freq_base_swa=500.0,
        rope_scaling_type=gguf.RopeScalingType.LINEAR,
        rope_scaling_factor=8.0,
        final_logit_softcapping=30.0,
    ).config
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    assert slides[:6] == [True, True, False] * 2
    assert config["final_logit_softcapping"] == 30
    assert config["rope_parameters"] == {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 500.0},
    }
    # Only the largest published size has 62 layers, and it scales by its width a head.
    assert config["query_pre_attn_scalar"] == config["hidden_size"] // 4 == 8


def change_config(tmp_path, name, change):
    """Copy a checkpoint, and let its config say something else, or nothing where that is ()."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "config.json").read_text()) | change
    kept = {key: value for key, value in config.items() if value != ()}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama_gqa", {"sliding_window": 7}, "sliding_window = 7.*llama.*Supported are.*rms_norm"),
        ("llama_gqa", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ("llama_gqa", {"logits_scaling": 0.5, "b": 1}, "logits_scaling = 0.5, b = 1, which"),
        ("llama_gqa", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("mistral_window", {"layer_types": ["full_attention"] * 3}, "layer_types.*mistral model"),
        ("mistral_window", {"attention_bias": True}, "attention_bias = True"),
        ("qwen2_bias", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window"),
        ("qwen2_bias", {"layer_types": ["full_attention"] * 2}, "3 layers and 2 layer_types"),
        (
            "qwen3_head_dim",
            {"layer_types": ["chunked_attention"] * 3},
            "type chunked_attention.*Supported are full_attention and sliding_attention",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "relu"}, "relu.*silu or gelu_pytorch_tanh"),
        ("gemma3_text", {"final_logit_softcapping": 0}, "softcapping = 0, where a pos"),
        ("gemma3_text", {"query_pre_attn_scalar": ()}, "lacks query_pre_attn_scalar"),
        ("gemma3_text", {"sliding_window": ()}, "lacks sliding_window"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window = None, where a whole number"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta.*not the sett"),
        ("gemma3_text", {"rope_parameters": ()}, "no rope_theta"),
        ("gemma3_old_config", {"rope_local_base_freq": ()}, "no rope_theta"),
        ("gemma3_old_config", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0, where"),
        ("llama_gqa", {"num_hidden_layers": 1025}, "num_hidden_layers = 1025, where .* to 1024"),
        ("llama_gqa", {"num_hidden_layers": 10**400}, "num_hidden_layers = 2.* to 1024 belongs"),
        ("llama_gqa", {"num_hidden_layers": True}, "num_hidden_layers = True, where a whole"),
        ("llama_gqa", {"vocab_size": 10**8}, r"embed_tokens.*shape \(100000000, "),
        ("llama_gqa", {"hidden_size": 10**9}, "hidden_size = 1000000000, where .* to 268435455"),
        ("llama_gqa", {"max_position_embeddings": "8"}, "max_position_embeddings = '8', where"),
        ("llama_gqa", {"num_key_value_heads": 0}, "num_key_value_heads = 0, where"),
        ("llama_gqa", {"head_dim": 0}, "head_dim = 0, where"),
        ("llama_gqa", {"head_dim": None, "num_attention_heads": 64}, "64 heads of width 0"),
        ("llama_gqa", {"head_dim": 2**27}, "4 heads of width 134217728"),
        ("llama_gqa", {"tie_word_embeddings": "false"}, "'false', where true or false"),
        ("llama_gqa", {"rms_norm_eps": 0}, "rms_norm_eps = 0, where a positive number"),
        ("llama_gqa", {"hidden_act": ["silu"]}, r"\['silu'\], where a text"),
        ("llama_gqa", {"rope_parameters": [1]}, "where an object"),
        ("llama_gqa", {"rope_theta": 5.0}, r"several values of rope_theta, \[5\.0, "),
        ("llama_gqa", {"hidden_act": 1}, r"model was not loaded: The config has hidden_act"),
        ("llama_gqa", {"rope_parameters": {"rope_theta": "1"}}, "make no table.*'1' is no number"),
        ("llama_gqa", {"architectures": "LlamaForCausalLM"}, "a list of names"),
        ("llama_gqa", {"architectures": [{}]}, "a list of names"),
        ("qwen3_window", {"max_window_layers": -1}, "max_window_layers = -1, where"),
        ("qwen3_window", {"layer_types": "full_attention"}, "layer_types = .* list of texts"),
        ("gemma3_text", {"query_pre_attn_scalar": "8"}, "query_pre_attn_scalar = '8', where"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 1}}, "full_attention.*not the sett"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(tmp_path, name, change, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_causal_lm(change_config(tmp_path, name, change))


JUNK = [None, True, -1, 0, 3, 10**9, 10**400, 0.5, 1e308, float("nan"), "", "x", [], {}, [[0]]]


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("name", ["gemma3_old_config", "llama_mqa_yarn", "qwen3_window"])
def test_a_config_changed_anywhere_loads_or_is_refused(tmp_path, name):
    shutil.copy(GOLDEN / name / "model.safetensors", tmp_path)
    config = json.loads((GOLDEN / name / "config.json").read_text())
    changes = [{key: junk} for key in config for junk in JUNK] + [
        {key: value | {part: junk}}
        for key, value in config.items()
        if isinstance(value, dict)
        for part in value
        for junk in JUNK
    ]
    loaded = 0
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        try:
            load_causal_lm(tmp_path)
        except ValueError:
            continue
        loaded += 1
    assert 0 < loaded < len(changes)


@pytest.mark.compiles_nothing
def test_what_has_no_influence_is_not_refused(tmp_path):
    change = {
        "_name_or_path": "somewhere",
        "attention_bias": False,
        "cache_implementation": "hybrid",
        "quantization_config": None,
        "torch_dtype": "bfloat16",
        "use_bidirectional_attention": None,
        "use_sliding_window": False,
    }
    load_causal_lm(change_config(tmp_path, "mistral_window", change))


@pytest.mark.compiles_nothing
def test_mistral_has_its_window_where_the_config_does_not_say(tmp_path):
    for change, window in [((), 4096), (None, None)]:
        folder = change_config(tmp_path / str(window), "mistral_window", {"sliding_window": change})
        windows = {block.attention.window for block in load_causal_lm(folder).stack.blocks}
        assert windows == {window}


@pytest.mark.compiles_nothing
def test_qwen_has_no_window_unless_the_config_turns_it_on(tmp_path):
    """Published configs hold a sliding_window beside use_sliding_window false."""
    for i, use in enumerate([False, ()]):
        folder = change_config(tmp_path / str(i), "qwen2_window", {"use_sliding_window": use})
        windows = {block.attention.window for block in load_causal_lm(folder).stack.blocks}
        assert windows == {None}


@pytest.mark.compiles_nothing
def test_scaled_embeddings_are_rounded_like_their_table():
    """In 16 bit Gemma's factor is another number, and the table's dtype is kept."""

    class ShowEmbeddings:
        def __call__(self, x, positions, mask):
            return x, []

        def extend(self, x, positions, caches):
            return x, []

    with pytensor.config.change_flags(floatX="float16"):
        model = CausalLM(
            embedding=Embedding("tokens", n_embeddings=7, n_features=5),
            stack=ShowEmbeddings(),
            norm=lambda hidden: hidden,
            head=lambda hidden: hidden,
            max_positions=8,
            embedding_scale=640**0.5,
        )
    ids = Input("ids", shape=(None, None), dtype="int64")
    shown = model(ids)
    assert shown.type.dtype == "float16"
    expected = model.embedding.W.get_value() * np.float16(640**0.5)
    values = compute_with_numpy([ids], shown, np.arange(7)[None])
    np.testing.assert_array_equal(values[0], expected)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("name", ["qwen2_bias", "gemma3_text", "llama_tied_llama3_rope"])
def test_a_model_is_written_as_transformers_wrote_it(name, tmp_path):
    """And once more when it was loaded from what was written."""
    config = open_checkpoint(GOLDEN / name).config
    save_causal_lm(load_causal_lm(GOLDEN / name), tmp_path, config=config)
    expected = load_file(GOLDEN / name / "model.safetensors")
    for folder in (tmp_path, tmp_path / "again"):
        written = load_file(folder / "model.safetensors")
        assert written.keys() == expected.keys()
        for key, tensor in written.items():
            np.testing.assert_array_equal(tensor, expected[key].astype("float32"), err_msg=key)
        assert json.loads((folder / "config.json").read_text()) == config | {"dtype": "float32"}
        save_causal_lm(load_causal_lm(tmp_path), tmp_path / "again", config=config)
    with pytest.raises(ValueError, match=r"is made from embed_tokens_W, of shape .* a value of"):
        save_causal_lm(load_causal_lm(tmp_path), tmp_path, config=config | {"vocab_size": 7})


@pytest.mark.compiles_nothing
def test_no_part_of_a_model_is_lost_in_writing(tmp_path):
    model = load_causal_lm(GOLDEN / "llama_gqa")
    config = open_checkpoint(GOLDEN / "llama_gqa").config
    with pytest.raises(ValueError, match=r"a model without layers_1_.*would be lost"):
        save_causal_lm(model, tmp_path, config=config | {"num_hidden_layers": 1})
    halve_weights(model)
    with pytest.raises(ValueError, match=r"is halved.*Save the model before"):
        save_causal_lm(model, tmp_path, config=config)
    assert not list(tmp_path.iterdir())


@pytest.mark.compiles_nothing
def test_a_model_of_known_ids_compiles_without_a_complaint():
    """Sums of what is known are made while compiling, by NumPy in its own dtype."""
    model = load_causal_lm(GOLDEN / "llama_gqa")
    expected = np.load(GOLDEN / "llama_gqa" / "expected.npz")
    mode = Mode(linker="py", optimizer="fast_compile")
    with pytensor.config.change_flags(mode=mode, cxx="", on_opt_error="raise"):
        logits = pytensor.function([], model(pt.constant(expected["input_ids"])), mode=mode)()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.compiles_nothing
def test_the_family_in_the_docs_works(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))
    monkeypatch.setattr(loading_gguf, "_families", dict(loading_gguf._families))
    text = (DOCS / "models.md").read_text()
    [code] = [
        block
        for block in re.findall("```python\n(.*?)```", text, re.S)
        if "register_gguf(" in block
    ]
    exec(code, {})
    assert_gives_golden_logits("seed_oss", GOLDEN / "seed_oss")
    assert_gives_golden_logits("seed_oss", write_gguf(tmp_path / "m.gguf", "seed_oss", "seed_oss"))
