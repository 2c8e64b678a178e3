import numpy as np
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from references import optim as reference

from pytensor_ml.optim import (
    Gradients,
    accumulate_gradients,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    compile_train,
    lion,
    matrices_except,
    scalar_state,
    sgd,
)
from pytensor_ml.params import trainable
from pytensor_ml.pytensorf import function

STEPS = 5
BOTH = ["matrix", "vector"]
DECAY = 0.3
START = {
    "matrix": np.array([[1, -2, 3], [0.5, 0.1, -4]]),
    "vector": np.array([2, -1.0]),
    # From here an error of a step is not small beside the parameter.
    "origin": np.zeros(4),
}


@pytest.fixture(scope="module")
def gradients():
    """Gradients of each step, whose entries differ by orders of magnitude."""
    rng = np.random.default_rng(0)
    scales = 10 ** rng.uniform(-6, 2, size=START["matrix"].shape)
    return {
        "matrix": (scales * rng.normal(size=(STEPS, *START["matrix"].shape))).astype("float32"),
        "vector": (10 * rng.normal(size=(STEPS, *START["vector"].shape))).astype("float32"),
        "origin": rng.normal(size=(STEPS, *START["origin"].shape)).astype("float32"),
    }


def trained(rules, gradients, dtype="float32"):
    """Return, by rule, the values of its parameters after every step, all compiled as one."""
    inputs = {
        name: pt.tensor(f"d{name}", shape=value.shape, dtype=dtype) for name, value in START.items()
    }
    updates, parameters = {}, {}
    for key, (rule, names) in rules.items():
        own = [trainable(START[name].astype(dtype), name=name) for name in names]
        parameters[key] = dict(zip(names, own, strict=True))
        updates |= rule(Gradients((p, inputs[p.name]) for p in own), own)
    run = function(list(inputs.values()), [], updates=updates, on_unused_input="ignore")
    history = {key: [] for key in rules}
    for step_gradients in zip(*(gradients[name] for name in START), strict=True):
        run(*step_gradients)
        for key, own in parameters.items():
            history[key].append({name: np.array(p.get_value()) for name, p in own.items()})
    return history, run


@pytest.fixture(scope="module")
def optimizers(gradients):
    rate = scalar_state("rate", 0.05, "float32")
    rules = {
        "sgd": (sgd(lambda step: 0.1 / (1 + step)), ["matrix"]),
        "momentum": (sgd(lambda step: 0.1 / (1 + step), 0.9), ["matrix"]),
        "nesterov": (sgd(rate, 0.9, nesterov=True), ["matrix"]),
        "adam": (adam(0.1), ["origin"]),
        "amsgrad": (adam(0.1, 0.5, 0.6, 1e-3, amsgrad=True), ["matrix"]),
        "adamw": (adamw(0.1, DECAY, mask=matrices_except()), BOTH),
        "lion": (lion(0.1, DECAY), ["matrix"]),
        "lion undecayed": (lion(0.1, DECAY, mask=matrices_except()), ["vector"]),
    }
    return trained(rules, gradients)


FALLING = [0.1 / (1 + i) for i in range(STEPS)]
DEFAULT = {"rates": [0.1] * STEPS, "betas": (0.9, 0.999), "epsilon": 1e-8}
LION = {"rates": [0.1] * STEPS, "betas": (0.9, 0.99)}
EXPECTED = {
    ("sgd", "matrix"): (reference.sgd, {"rates": FALLING}),
    ("momentum", "matrix"): (reference.sgd, {"rates": FALLING, "momentum": 0.9}),
    ("nesterov", "matrix"): (
        reference.sgd,
        {"rates": [0.05] * STEPS, "momentum": 0.9, "nesterov": True},
    ),
    ("adam", "origin"): (reference.adam, DEFAULT),
    ("amsgrad", "matrix"): (
        reference.adam,
        {"rates": [0.1] * STEPS, "betas": (0.5, 0.6), "epsilon": 1e-3, "amsgrad": True},
    ),
    ("adamw", "matrix"): (reference.adam, {**DEFAULT, "weight_decay": DECAY}),
    ("adamw", "vector"): (reference.adam, DEFAULT),
    ("lion", "matrix"): (reference.lion, {**LION, "weight_decay": DECAY}),
    ("lion undecayed", "vector"): (reference.lion, LION),
}


@pytest.mark.parametrize(("rule", "name"), EXPECTED)
def test_an_optimizer_matches_numpy_at_every_step(rule, name, optimizers, gradients):
    oracle, options = EXPECTED[rule, name]
    history, _ = optimizers
    wide = gradients[name].astype("float64")
    for i, values in enumerate(history[rule]):
        taken = options | {"rates": options["rates"][: i + 1]}
        assert_close(values[name], oracle(START[name], wide[: i + 1], **taken))


def test_rates_of_a_float32_network_are_float32(optimizers):
    _, run = optimizers
    types = {v.type.dtype for node in run.maker.fgraph.toposort() for v in node.outputs}
    assert types <= {"float32", "int64", "bool"}


@pytest.fixture(scope="module")
def max_norm(gradients):
    """A norm that some steps keep to."""
    norms = [
        np.linalg.norm(np.append(m, v)) for m, v in zip(*map(gradients.get, BOTH), strict=True)
    ]
    return float(np.median(norms))


@pytest.fixture(scope="module")
def transformed(gradients, max_norm):
    rules = {
        "clipped": (chain(clip_by_global_norm(max_norm), sgd(0.1)), BOTH),
        "accumulated": (accumulate_gradients(sgd(0.1, 0.9), 2), ["vector"]),
    }
    return trained(rules, gradients)[0]


def test_clipping_shortens_all_gradients_together_where_they_are_long(
    transformed, gradients, max_norm
):
    expected = dict(START)
    for i, values in enumerate(transformed["clipped"]):
        wide = [gradients[name][i].astype("float64") for name in BOTH]
        for name, g in zip(BOTH, reference.clipped(wide, max_norm), strict=True):
            expected[name] = expected[name] - 0.1 * g
            assert_close(values[name], expected[name])


def test_accumulation_takes_one_step_for_several_batches(transformed, gradients):
    """Five batches make two steps, and momentum sees the means only."""
    wide = gradients["vector"].astype("float64")
    means = [wide[i : i + 2].mean(axis=0) for i in (0, 2)]
    options = {"rates": [0.1, 0.1], "momentum": 0.9}
    after_one = reference.sgd(START["vector"], means[:1], rates=[0.1], momentum=0.9)
    after_two = reference.sgd(START["vector"], means, **options)
    expected = [START["vector"], after_one, after_one, after_two, after_two]
    for values, value in zip(transformed["accumulated"], expected, strict=True):
        assert_close(values["vector"], value)


HALF = {
    "sgd": (sgd(0.1), reference.sgd, {}),
    "momentum": (sgd(0.1, 0.9), reference.sgd, {"momentum": 0.9}),
    "adam": (adam(0.1), reference.adam, {"betas": (0.9, 0.999), "epsilon": 1e-8}),
    "amsgrad": (
        adam(0.1, amsgrad=True),
        reference.adam,
        {"betas": (0.9, 0.999), "epsilon": 1e-8, "amsgrad": True},
    ),
    "lion": (lion(0.1), reference.lion, {"betas": (0.9, 0.99), "weight_decay": 0.01}),
}


def test_float16_parameters_are_rounded_once_a_step(backend, gradients):
    """In float16 Adam divides 0 by 0 where a gradient is 0, and squares above 255 overflow."""
    if backend == "numba":
        pytest.skip("Numba has no float16")
    half = {name: value.astype("float16") for name, value in gradients.items()}
    half["matrix"][:, 0] = [0, 300, -0.01]
    rules = {name: (rule, ["matrix"]) for name, (rule, _, _) in HALF.items()}
    rules["clipped"] = (chain(clip_by_global_norm(1.0), sgd(0.1)), ["matrix"])
    rules["accumulated"] = (accumulate_gradients(sgd(0.1), STEPS), ["matrix"])
    history, _ = trained(rules, half, "float16")

    wide = half["matrix"].astype("float64")
    expected = {
        name: oracle(START["matrix"], wide, rates=[0.1] * STEPS, **options)
        for name, (_, oracle, options) in HALF.items()
    }
    clipped = [reference.clipped([g], 1.0)[0] for g in wide]
    expected["clipped"] = reference.sgd(START["matrix"], clipped, rates=[0.1] * STEPS)
    expected["accumulated"] = reference.sgd(START["matrix"], [wide.mean(axis=0)], rates=[0.1])
    for name, value in expected.items():
        result = history[name][-1]["matrix"]
        assert result.dtype == "float16"
        # Half of the last bit for each step.
        assert_close(result, value, STEPS * 2**-11)


def test_a_gradient_that_is_nan_spoils_no_other():
    clip = clip_by_global_norm(1.0)
    a, b = (trainable(np.ones(2, "float32"), name=name) for name in "ab")
    dense = {a: pt.constant(np.array([np.nan, 1], "float32")), b: pt.ones(2, "float32")}
    clipped = clip(Gradients(dense), [a, b])
    assert np.isfinite(function([], clipped[b])()).all()


def test_parameters_can_be_scalars():
    w = trainable(np.float32(3), name="w")
    step = compile_train(w**2, chain(clip_by_global_norm(0.5), sgd(1.0)))
    assert float(step()) == 9
    assert_close(np.asarray(w.get_value()), 2.5)


@pytest.mark.compiles_nothing
def test_errors_name_the_value_and_the_fix():
    w, unused = (trainable(np.ones(2, "float32"), name=name) for name in ("w", "unused"))
    loss = (w**2).sum()
    with pytest.raises(ValueError, match="does not reach unused"):
        adam()(loss, [w, unused])
    with pytest.raises(ValueError, match="only a scalar"):
        adam()(w**2, [w])
    with pytest.raises(ValueError, match="adam takes gradients"):
        chain(sgd(), adam())(loss, [w])
    with pytest.raises(ValueError, match="clip_by_global_norm takes gradients"):
        chain(adam(), clip_by_global_norm())(loss, [w])
    with pytest.raises(ValueError, match="End the chain with an optimizer"):
        compile_train(loss, clip_by_global_norm())
    with pytest.raises(ValueError, match="nothing to train"):
        compile_train(pt.scalar("x") ** 2, adam())
    with pytest.raises(ValueError, match="does not reach unused"):
        compile_train(loss, sgd()(loss, [w]), parameters=[w, unused])
    for make, what in (
        (lambda: sgd(-1), "rate of -1"),
        (lambda: adamw(np.nan), "rate of nan"),
        (lambda: adam(beta2=1), "beta2=1"),
        (lambda: adamw(weight_decay=-1), "weight_decay=-1, with which parameters could grow"),
        (lambda: lion(beta1=-0.1), "beta1=-0.1"),
        (lambda: sgd(momentum=1), "momentum=1"),
        (lambda: sgd(nesterov=True), "without a momentum"),
        (lambda: clip_by_global_norm(0), "max_norm=0"),
        (lambda: accumulate_gradients(sgd(), 0), "n_batches=0"),
        (lambda: accumulate_gradients(sgd(), 2.5), "n_batches=2.5"),
        (chain, "no transforms"),
    ):
        with pytest.raises(ValueError, match=what):
            make()
