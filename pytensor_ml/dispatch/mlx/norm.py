"""MLX kernels of the norms."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pytensor.link.mlx.dispatch.basic import mlx_funcify

from pytensor_ml.layers.norm import (
    PreciseSum,
    RMSNormLayer,
    RMSNormPullback,
    ZeroCenteredRMSNormLayer,
)

# As many terms as are added one after the other. Beside one that is large, each that is smaller
# than its rounding is lost; twice as many lost too much of small losses.
TERMS = 4


@mlx_funcify.register(PreciseSum)
def mlx_funcify_precise_sum(op: PreciseSum, **kwargs: Any) -> Callable[[mx.array], mx.array]:
    def precise_sum(x: mx.array) -> mx.array:
        for axis in op.axes:
            x = add_parts(x, axis)
        return mx.sum(x, axis=op.axes)

    return precise_sum


@mlx_funcify.register(RMSNormLayer)
def mlx_funcify_rms_norm(op: RMSNormLayer, **kwargs: Any) -> Callable[..., mx.array]:
    def rms_norm(x: mx.array, *scale: mx.array) -> mx.array:
        wide = widen(x)
        y = wide / root_mean_square(wide, op.n_in, op.epsilon)
        return (y * scale[0].astype(y.dtype) if op.affine else y).astype(x.dtype)

    return rms_norm


@mlx_funcify.register(ZeroCenteredRMSNormLayer)
def mlx_funcify_zero_centered_rms_norm(
    op: ZeroCenteredRMSNormLayer, **kwargs: Any
) -> Callable[..., mx.array]:
    def zero_centered_rms_norm(x: mx.array, weight: mx.array) -> mx.array:
        wide = widen(x)
        normalized = wide / root_mean_square(wide, op.n_in, op.epsilon)
        dtype = wide.dtype if op.compute_dtype else x.dtype
        return (normalized.astype(dtype) * (1 + weight.astype(dtype))).astype(x.dtype)

    return zero_centered_rms_norm


@mlx_funcify.register(RMSNormPullback)
def mlx_funcify_rms_norm_pullback(op: RMSNormPullback, **kwargs: Any) -> Callable[..., Any]:
    def rms_norm_pullback(x: mx.array, dy: mx.array, *parameters: mx.array) -> Any:
        wide, g = widen(x), dy.astype(widen(x).dtype)
        rms = root_mean_square(wide, op.n_in, op.epsilon)
        normalized = wide / rms
        leading = tuple(range(x.ndim - 1))
        gradients = []
        for parameter in parameters:
            products = g * normalized
            for axis in leading:
                products = add_parts(products, axis)
            gradients.append(mx.sum(products, axis=leading).astype(parameter.dtype))
            g = g * (op.offset + parameter.astype(wide.dtype))
        mean = mx.sum(add_parts(g * normalized, -1), axis=-1) / op.n_in
        dx = (g - normalized * mean[..., None]) / rms
        return (dx.astype(x.dtype), *gradients) if gradients else dx.astype(x.dtype)

    return rms_norm_pullback


def root_mean_square(x: mx.array, n: int, epsilon: float) -> mx.array:
    """Return the root mean square of the last axis, of width ``n``, which is kept.

    The axis is put back last, as MLX fuses what follows up to there: an elementwise loop that has
    the root in it computes it anew for each element.
    """
    total = mx.sum(add_parts(x * x, -1), axis=-1)
    return mx.sqrt(total / n + epsilon)[..., None]


def add_parts(x: mx.array, axis: int) -> mx.array:
    """Add parts of ``axis``, each of equal length, until it is at most ``TERMS`` long.

    On a CPU, mx.sum adds serially in the dtype of x, so that a long sum loses small terms.
    """
    axis = axis % x.ndim
    while (size := x.shape[axis]) > TERMS:
        parts = next((n for n in range(TERMS, TERMS // 2 - 1, -1) if size % n == 0), TERMS)
        length = size // parts
        rest = None
        if size % parts:
            x, rest = mx.split(x, [parts * length], axis=axis)
        x = mx.sum(mx.unflatten(x, axis, (parts, length)), axis=axis)
        if rest is not None:
            x = mx.concatenate([x, rest], axis=axis)
    return x


def widen(x: mx.array) -> mx.array:
    """Return ``x`` in at least float32."""
    return x.astype(mx.float32) if x.dtype == mx.float16 else x
