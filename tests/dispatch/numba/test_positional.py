import pytest

from dispatch import positional_checks


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


def test_rotation_kernels_stand_in_for_inner_graphs():
    positional_checks.check_rotations()


def test_table_kernels_stand_in_for_inner_graphs():
    positional_checks.check_tables()
