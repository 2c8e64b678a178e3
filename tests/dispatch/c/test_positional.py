import pytest

from dispatch import positional_checks


@pytest.fixture(autouse=True)
def _only_on_c(backend):
    if backend != "c":
        pytest.skip("about C")


def test_rotation_kernels_stand_in_for_inner_graphs():
    positional_checks.check_rotations()
