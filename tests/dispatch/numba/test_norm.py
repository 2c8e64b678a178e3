from importlib import import_module

import numba
import numpy as np
import pytensor.tensor as pt
import pytest

from dispatch import norm_checks
from pytensor_ml.layers.norm import (
    RMSNormLayer,
    RMSNormPullback,
    ZeroCenteredRMSNormLayer,
)


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


def test_kernels_stand_in_for_inner_graphs():
    norm_checks.check_kernels_stand_in_for_inner_graphs()


def test_kernels_take_rows_of_any_magnitude():
    norm_checks.check_rows_of_any_magnitude()


def test_kernels_refuse_unequal_shapes():
    norm_checks.check_kernels_refuse_unequal_shapes()


def test_precise_sum_runs_as_a_kernel():
    norm_checks.check_precise_sum_runs_as_a_kernel()


def test_cache_keys_tell_apart_what_the_kernels_read():
    import_module("pytensor_ml.dispatch.numba")  # as compiling does
    from pytensor.link.numba.dispatch.basic import numba_funcify_and_cache_key

    def key(op, width=4):
        x, parameter = pt.tensor(shape=(3, width)), pt.tensor(shape=(width,))
        y = op(*[x, x, parameter][-n_inputs[type(op)] :], return_list=True)[0]
        return numba_funcify_and_cache_key(y.owner.op, node=y.owner)[1]

    n_inputs = {RMSNormLayer: 2, ZeroCenteredRMSNormLayer: 2, RMSNormPullback: 3}
    ops = [
        RMSNormLayer(n_in=4, epsilon=1e-6, affine=True),
        RMSNormLayer(n_in=4, epsilon=1e-5, affine=True),
        ZeroCenteredRMSNormLayer(n_in=4, epsilon=1e-6, compute_dtype=None),
        RMSNormPullback(n_in=4, epsilon=1e-6, offset=0),
        RMSNormPullback(n_in=4, epsilon=1e-6, offset=1),
    ]
    assert len({key(op) for op in ops}) == len(ops)
    assert key(ops[0]) == key(RMSNormLayer(n_in=8, epsilon=1e-6, affine=True), width=8)


def test_a_row_of_zeros_without_an_epsilon_gives_nan_and_no_error():
    norm = import_module("pytensor_ml.dispatch.numba.norm")
    rms_norm, rms_norm_pullback = norm.rms_norm_rows, norm.rms_norm_pullback_rows
    layer_norm, layer_norm_pullback = norm.layer_norm_rows, norm.layer_norm_pullback_rows

    @numba.njit
    def run(x, ones):
        y, z = rms_norm(x, ones[0], 0.0), layer_norm(x, ones[0], ones[0], 0.0)
        dx = rms_norm_pullback(x, ones, ones[0], 0.0)[0]
        return y, z, dx, layer_norm_pullback(x, ones, ones[0], 0.0)[0]

    for made in run(np.zeros((1, 3), "float32"), np.ones((1, 3), "float32")):
        assert np.isnan(made).all()
