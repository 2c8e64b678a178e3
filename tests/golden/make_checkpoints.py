"""Make the golden checkpoints and outputs with transformers and torch.

    python -m venv .golden
    .golden/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate gguf
    .golden/bin/python tests/golden/make_checkpoints.py tiny OUT
    .golden/bin/python tests/golden/make_checkpoints.py smollm2 OUT SmolLM2-135M-Instruct.Q4_1.gguf
    .golden/bin/python tests/golden/make_checkpoints.py gemma3_270m OUT gemma-3-270m-q4_k_m.gguf

``tiny`` makes every folder of CONFIGS: a random checkpoint with its logits for a batch, and for the
same batch whose row 0 has four tokens of padding on the left. The others hold, for two prompts,
token ids, logits at the last prompt token (of Gemma the 64 largest), and the prompt with its greedy
continuation.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PROMPTS = ["The capital of France is", "Once upon a time, in a small village,"]
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# A checkpoint's place is the seed of its weights.
CONFIGS = {
    "llama_gqa": {"model_type": "llama", "head_dim": 8, "rms_norm_eps": 1e-5},
    "llama_tied_llama3_rope": {
        "model_type": "llama",
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama_mqa_yarn": {
        "model_type": "llama",
        "head_dim": 8,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2_bias": {"model_type": "qwen2"},
    "qwen3_head_dim": {"model_type": "qwen3", "head_dim": 16},
    "mistral_window": {"model_type": "mistral", "head_dim": 8, "sliding_window": 4},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral_no_window": {
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3_window": {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_old_config": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "rope_theta": 50_000.0,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "seed_oss": {"model_type": "seed_oss", "num_hidden_layers": 2, "head_dim": 16},
}
# What these say is read from older keys than transformers writes now.
OLD = {"qwen2_window": "Qwen2ForCausalLM", "gemma3_old_config": "Gemma3ForCausalLM"}


def make_tiny(out: Path) -> None:
    for seed, (name, own) in enumerate(CONFIGS.items()):
        entries = COMMON | own
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**json.loads(json.dumps(entries)))
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            # Scales of ones, or of zeros if zero-centered, would hide a norm that has none.
            center = 0 if "gemma" in name else 1
            for key, parameter in model.named_parameters():
                noise = torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.15)
                parameter.copy_(noise + center if "norm" in key else noise)
            ids = torch.randint(3, config.vocab_size, (2, 13))
            mask = torch.ones_like(ids)
            mask[0, :4] = 0
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            padded = model(ids, attention_mask=mask, position_ids=positions).logits
            model.save_pretrained(out / name)
            np.savez(
                out / name / "expected.npz",
                input_ids=ids.numpy(),
                attention_mask=mask.numpy(),
                logits=model(ids).logits.numpy(),
                logits_padded=padded.numpy(),
            )
        if name in OLD:
            entries = {"architectures": [OLD[name]], "dtype": "float32"} | entries
            if "rope_theta" not in entries:
                entries["rope_theta"] = config.rope_parameters["rope_theta"]
            (out / name / "config.json").write_text(json.dumps(entries, indent=2) + "\n")


def make_from_gguf(out: Path, gguf: Path, n_logits: int | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    arrays = {"prompts": np.array(PROMPTS)}
    with torch.no_grad():
        for i, prompt in enumerate(PROMPTS):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            arrays[f"ids{i}"] = ids[0].numpy()
            last = model(ids).logits[0, -1]
            if n_logits is None:
                arrays[f"last{i}"] = last.numpy()
            else:
                largest = last.topk(n_logits)
                arrays[f"top_ids{i}"] = largest.indices.numpy()
                arrays[f"top_logits{i}"] = largest.values.numpy()
            generated = model.generate(ids, max_new_tokens=24, do_sample=False)
            arrays[f"gen{i}"] = generated[0].numpy()
    np.savez_compressed(out / "expected.npz", **arrays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["tiny", "smollm2", "gemma3_270m"])
    parser.add_argument("out", type=Path)
    parser.add_argument("gguf", type=Path, nargs="?")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.kind == "tiny":
        make_tiny(options.out)
    else:
        make_from_gguf(
            options.out, options.gguf, n_logits=64 if options.kind == "gemma3_270m" else None
        )
