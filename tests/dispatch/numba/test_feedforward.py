import pytest

from dispatch import feedforward_checks


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


def test_kernels_stand_in_for_inner_graphs():
    feedforward_checks.check_gated_activations()


def test_inputs_that_are_not_alike():
    feedforward_checks.check_inputs_that_are_not_alike()
