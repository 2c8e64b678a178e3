"""Save a decoder on one backend and open it on others.

The folder that ``save_pretrained`` writes holds the graph and the values, and nothing of the
backend that the network ran on. Here each of the other backends opens it in a new process, which
knows the network from these files alone, and the logits are compared. The picture shows how far
apart they are at each token. Run it with ``python docs/examples/save_and_open.py``.
"""

import argparse
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytensor
from matplotlib.figure import Figure

from pytensor_ml import from_pretrained, save_pretrained
from pytensor_ml.layers import (
    DecoderBlock,
    Embedding,
    GatedFeedForward,
    Input,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    TransformerStack,
)
from pytensor_ml.model import Model
from pytensor_ml.models import CausalLM
from pytensor_ml.pytensorf import BACKENDS, backend_mode, compile_predict

WIDTH, DEPTH, VOCABULARY, TOKENS = 64, 4, 256, 48

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", choices=BACKENDS, default="numba", help="to save on")
parser.add_argument(
    "--open-on", nargs="+", choices=BACKENDS, help="where to open; default is all others"
)
parser.add_argument("--quick", action="store_true", help="one block, opened on one other backend")
parser.add_argument(
    "--folder",
    type=Path,
    default=Path(__file__).parent.parent / "images",
    help="where the picture goes",
)
# What the new processes are started with.
parser.add_argument("--saved", type=Path, help=argparse.SUPPRESS)


def build(depth):
    def block(name):
        return DecoderBlock(
            name,
            attention=MultiheadAttention(
                f"{name}_attention",
                n_embd=WIDTH,
                n_head=4,
                n_kv_head=2,
                bias=False,
                is_causal=True,
            ),
            feed_forward=GatedFeedForward(f"{name}_mlp", d_model=WIDTH, hidden_dim=2 * WIDTH),
            attention_norm=RMSNorm(f"{name}_norm1", n_in=WIDTH),
            feed_forward_norm=RMSNorm(f"{name}_norm2", n_in=WIDTH),
        )

    return CausalLM(
        embedding=Embedding("embedding", n_embeddings=VOCABULARY, n_features=WIDTH),
        stack=TransformerStack(
            "stack",
            [block(f"block_{i}") for i in range(depth)],
            rotary=RotaryEmbedding(rotary_dim=WIDTH // 4),
        ),
        norm=RMSNorm("norm", n_in=WIDTH),
        max_positions=TOKENS,
    )


def compute(logits, backend):
    """Return the logits of some made-up tokens."""
    ids = np.random.default_rng(0).integers(VOCABULARY, size=(1, TOKENS))
    run = compile_predict(logits, compile_kwargs={"mode": backend_mode(backend)})
    return np.asarray(run(ids))[0]


def open_saved(folder, backend):
    [_], logits = from_pretrained(folder)
    np.save(folder / f"{backend}.npy", compute(logits, backend))


def main(options):
    others = options.open_on or [backend for backend in BACKENDS if backend != options.backend]
    if options.quick:
        del others[1:]
    logits = build(1 if options.quick else DEPTH)(Input("ids", (1, None), "int64"))
    Model(logits).initialize(seed=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pretrained(logits, folder)
        for path in sorted(folder.iterdir()):
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
        saved = compute(logits, options.backend)
        opened = {}
        for backend in others:
            arguments = ["--backend", backend, "--saved", folder]
            subprocess.run([sys.executable, __file__, *arguments], check=True)
            opened[backend] = np.load(folder / f"{backend}.npy")

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for backend, found in opened.items():
        apart = np.abs(found - saved).max(axis=-1) / np.abs(saved).max()
        print(
            f"saved on {options.backend}, opened on {backend}: logits differ by {apart.max():.1e} "
            "of the largest"
        )
        axes.semilogy(apart, marker=".", label=f"opened on {backend}")
    axes.axhline(np.finfo("float32").eps, color="gray", linestyle="--", label="float32 epsilon")
    axes.set(xlabel="token", ylabel="largest difference of logits / largest logit")
    axes.set_title(f"saved on {options.backend}")
    axes.legend()
    path = options.folder / "save_and_open.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"wrote {path}")


if __name__ == "__main__":
    pytensor.config.floatX = "float32"
    # The linker's advice about BLAS is repeated in the README.
    warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
    options = parser.parse_args()
    if options.saved is None:
        main(options)
    else:
        open_saved(options.saved, options.backend)
