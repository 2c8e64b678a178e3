"""A network for every layer of the package, by name: its data inputs and its outputs."""

from functools import cache

import pytensor.tensor as pt

from pytensor_ml import activations
from pytensor_ml.generation import CacheWrite
from pytensor_ml.layers import (
    CausalSelfAttention,
    Concatenate,
    DecoderBlock,
    Dropout,
    Embedding,
    FeedForward,
    Flatten,
    GatedAttention,
    GatedFeedForward,
    IntegerRotaryEmbedding,
    KVCache,
    LayerNorm,
    Linear,
    MoE,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    Squeeze,
    TransformerBlock,
    TransformerStack,
    ZeroCenteredRMSNorm,
    build_moe_config,
    cached_attention,
    call_as_block,
    modulate,
    praxis_stack,
    scaled_dot_product_attention,
)
from pytensor_ml.models import halve_weights

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    },
}


@cache
def network(name):
    """Return the inputs and outputs of a network, always the same ones."""
    return NETWORKS[name]()


def tokens(name="x", width=16):
    return pt.tensor(name, shape=(None, 5, width), dtype="float32")


def ids(name="ids"):
    return pt.tensor(name, shape=(None, 5), dtype="int64")


def heads(name, n_head=4):
    return pt.tensor(name, shape=(None, n_head, 5, 8), dtype="float32")


def unary(*layers):
    x = tokens()
    return [x], [layer(x) for layer in layers]


def each_activation():
    kinds = vars(activations).values()
    made = [k for k in kinds if isinstance(k, type) and issubclass(k, activations.Activation)]
    made.remove(activations.Activation)
    return unary(*(kind() for kind in made), activations.GELU(approximate=False))


def norms():
    return unary(
        *(kind(f"{kind.__name__}", n_in=16) for kind in (LayerNorm, RMSNorm, ZeroCenteredRMSNorm)),
        LayerNorm(n_in=16, affine=False, epsilon=1e-3),
        RMSNorm(n_in=16, affine=False),
        ZeroCenteredRMSNorm("own_dtype", n_in=16, compute_dtype=None),
    )


def tied_head():
    x = ids()
    table = Embedding("tokens", n_embeddings=11, n_features=16)
    return [x], [table.head(table(x))]


def halved():
    x = ids()
    table = Embedding("tokens", n_embeddings=11, n_features=16)
    linear = Linear("fc", n_in=16, n_out=16)
    halve_weights([table, linear])
    return [x], [table.head(linear(table(x)))]


def rotary(scaling):
    q, positions = heads("q"), ids("positions")
    return [q, positions], [RotaryEmbedding("r", scaling=scaling)(q, positions)]


def rotary_kinds():
    q, positions = heads("q"), ids("positions")
    wide = pt.tensor("wide", shape=(None, 4, 5, None), dtype="float32")
    layers = [
        RotaryEmbedding("ntk", scaling="ntk", scaling_factor=2.0),
        RotaryEmbedding("adjacent", pairing="adjacent", rotary_dim=4),
    ]
    table = IntegerRotaryEmbedding(dim=8, effective_dim=6, base=10_000, table_size=64)
    symbolic = RotaryEmbedding("symbolic")(wide, positions)
    return (
        [q, wide, positions],
        [*(layer(q, positions) for layer in layers), table(positions), symbolic],
    )


def attention():
    q, k, v = heads("q"), heads("k", 2), heads("v", 2)
    mask = pt.tensor("mask", shape=(None, 1, 5, 5), dtype="bool")
    bias = pt.tensor("bias", shape=(None, 1, 5, 5), dtype="float32")
    options = {"is_causal": True, "window": 3, "softcap": 5.0, "scale": 0.3}
    return (
        [q, k, v, mask, bias],
        [
            scaled_dot_product_attention(q, k, v, mask=mask),
            scaled_dot_product_attention(q, k, v, mask=bias),
            scaled_dot_product_attention(q, k, v, **options),
        ],
    )


def float_mask():
    q, bias = heads("q"), pt.tensor("bias", shape=(None, 1, 5, 5), dtype="float32")
    return [q, bias], [scaled_dot_product_attention(q, q, q, mask=bias)]


def cached():
    q, k, v = (pt.tensor(n, shape=(2, h, 1, 8)) for n, h in [("q", 4), ("k", 2), ("v", 2)])
    keys, values = (pt.tensor(n, shape=(2, 2, 12, 8)) for n in ("keys", "values"))
    length, start = pt.lscalar("length"), pt.tensor("start", shape=(2,), dtype="int64")
    cache = KVCache(keys, values, length, start)
    written = CacheWrite()(keys, k, length)
    return [q, k, v, *cache], [cached_attention(q, k, v, cache), written]


def attention_layers():
    x, positions = tokens(), ids("positions")
    rope = RotaryEmbedding("r", rotary_dim=4).table(positions)
    gated = GatedAttention(
        "g", dim=16, num_heads=4, num_kv_heads=2, head_dim=4, qk_norm_eps=1e-6, gate="channel"
    )
    own_norms = MultiheadAttention(
        "n", n_embd=16, n_head=4, q_norm=RMSNorm("q", n_in=4), k_norm=RMSNorm("k", n_in=4)
    )
    return (
        [x, positions],
        [
            CausalSelfAttention("c", n_embd=16, n_head=4, n_kv_head=2)(x),
            MultiheadAttention("f", n_embd=16, n_head=4, fused_qkv=True)(x),
            own_norms(x, rope=rope),
            gated(x, rope),
        ],
    )


def feed_forward():
    return unary(
        FeedForward("plain", d_model=16),
        FeedForward("gated", d_model=16, gated=True, bias=False),
        GatedFeedForward("separate", d_model=16, hidden_dim=8),
    )


def mixture():
    x, valid = tokens(), pt.tensor("valid", shape=(None, 5), dtype="bool")
    moe = MoE(
        "moe",
        d_model=16,
        hidden_dim=8,
        n_experts=4,
        top_k=2,
        n_groups=2,
        top_k_groups=1,
        n_shared_experts=1,
        score="softmax",
        aux_loss_coeff=0.1,
        selection_bias=True,
        bias_update_factor=0.01,
    )
    y = moe(x, valid)
    return [x, valid], [y, moe.load, moe.balance_loss]


def modulated():
    x, shift, scale = (tokens(name) for name in ("x", "shift", "scale"))
    return [x, shift, scale], [modulate(x, shift, scale, dtype="float32")]


def combinators():
    x = tokens()
    y = Sequential(Linear("fc", n_in=16, n_out=3), activations.ReLU(), Flatten)(x)
    return [x], [y, Concatenate([x, x], axis=1), Squeeze(x[:, :1], axis=1)]


def block():
    return unary(TransformerBlock("b", d_model=16, n_head=4, dropout=0.1, norm_first=False))


def block_as_op():
    x = tokens()
    return [x], [call_as_block(TransformerBlock("b", d_model=16, n_head=4), x)]


def stack(depth=3, dropout=0.1):
    x, positions = tokens(), ids("positions")
    blocks = [
        DecoderBlock(
            f"block_{i}",
            attention=MultiheadAttention(
                f"block_{i}_attention", n_embd=16, n_head=4, n_kv_head=2, is_causal=True
            ),
            feed_forward=GatedFeedForward(f"block_{i}_ff", d_model=16, hidden_dim=24),
            attention_norm=RMSNorm(f"block_{i}_norm_1", n_in=16),
            feed_forward_norm=RMSNorm(f"block_{i}_norm_2", n_in=16),
            dropout=dropout,
        )
        for i in range(depth)
    ]
    y, _ = TransformerStack("stack", blocks, rotary=RotaryEmbedding("r", rotary_dim=4))(
        x, positions
    )
    return [x, positions], [y]


def praxis(depth=3):
    x, conditioning = tokens(), tokens("x_mod", width=4)
    moe = build_moe_config(
        dim=16,
        expert_hidden=8,
        num_routed_experts=4,
        top_k_routed=2,
        routed_scaling_factor=2.5,
        gate_bias_update_factor=1e-3,
    )
    trunk = praxis_stack(
        "trunk",
        depth=depth,
        dense_blocks=(0,),
        dim=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qk_norm_eps=1e-6,
        norm_eps=1e-6,
        dense_hidden=32,
        rotary=IntegerRotaryEmbedding(dim=8, effective_dim=6, base=10_000, table_size=64),
        moe=moe,
        modulation_dim=4,
        dtype="float32",
    )
    y, taps = trunk(x, 2_000_000 + pt.arange(5), x_mod=conditioning, tap_blocks=[0])
    return [x, conditioning], [y, *taps]


NETWORKS = {
    "activations": each_activation,
    "linear": lambda: unary(
        Linear("fc", n_in=16, n_out=3), Linear("bare", n_in=16, n_out=3, bias=False)
    ),
    "norms": norms,
    "dropout": lambda: unary(Dropout("d", p=0.2)),
    "tied head": tied_head,
    "halved": halved,
    **{f"rotary {kind}": lambda s=scaling: rotary(s) for kind, scaling in SCALINGS.items()},
    "rotary kinds": rotary_kinds,
    "attention": attention,
    "float mask": float_mask,
    "cached attention": cached,
    "attention layers": attention_layers,
    "feed-forward": feed_forward,
    "mixture": mixture,
    "modulation": modulated,
    "combinators": combinators,
    "block": block,
    "block as op": block_as_op,
    "stack": stack,
    "praxis": praxis,
}
