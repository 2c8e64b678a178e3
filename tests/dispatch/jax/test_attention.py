import pytest

from dispatch import attention_checks
from pytensor_ml.dispatch.jax import attention


@pytest.fixture(autouse=True)
def _only_on_jax(backend):
    if backend != "jax":
        pytest.skip("about JAX")


def test_attention_kernels_stand_in_for_inner_graphs():
    attention_checks.check_attention()


@pytest.mark.parametrize("block", [4, 512])
def test_cached_attention_kernel_stands_in_for_inner_graph(monkeypatch, block):
    """The capacity is no multiple of the smaller block."""
    monkeypatch.setattr(attention, "BLOCK", block)
    attention_checks.check_cached_attention()
