import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch import linear_checks
from pytensor_ml.layers import Linear


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


@pytest.mark.parametrize("bias", [True, False])
def test_kernels_agree_with_numpy(bias):
    linear_checks.check_linear(bias)


def test_weights_of_any_layout():
    linear_checks.check_layouts_of_weights()


def test_linear_of_two_dtypes_computes_in_the_wider():
    linear, x = Linear("fc", n_in=5, n_out=3), pt.matrix("x", dtype="float64")
    value = np.random.default_rng(0).normal(size=(4, 5))
    made = pytensor.function([x], linear(x))(value)
    assert made.dtype == "float64"
    assert_close(made, value @ linear.W.get_value().astype("float64"))


def test_weights_of_words():
    linear_checks.check_weights_of_words()
