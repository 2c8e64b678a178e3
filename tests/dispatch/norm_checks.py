"""What the kernels of the norms must do on every backend that has them."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied, in_python
from pytensor_ml.layers.norm import (
    LayerNorm,
    PreciseSum,
    RMSNorm,
    RMSNormPullback,
    ZeroCenteredRMSNorm,
)

# Neither a multiple of the lanes that the kernels add in, nor smaller than one of them.
WIDTH = 77


NORMS = (RMSNorm, ZeroCenteredRMSNorm, LayerNorm)


def norms_and_gradients(norms=NORMS):
    """Inputs X and dY, and every output of every norm and of its pullback."""
    rng = np.random.default_rng(11)
    x, dy = (pt.tensor(name, shape=(None, WIDTH), dtype="float32") for name in ("x", "dy"))
    outputs = []
    for layer in (norm(n_in=WIDTH) for norm in norms):
        parameters = [getattr(layer, name, None) for name in ("loc", "scale", "weight")]
        parameters = [parameter for parameter in parameters if parameter is not None]
        for parameter in parameters:
            parameter.set_value(rng.uniform(0.5, 2, WIDTH).astype(parameter.type.dtype))
        y = layer(x)
        gradients = pt.grad(None, [x, *parameters], known_grads={y: dy})
        outputs += [y, *gradients]
    return x, dy, outputs


def check_kernels_stand_in_for_inner_graphs(norms=NORMS):
    """Ops whose inner graphs were replaced by constants give what the real ones give in NumPy."""
    x, dy, outputs = norms_and_gradients(norms)
    run = pytensor.function([x, dy], emptied(outputs))
    run_inner_graphs = in_python([x, dy], outputs)

    plain, spoiled = np.random.default_rng(12).normal(2, 1, (2, 37, WIDTH)).astype("float32")
    spoiled[2, 3] = np.nan
    empty = np.zeros((0, WIDTH), "float32")
    strided = np.repeat(plain, 2, axis=1)[::-1, ::2]
    for pair in [(plain, plain * plain), (strided, strided), (empty, empty), (spoiled, plain)]:
        for result, right in zip(run(*pair), run_inner_graphs(*pair), strict=True):
            np.testing.assert_array_equal(np.isnan(result), np.isnan(right))
            assert_close(np.nan_to_num(result), np.nan_to_num(right), 2e-6)


def check_rows_of_any_magnitude():
    """Squares that float32 cannot hold, in rows that it can."""
    rng = np.random.default_rng(13)
    x, dy = (pt.tensor(name, shape=(None, WIDTH), dtype="float32") for name in ("x", "dy"))
    y = RMSNorm(n_in=WIDTH, epsilon=0.0, affine=False)(x)
    run = pytensor.function([x, dy], [y, pt.grad(None, x, known_grads={y: dy})])
    values, gradients = rng.normal(size=(2, 5, WIDTH)).astype("float32")
    values *= np.array([1, 1e25, 1e-25, 1, 1e-12], "float32")[:, None]
    gradients *= np.array([1, 1e20, 1e-20, 1e37, 1e-30], "float32")[:, None]

    wide, dwide = values.astype("float64"), gradients.astype("float64")
    rms = np.sqrt((wide**2).mean(1, keepdims=True))
    right = wide / rms
    dright = (dwide - right * (dwide * right).mean(1, keepdims=True)) / rms
    for results, expected in zip(run(values, gradients), (right, dright), strict=True):
        for result, row in zip(results, expected, strict=True):
            assert_close(result, row, 2e-6)


def check_kernels_refuse_unequal_shapes():
    """A kernel must not read past the end of its inputs."""
    x, dy, scale = (pt.tensor(shape=(None,) * rank, dtype="float32") for rank in (2, 2, 1))
    op = RMSNormPullback(n_in=WIDTH, epsilon=1e-6, offset=0)
    run = pytensor.function([x, dy, scale], op(x, dy, scale))
    values = [np.ones(shape, "float32") for shape in [(2, WIDTH), (1, WIDTH), (WIDTH - 1,)]]
    with pytest.raises(ValueError, match="wide"):
        run(values[0], values[0], values[2])
    with pytest.raises(ValueError, match="another shape"):
        run(values[0], values[1], values[0][0])


def check_precise_sum_runs_as_a_kernel():
    """A serial float32 sum loses every small term."""
    terms = np.full((3, 4096), 0.999 * 2.0**-24, "float32")
    terms[:, 0] = 1
    x = pt.tensor("x", shape=(None, None), dtype="float32")
    run = pytensor.function([x], [PreciseSum(axes=(1,))(x), PreciseSum(axes=(0,))(x)])
    assert_close(run(terms)[0], terms.astype("float64").sum(1), 1e-6)
    assert_close(run(terms.T)[1], terms.astype("float64").sum(1), 1e-6)
