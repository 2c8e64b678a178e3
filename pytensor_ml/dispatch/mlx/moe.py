"""MLX kernels of mixtures of experts."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pytensor.link.mlx.dispatch.basic import mlx_funcify

from pytensor_ml.layers.moe import ExpertsLayer, ExpertsPullback


@mlx_funcify.register(ExpertsLayer)
def mlx_funcify_experts(op: ExpertsLayer, **kwargs: Any) -> Callable[..., mx.array]:
    return _run_experts


@mlx_funcify.register(ExpertsPullback)
def mlx_funcify_experts_pullback(
    op: ExpertsPullback, **kwargs: Any
) -> Callable[..., tuple[mx.array, ...]]:
    def experts_pullback(
        x: mx.array, ids: mx.array, weights: mx.array, *others: mx.array
    ) -> tuple[mx.array, ...]:
        *parameters, g = others
        if x.size == 0:
            return tuple(mx.zeros_like(v) for v in (x, weights, *parameters))
        _, gradients = mx.vjp(
            lambda x, weights, *parameters: _run_experts(x, ids, weights, *parameters),
            [x, weights, *parameters],
            [g],
        )
        return tuple(gradients)

    return experts_pullback


def _run_experts(
    x: mx.array, ids: mx.array, weights: mx.array, gate: mx.array, up: mx.array, down: mx.array
) -> mx.array:
    k = ids.shape[-1]
    experts = ids.reshape(-1)
    order = mx.argsort(experts)
    tokens = x.reshape(-1, x.shape[-1])[order // k][:, None]

    def multiply(rows: mx.array, parameter: mx.array) -> mx.array:
        return mx.gather_mm(
            rows,
            parameter,
            rhs_indices=experts[order],
            sorted_indices=True,
        )

    inner = multiply(tokens, gate)
    hidden = inner * mx.sigmoid(inner) * multiply(tokens, up)
    outputs = multiply(hidden, down)[:, 0]
    by_token = outputs[mx.argsort(order)].reshape(*ids.shape, outputs.shape[-1])
    return mx.sum(by_token * weights[..., None], axis=-2)
