"""The Llama family: RMSNorm, rotary positions, grouped queries, SwiGLU."""

from typing import Any

from pytensor_ml.layers.attention import MultiheadAttention
from pytensor_ml.layers.embedding import Embedding
from pytensor_ml.layers.feedforward import GatedFeedForward
from pytensor_ml.layers.linear import Linear
from pytensor_ml.layers.norm import RMSNorm
from pytensor_ml.layers.positional import RotaryEmbedding
from pytensor_ml.layers.rotary_scaling import rotated_channels
from pytensor_ml.layers.transformer import DecoderBlock, TransformerStack
from pytensor_ml.models.causal_lm import CausalLM
from pytensor_ml.models.loading.binding import bind_linear, bind_norm
from pytensor_ml.models.loading.keys import KeyMap
from pytensor_ml.models.loading.registry import register_builder


@register_builder("LlamaForCausalLM")
@register_builder("llama")
def build_llama(config: dict[str, Any], keys: KeyMap) -> CausalLM:
    """Build a model of the Llama family [1]_.

    Parameters
    ----------
    config : dict
        Config as transformers writes it.
    keys : KeyMap
        Filled with the names that transformers gives the parameters.

    Raises
    ------
    ValueError
        If the config lacks an entry that has no safe default, or asks for what is not supported.

    References
    ----------
    .. [1] Touvron et al. (2023). LLaMA. arXiv:2302.13971.
    """
    _check_supported(config)
    width, n_head = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // n_head
    bias = config.get("attention_bias", False)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, n_in=width, epsilon=config["rms_norm_eps"])

    embedding = Embedding("embed_tokens", n_embeddings=config["vocab_size"], n_features=width)
    keys.bind(embedding.W, "model", "embed_tokens", "weight")
    blocks = []
    for i in range(config["num_hidden_layers"]):
        name = f"layers_{i}"
        attention = MultiheadAttention(
            f"{name}_self_attn",
            n_embd=width,
            n_head=n_head,
            n_kv_head=config.get("num_key_value_heads") or n_head,
            head_dim=head_dim,
            bias=bias,
            out_bias=config.get("attention_out_bias", bias),
            is_causal=True,
            window=config.get("sliding_window"),
        )
        feed_forward = GatedFeedForward(
            f"{name}_mlp", d_model=width, hidden_dim=config["intermediate_size"]
        )
        attention_norm = norm(f"{name}_input_layernorm")
        feed_forward_norm = norm(f"{name}_post_attention_layernorm")
        with keys.scope("model", "layers", str(i)):
            bind_norm(keys, attention_norm, "input_layernorm")
            bind_linear(keys, attention.q_proj, "self_attn", "q_proj")
            bind_linear(keys, attention.k_proj, "self_attn", "k_proj")
            bind_linear(keys, attention.v_proj, "self_attn", "v_proj")
            bind_linear(keys, attention.out_proj, "self_attn", "o_proj")
            bind_norm(keys, feed_forward_norm, "post_attention_layernorm")
            bind_linear(keys, feed_forward.gate, "mlp", "gate_proj")
            bind_linear(keys, feed_forward.up, "mlp", "up_proj")
            bind_linear(keys, feed_forward.down, "mlp", "down_proj")
        blocks.append(
            DecoderBlock(
                name,
                attention=attention,
                feed_forward=feed_forward,
                attention_norm=attention_norm,
                feed_forward_norm=feed_forward_norm,
            )
        )
    final_norm = norm("norm")
    bind_norm(keys, final_norm, "model", "norm")
    if config.get("tie_word_embeddings", False):
        head = None
        keys.tie(embedding.W, "lm_head", "weight")
    else:
        head = Linear("lm_head", n_in=width, n_out=config["vocab_size"], bias=False)
        bind_linear(keys, head, "lm_head")
    return CausalLM(
        "llama",
        embedding=embedding,
        stack=TransformerStack("layers", blocks, rotary=_rotary(config, head_dim)),
        norm=final_norm,
        head=head,
        max_positions=config["max_position_embeddings"],
    )


def _rotary(config: dict[str, Any], head_dim: int) -> RotaryEmbedding:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = parameters.get("rope_theta", config.get("rope_theta"))
    if base is None:
        raise ValueError(
            "The config has no rope_theta, neither by itself nor in rope_parameters, and a wrong "
            "base gives wrong text without an error. Add the base the model was trained with."
        )
    if "partial_rotary_factor" in config:
        parameters = {**parameters, "partial_rotary_factor": config["partial_rotary_factor"]}
    return RotaryEmbedding(
        "rotary_emb",
        base=base,
        scaling=parameters or "none",
        rotary_dim=rotated_channels(head_dim, parameters),
    )


def _check_supported(config: dict[str, Any]) -> None:
    needed = {
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "vocab_size",
    }
    if missing := sorted(needed - set(config)):
        raise ValueError(
            f"The config lacks {', '.join(missing)}, without which a Llama model has no shape. "
            "Take the config.json that belongs to the weights."
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(
            f"The config asks for the activation {activation}, but a Llama feed-forward here uses "
            "silu, so its output would be wrong. Use a checkpoint with hidden_act silu."
        )
    if config.get("mlp_bias", False):
        raise ValueError(
            "The config asks for mlp_bias, but the gated feed-forward here has no biases, so they "
            "would be lost. Use a checkpoint without them."
        )
