import math

import numpy as np
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from pytensor_ml import activations
from pytensor_ml.layers import Input
from pytensor_ml.pytensorf import function

ORACLES = [
    (activations.ReLU(), lambda x: max(x, 0.0)),
    (activations.LeakyReLU(0.2), lambda x: x if x > 0 else 0.2 * x),
    (activations.Tanh(), math.tanh),
    (activations.Sigmoid(), lambda x: 1 / (1 + math.exp(-x))),
    (activations.SoftPlus(), lambda x: math.log1p(math.exp(x))),
    (activations.GELU(approximate=False), lambda x: x / 2 * math.erfc(-x / math.sqrt(2))),
    (
        activations.GELU(),
        lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    (activations.Swish(1.5), lambda x: x / (1 + math.exp(-1.5 * x))),
    (activations.SiLU(), lambda x: x / (1 + math.exp(-x))),
    (activations.QuickGELU(), lambda x: x / (1 + math.exp(-1.702 * x))),
]


@pytest.fixture(scope="module")
def values_and_gradients():
    x = Input("x", shape=(None,), dtype="float32")
    outputs = [layer(x) for layer, _ in ORACLES]
    softmax = activations.Softmax(axis=0)(x)
    data = np.array([-3.25, -1.5, -0.125, 0.25, 1.0, 2.5], "float32")
    gradients = [pt.grad(y.sum(), x) for y in outputs]
    assert {y.type.dtype for y in [*outputs, softmax, *gradients]} == {"float32"}
    n = len(outputs)
    *results, soft = function([x], [*outputs, *gradients, softmax])(data)
    return data.astype("float64"), results[:n], results[n:], soft


def test_activations_match_scalar_formulas(values_and_gradients):
    data, outputs, _, soft = values_and_gradients
    for (_, oracle), y in zip(ORACLES, outputs, strict=True):
        assert_close(y, [oracle(v) for v in data])
    assert_close(soft, np.exp(data) / np.exp(data).sum())


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("layer", [activations.GELU(), activations.LeakyReLU()])
def test_integers_are_refused(layer):
    with pytest.raises(TypeError, match="int64, in which its constants would be truncated"):
        layer(pt.constant([1, 2]))


def test_activation_gradients_match_central_differences(values_and_gradients):
    data, _, gradients, _ = values_and_gradients
    h = 1e-5
    for (_, oracle), gradient in zip(ORACLES, gradients, strict=True):
        assert_close(gradient, [(oracle(v + h) - oracle(v - h)) / (2 * h) for v in data])
