import pytest

from dispatch import moe_checks


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


def test_experts_kernels_stand_in_for_inner_graphs():
    moe_checks.check_experts(is_checked=True)


def test_experts_kernels_of_float64_and_strided_arrays():
    moe_checks.check_experts("float64", is_strided=True)


def test_router_kernels_stand_in_for_inner_graphs():
    moe_checks.check_routers()
