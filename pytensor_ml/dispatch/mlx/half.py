"""MLX kernel of float16 words."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pytensor.link.mlx.dispatch.basic import mlx_funcify

from pytensor_ml.layers.half import Widen


@mlx_funcify.register(Widen)
def mlx_funcify_widen(op: Widen, **kwargs: Any) -> Callable[..., mx.array]:
    return widened


def widened(words: mx.array) -> mx.array:
    return words.view(mx.float16).astype(mx.float32)
