"""Rotary positions in the millions: what float32 angles do there, and the table of this package.

An angle formed in float32 is off by more, the further out a position is, so the score of two tokens
comes to depend on where they stand and not only on how far apart they are. ``rotary_table`` is as
exact at ten million as at one. The picture shows the worst error of an angle by position, and the
score of a query and a key that are 16 tokens apart, which should not change. Run it with
``python docs/examples/rotary_error.py``.
"""

import argparse
from pathlib import Path

import numpy as np
import pytensor.tensor as pt
from matplotlib.figure import Figure

from pytensor_ml.layers import rotary_table
from pytensor_ml.layers.rotary_scaling import rotary_frequencies
from pytensor_ml.pytensorf import BACKENDS, backend_mode, function

ROTARY_DIM, DISTANCE = 128, 16

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", choices=BACKENDS, default="numba")
parser.add_argument("--quick", action="store_true", help="a size that only shows that it runs")
parser.add_argument(
    "--folder",
    type=Path,
    default=Path(__file__).parent.parent / "images",
    help="where the picture goes",
)
options = parser.parse_args()

p = pt.lvector("positions")
run = function([p], rotary_table(p, rotary_dim=ROTARY_DIM), mode=backend_mode(options.backend))
frequencies, _ = rotary_frequencies(rotary_dim=ROTARY_DIM)


def float32_directions(positions):
    """Return the directions as complex numbers, of angles that are formed in float32."""
    angles = positions.astype("float32")[:, None] * frequencies.astype("float32")
    return np.exp(1j * angles.astype("float64"))


def table_directions(positions):
    table = np.asarray(run(positions)).astype("float64")
    return table[..., 0] + 1j * table[..., 1]


positions = np.unique(np.geomspace(1, 1e7, 40 if options.quick else 400).astype("int64"))
# Off by 1e-9 at most: float64 has 2**53 / 1e7 steps a radian here.
exact = np.exp(1j * positions[:, None] * frequencies)
rng = np.random.default_rng(0)
pairs = rng.normal(size=ROTARY_DIM // 2) + 1j * rng.normal(size=ROTARY_DIM // 2)

figure = Figure(figsize=(9, 4), layout="constrained")
left, right = figure.subplots(ncols=2)
for label, directions in (
    ("angles in float32", float32_directions),
    ("rotary_table", table_directions),
):
    keys, queries = directions(positions), directions(positions + DISTANCE)
    error = np.abs(np.angle(keys * exact.conj())).max(axis=-1)
    # A query and a key of the same content, rotated to where they stand.
    scores = ((pairs * queries) * (pairs * keys).conj()).sum(axis=-1).real
    print(
        f"{label}: angles are off by {error.max():.1e} radians at most, scores vary by "
        f"{np.ptp(scores) / np.abs(scores).max():.1e} of the largest"
    )
    left.loglog(positions, error, ".", markersize=3, label=label)
    right.semilogx(positions, scores, ".", markersize=3, label=label)
left.set(xlabel="position", ylabel="worst error of an angle (radians)")
left.set_title(f"rotary_dim {ROTARY_DIM}, base 1e4, float32 tables")
left.legend()
right.set(xlabel="position of the key", ylabel="score")
right.set_title(f"a query {DISTANCE} tokens behind its key")

path = options.folder / "rotary_error.png"
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=90)
print(f"wrote {path}")
