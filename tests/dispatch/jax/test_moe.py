import jax
import pytest

from dispatch import moe_checks
from pytensor_ml.dispatch.jax import moe


@pytest.fixture(autouse=True)
def _only_on_jax(backend):
    if backend != "jax":
        pytest.skip("about JAX")


@pytest.mark.parametrize("n_rows", [1, 4, 160])
def test_experts_kernels_stand_in_for_inner_graphs(monkeypatch, n_rows):
    """Blocks end with an expert's rows, before, and after."""
    monkeypatch.setattr(moe, "FEWEST_ROWS", 1)
    monkeypatch.setattr(moe, "MOST_ROWS", n_rows)
    moe_checks.check_experts()


def test_ragged_experts_kernels_stand_in_for_inner_graphs(monkeypatch):
    """What runs on a GPU or TPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    moe_checks.check_experts()
