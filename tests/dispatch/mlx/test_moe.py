import pytest

from dispatch import moe_checks


@pytest.fixture(autouse=True)
def _only_on_mlx(backend):
    if backend != "mlx":
        pytest.skip("about MLX")


def test_experts_kernels_stand_in_for_inner_graphs():
    moe_checks.check_experts()
