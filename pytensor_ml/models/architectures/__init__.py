"""Published architectures, one file a family; importing one makes it known to the loaders."""

from pytensor_ml.models.architectures import gemma3, llama, mistral, qwen

__all__ = ["gemma3", "llama", "mistral", "qwen"]
