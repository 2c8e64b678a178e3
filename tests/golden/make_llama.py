"""Make the golden data of the Llama family with transformers and torch.

    python -m venv .golden
    .golden/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate gguf
    .golden/bin/python tests/golden/make_llama.py llama_gqa OUT
    .golden/bin/python tests/golden/make_llama.py smollm2 OUT --gguf SmolLM2-135M-Instruct.Q4_1.gguf

``llama_gqa`` is a tiny random checkpoint with its logits for a batch, and for the same batch whose
row 0 has four tokens of padding on the left. ``smollm2`` holds, for two prompts, token ids, logits
at the last prompt token, and the prompt with its greedy continuation.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PROMPTS = ["The capital of France is", "Once upon a time, in a small village,"]


def make_llama_gqa(out: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # A scale of ones would hide a norm that has none.
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
        ids = torch.randint(1, config.vocab_size, (2, 13))
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        np.savez(
            out / "expected.npz",
            input_ids=ids.numpy(),
            attention_mask=mask.numpy(),
            logits=model(ids).logits.numpy(),
            logits_padded=model(ids, attention_mask=mask, position_ids=position_ids).logits.numpy(),
        )
    model.save_pretrained(out)


def make_smollm2(out: Path, gguf: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    arrays = {"prompts": np.array(PROMPTS)}
    with torch.no_grad():
        for i, prompt in enumerate(PROMPTS):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            arrays[f"ids{i}"] = ids[0].numpy()
            arrays[f"last{i}"] = model(ids).logits[0, -1].numpy()
            generated = model.generate(ids, max_new_tokens=24, do_sample=False)
            arrays[f"gen{i}"] = generated[0].numpy()
    np.savez_compressed(out / "expected.npz", **arrays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["llama_gqa", "smollm2"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.kind == "smollm2":
        make_smollm2(options.out, options.gguf)
    else:
        make_llama_gqa(options.out)
