"""Graph rewrites."""

from pytensor_ml.rewriting import blocks as blocks
