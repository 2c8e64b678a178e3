import pytest

from dispatch import positional_checks


@pytest.fixture(autouse=True)
def _only_on_jax(backend):
    if backend != "jax":
        pytest.skip("about JAX")


def test_rotation_kernel_stands_in_for_inner_graphs():
    positional_checks.check_rotations()
