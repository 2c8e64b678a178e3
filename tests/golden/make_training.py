"""Make the golden losses of training with transformers and torch.

    python -m venv .golden
    .golden/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate
    .golden/bin/python tests/golden/make_training.py tests/golden/training_llama

The folder gets a random checkpoint, the ids of 20 batches, and the loss before each of 20 steps of
AdamW, which decays matrices but not the embedding.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# No padding token: torch gives the embedding of one no gradient.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    # Gains of one would hide a missing gain.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    # A token is likely to be followed by the one three after it, so that there is much to learn.
    start = torch.randint(61, (20, 4, 1))
    noise = (torch.rand(20, 4, 17) < 0.1) * torch.randint(61, (20, 4, 17))
    ids = (start + 3 * torch.arange(17) + noise) % 61

    decaying = [p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    losses = []
    for batch in ids:
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (folder / "steps.json").write_text(json.dumps({"ids": ids.tolist(), "losses": losses}) + "\n")


if __name__ == "__main__":
    main()
