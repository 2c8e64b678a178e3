"""A small Praxis trunk on a made-up video latent.

The trunk of ``praxis_stack``: gated attention, mixtures of experts between two dense blocks, and
conditioning of every token, in the fourth million of positions. The picture shows the mask, by
which each frame sees itself and those before, and the norms of tokens after each block. Run it with
``python docs/examples/praxis_trunk.py``.
"""

import argparse
from pathlib import Path

import numpy as np
import pytensor.tensor as pt
from matplotlib.figure import Figure

from pytensor_ml.layers import (
    Input,
    IntegerRotaryEmbedding,
    build_moe_config,
    praxis_stack,
)
from pytensor_ml.pytensorf import (
    BACKENDS,
    backend_mode,
    collect_trainable_params,
    compile_predict,
)
from pytensor_ml.state import initialize_params

FRAMES, ROWS, COLUMNS = 4, 3, 4
DIM, CONDITIONING = 64, 16
# Positions of a long stream: a frame every 10,000, in the fourth million.
FIRST_FRAME = 300

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

DEPTH = 3 if options.quick else 6

stack = praxis_stack(
    "trunk",
    depth=DEPTH,
    dense_blocks=(0, DEPTH - 1),
    dim=DIM,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm_eps=1e-6,
    norm_eps=1e-6,
    dense_hidden=4 * DIM,
    rotary=IntegerRotaryEmbedding(dim=16, effective_dim=12, base=10_000, table_size=1024),
    moe=build_moe_config(
        dim=DIM,
        expert_hidden=DIM,
        num_routed_experts=8,
        top_k_routed=2,
        routed_scaling_factor=2.5,
        gate_bias_update_factor=1e-3,
    ),
    modulation_dim=CONDITIONING,
    dtype="float32",
)
x = Input("x", shape=(None, None, DIM), dtype="float32")
positions = Input("positions", shape=(None, None), dtype="int64")
mask = Input("mask", shape=(None, None), dtype="bool")
x_mod = Input("x_mod", shape=(None, None, CONDITIONING), dtype="float32")
taps = tuple(range(DEPTH))
y, tapped = stack(x, positions, mask, x_mod, tap_blocks=taps)
parameters = collect_trainable_params(y)
for parameter, value in zip(parameters, initialize_params(parameters, 0), strict=True):
    parameter.set_value(value)
norms = [pt.sqrt(pt.sum(tap**2, axis=-1, acc_dtype="float32")) for tap in tapped]
loads = [stack.blocks[i].feed_forward.load for i in range(1, DEPTH - 1)]
print(f"compiling {DEPTH} blocks for {options.backend}")
run = compile_predict(
    [*norms, *loads],
    inputs=[x, positions, mask, x_mod],
    compile_kwargs={"mode": backend_mode(options.backend)},
)

rng = np.random.default_rng(0)
n_tokens = FRAMES * ROWS * COLUMNS
frame = np.arange(n_tokens) // (ROWS * COLUMNS)
place = np.arange(n_tokens) % (ROWS * COLUMNS)
visible = frame[None, :] <= frame[:, None]
results = run(
    rng.normal(size=(1, n_tokens, DIM)).astype("float32"),
    (10_000 * (FIRST_FRAME + frame) + place)[None],
    visible,
    rng.normal(size=(1, n_tokens, CONDITIONING)).astype("float32"),
)
tap_norms = np.array([np.asarray(norm)[0] for norm in results[:DEPTH]])
for i, load in enumerate(results[DEPTH:], start=1):
    print(f"block {i}: tokens of each expert {np.asarray(load).astype(int).tolist()}")

figure = Figure(figsize=(9, 4), layout="constrained")
left, right = figure.subplots(ncols=2)
left.imshow(visible, cmap="Greys", interpolation="nearest")
left.set_title("attention mask: frames are blocks")
left.set_xlabel("key token")
left.set_ylabel("query token")
right.boxplot(tap_norms.T, tick_labels=[str(i) for i in taps])
right.set_title("norm of each token after each block")
right.set_xlabel("block")
right.set_ylabel("norm")

path = options.folder / "praxis_trunk.png"
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=90)
print(f"wrote {path}")
