"""Gemma 3, its text part: zero-centered norms on both sides of each branch, local layers."""

import math
from typing import Any

import numpy as np

from pytensor_ml.layers.norm import ZeroCenteredRMSNorm
from pytensor_ml.models.decoder import FULL, SLIDING, DecoderOptions, register_decoder
from pytensor_ml.models.loading.gguf import TENSOR_NAMES, GGUFSettings, register_gguf


@register_decoder(
    "Gemma3ForCausalLM",
    "gemma3_text",
    needs=("query_pre_attn_scalar", "sliding_window"),
    reads=(
        "attention_bias",
        "final_logit_softcapping",
        "hidden_activation",
        "layer_types",
        "rope_local_base_freq",
        "sliding_window_pattern",
    ),
)
def gemma3(config: dict[str, Any]) -> DecoderOptions:
    """Return what is particular to Gemma 3 [1]_.

    References
    ----------
    .. [1] Gemma Team (2025). Gemma 3 Technical Report. arXiv:2503.19786.
    """
    bias = config.get("attention_bias", False)
    rope = config.get("rope_parameters") or {}
    allowed = {FULL: (dict, type(None)), SLIDING: (dict, type(None))}
    if unknown := sorted(k for k, v in rope.items() if not isinstance(v, allowed.get(k, ()))):
        raise ValueError(
            f"The config has {', '.join(unknown)} in rope_parameters, which are not the settings "
            f"of one of Gemma 3's two rotary tables. Put settings into {FULL} or {SLIDING}."
        )
    return DecoderOptions(
        norm=ZeroCenteredRMSNorm,
        qk_norm=True,
        branch_norms=True,
        qkv_bias=bias,
        out_bias=bias,
        activation=config.get("hidden_activation") or "gelu_pytorch_tanh",
        window=config["sliding_window"],
        layer_types=config.get("layer_types")
        or _every(config.get("sliding_window_pattern"), config["num_hidden_layers"]),
        rope={
            FULL: {"rope_theta": config.get("rope_theta")}
            | (rope.get(FULL) or {})
            | (config.get("rope_scaling") or {}),
            SLIDING: {"rope_theta": config.get("rope_local_base_freq")} | (rope.get(SLIDING) or {}),
        },
        query_scale=config["query_pre_attn_scalar"] ** -0.5,
        embedding_scale=math.sqrt(config["hidden_size"]),
        logit_softcap=config.get("final_logit_softcapping"),
        tied=True,
    )


def _every(period: int | None, n_layers: int) -> list[str]:
    """Return layer types of which each ``period``-th is full, by default each sixth."""
    period = 6 if period is None else period
    if period < 1:
        raise ValueError(
            f"The model has a sliding_window_pattern of {period}, by which no layer is the full "
            "one of each period. Take the number that belongs to the weights, such as 6."
        )
    return [SLIDING if (i + 1) % period else FULL for i in range(n_layers)]


def _config_of_gguf(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    n_layers = config["num_hidden_layers"]
    key = "attention.sliding_window_pattern"
    pattern = settings.optional(key, (int, np.ndarray))
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != bool or pattern.size != n_layers:
            raise ValueError(
                f"{settings.file.path} has gemma3.{key} of {pattern.size} values of type "
                f"{pattern.dtype}, where its {n_layers} blocks need a truth value each: some would "
                "attend to other tokens. Fetch or convert the file again."
            )
        layer_types = [SLIDING if slides else FULL for slides in pattern]
    else:
        layer_types = _every(None if pattern is None else settings.number(key), n_layers)
    return {
        "layer_types": layer_types,
        "sliding_window": settings.number("attention.sliding_window"),
        "rope_parameters": {
            FULL: config["rope_parameters"],
            SLIDING: {"rope_theta": settings.number("rope.freq_base_swa", float, 10_000.0)},
        },
        # The files do not say; of the published sizes only that of 62 layers, 27B, differs.
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if n_layers == 62
        else config["head_dim"],
        "final_logit_softcapping": settings.optional("final_logit_softcapping", float),
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _zero_centered(key: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    return values - np.float32(1) if key.endswith("norm.weight") else values


register_gguf(
    "gemma3",
    "Gemma3ForCausalLM",
    names=TENSOR_NAMES
    | {
        "blk.attn_q_norm": "model.layers.{}.self_attn.q_norm",
        "blk.attn_k_norm": "model.layers.{}.self_attn.k_norm",
        "blk.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
        "blk.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    config=_config_of_gguf,
    restore=_zero_centered,
)
