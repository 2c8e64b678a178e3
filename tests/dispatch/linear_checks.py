"""What the kernels of affine maps must do on every backend that has them."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied, normal
from pytensor_ml.layers import Linear
from pytensor_ml.layers.linear import LinearLayer, LinearPullback


def check_linear(bias):
    """Kernels give what NumPy gives, for inputs and gradients of any shape and layout."""
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
    if bias:
        # A serial float32 sum is off by 1e-4 then.
        many = np.full((10_000, 1, 3), 0.1, "float32")
        assert_close(
            run(np.zeros((10_000, 1, 5), "float32"), many)[-1], many.sum((0, 1), "float64")
        )
    with_nan = np.ones((2, 1, 5), "float32")
    with_nan[0, 0, 2] = np.nan
    made = run(with_nan, np.ones((2, 1, 3), "float32"))[0]
    assert np.isnan(made[0]).all()
    assert np.isfinite(made[1]).all()


def check_layouts_of_weights():
    """A weight may be a transpose or scattered, and one row is a case of its own."""
    x, W, g = (pt.tensor(name, shape=(None, None), dtype="float64") for name in "xWg")
    y = LinearLayer(n_in=5, n_out=3, bias=False)(x, W)
    gradients = LinearPullback(n_in=5, n_out=3)(x, W, g)
    run = pytensor.function([x, W, g], emptied([y, *gradients]))
    weight = normal(5, 3, dtype="float64")
    scattered = np.zeros((10, 6))[::2, ::2]
    scattered[:] = weight
    for n_rows in (1, 4):
        x_value, g_value = normal(n_rows, 5, dtype="float64"), normal(n_rows, 3, dtype="float64")
        right = [x_value @ weight, g_value @ weight.T, x_value.T @ g_value]
        for value in (weight, np.asfortranarray(weight), scattered):
            for made, expected in zip(run(x_value, value, g_value), right, strict=True):
                assert_close(made, expected, 1e-12)
    with pytest.raises(ValueError, match="does not fit its weight"):
        run(x_value[:, :4], weight, g_value)
    with pytest.raises(ValueError, match="does not fit its weight"):
        run(x_value, weight, g_value[:2])


def check_weights_of_words():
    """A weight of float16 words, of any layout, gives what its float32 values give."""
    x, W = (
        pt.tensor("x", shape=(None, None), dtype="float32"),
        pt.tensor("W", shape=(None, None), dtype="uint16"),
    )
    run = pytensor.function([x, W], emptied([LinearLayer(n_in=5, n_out=3, bias=False)(x, W)]))
    # The largest is shared out among threads.
    for n_in, n_out in ((37, 11), (4, 3), (1030, 1021), (0, 2), (3, 0)):
        weight = normal(n_in, n_out).astype("float16")
        scattered = np.zeros((2 * n_in, 2 * n_out), "float16")[::2, ::2]
        scattered[:] = weight
        # A few rows, and more, are two cases.
        for n_rows in (1, 3, 6):
            x_value = normal(n_rows, n_in)
            right = x_value.astype("float64") @ weight.astype("float64")
            for value in (weight, np.asfortranarray(weight), scattered):
                made = run(x_value, value.view("uint16"))[0]
                assert made.shape == right.shape
                if right.size and n_in:
                    assert_close(made, right)
                else:
                    assert not np.any(made)
    with pytest.raises(ValueError, match="does not fit its weight"):
        run(normal(1, 4), np.zeros((5, 3), "uint16"))
