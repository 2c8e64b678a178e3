import pytest

from dispatch import norm_checks
from pytensor_ml.layers.norm import RMSNorm, ZeroCenteredRMSNorm


@pytest.fixture(autouse=True)
def _only_on_mlx(backend):
    if backend != "mlx":
        pytest.skip("about MLX")


def test_kernels_stand_in_for_inner_graphs():
    norm_checks.check_kernels_stand_in_for_inner_graphs((RMSNorm, ZeroCenteredRMSNorm))


def test_precise_sum_runs_as_a_kernel():
    norm_checks.check_precise_sum_runs_as_a_kernel()
