import pytest

from dispatch import generation_checks


@pytest.fixture(autouse=True)
def _only_on_mlx(backend):
    if backend != "mlx":
        pytest.skip("about MLX")


def test_cache_write_kernel_stands_in_for_inner_graph():
    generation_checks.check_cache_write()
