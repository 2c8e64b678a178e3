"""Load balancing of a mixture of experts without an auxiliary loss.

The router of a mixture begins lopsided: one of eight experts gets 60 % of the tokens. Two copies of
the mixture learn the same map, one of them with the selection bias that ``bias_update_factor``
moves after each step: down for an expert that got more than its share, up for one that got less.
The picture shows the share of the tokens that chose each expert, step by step. Run it with
``python docs/examples/moe_balance.py``.
"""

import argparse
from pathlib import Path

import numpy as np
import pytensor
from matplotlib.figure import Figure

from pytensor_ml.layers import Input, MoE
from pytensor_ml.loss import SquaredError
from pytensor_ml.model import Model
from pytensor_ml.optim import adam
from pytensor_ml.pytensorf import BACKENDS, backend_mode

WIDTH, EXPERTS, TOP_K, TOKENS = 16, 8, 2, 512
FAVORED_SHARE = 0.6

pytensor.config.floatX = "float32"
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", choices=BACKENDS, default="numba")
parser.add_argument("--quick", action="store_true", help="fewer steps")
parser.add_argument(
    "--folder",
    type=Path,
    default=Path(__file__).parent.parent / "images",
    help="where the picture goes",
)
options = parser.parse_args()
n_steps, rate = (60, 1e-2) if options.quick else (200, 2e-3)

rng = np.random.default_rng(0)
target_map = rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5


def draw_batch(rng, n_tokens=TOKENS):
    tokens = rng.normal(size=(1, n_tokens, WIDTH)).astype("float32")
    # The router has no bias, so that its weight on this channel is one.
    tokens[..., 0] = 1
    return tokens, np.tanh(tokens @ target_map).astype("float32")


def lopsided_router(rng):
    """Return a router's weight by which FAVORED_SHARE of the tokens choose expert 0."""
    weight = rng.normal(size=(WIDTH, EXPERTS)) / WIDTH**0.5
    tokens, _ = draw_batch(rng, 32 * TOKENS)
    logits = tokens[0] @ weight
    lacking = np.sort(logits[:, 1:], axis=-1)[:, -TOP_K] - logits[:, 0]
    weight[0, 0] += np.quantile(lacking, FAVORED_SHARE)
    return weight.astype("float32")


shares = {}
router = lopsided_router(rng)
for label, factor in (("without the update", 0.0), ("with the update", rate)):
    moe = MoE(
        "moe",
        d_model=WIDTH,
        hidden_dim=WIDTH,
        n_experts=EXPERTS,
        top_k=TOP_K,
        selection_bias=True,
        bias_update_factor=factor,
    )
    y = moe(Input("x", shape=(1, TOKENS, WIDTH)))
    model = Model(y, {"mode": backend_mode(options.backend)}).initialize(seed=0)
    moe.router.W.set_value(router)
    step = model.compile_train(adam(1e-3), SquaredError(), extra_outputs=[moe.load])
    batches = np.random.default_rng(1)
    losses, loads = zip(*(step(*draw_batch(batches)) for _ in range(n_steps)), strict=True)
    shares[label] = np.array(loads) / TOKENS
    print(
        f"{label}: the busiest expert has {shares[label][0].max():.0%} of the tokens at first, "
        f"{shares[label][-1].max():.0%} after {n_steps} steps; loss {float(losses[0]):.3f}, then "
        f"{float(losses[-1]):.3f}"
    )

figure = Figure(figsize=(8, 3.5), layout="constrained")
for axes, (label, share) in zip(figure.subplots(ncols=2, sharey=True), shares.items(), strict=True):
    axes.plot(share, linewidth=0.8)
    axes.axhline(TOP_K / EXPERTS, color="gray", linestyle="--")
    axes.set(xlabel="step", title=label, ylim=(0, None))
    axes.set_ylabel("share of the tokens that chose an expert")
    axes.label_outer()

path = options.folder / "moe_balance.png"
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=70)
print(f"wrote {path}")
