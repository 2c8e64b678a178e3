"""A decoder from scratch in 40 lines, trained to repeat what it has read.

The model is what stands in the two classes: embedding, norms, rotary positions, attention written
out and gated feed-forwards. Each sequence is a number of random symbols, a mark, and the same
symbols again, of which the decoder has to predict the second half; it finds out that it has to look
back by as many tokens as there are symbols. The picture shows the loss beside that of a guess, and
what each token attends to. Run it with ``python docs/examples/decoder.py``.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
from matplotlib.figure import Figure

from pytensor_ml.layers import (
    Embedding,
    GatedFeedForward,
    Input,
    Linear,
    RMSNorm,
    apply_rotary,
    rotary_table,
    scaled_dot_product_attention,
)
from pytensor_ml.loss import CrossEntropy
from pytensor_ml.model import Model
from pytensor_ml.optim import adam
from pytensor_ml.pytensorf import BACKENDS, backend_mode

WIDTH, HEADS, DEPTH = 32, 2, 2
SYMBOLS, LENGTH, BATCH = 16, 10, 32
MARK, IGNORED = SYMBOLS, -1


class Block:
    def __init__(self, name):
        self.norms = [RMSNorm(f"{name}_norm{i}", n_in=WIDTH) for i in (1, 2)]
        self.qkv = Linear(f"{name}_qkv", n_in=WIDTH, n_out=3 * WIDTH, bias=False)
        self.out = Linear(f"{name}_out", n_in=WIDTH, n_out=WIDTH, bias=False)
        self.feed_forward = GatedFeedForward(f"{name}_mlp", d_model=WIDTH, hidden_dim=2 * WIDTH)

    def __call__(self, x, table):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).reshape((batch, length, 3, HEADS, WIDTH // HEADS))
        q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
        q, k = apply_rotary(q, table), apply_rotary(k, table)
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.swapaxes(1, 2).reshape((batch, length, WIDTH)))
        x = x + self.feed_forward(self.norms[1](x))
        # With the identity in the place of values, attention gives its weights.
        places = pt.broadcast_to(pt.eye(length), (batch, HEADS, length, length))
        return x, scaled_dot_product_attention(q, k, places, is_causal=True)


class Decoder:
    def __init__(self):
        self.embedding = Embedding("embedding", n_embeddings=SYMBOLS + 1, n_features=WIDTH)
        self.blocks = [Block(f"block_{i}") for i in range(DEPTH)]
        self.norm = RMSNorm("norm", n_in=WIDTH)

    def __call__(self, ids):
        table = rotary_table(pt.arange(ids.type.shape[1]), rotary_dim=WIDTH // HEADS)
        x, attentions = self.embedding(ids), []
        for block in self.blocks:
            x, attention = block(x, table)
            attentions.append(attention)
        return self.embedding.head(self.norm(x)), attentions


def draw_batch(rng):
    """Return sequences without their last token, and the token after each that is to be told."""
    symbols = rng.integers(SYMBOLS, size=(BATCH, LENGTH))
    ids = np.hstack([symbols, np.full((BATCH, 1), MARK), symbols])
    targets = ids[:, 1:].copy()
    targets[:, :LENGTH] = IGNORED
    return ids[:, :-1], targets


pytensor.config.floatX = "float32"
# The linker's advice about BLAS is repeated in the README.
warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
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

logits, attentions = Decoder()(Input("ids", shape=(None, 2 * LENGTH), dtype="int64"))
model = Model(logits, {"mode": backend_mode(options.backend)}).initialize(seed=0)
step = model.compile_train(
    adam(5e-3),
    CrossEntropy(expect_logits=True, ignore_index=IGNORED),
    extra_outputs=[logits, *attentions],
)
rng = np.random.default_rng(0)
losses = []
for _ in range(70 if options.quick else 300):
    ids, targets = draw_batch(rng)
    loss, scores, *maps = step(ids, targets)
    losses.append(float(loss))

# The outputs of the last step are those of sequences that it had not seen.
counted = targets != IGNORED
right = (np.asarray(scores).argmax(axis=-1) == targets)[counted].mean()
print(f"loss {losses[0]:.3f} before training, {losses[-1]:.3f} after {len(losses)} steps")
print(f"{right:.1%} of the symbols of new sequences repeated")

figure = Figure(figsize=(10, 3.5), layout="constrained")
left, *others = figure.subplots(ncols=1 + DEPTH, width_ratios=[1.3] + [1] * DEPTH)
left.plot(losses, linewidth=1)
left.axhline(np.log(SYMBOLS), color="gray", linestyle="--", label=f"a guess of {SYMBOLS}")
left.set(xlabel="step", ylabel="loss", ylim=(0, None))
left.legend()
for i, (axes, attention) in enumerate(zip(others, maps, strict=True)):
    axes.imshow(np.asarray(attention).max(axis=1).mean(axis=0), vmin=0, vmax=1, cmap="Blues")
    axes.set(xlabel="token looked at", ylabel="token", title=f"block {i}: attention")

path = options.folder / "decoder.png"
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=90)
print(f"wrote {path}")
