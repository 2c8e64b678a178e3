"""MLX kernels of generation."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pytensor.link.mlx.dispatch.basic import mlx_funcify

from pytensor_ml.generation import CacheWrite


@mlx_funcify.register(CacheWrite)
def mlx_funcify_cache_write(op: CacheWrite, **kwargs: Any) -> Callable[..., mx.array]:
    def cache_write(cache: mx.array, new: mx.array, slot: mx.array) -> mx.array:
        return mx.slice_update(cache, new, slot.reshape(1), axes=(2,))

    return cache_write
