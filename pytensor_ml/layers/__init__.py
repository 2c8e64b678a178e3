"""Layers: Python objects that own parameters and add symbolic ops to a graph."""

from pytensor_ml.layers.attention import (
    CausalSelfAttention,
    GatedAttention,
    KVCache,
    MultiheadAttention,
    cached_attention,
    scaled_dot_product_attention,
)
from pytensor_ml.layers.combinators import (
    Concatenate,
    Flatten,
    Input,
    Sequential,
    Squeeze,
    call_as_block,
)
from pytensor_ml.layers.dropout import Dropout
from pytensor_ml.layers.embedding import Embedding
from pytensor_ml.layers.feedforward import FeedForward, GatedFeedForward
from pytensor_ml.layers.linear import Linear
from pytensor_ml.layers.moe import MoE, build_moe_config
from pytensor_ml.layers.norm import LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from pytensor_ml.layers.positional import (
    IntegerRotaryEmbedding,
    RotaryEmbedding,
    apply_rotary,
    rotary_embedding,
    rotary_table,
)
from pytensor_ml.layers.transformer import (
    DecoderBlock,
    TransformerBlock,
    TransformerStack,
    modulate,
    praxis_stack,
)

__all__ = [
    "CausalSelfAttention",
    "Concatenate",
    "DecoderBlock",
    "Dropout",
    "Embedding",
    "FeedForward",
    "Flatten",
    "GatedAttention",
    "GatedFeedForward",
    "Input",
    "IntegerRotaryEmbedding",
    "KVCache",
    "LayerNorm",
    "Linear",
    "MoE",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "Sequential",
    "Squeeze",
    "TransformerBlock",
    "TransformerStack",
    "ZeroCenteredRMSNorm",
    "apply_rotary",
    "build_moe_config",
    "cached_attention",
    "call_as_block",
    "modulate",
    "praxis_stack",
    "rotary_embedding",
    "rotary_table",
    "scaled_dot_product_attention",
]
