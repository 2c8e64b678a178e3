"""Train a byte-level decoder on the source files of Python's standard library.

The decoder has RMSNorm, rotary positions, grouped-query attention and SwiGLU feed-forwards, with
--moe mixtures of them. Some files are held out; the bits that the decoder needs for a byte of them
stand beside those that ``gzip -9`` needs. Ctrl-C saves, and --resume goes on from there.
"""

import argparse
import gzip
import json
import math
import signal
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import numpy as np
import pytensor
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pytensor_ml.checkpoint import load_state, save_state, written_atomically
from pytensor_ml.generation import Decoder, generate
from pytensor_ml.layers import (
    DecoderBlock,
    Embedding,
    GatedFeedForward,
    Input,
    MoE,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    TransformerStack,
)
from pytensor_ml.loss import CrossEntropy, supervised_loss
from pytensor_ml.model import Model
from pytensor_ml.models import CausalLM
from pytensor_ml.optim import adamw, chain, clip_by_global_norm, cosine_schedule, matrices_except
from pytensor_ml.pytensorf import BACKENDS, backend_mode, compile_predict

SIZES = {
    "default": {"width": 128, "depth": 4, "context": 256, "batch": 16, "steps": 400, "every": 50},
    "quick": {"width": 32, "depth": 2, "context": 32, "batch": 4, "steps": 20, "every": 10},
}
HEAD_DIM = 16
HELD_OUT = 20  # One file of so many.
PROMPT = b"def read("


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="numba", help=f"one of {', '.join(BACKENDS)}")
    parser.add_argument("--moe", action="store_true", help="mixtures of experts as feed-forwards")
    parser.add_argument("--steps", type=int, help="how many steps to take in all")
    parser.add_argument("--quick", action="store_true", help="a size that only shows that it runs")
    parser.add_argument(
        "--folder", type=Path, default=Path("train_bytes"), help="of checkpoint and picture"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_files() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the files to train on and of those held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not skipped & set(path.relative_to(folder).parts)
    ]
    held_out = paths[::HELD_OUT]
    parts = [[p for p in paths if p not in held_out], held_out]
    return tuple(
        np.frombuffer(b"\0".join(path.read_bytes() for path in part), "uint8") for part in parts
    )


def build(width: int, depth: int, context: int, moe: bool) -> CausalLM:
    def feed_forward(name: str) -> GatedFeedForward | MoE:
        if not moe:
            return GatedFeedForward(name, d_model=width, hidden_dim=3 * width)
        return MoE(
            name,
            d_model=width,
            hidden_dim=width,
            n_experts=8,
            top_k=2,
            selection_bias=True,
            bias_update_factor=1e-3,
        )

    def block(name: str) -> DecoderBlock:
        return DecoderBlock(
            name,
            attention=MultiheadAttention(
                f"{name}_attention",
                n_embd=width,
                n_head=width // HEAD_DIM,
                n_kv_head=width // HEAD_DIM // 2,
                bias=False,
                is_causal=True,
            ),
            feed_forward=feed_forward(f"{name}_mlp"),
            attention_norm=RMSNorm(f"{name}_norm1", n_in=width),
            feed_forward_norm=RMSNorm(f"{name}_norm2", n_in=width),
        )

    return CausalLM(
        embedding=Embedding("bytes", n_embeddings=256, n_features=width),
        stack=TransformerStack(
            "stack",
            [block(f"block_{i}") for i in range(depth)],
            rotary=RotaryEmbedding(rotary_dim=HEAD_DIM),
        ),
        norm=RMSNorm("norm", n_in=width),
        max_positions=context,
    )


def windows(data: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, each the byte after its input."""
    ids = data[starts[:, None] + np.arange(length + 1)].astype("int64")
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def draw(curves: dict[str, list], gzip_bits: float, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curves["train"], strict=True), label="training", linewidth=0.8, alpha=0.7)
    axes.plot(*zip(*curves["held_out"], strict=True), label="held-out files", marker="o")
    axes.axhline(gzip_bits, label="gzip -9, held-out files", color="gray", linestyle="--")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def main(options: argparse.Namespace) -> None:
    console = Console(stderr=True)
    mode = backend_mode(options.backend)
    size = SIZES["quick" if options.quick else "default"]
    context, batch, every = size["context"], size["batch"], size["every"]
    n_steps = size["steps"] if options.steps is None else options.steps
    warmup = n_steps // 20
    if n_steps < 20:
        raise ValueError(
            f"--steps is {n_steps}, of which a twentieth, the warm-up, is none. Ask for at least "
            "20."
        )
    state, history = options.folder / "state.safetensors", options.folder / "curves.json"
    if options.resume and not state.exists():
        raise FileNotFoundError(
            f"There is no {state} to resume from. Train without --resume first, or name the folder "
            "with --folder."
        )
    options.folder.mkdir(parents=True, exist_ok=True)

    train, held_out = read_files()
    gzip_bits = 8 * len(gzip.compress(held_out.tobytes(), 9)) / len(held_out)
    network = build(size["width"], size["depth"], context, options.moe)
    # Without static lengths, so that samples and batches are one graph.
    model = Model(network(Input("ids", (None, None), "int64")), {"mode": mode})
    model.initialize(options.seed)
    n_parameters = sum(p.get_value(borrow=True).size for p in model.weights)
    console.print(
        f"{len(train) / 1e6:.1f} MB to train on, {len(held_out) / 1e6:.1f} MB held out, "
        f"{n_parameters / 1e6:.2f} million parameters"
    )

    loss_fn = CrossEntropy(expect_logits=True)
    schedule = cosine_schedule(3e-3, n_steps - warmup, 3e-4, warmup_steps=warmup)
    optimizer = adamw(
        schedule, weight_decay=0.1, beta2=0.99, mask=matrices_except(network.embedding.W)
    )
    step = model.compile_train(chain(clip_by_global_norm(1.0), optimizer), loss_fn)
    loss, _ = supervised_loss(model.y, loss_fn)
    evaluate = compile_predict(loss, compile_kwargs={"mode": mode})
    decoder = Decoder(network, capacity=context, mode=mode)

    curves: dict[str, list] = {"train": [], "held_out": []}
    if options.resume:
        load_state(step.get_shared(), state)
        curves = json.loads(history.read_text())

    def bits_held_out() -> float:
        starts = np.linspace(0, len(held_out) - context - 1, 4 * batch).astype(int)
        parts = np.array_split(starts, 4)
        nats = [float(evaluate(*windows(held_out, part, context))) for part in parts]
        return float(np.mean(nats)) / math.log(2)

    def sample() -> str:
        tokens = generate(
            decoder,
            [list(PROMPT)],
            max_new_tokens=context - len(PROMPT),
            temperature=0.7,
            seed=options.seed,
        )
        return (PROMPT + bytes(int(token) for [token] in tokens)).decode(errors="replace")

    def save() -> None:
        save_state(step.get_shared(), state)
        with written_atomically(history) as file:
            file.write(json.dumps(curves).encode())

    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        # A second time ends the program as usual.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, stop)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=console,
    )
    first = int(step.step_count.get_value())
    with bar:
        task = bar.add_task("compiling", total=n_steps, completed=first, speed="")
        for i in range(first, n_steps):
            rng = np.random.default_rng([options.seed, i])
            data = windows(train, rng.integers(len(train) - context, size=batch), context)
            started = time.perf_counter()
            bits = float(step(*data)) / math.log(2)
            seconds = time.perf_counter() - started
            curves["train"].append((i, bits))
            speed = f"{bits:.2f} bits per byte, {batch * context / seconds:,.0f} tokens/s"
            bar.update(task, advance=1, description="training", speed=speed)
            if stopping or (i + 1) % every == 0 or i + 1 == n_steps:
                curves["held_out"].append((i + 1, bits_held_out()))
                save()
                bar.print(f"step {i + 1}: {curves['held_out'][-1][1]:.3f} bits per byte held out")
                bar.print(sample(), highlight=False, markup=False)
            if stopping:
                break
    picture = options.folder / "train_bytes.png"
    draw(curves, gzip_bits, picture)
    if stopping:
        print(f"stopped; {state} holds step {i + 1}, go on with --resume")
    print(
        f"{curves['held_out'][-1][1]:.3f} bits per byte of held-out files, "
        f"gzip -9 of them {gzip_bits:.3f}; curves in {picture}"
    )


if __name__ == "__main__":
    pytensor.config.floatX = "float32"
    # The linker's advice about BLAS is repeated in the README.
    warnings.filterwarnings("ignore", message="PyTensor could not link to a BLAS")
    try:
        main(parse_arguments())
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
