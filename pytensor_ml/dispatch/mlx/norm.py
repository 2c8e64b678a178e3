"""MLX kernels of the norms."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pytensor.link.mlx.dispatch.basic import mlx_funcify

from pytensor_ml.layers.norm import PreciseSum


@mlx_funcify.register(PreciseSum)
def mlx_funcify_precise_sum(op: PreciseSum, **kwargs: Any) -> Callable[[mx.array], mx.array]:
    def precise_sum(x: mx.array) -> mx.array:
        # On a CPU, mx.sum adds serially in the dtype of x; adding halves rounds log2(size) times.
        for axis in op.axes:
            while x.shape[axis] > 8:
                half = x.shape[axis] // 2
                lower, upper, odd = mx.split(x, [half, 2 * half], axis=axis)
                x = lower + upper
                if odd.shape[axis]:
                    x = mx.concatenate([x, odd], axis=axis)
        return mx.sum(x, axis=op.axes)

    return precise_sum
