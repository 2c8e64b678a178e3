import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from pytensor_ml.checkpoint import load_state, save_state
from pytensor_ml.layers import (
    Dropout,
    Input,
    Linear,
    MoE,
    Sequential,
    call_as_block,
)
from pytensor_ml.loss import CrossEntropy, SquaredError
from pytensor_ml.model import Model
from pytensor_ml.optim import (
    adamw,
    chain,
    clip_by_global_norm,
    compile_train,
    cosine_schedule,
    scalar_state,
    sgd,
)
from pytensor_ml.params import trainable

pytestmark = pytest.mark.skipif(
    pytensor.config.floatX != "float32", reason="the layers follow floatX"
)
CLASSES = 8
IGNORED = -100
STEP_COUNTS = {"train/step_count", "adamw/step_count"}
MIXTURE = {
    "d_model": CLASSES,
    "hidden_dim": 4,
    "n_experts": 8,
    "top_k": 1,
    "selection_bias": True,
    "bias_update_factor": 0.01,
}


def begin(seed, dropout):
    """Return a training step of a mixture of experts, whose output are logits of classes."""
    moe = MoE("moe", **MIXTURE)
    inner, outer = (Dropout(f"{where}_dropout", p=dropout) for where in ("inner", "outer"))
    x = outer(Input("x", (None, None, CLASSES)))
    y = call_as_block(lambda x: x + inner(moe(x)), x, name="block")
    model = Model(y).initialize(seed)
    schedule = cosine_schedule(0.03, 90, warmup_steps=10)
    rule = chain(clip_by_global_norm(1.0), adamw(schedule, 0.1, beta2=0.95))
    loss_fn = CrossEntropy(expect_logits=True, ignore_index=IGNORED)
    return model.compile_train(rule, loss_fn, {"random_seed": seed, "on_unused_input": "raise"})


@pytest.fixture(scope="module")
def twins():
    return [begin(0, dropout=0.1) for _ in range(2)]


def values_by_name(step):
    """Return copies of all that a step reads or updates."""
    values = {v.name: v.get_value() for v in step.get_shared()}
    return {
        name: value.bit_generator.state if "/rng_" in name else np.array(value)
        for name, value in values.items()
    }


def assert_same(some, others):
    assert some.keys() == others.keys()
    for name, value in some.items():
        np.testing.assert_equal(value, others[name])


def batches(first, last):
    """Yield inputs, a class each with some noise, and the classes after them."""
    for i in range(first, last):
        rng = np.random.default_rng(i)
        ids = rng.integers(CLASSES, size=(4, 6))
        x = np.eye(CLASSES)[ids] + rng.normal(scale=0.1, size=(4, 6, CLASSES))
        yield x.astype("float32"), (ids + 1) % CLASSES


def test_a_run_that_stops_and_resumes_ends_as_one_that_does_not(backend, twins, tmp_path):
    """Dropout, the mixture's bias, step counts, moments and the schedule go on."""
    # JAX and MLX draw from generators of their own, which a checkpoint does not hold.
    exact = backend in ("c", "numba")
    one, other = twins if exact else [begin(seed, dropout=0.0) for seed in (0, 1)]
    losses = [float(one(*batch)) for batch in batches(0, 50)]
    save_state(one.get_shared(), tmp_path / "step_50.safetensors")
    losses += [float(one(*batch)) for batch in batches(50, 100)]

    load_state(other.get_shared(), tmp_path / "step_50.safetensors")
    resumed = [float(other(*batch)) for batch in batches(50, 100)]

    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    states = [values_by_name(step) for step in (one, other)]
    assert states[0].keys() == states[1].keys() >= {*STEP_COUNTS, "moe_selection_bias"}
    assert all(states[1][name] == 100 for name in STEP_COUNTS)
    assert np.any(states[1]["moe_selection_bias"])
    if not exact:
        np.testing.assert_allclose(resumed, losses[50:], rtol=1e-4)
        return
    assert resumed == losses[50:]
    assert sum("/rng_" in name for name in states[0]) == 2
    assert_same(*states)


def test_a_refused_step_changes_nothing(twins, tmp_path):
    """Nor does finding out why: masks and the mixture's bias go on as if it had not been."""
    one, other = twins
    save_state(one.get_shared(), tmp_path / "state.safetensors")
    load_state(other.get_shared(), tmp_path / "state.safetensors")
    for batch in batches(0, 2):
        for step in twins:
            step(*batch)
    before = values_by_name(one)
    x, target = next(batches(2, 3))
    target[0, 0] = IGNORED
    wrong = target.copy()
    wrong[1, 0] = CLASSES
    with pytest.raises(ValueError, match=rf"targets run from \d to {CLASSES}, but"):
        one(x, wrong)
    with pytest.raises(FloatingPointError, match="the gradient of moe_"):
        one(np.full_like(x, 3e38), target)
    assert_same(values_by_name(one), before)
    after = [[float(step(*batch)) for batch in batches(3, 6)] for step in twins]
    np.testing.assert_allclose(*after, rtol=1e-6)


def test_a_refused_step_is_explained_by_its_own_draws():
    def compiled():
        scales = [trainable(np.float32(1), name=f"scale_{i}") for i in range(8)]
        y = Dropout("dropout", p=0.5, random_state=0)(pt.stack(scales))
        loss = pt.log(pt.scalar("limit", dtype="float32") - y).sum()
        return compile_train(loss, sgd(0.0), extra_outputs=[y])

    allowed, refused = compiled(), compiled()
    for step in (allowed, refused):
        step(np.float32(3))
    _, value = allowed(np.float32(3))
    n_kept = int((np.asarray(value) == 2).sum())
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=f"so are {n_kept} of 8"):
            refused(np.float32(2))


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


@pytest.mark.compiles_nothing
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


def test_what_is_not_among_the_parameters_is_not_trained():
    x = Input("x", (None, 2))
    first, last = Linear("first", n_in=2, n_out=3), Linear("last", n_in=3, n_out=1)
    model = Model(last(first(x))).initialize(0)
    step = model.compile_train(sgd(0.1), SquaredError(), parameters=[first.W, last.b])
    before = [np.array(v.get_value()) for v in model.weights]
    step(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
    changed = {
        v.name
        for v, value in zip(model.weights, before, strict=True)
        if np.any(np.asarray(v.get_value()) != value)
    }
    assert changed == {"first_W", "last_b"}
    with pytest.raises((AssertionError, ValueError), match=r"[Ss]hape") as raised:
        step(np.ones((4, 2), "float32"), np.ones((3, 1), "float32"))
    [note] = raised.value.__notes__[-1:]
    assert "x of dtype float32 and shape (4, 2), target of dtype float32 and shape (3, 1)" in note


def test_logits_taken_for_probabilities_are_told_from_other_faults():
    fc = Linear("fc", n_in=2, n_out=3)
    model = Model(fc(Input("x", (None, 2)))).initialize(0)
    fc.b.set_value(np.array([0, 0, 2], "float32"))
    step = model.compile_train(sgd(0.1), CrossEntropy())
    with pytest.raises(ValueError, match=r"no probabilities.*CrossEntropy\(expect_logits=True\)"):
        step(np.zeros((1, 2), "float32"), np.array([1]))
    with pytest.raises(TypeError, match="Model got list, but a loss compares one output"):
        Model([model.y])


@pytest.mark.compiles_nothing
def test_one_seed_draws_the_same_parameters():
    y = Linear("fc", n_in=2, n_out=3)(Input("x", (None, 2)))
    model = Model(y)
    values = [[p.get_value() for p in model.initialize(seed).weights] for seed in (0, 0, 1)]
    assert {p.name for p in model.weights} == {"fc_W", "fc_b"}
    assert all(np.array_equal(a, b) for a, b in zip(values[0], values[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(values[0], values[2], strict=True))


def test_a_loss_takes_the_inputs_that_it_needs_and_trains_its_own_parameters():
    x, z = Input("x", (None, 2)), Input("z", (None, 1))
    hidden = Linear("hidden", n_in=2, n_out=1)(x)
    model = Model(hidden * z).initialize(0)
    own = Linear("own", n_in=1, n_out=1)
    step = model.compile_train(sgd(0.1), loss=pt.sqr(own(hidden) - 1).mean())
    before = own.W.get_value()
    step(np.ones((3, 2), "float32"))
    assert np.all(np.asarray(own.W.get_value()) != before)
