import numpy as np
import pytest

from dispatch import generation_checks
from pytensor_ml.generation import Decoder
from pytensor_ml.layers import Embedding, RMSNorm, TransformerBlock, TransformerStack
from pytensor_ml.models import CausalLM


@pytest.fixture(autouse=True)
def _only_on_jax(backend):
    if backend != "jax":
        pytest.skip("about JAX")


def test_cache_write_kernel_stands_in_for_inner_graph():
    generation_checks.check_cache_write()


def test_a_step_copies_neither_the_cache_nor_parameters(monkeypatch):
    import jax

    memory = []

    def jit(*function, jit=jax.jit, **kwargs):
        compiled = jit(*function, **kwargs)
        if "donate_argnums" not in kwargs:
            return compiled

        def run(given_away, kept):
            assert all(isinstance(x, jax.Array) for x in kept if np.size(x) > 2)
            if isinstance(given_away[0], jax.Array):
                step = compiled.lower(given_away, kept).compile()
                memory.append(step.memory_analysis())
            return compiled(given_away, kept)

        return run

    blocks = [TransformerBlock(f"block_{i}", d_model=8, n_head=2, is_causal=True) for i in range(3)]
    model = CausalLM(
        embedding=Embedding("tokens", n_embeddings=5, n_features=8),
        stack=TransformerStack("stack", blocks, rotary=None),
        norm=RMSNorm("norm", n_in=8),
        max_positions=8192,
    )
    monkeypatch.setattr(jax, "jit", jit)
    decoder = Decoder(model)
    decoder.begin([[1, 2]])
    decoder.extend(np.array([[3]]))
    one_cache = 2 * 8192 * 4 * 4
    assert memory[-1].temp_size_in_bytes < one_cache / 2
    assert memory[-1].alias_size_in_bytes >= 6 * one_cache
