from unittest.mock import Mock

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from pytensor_ml.dispatch.jax import attention
from pytensor_ml.layers import TransformerBlock, TransformerStack


@pytest.fixture(autouse=True)
def _only_on_jax(backend):
    if backend != "jax":
        pytest.skip("about JAX")


def test_equal_blocks_are_traced_once(monkeypatch):
    counted = Mock(wraps=attention._attend)
    monkeypatch.setattr(attention, "_attend", counted)
    blocks = [TransformerBlock(f"b{i}", d_model=4, n_head=2) for i in range(3)]
    x = pt.tensor("x", shape=(None, None, 4), dtype="float32")
    y, _ = TransformerStack("stack", blocks, rotary=None)(x, pt.arange(3))
    pytensor.function([x], y)(np.ones((2, 3, 4), "float32"))
    assert counted.call_count == 1
