import pytest

from dispatch import norm_checks


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


def test_kernels_stand_in_for_inner_graphs():
    norm_checks.check_kernels_stand_in_for_inner_graphs()


def test_kernels_refuse_unequal_shapes():
    norm_checks.check_kernels_refuse_unequal_shapes()


def test_precise_sum_runs_as_a_kernel():
    norm_checks.check_precise_sum_runs_as_a_kernel()
