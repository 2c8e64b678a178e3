import pytest

from dispatch import attention_checks


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_attention_kernels_stand_in_for_inner_graphs(dtype):
    attention_checks.check_attention(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cached_attention_kernel_stands_in_for_inner_graph(dtype):
    attention_checks.check_cached_attention(dtype)
