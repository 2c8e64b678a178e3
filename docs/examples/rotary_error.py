"""Draw the error of rotary tables up to ten million positions: float32 angles against digits."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytensor
import pytensor.tensor as pt

from pytensor_ml.layers.positional import rotary_table
from pytensor_ml.layers.rotary_scaling import rotary_frequencies

ROTARY_DIM = 128


def phase_error(cos, sin, angles):
    """Return the largest angle, in radians, between (cos, sin) and the exact direction."""
    exact = np.exp(-1j * angles)
    return np.abs(np.angle((cos + 1j * sin) * exact)).max(axis=-1)


frequencies, _ = rotary_frequencies(rotary_dim=ROTARY_DIM)
positions = np.unique(np.geomspace(1, 1e7, 400).astype("int64"))
# Off by 1e-9 at most: float64 has 2**53 / 1e7 steps a radian here.
angles = positions[:, None] * frequencies

single = positions.astype("float32")[:, None] * frequencies.astype("float32")
p = pt.lvector("p")
table = np.asarray(pytensor.function([p], rotary_table(p, rotary_dim=ROTARY_DIM))(positions))
table = table.astype("float64")

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
axes.loglog(
    positions,
    phase_error(np.cos(single.astype("float64")), np.sin(single.astype("float64")), angles),
    ".",
    markersize=3,
    label="angle formed in float32",
)
axes.loglog(
    positions,
    phase_error(table[..., 0], table[..., 1], angles),
    ".",
    markersize=3,
    label="rotary_table",
)
axes.set_xlabel("position")
axes.set_ylabel("worst angle error of a pair (radians)")
axes.set_title(f"rotary_dim {ROTARY_DIM}, base 1e4, float32 tables")
axes.legend()

path = Path(__file__).parent.parent / "images" / "rotary_error.png"
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=90)
print(f"wrote {path}")
