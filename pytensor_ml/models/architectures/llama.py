"""Llama: RMSNorm, rotary positions, grouped queries, SwiGLU."""

from typing import Any

import numpy as np

from pytensor_ml.models.decoder import DecoderOptions, register_decoder
from pytensor_ml.models.loading.gguf import GGUFSettings, half_from_adjacent, register_gguf


@register_decoder("LlamaForCausalLM", "llama", reads=("attention_bias", "attention_out_bias"))
def llama(config: dict[str, Any]) -> DecoderOptions:
    """Return what is particular to Llama [1]_: biases, if the config has them.

    References
    ----------
    .. [1] Touvron et al. (2023). LLaMA. arXiv:2302.13971.
    """
    bias = config.get("attention_bias", False)
    return DecoderOptions(qkv_bias=bias, out_bias=config.get("attention_out_bias", bias))


def _config_of_gguf(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    tensors = settings.file.tensors
    window = settings.optional("attention.sliding_window")
    # Mistral has no architecture of its own.
    return {
        "architectures": ["LlamaForCausalLM" if window is None else "MistralForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "sliding_window": window,
    }


def _paired_by_halves(key: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if ".q_proj." in key:
        return half_from_adjacent(values, config["num_attention_heads"])
    if ".k_proj." in key:
        return half_from_adjacent(values, config["num_key_value_heads"])
    return values


register_gguf("llama", "LlamaForCausalLM", config=_config_of_gguf, restore=_paired_by_halves)
