"""Gated activations; feed-forwards themselves are tested as parts of blocks."""

import math
from itertools import chain

import numpy as np
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from pytensor_ml.activations import GELU, QuickGELU, ReLU, SiLU, Swish
from pytensor_ml.layers import Input
from pytensor_ml.layers.feedforward import GatedActivationLayer, gated
from pytensor_ml.pytensorf import function


class DoubledSiLU(SiLU):
    def __call__(self, x):
        return super().__call__(x) + super().__call__(x)


# The first two are differentiated: the others are the first with another factor.
N_DIFFERENTIATED = 2
ONE_OP = [SiLU(), GELU(), Swish(1.5), QuickGELU()]
SPELLED_OUT = [GELU(approximate=False), ReLU(), DoubledSiLU()]


def swish(beta, x):
    return x / (1 + math.exp(-beta * x))


ORACLES = [
    lambda x: swish(1, x),
    lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    lambda x: swish(1.5, x),
    lambda x: swish(1.702, x),
    lambda x: x / 2 * math.erfc(-x / math.sqrt(2)),
    lambda x: max(x, 0.0),
    lambda x: 2 * swish(1, x),
]


@pytest.fixture(scope="module")
def results():
    """The inputs, the outputs, and first and second gradients of some."""
    gate, value = (Input(name, shape=(None, 3), dtype="float32") for name in ("gate", "value"))
    outputs = [gated(f, gate, value) for f in ONE_OP + SPELLED_OUT]
    first = [pt.grad(pt.sqr(y).sum() / 2, [gate, value]) for y in outputs[:N_DIFFERENTIATED]]
    second = [pt.grad(pt.sqr(g).sum() / 2, [gate, value]) for g, _ in first]
    run = function([gate, value], [*outputs, *chain.from_iterable(first + second)])
    x, v = np.random.default_rng(0).normal(0, 2, (2, 4, 3)).astype("float32")
    made = map(np.asarray, run(x, v))
    outputs = [next(made) for _ in outputs]
    pairs = [(next(made), next(made)) for _ in first + second]
    return x.astype("float64"), v.astype("float64"), outputs, pairs


def derivative(f, x, h=1e-4):
    """Fourth-order central difference in float64."""
    steps = [(f(x + 2 * h), -1), (f(x + h), 8), (f(x - h), -8), (f(x - 2 * h), 1)]
    return sum(weight * y for y, weight in steps) / (12 * h)


def test_outputs_and_gradients_match_scalar_formulas(results):
    x, v, outputs, pairs = results
    for y, oracle in zip(outputs, ORACLES, strict=True):
        assert_close(y, np.vectorize(oracle)(x) * v, 2e-6)
    for oracle, (dgate, dvalue) in zip(ORACLES, pairs[:N_DIFFERENTIATED], strict=False):
        f = np.vectorize(oracle)
        assert_close(dgate, f(x) * derivative(f, x) * v * v, 4e-6)
        assert_close(dvalue, f(x) ** 2 * v, 4e-6)


def test_second_derivatives_match_differences_of_the_first(results):
    x, v, _, pairs = results
    for oracle, (dgate, dvalue) in zip(ORACLES, pairs[N_DIFFERENTIATED:], strict=False):
        f = np.vectorize(oracle)

        def first(x, v=v, f=f):
            return f(x) * derivative(f, x) * v * v

        assert_close(dgate, first(x) * derivative(first, x, 1e-3), 1e-5)
        assert_close(dvalue, first(x) ** 2 * 2 / v, 1e-5)


@pytest.mark.compiles_nothing
def test_what_is_known_is_one_op_and_what_is_not_is_spelled_out():
    x = Input("x", shape=(None, 3), dtype="float32")
    made = [isinstance(gated(f, x, x).owner.op, GatedActivationLayer) for f in ONE_OP + SPELLED_OUT]
    assert made == [True] * len(ONE_OP) + [False] * len(SPELLED_OUT)
    for shape, dtype in (((None, 3), "float64"), ((1, 3), "float32")):
        value = Input("value", shape=shape, dtype=dtype)
        assert not isinstance(gated(SiLU(), x, value).owner.op, GatedActivationLayer)


@pytest.mark.compiles_nothing
def test_a_steepness_is_a_finite_float_of_python():
    assert type(Swish(np.float32(1.5)).beta) is float
    with pytest.raises(ValueError, match="NaN"):
        Swish(math.inf)
