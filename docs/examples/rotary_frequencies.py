"""Rotary frequencies under each scaling kind.

A model that was trained on 4096 positions is run on eight times as many: the picture shows what
each kind of ``scaling`` makes of the frequency of every pair of channels, and its ratio to the
frequency without scaling. Run it with ``python docs/examples/rotary_frequencies.py``.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from pytensor_ml.layers.rotary_scaling import rotary_frequencies

ROTARY_DIM, ORIGINAL, FACTOR = 128, 4096, 8.0
LENGTH = int(FACTOR * ORIGINAL)
KINDS = {
    "default": {},
    "linear": {"factor": FACTOR},
    "ntk": {"factor": FACTOR},
    "dynamic": {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL},
    "yarn": {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": FACTOR,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "factor": FACTOR,
        "short_factor": [1.0] * (ROTARY_DIM // 2),
        "long_factor": np.linspace(1.0, 2 * FACTOR, ROTARY_DIM // 2).tolist(),
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="three of the kinds")
parser.add_argument(
    "--folder",
    type=Path,
    default=Path(__file__).parent.parent / "images",
    help="where the picture goes",
)
options = parser.parse_args()

kinds = list(KINDS)[:3] if options.quick else list(KINDS)
plain, _ = rotary_frequencies(rotary_dim=ROTARY_DIM)
figure = Figure(figsize=(7, 7), layout="constrained")
above, below = figure.subplots(2, 1, sharex=True)
for style, kind in enumerate(kinds):
    frequencies, attention_factor = rotary_frequencies(
        rotary_dim=ROTARY_DIM, scaling={"rope_type": kind, **KINDS[kind]}, length=LENGTH
    )
    lowest = frequencies[frequencies > 0].min()
    print(
        f"{kind}: the slowest pair turns {lowest * LENGTH / (2 * np.pi):.2f} times in {LENGTH} "
        "positions"
    )
    shown = np.where(frequencies > 0, frequencies, np.nan)
    label = kind if attention_factor == 1 else f"{kind} (attention factor {attention_factor:.3f})"
    line = {"linestyle": ("-", "--", ":", "-.")[style % 4], "linewidth": 1.6, "label": label}
    above.semilogy(shown, **line)
    below.plot(shown / plain, **line)
above.axhline(2 * np.pi / ORIGINAL, color="gray", linewidth=0.8)
above.text(0, 2 * np.pi / ORIGINAL, "one turn in the original length", fontsize=8, va="bottom")
above.set_ylabel("frequency (radians a position)")
above.set_title(f"rotary_dim {ROTARY_DIM}, base 1e4, {ORIGINAL} to {LENGTH} positions")
below.set_ylabel("frequency / default")
below.set_xlabel("pair")
below.legend(fontsize=8)

path = options.folder / "rotary_frequencies.png"
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=90)
print(f"wrote {path}")
