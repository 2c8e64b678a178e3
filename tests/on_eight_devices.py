"""Run decoders split over eight devices and on one, and print how they compare: for test_sharding.

XLA is told how many devices there are before it starts, so this is a process of its own.
"""

import json
import os
import re
from collections import Counter

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pytensor_ml import to_jax
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
from pytensor_ml.models import CausalLM
from pytensor_ml.pytensorf import collect_trainable_params
from pytensor_ml.sharding import RULES, partition_specs, shard_params

WIDTH, VOCABULARY = 64, 96


def decoder(kinds):
    def feed_forward(name, kind):
        if kind == "dense":
            return GatedFeedForward(name, d_model=WIDTH, hidden_dim=2 * WIDTH)
        return MoE(
            name,
            d_model=WIDTH,
            hidden_dim=WIDTH,
            n_experts=8,
            top_k=2,
            n_shared_experts=1,
            selection_bias=True,
        )

    def block(name, kind):
        return DecoderBlock(
            name,
            attention=MultiheadAttention(
                f"{name}_attn", n_embd=WIDTH, n_head=8, n_kv_head=4, is_causal=True
            ),
            feed_forward=feed_forward(f"{name}_mlp", kind),
            attention_norm=RMSNorm(f"{name}_norm1", n_in=WIDTH),
            feed_forward_norm=RMSNorm(f"{name}_norm2", n_in=WIDTH),
        )

    return CausalLM(
        embedding=Embedding("tokens", n_embeddings=VOCABULARY, n_features=WIDTH),
        stack=TransformerStack(
            "stack",
            [block(f"b{i}", kind) for i, kind in enumerate(kinds)],
            rotary=RotaryEmbedding(rotary_dim=WIDTH // 8),
        ),
        norm=RMSNorm("norm", n_in=WIDTH),
        max_positions=16,
    )


def compare(kinds, shape, rules):
    model = decoder(kinds)
    rng = np.random.default_rng(0)
    logits = model(Input("ids", (None, None), "int64"))
    for parameter in collect_trainable_params(logits):
        value = rng.normal(size=parameter.get_value().shape) / 8
        is_scale = parameter.name.endswith("scale")
        parameter.set_value((value + is_scale).astype("float32"))
    f, params = to_jax(logits)
    ids = rng.integers(VOCABULARY, size=(4, 8))
    cotangent = rng.normal(size=(4, 8, VOCABULARY)).astype("float32")

    def run(params, ids):
        logits, pull_back = jax.vjp(lambda params: f(params, ids), params)
        return logits, pull_back(cotangent)[0]

    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "tensor"))
    split = shard_params(params, partition_specs(model, mesh, rules), mesh)
    split_ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
    expected = jax.jit(run)(params, ids)
    result = jax.jit(run)(split, split_ids)
    compiled = jax.jit(f).lower(split, split_ids).compile().as_text()
    on_device = Counter()
    for value in split.values():
        for shard in value.addressable_shards:
            on_device[shard.device.id] += shard.data.nbytes
    return {
        "errors": {
            name: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300))
            for name, a, b in [
                ("logits", result[0], expected[0]),
                *((name, result[1][name], value) for name, value in expected[1].items()),
            ]
        },
        "n_devices": len(on_device),
        "bytes": sum(value.nbytes for value in params.values()),
        "most_bytes": max(on_device.values()),
        "collectives": Counter(re.findall(r"= \S+ (all-\w+|collective-\w+)\(", compiled)),
    }


if __name__ == "__main__":
    results = {
        "tensor": compare(["dense", "dense"], (1, 4), RULES),
        "both": compare(["mixture"], (2, 4), RULES | {"width": "data"}),
    }
    print(json.dumps(results))
