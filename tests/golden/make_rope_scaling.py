"""Write rope_scaling.json: frequencies that transformers 5.24 computes for each scaling kind.

Run with an interpreter that has transformers and torch: python tests/golden/make_rope_scaling.py
"""

import json
from pathlib import Path

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
CASES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.25,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "longrope",
        "factor": 32.0,
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + 0.9 * i for i in range(32)],
        "original_max_position_embeddings": 4096,
    },
    {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25},
]
HEAD_DIM, MAX_POSITIONS = 64, 2048

entries = []
for scaling in CASES:
    for base in (10_000.0, 1_000_000.0):
        for length in (1000, 9000):
            config = transformers.LlamaConfig(
                hidden_size=4 * HEAD_DIM,
                num_attention_heads=4,
                max_position_embeddings=MAX_POSITIONS,
                rope_parameters={**scaling, "rope_theta": base},
            )
            config.head_dim = HEAD_DIM
            compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
            frequencies, attention_factor = compute(config, torch.device("cpu"), seq_len=length)
            entries.append(
                {
                    "scaling": scaling,
                    "base": base,
                    "length": length,
                    "frequencies": [float(f) for f in frequencies],
                    "attention_factor": float(attention_factor),
                }
            )

text = json.dumps(
    {
        "maker": Path(__file__).name,
        "transformers": transformers.__version__,
        "rotary_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "entries": entries,
    }
)
(HERE / "rope_scaling.json").write_text(text + "\n")
