import warnings

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from dispatch import norm_checks
from pytensor_ml.layers.norm import LayerNorm


@pytest.fixture(autouse=True)
def _only_on_jax(backend):
    if backend != "jax":
        pytest.skip("about JAX")


def test_precise_sum_runs_as_a_kernel():
    norm_checks.check_precise_sum_runs_as_a_kernel()


def test_no_sum_asks_for_float64():
    """PyTensor gives a sum over all axes, as over a vector's, a float64 accumulator."""
    x = pt.tensor("x", shape=(4,), dtype="float32")
    run = pytensor.function([x], pt.grad(LayerNorm()(x)[0], x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(np.arange(4, dtype="float32")).dtype == "float32"
