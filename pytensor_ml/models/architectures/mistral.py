"""Mistral: a Llama whose layers may see a window only. Its GGUF files are of llama's kind."""

from typing import Any

from pytensor_ml.models.decoder import DecoderOptions, register_decoder


@register_decoder("MistralForCausalLM", "mistral", reads=("sliding_window",))
def mistral(config: dict[str, Any]) -> DecoderOptions:
    """Return what is particular to Mistral [1]_.

    References
    ----------
    .. [1] Jiang et al. (2023). Mistral 7B. arXiv:2310.06825.
    """
    return DecoderOptions(window=config.get("sliding_window", 4096))
