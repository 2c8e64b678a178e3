import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from pytensor_ml.checkpoint import load_state, save_state
from pytensor_ml.layers import (
    DecoderBlock,
    Dropout,
    Embedding,
    Input,
    Linear,
    MoE,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    TransformerStack,
    call_as_block,
)
from pytensor_ml.loss import CrossEntropy, SquaredError
from pytensor_ml.model import Model
from pytensor_ml.models import CausalLM
from pytensor_ml.optim import (
    adamw,
    chain,
    clip_by_global_norm,
    cosine_schedule,
    scalar_state,
    sgd,
)

pytestmark = pytest.mark.skipif(
    pytensor.config.floatX != "float32", reason="the layers follow floatX"
)
VOCABULARY = 11
CLOCKS = {"train/step_count", "adamw/step_count"}


MIXTURE = {
    "d_model": 8,
    "hidden_dim": 4,
    "n_experts": 8,
    "top_k": 1,
    "selection_bias": True,
    "bias_update_factor": 0.01,
}


def decoder(dropout):
    """A decoder whose block has a mixture of experts."""
    block = DecoderBlock(
        "block",
        attention=MultiheadAttention(
            "attention", n_embd=8, n_head=2, n_kv_head=1, bias=False, is_causal=True
        ),
        feed_forward=MoE("moe", **MIXTURE),
        attention_norm=RMSNorm("norm1", n_in=8),
        feed_forward_norm=RMSNorm("norm2", n_in=8),
        dropout=dropout,
    )
    network = CausalLM(
        embedding=Embedding("tokens", n_embeddings=VOCABULARY, n_features=8),
        stack=TransformerStack("stack", [block], rotary=RotaryEmbedding(rotary_dim=4)),
        norm=RMSNorm("norm", n_in=8),
        max_positions=16,
    )
    return network(Input("ids", shape=(None, None), dtype="int64"))


def batches(first, last):
    for i in range(first, last):
        rng = np.random.default_rng(i)
        ids = (rng.integers(VOCABULARY, size=(4, 1)) + np.arange(7)) % VOCABULARY
        yield ids[:, :-1], ids[:, 1:]


def test_a_run_that_stops_and_resumes_ends_as_one_that_does_not(backend, tmp_path):
    """Dropout, the mixture's bias, clocks, moments and the schedule go on where they stopped."""
    # JAX and MLX draw from generators of their own, which a checkpoint does not hold.
    exact = backend in ("c", "numba")

    def begin(seed):
        model = Model(decoder(dropout=0.1 if exact else 0.0)).initialize(seed)
        schedule = cosine_schedule(0.03, 90, warmup_steps=10)
        rule = chain(clip_by_global_norm(1.0), adamw(schedule, beta2=0.99))
        kwargs = {"random_seed": seed}
        return model.compile_train(rule, CrossEntropy(expect_logits=True), kwargs)

    one = begin(0)
    losses = [float(one(*batch)) for batch in batches(0, 50)]
    save_state(one.get_shared(), tmp_path / "step_50.safetensors")
    losses += [float(one(*batch)) for batch in batches(50, 100)]

    other = begin(1)
    load_state(other.get_shared(), tmp_path / "step_50.safetensors")
    resumed = [float(other(*batch)) for batch in batches(50, 100)]

    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    states = [{v.name: v.get_value() for v in step.get_shared()} for step in (one, other)]
    assert states[0].keys() == states[1].keys() >= {*CLOCKS, "moe_selection_bias"}
    assert all(states[1][name] == 100 for name in CLOCKS)
    assert np.any(np.asarray(states[1]["moe_selection_bias"]))
    if not exact:
        np.testing.assert_allclose(resumed, losses[50:], rtol=1e-4)
        return
    assert resumed == losses[50:]
    generators = [name for name in states[0] if "/rng_" in name]
    assert len(generators) == 2
    for name, value in states[0].items():
        if name in generators:
            assert value.bit_generator.state == states[1][name].bit_generator.state
        else:
            np.testing.assert_array_equal(value, states[1][name])


def test_the_gradient_uses_the_mask_of_the_forward_pass():
    fc = Linear("fc", n_in=3, n_out=40)
    y = call_as_block(Sequential(fc, Dropout("dropout", p=0.5, random_state=0)), Input("x", (4, 3)))
    model = Model(y)
    step = model.compile_train(sgd(1.0), loss=y.sum(), extra_outputs=[y])
    x = np.abs(np.random.default_rng(0).normal(size=(4, 3))).astype("float32")
    masks = []
    for _ in range(2):
        fc.W.set_value(np.ones((3, 40), "float32"))
        fc.b.set_value(np.zeros(40, "float32"))
        _, value = step(x)
        masks.append(np.asarray(value) != 0)
        assert_close(-np.asarray(fc.b.get_value()), 2.0 * masks[-1].sum(axis=0))
        assert_close(1 - np.asarray(fc.W.get_value()), 2 * x.T @ masks[-1])
    assert 0.3 < masks[0].mean() < 0.7
    assert np.any(masks[0] != masks[1])
    assert_close(model.predict(x), x @ np.asarray(fc.W.get_value()) + fc.b.get_value(), 1e-5)


def test_loads_of_a_mixture_even_out_and_padding_does_not_count():
    n_experts, n_tokens = MIXTURE["n_experts"], 512
    rng = np.random.default_rng(0)
    moe = MoE("moe", **MIXTURE)
    # The first channel is 1 for a token and -9 for padding, all of which one expert likes best.
    data = rng.normal(size=(2, n_tokens, 8)).astype("float32")
    valid = np.arange(2 * n_tokens).reshape(2, n_tokens) % 2 == 0
    data[..., 0] = np.where(valid, 1, -9)
    router = rng.normal(size=(8, n_experts)).astype("float32") / 2
    router[0] = 0
    others = data[valid][:, 1:] @ router[1:]
    lead = np.sort(others[:, 1:].max(axis=1) - others[:, 0])[int(0.6 * n_tokens)]
    router[0, 0] = lead
    router[0, 1] = -2

    x = Input("x", (None, None, 8))
    is_valid = Input("valid", (None, None), dtype="bool")
    y, load = call_as_block(lambda x, valid: [moe(x, valid), moe.load], x, is_valid, name="block")
    model = Model(y).initialize(0)
    moe.router.W.set_value(router)
    loss = SquaredError()(x, y)
    step = model.compile_train(sgd(1e-3), loss=loss, inputs=[x, is_valid], extra_outputs=[load])
    loads = np.array([step(data, valid)[1] for _ in range(300)])
    assert np.all(loads.sum(axis=1) == n_tokens)
    assert abs(loads[0].max() / n_tokens - 0.6) < 0.02
    assert loads[-1].max() < 1.3 * n_tokens / n_experts


@pytest.fixture
def scored():
    """A network through a square root, whose gradient at 0 is infinite."""
    x = Input("x", (None, 2))
    first, last = Linear("first", n_in=2, n_out=3), Linear("last", n_in=3, n_out=4)
    model = Model(last(pt.sqrt(first(x)))).initialize(0)
    first.W.set_value(np.ones((2, 3), "float32"))
    rate = scalar_state("rate", 0.1, "float32")
    return model.compile_train(sgd(rate, 0.9), CrossEntropy(expect_logits=True)), first


def test_a_step_whose_loss_is_not_finite_says_why_and_changes_nothing(scored):
    step, first = scored
    x, target = np.ones((2, 2), "float32"), np.array([0, 3])
    step(x, target)
    names = {v.name for v in step.get_shared()}
    assert {"rate", "last_W/sgd/velocity", "train/step_count"} <= names
    before = [np.array(v.get_value()) for v in step.get_shared()]
    with pytest.raises(ValueError, match=r"nan at step 2: targets run from 0 to 4.* 4 classes"):
        step(x, target + np.array([0, 1]))
    with pytest.raises(FloatingPointError, match="nan at step 2: the gradient of last_"):
        step(x * np.nan, target)
    for variable, value in zip(step.get_shared(), before, strict=True):
        np.testing.assert_array_equal(variable.get_value(), value)

    step(x, target)
    first.W.set_value(np.zeros((2, 3), "float32"))
    first.b.set_value(np.zeros(3, "float32"))
    assert np.isfinite(float(step(x, target)))
    with pytest.raises(FloatingPointError, match="nan at step 4: first_"):
        step(x, target)


def test_parameters_that_a_loss_does_not_reach_are_named():
    x = Input("x", (None, 2))
    branches = [Linear(name, n_in=2, n_out=1)(x) for name in ("a", "b")]
    model = Model(pt.concatenate(branches, axis=1))
    with pytest.raises(ValueError, match=r"does not reach b_(b, b_W|W, b_b):"):
        model.compile_train(sgd(), loss=branches[0].sum())
    with pytest.raises(ValueError, match="got neither"):
        model.compile_train(sgd())
    with pytest.raises(ValueError, match="got both"):
        model.compile_train(sgd(), SquaredError(), loss=model.y.sum())


def test_one_seed_draws_the_same_parameters():
    y = Linear("fc", n_in=2, n_out=3)(Input("x", (None, 2)))
    model = Model(y)
    values = [[p.get_value() for p in model.initialize(seed).weights] for seed in (0, 0, 1)]
    assert {p.name for p in model.weights} == {"fc_W", "fc_b"}
    assert all(np.array_equal(a, b) for a, b in zip(values[0], values[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(values[0], values[2], strict=True))
