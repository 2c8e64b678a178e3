"""The decoder that published configs describe, whatever their family."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytensor_ml.activations import GELU, SiLU
from pytensor_ml.layers.attention import MultiheadAttention
from pytensor_ml.layers.embedding import Embedding
from pytensor_ml.layers.feedforward import GatedFeedForward
from pytensor_ml.layers.linear import Linear
from pytensor_ml.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from pytensor_ml.layers.positional import RotaryEmbedding
from pytensor_ml.layers.rotary_scaling import rotated_channels
from pytensor_ml.layers.transformer import DecoderBlock, TransformerStack
from pytensor_ml.models.causal_lm import CausalLM
from pytensor_ml.models.loading.binding import bind_linear, bind_norm
from pytensor_ml.models.loading.keys import KeyMap
from pytensor_ml.models.loading.registry import register_builder

FULL = "full_attention"
SLIDING = "sliding_attention"

type Family = Callable[[dict[str, Any]], "DecoderOptions"]


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """How a family departs from the plainest decoder, a Llama without biases.

    Parameters
    ----------
    norm : RMSNorm or ZeroCenteredRMSNorm
        Class of every norm.
    qk_norm : bool
        Whether queries and keys are normalized, each head by itself, before they are rotated.
    branch_norms : bool
        Whether the outputs of attention and feed-forward are normalized before they are added. The
        tensors are then named like Gemma's.
    qkv_bias, out_bias : bool
        Whether the projections to queries, keys and values, and the one after, have biases.
    activation : str, optional
        Name of the feed-forward's activation. Default is the config's ``hidden_act``, or "silu".
    window : int, optional
        How many tokens a sliding layer sees.
    layer_types : sequence of str, optional
        "full_attention" or "sliding_attention" for each layer. By default all layers slide if there
        is a window.
    rope : mapping, optional
        Rotary settings for each layer type. By default one table is made of the config's
        ``rope_parameters``, ``rope_scaling`` and ``rope_theta``.
    query_scale : float, optional
        What scores are multiplied by. Default is 1 / sqrt(head_dim).
    embedding_scale : float
        What embeddings are multiplied by.
    logit_softcap : float, optional
        Bound c: logits become c tanh(logits / c).
    tied : bool
        Whether the embedding is also the head where the config does not say.
    """

    norm: type[RMSNorm] | type[ZeroCenteredRMSNorm] = RMSNorm
    qk_norm: bool = False
    branch_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    activation: str | None = None
    window: int | None = None
    layer_types: Sequence[str] | None = None
    rope: Mapping[str, Mapping[str, Any]] | None = None
    query_scale: float | None = None
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False


def register_decoder(
    *architectures: str, needs: Collection[str] = (), reads: Collection[str] = ()
) -> Callable[[Family], Family]:
    """Make the decorated function say how configs of a family are to be built.

    Parameters
    ----------
    *architectures : str
        Names as configs give them in ``architectures`` and ``model_type``; errors use the last.
    needs, reads : collection of str
        Keys that the function reads, beside those that every decoder does: without the first it is
        an error. A config with any other key that may change the output is refused.

    Returns
    -------
    callable
        Decorator of a function from a config to :class:`DecoderOptions`.

    Examples
    --------
    >>> from pytensor_ml.models import DecoderOptions, register_decoder
    >>> @register_decoder("ExampleForCausalLM", "example", reads=("sliding_window",))
    ... def example(config):
    ...     return DecoderOptions(qk_norm=True, window=config.get("sliding_window"))
    """

    def register(family: Family) -> Family:
        name = architectures[-1]

        def build(config: dict[str, Any], keys: KeyMap) -> CausalLM:
            _check_config(name, config, needs, reads)
            return build_decoder(name, config, keys, family(config))

        for architecture in architectures:
            register_builder(architecture)(build)
        return family

    return register


def build_decoder(
    name: str, config: dict[str, Any], keys: KeyMap, options: DecoderOptions
) -> CausalLM:
    """Build a decoder and bind its parameters to the names that transformers gives them.

    Parameters
    ----------
    name : str
        Name of the model.
    config : dict
        Config as transformers writes it.
    keys : KeyMap
        Map to fill.
    options : DecoderOptions
        What is particular to the family.

    Raises
    ------
    ValueError
        If an option has no such value.
    """
    width, n_head = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // n_head
    if not 0 < n_head * head_dim < _TOO_LARGE:
        raise ValueError(
            f"The config has {n_head} heads of width {head_dim} in a model of width {width}, of "
            "which there is none. Take the config.json that belongs to the weights."
        )
    layer_types = _layer_types(config, options)
    activation = options.activation or config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"The config asks for the activation {activation}, but the feed-forward of a decoder "
            f"can be built with {' or '.join(_ACTIVATIONS)}, so its output would be wrong. Use a "
            "checkpoint with one of these."
        )

    def norm(name: str, n_in: int, *parts: str) -> RMSNorm | ZeroCenteredRMSNorm:
        made = options.norm(name, n_in=n_in, epsilon=config["rms_norm_eps"])
        bind_norm(keys, made, *parts)
        return made

    embedding = Embedding("embed_tokens", n_embeddings=config["vocab_size"], n_features=width)
    keys.bind(embedding.W, "model", "embed_tokens", "weight")
    blocks = []
    for i, layer_type in enumerate(layer_types):
        block = f"layers_{i}"
        with keys.scope("model", "layers", str(i)):
            q_norm = k_norm = None
            if options.qk_norm:
                q_norm = norm(f"{block}_q_norm", head_dim, "self_attn", "q_norm")
                k_norm = norm(f"{block}_k_norm", head_dim, "self_attn", "k_norm")
            attention = MultiheadAttention(
                f"{block}_self_attn",
                n_embd=width,
                n_head=n_head,
                n_kv_head=config.get("num_key_value_heads") or n_head,
                head_dim=head_dim,
                bias=options.qkv_bias,
                out_bias=options.out_bias,
                is_causal=True,
                q_norm=q_norm,
                k_norm=k_norm,
                scale=options.query_scale,
                window=options.window if layer_type == SLIDING else None,
            )
            feed_forward = GatedFeedForward(
                f"{block}_mlp",
                d_model=width,
                hidden_dim=config["intermediate_size"],
                activation=_ACTIVATIONS[activation](),
            )
            bind_linear(keys, attention.q_proj, "self_attn", "q_proj")
            bind_linear(keys, attention.k_proj, "self_attn", "k_proj")
            bind_linear(keys, attention.v_proj, "self_attn", "v_proj")
            bind_linear(keys, attention.out_proj, "self_attn", "o_proj")
            bind_linear(keys, feed_forward.gate, "mlp", "gate_proj")
            bind_linear(keys, feed_forward.up, "mlp", "up_proj")
            bind_linear(keys, feed_forward.down, "mlp", "down_proj")
            norms = {
                role: norm(f"{block}_{key}", width, key)
                for role, key in (_FOUR_NORMS if options.branch_norms else _TWO_NORMS).items()
            }
        blocks.append(
            DecoderBlock(
                block,
                attention=attention,
                feed_forward=feed_forward,
                attention_norm=norms["attention_norm"],
                feed_forward_norm=norms["feed_forward_norm"],
                post_attention_norm=norms.get("post_attention_norm"),
                post_feed_forward_norm=norms.get("post_feed_forward_norm"),
                rotary_kind=None if options.rope is None else layer_type,
            )
        )
    final_norm = norm("norm", width, "model", "norm")
    if config.get("tie_word_embeddings", options.tied):
        head = None
        keys.tie(embedding.W, "lm_head", "weight")
    else:
        head = Linear("lm_head", n_in=width, n_out=config["vocab_size"], bias=False)
        bind_linear(keys, head, "lm_head")
    return CausalLM(
        name,
        embedding=embedding,
        stack=TransformerStack(
            "layers", blocks, rotary=_rotary(config, options.rope, layer_types, head_dim)
        ),
        norm=final_norm,
        head=head,
        max_positions=config["max_position_embeddings"],
        embedding_scale=options.embedding_scale,
        logit_softcap=options.logit_softcap,
    )


_ACTIVATIONS: dict[str, type[SiLU] | type[GELU]] = {"silu": SiLU, "gelu_pytorch_tanh": GELU}
# A norm's place in a block, and the name of its tensor.
_TWO_NORMS = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}
_FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "post_feed_forward_norm": "post_feedforward_layernorm",
}


def _layer_types(config: dict[str, Any], options: DecoderOptions) -> Sequence[str]:
    n_layers = config["num_hidden_layers"]
    layer_types = options.layer_types
    if layer_types is None:
        layer_types = [FULL if options.window is None else SLIDING] * n_layers
    if len(layer_types) != n_layers:
        raise ValueError(
            f"The config has {n_layers} layers and {len(layer_types)} layer_types, so it is not "
            "known which layers slide. Take the config.json that belongs to the weights."
        )
    if unknown := sorted(set(layer_types) - {FULL, SLIDING}):
        raise ValueError(
            f"The config has layers of the type {', '.join(unknown)}, which would attend "
            f"otherwise than they were trained to. Supported are {FULL} and {SLIDING}."
        )
    if SLIDING in layer_types and options.window is None:
        raise ValueError(
            f"The config has layers of the type {SLIDING} and no sliding_window, so how far they "
            "see is not known. Take the config.json that belongs to the weights."
        )
    return layer_types


def _rotary(
    config: dict[str, Any],
    rope: Mapping[str, Mapping[str, Any]] | None,
    layer_types: Sequence[str],
    head_dim: int,
) -> RotaryEmbedding | dict[str, RotaryEmbedding]:
    def build(name: str, settings: Mapping[str, Any]) -> RotaryEmbedding:
        if settings.get("rope_theta") is None:
            raise ValueError(
                "The config has no rope_theta, neither by itself nor in rope_parameters, and a "
                "wrong base gives wrong text without an error. Add the base the model was trained "
                "with."
            )
        try:
            return RotaryEmbedding(
                name,
                base=settings["rope_theta"],
                scaling=settings,
                rotary_dim=rotated_channels(head_dim, settings),
            )
        except (TypeError, OverflowError) as error:
            raise ValueError(f"The config's rotary settings make no table: {error}") from error

    if rope is None:
        named = {"rope_theta": config.get("rope_theta")}
        settings = [config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
        for name in {name for given in settings for name in given}:
            values = [given[name] for given in (named, *settings) if given.get(name) is not None]
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"The config has several values of {name}, {_brief(values)}, and only one can "
                    "be used. Take the config.json that belongs to the weights."
                )
        return build("rotary_emb", named | settings[0] | settings[1])
    return {kind: build(f"rotary_emb_{kind}", rope[kind]) for kind in sorted(set(layer_types))}


_NEEDED = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
}
_READ = {
    "head_dim",
    "hidden_act",
    "num_key_value_heads",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
}
# What concerns training, tokens, or the programs that run a model, and not its output.
_INERT = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}
# What changes nothing only while it has this value.
_NEUTRAL = {
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}


# What the values of keys have to be, whichever families read them.
_SIZES = (
    *("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window"),
    *("sliding_window_pattern", "vocab_size"),
)
_POSITIVE_NUMBERS = (
    *("final_logit_softcapping", "query_pre_attn_scalar", "rms_norm_eps", "rope_local_base_freq"),
    "rope_theta",
)
_TRUTHS = ("attention_bias", "attention_out_bias", "tie_word_embeddings", "use_sliding_window")
_TEXTS = ("hidden_act", "hidden_activation")
_MAPPINGS = ("rope_parameters", "rope_scaling")
# A size that no model has, and of which two make no array that numpy refuses.
_TOO_LARGE = 2**28
# The deepest published decoders have 126; building as many as this takes a second.
_MOST_LAYERS = 1024
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        _SIZES,
        (
            f"a whole number from 1 to {_TOO_LARGE - 1}",
            lambda value: type(value) is int and 0 < value < _TOO_LARGE,
        ),
    ),
    **dict.fromkeys(
        _POSITIVE_NUMBERS,
        (
            "a positive number",
            lambda value: type(value) in (int, float) and 0 < value < 1e300,
        ),
    ),
    **dict.fromkeys(_TRUTHS, ("true or false", lambda value: type(value) is bool)),
    **dict.fromkeys(_TEXTS, ("a text", lambda value: type(value) is str)),
    **dict.fromkeys(_MAPPINGS, ("an object", lambda value: type(value) is dict)),
    "num_hidden_layers": (
        f"a whole number from 1 to {_MOST_LAYERS}",
        lambda value: type(value) is int and 0 < value <= _MOST_LAYERS,
    ),
    "layer_types": (
        "a list of texts",
        lambda value: type(value) is list and all(type(v) is str for v in value),
    ),
    "max_window_layers": (
        "a whole number from 0 on",
        lambda value: type(value) is int and value >= 0,
    ),
}


def _check_config(
    name: str, config: dict[str, Any], needs: Collection[str], reads: Collection[str]
) -> None:
    needed = {*_NEEDED, *needs}
    if missing := sorted(needed - set(config)):
        raise ValueError(
            f"The config lacks {', '.join(missing)}, without which a {name} model is not "
            "determined. Take the config.json that belongs to the weights."
        )
    read = needed | _READ | {*reads}
    for key in sorted(read & _KINDS.keys() & config.keys()):
        expected, is_of_kind = _KINDS[key]
        value = config[key]
        if not (is_of_kind(value) or (value is None and key not in needed)):
            raise ValueError(
                f"The config has {key} = {_brief(value)}, where {expected} belongs, so there is no "
                f"{name} model of it. Take the config.json that belongs to the weights."
            )
    unread = {
        key: value
        for key, value in config.items()
        if not (key in read or key in _INERT or key.startswith("_") or value is None)
        and _NEUTRAL.get(key) is not value
    }
    if unread:
        given = ", ".join(f"{key} = {_brief(value)}" for key, value in [*unread.items()][:20])
        raise ValueError(
            f"The config has {given}, which a {name} model is built without here, so its output "
            f"could be wrong. Supported are {', '.join(sorted(read))}. Use a checkpoint that needs "
            "no others, or take out of config.json what has no influence on the output."
        )


def _brief(value: Any) -> str:
    # Python refuses to write out whole numbers of thousands of digits.
    return f"{value!r:.80}" if not isinstance(value, int) or abs(value) < 2**64 else "2**64 or more"
