import pytest

from dispatch import attention_checks


@pytest.fixture(autouse=True)
def _only_on_mlx(backend):
    if backend != "mlx":
        pytest.skip("about MLX")


def test_attention_kernels_stand_in_for_inner_graphs():
    attention_checks.check_attention(spoils_hidden=True, takes_backward=False)


def test_cached_attention_kernel_stands_in_for_inner_graph():
    attention_checks.check_cached_attention()
