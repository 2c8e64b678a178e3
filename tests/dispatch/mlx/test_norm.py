import pytest

from dispatch import norm_checks


@pytest.fixture(autouse=True)
def _only_on_mlx(backend):
    if backend != "mlx":
        pytest.skip("about MLX")


def test_precise_sum_runs_as_a_kernel():
    norm_checks.check_precise_sum_runs_as_a_kernel()
