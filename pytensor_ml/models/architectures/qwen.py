"""Qwen2 and Qwen3: biases or norms of queries and keys, and windows in the upper layers."""

from collections.abc import Sequence
from typing import Any

from pytensor_ml.models.decoder import FULL, SLIDING, DecoderOptions, register_decoder
from pytensor_ml.models.loading.gguf import TENSOR_NAMES, register_gguf

_WINDOW_KEYS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")


@register_decoder("Qwen2ForCausalLM", "qwen2", reads=_WINDOW_KEYS)
def qwen2(config: dict[str, Any]) -> DecoderOptions:
    """Return what is particular to Qwen2 [1]_.

    References
    ----------
    .. [1] Yang et al. (2024). Qwen2 Technical Report. arXiv:2407.10671.
    """
    window, layer_types = _windows(config)
    return DecoderOptions(qkv_bias=True, window=window, layer_types=layer_types)


@register_decoder("Qwen3ForCausalLM", "qwen3", reads=("attention_bias", *_WINDOW_KEYS))
def qwen3(config: dict[str, Any]) -> DecoderOptions:
    """Return what is particular to Qwen3 [1]_.

    References
    ----------
    .. [1] Yang et al. (2025). Qwen3 Technical Report. arXiv:2505.09388.
    """
    window, layer_types = _windows(config)
    bias = config.get("attention_bias", False)
    return DecoderOptions(
        qk_norm=True, qkv_bias=bias, out_bias=bias, window=window, layer_types=layer_types
    )


def _windows(config: dict[str, Any]) -> tuple[int | None, Sequence[str]]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = 28 if config.get("max_window_layers") is None else config["max_window_layers"]
    by_default = [
        FULL if window is None or i < first else SLIDING for i in range(config["num_hidden_layers"])
    ]
    return window, config.get("layer_types") or by_default


register_gguf("qwen2", "Qwen2ForCausalLM")
register_gguf(
    "qwen3",
    "Qwen3ForCausalLM",
    names=TENSOR_NAMES
    | {
        "blk.attn_q_norm": "model.layers.{}.self_attn.q_norm",
        "blk.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    },
)
