"""Builders of published architectures, one file a family."""

from pytensor_ml.models.architectures.llama import build_llama

__all__ = ["build_llama"]
