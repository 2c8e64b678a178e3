import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied
from pytensor_ml.layers import Linear


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


@pytest.mark.parametrize("bias", [True, False])
def test_linear_kernels_agree_with_numpy(bias):
    rng = np.random.default_rng(0)
    linear = Linear("fc", n_in=5, n_out=3, bias=bias)
    parameters = [v for v in (linear.W, linear.b) if v is not None]
    for parameter in parameters:
        parameter.set_value(rng.normal(size=parameter.get_value().shape).astype("float32"))
    W = linear.W.get_value().astype("float64")
    x, g = pt.tensor3("x", dtype="float32"), pt.tensor3("g", dtype="float32")
    y = linear(x)
    gradients = pytensor.grad(None, [x, *parameters], known_grads={y: g})
    run = pytensor.function([x, g], emptied([y, *gradients]))

    for shape in ((2, 4), (1, 1), (0, 2)):
        x_value = rng.normal(size=(*shape, 5)).astype("float32")
        g_value = rng.normal(size=(*shape, 3)).astype("float32")
        for make in (np.asarray, np.asfortranarray):
            expected = [x_value @ W, g_value @ W.T, np.einsum("bti,bto->io", x_value, g_value)]
            if bias:
                expected[0] = expected[0] + linear.b.get_value()
                expected.append(g_value.sum((0, 1)))
            for made, value in zip(run(make(x_value), make(g_value)), expected, strict=True):
                assert_close(made, value)
    with_nan = np.ones((2, 1, 5), "float32")
    with_nan[0, 0, 2] = np.nan
    made = run(with_nan, np.ones((2, 1, 3), "float32"))[0]
    assert np.isnan(made[0]).all()
    assert np.isfinite(made[1]).all()


def test_linear_of_two_dtypes_computes_in_the_wider():
    linear, x = Linear("fc", n_in=5, n_out=3), pt.matrix("x", dtype="float64")
    value = np.random.default_rng(0).normal(size=(4, 5))
    made = pytensor.function([x], linear(x))(value)
    assert made.dtype == "float64"
    assert_close(made, value @ linear.W.get_value().astype("float64"))
