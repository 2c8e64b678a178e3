"""One decoder split over eight devices: the same numbers, and an eighth of the parameters on each.

A small decoder becomes a function of JAX (``to_jax``), and its parameters are split over a mesh of
2 x 4 devices by the partition rules of ``pytensor_ml.sharding``: heads, hidden units and vocabulary
over the four of the axis "tensor", the other axis of each matrix over the two of the axis "data",
which also share the batch. Logits and one step of gradient descent are compared with those of one
device. The eight devices are threads of this machine's processor, on which nothing gets faster; on
as many GPUs the program is the same without its first line of code. The picture shows which part of
each parameter is on which device. Run it with ``python docs/examples/shard.py``.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import argparse
import warnings
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytensor
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure

from pytensor_ml import to_jax
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
from pytensor_ml.loss import CrossEntropy, supervised_loss
from pytensor_ml.models import CausalLM
from pytensor_ml.sharding import RULES, partition_specs, shard_params

N_HEAD, N_KV_HEAD, HEAD_DIM, VOCABULARY = 8, 4, 16, 512
LEARNING_RATE = 0.1

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="one block instead of six")
parser.add_argument(
    "--folder",
    type=Path,
    default=Path(__file__).parent.parent / "images",
    help="where the picture goes",
)
options = parser.parse_args()
pytensor.config.floatX = "float32"
# On JAX positions are int32, in which these fit.
warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")

width = N_HEAD * HEAD_DIM


def block(name):
    return DecoderBlock(
        name,
        attention=MultiheadAttention(
            f"{name}_attention",
            n_embd=width,
            n_head=N_HEAD,
            n_kv_head=N_KV_HEAD,
            bias=False,
            is_causal=True,
        ),
        feed_forward=GatedFeedForward(f"{name}_mlp", d_model=width, hidden_dim=3 * width),
        attention_norm=RMSNorm(f"{name}_norm1", n_in=width),
        feed_forward_norm=RMSNorm(f"{name}_norm2", n_in=width),
    )


model = CausalLM(
    embedding=Embedding("tokens", n_embeddings=VOCABULARY, n_features=width),
    stack=TransformerStack(
        "stack",
        [block(f"block_{i}") for i in range(1 if options.quick else 6)],
        rotary=RotaryEmbedding(rotary_dim=HEAD_DIM),
    ),
    norm=RMSNorm("norm", n_in=width),
    max_positions=64,
)
ids = Input("ids", (None, None), "int64")
logits = model(ids)
loss, targets = supervised_loss(logits, CrossEntropy(expect_logits=True))
f, params = to_jax([loss, logits], inputs=[ids, targets])

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
stored = partition_specs(model, mesh, RULES | {"width": "data"})
# For its block each weight is gathered over "data" first, or XLA would split the width of all that
# is computed.
used = {name: NamedSharding(mesh, spec) for name, spec in partition_specs(model, mesh).items()}
split = shard_params(params, stored, mesh)


def step(params, *batch, shardings=None):
    def loss_and_logits(params):
        if shardings is not None:
            params = jax.lax.with_sharding_constraint(params, shardings)
        return f(params, *batch)

    (loss, logits), gradients = jax.value_and_grad(loss_and_logits, has_aux=True)(params)
    changed = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)
    return loss, logits, changed


tokens = np.random.default_rng(0).integers(VOCABULARY, size=(8, 33))
batch = tokens[:, :-1], tokens[:, 1:]
split_batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
one = jax.jit(step)(params, *batch)
results = {"loss": None, "logits": None, "parameters": {k: v.sharding for k, v in split.items()}}
eight = jax.jit(
    lambda *arguments: step(*arguments, shardings=used), out_shardings=tuple(results.values())
)(split, *split_batch)

print(f"{len(params)} parameters of {sum(p.size for p in params.values()):,} numbers")
for name, some, other in zip(results, one, eight, strict=True):
    largest = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(other), strict=True)
    ]
    when = " after a step" if name == "parameters" else ""
    print(f"max difference of {name}{when}, eight devices and one: {max(largest):.1e}")
total = sum(p.nbytes for p in params.values())
held = Counter()
for array in eight[2].values():
    for shard in array.addressable_shards:
        held[shard.device.id] += shard.data.nbytes
for device, n_bytes in sorted(held.items()):
    print(f"device {device}: {n_bytes:,} bytes of parameters, {n_bytes / total:.1%} of {total:,}")

figure = Figure(figsize=(10, 5.5), layout="constrained")
panels = figure.subplots(2, 4).flat
colors = [f"C{i}" for i in range(8)]
drawn = {
    "tokens_W": "embedding, tied head",
    "block_0_attention_q_proj_W": "queries",
    "block_0_attention_k_proj_W": "keys (values alike)",
    "block_0_attention_out_proj_W": "output of attention",
    "block_0_mlp_gate_W": "gate (up alike)",
    "block_0_mlp_down_W": "down",
    "block_0_norm1_scale": "norms: whole everywhere",
}
for (name, title), axes in zip(drawn.items(), panels, strict=False):
    array = split[name]
    n_rows, n_columns = array.shape if array.ndim == 2 else (8, array.size)
    axes.set(xlim=(0, n_columns), ylim=(n_rows, 0), xlabel="columns", ylabel="rows")
    axes.set_title(f"{title}\n{' x '.join(map(str, array.shape))}", fontsize=9)
    for shard in array.addressable_shards:
        i = shard.device.id
        # A parameter that every device holds is drawn as a row of each.
        rows, columns = shard.index if array.ndim == 2 else (slice(i, i + 1), slice(None))
        top, bottom, _ = rows.indices(n_rows)
        left, right, _ = columns.indices(n_columns)
        axes.fill_between([left, right], top, bottom, color=colors[i], edgecolor="white")
        axes.text((left + right) / 2, (top + bottom) / 2, i, ha="center", va="center", fontsize=8)
    if array.ndim == 1:
        axes.set(ylabel="device", yticks=[])
bars = panels[-1]
bars.bar(held.keys(), [n / 2**20 for n in held.values()], color=colors)
bars.axhline(total / 8 / 2**20, color="black", linestyle="--", linewidth=1)
bars.set(xlabel="device", ylabel="MiB", xticks=range(8))
bars.set_title("bytes of parameters\n(dashed: an eighth of all)", fontsize=9)
options.folder.mkdir(parents=True, exist_ok=True)
path = options.folder / "shard.png"
figure.savefig(path, dpi=90)
print(f"wrote {path}")
