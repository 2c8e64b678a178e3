"""MLX kernels of attention."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import mlx.core as mx
from pytensor.link.mlx.dispatch.basic import mlx_funcify

from pytensor_ml.layers.attention import AttentionLayer, AttentionPullback, CachedAttentionLayer


@mlx_funcify.register(AttentionLayer)
def mlx_funcify_attention(op: AttentionLayer, **kwargs: Any) -> Callable[..., mx.array]:
    def attention(q: mx.array, k: mx.array, v: mx.array, *mask: mx.array) -> mx.array:
        adds_to_scores = mask and mask[0].dtype != mx.bool_
        if op.softcap is not None or adds_to_scores or q.ndim != 4:
            return _attend(op, q, k, v, *mask)
        visible = _visible(op, q, k, *mask)
        if visible is not None and (mask or op.window is not None):
            k, v = _drop_unseen(k, v, visible)
        y = mx.fast.scaled_dot_product_attention(
            _wide(q), _wide(k), _wide(v), scale=op.scale, mask=visible
        ).astype(q.dtype)
        # MLX gives the mean of the values where a row sees nothing.
        return y if visible is None else mx.where(mx.any(visible, axis=-1, keepdims=True), y, 0)

    return attention


@mlx_funcify.register(AttentionPullback)
def mlx_funcify_attention_pullback(
    op: AttentionPullback, **kwargs: Any
) -> Callable[..., tuple[mx.array, ...]]:
    def attention_pullback(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, *mask: mx.array
    ) -> tuple[mx.array, ...]:
        if mask and mask[0].dtype == mx.bool_:
            gradients = mx.vjp(lambda *qkv: _attend(op, *qkv, *mask), [q, k, v], [g])[1]
        else:
            gradients = mx.vjp(lambda *inputs: _attend(op, *inputs), [q, k, v, *mask], [g])[1]
        return tuple(gradients)

    return attention_pullback


@mlx_funcify.register(CachedAttentionLayer)
def mlx_funcify_cached_attention(
    op: CachedAttentionLayer, **kwargs: Any
) -> Callable[..., mx.array]:
    def cached_attention(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        cached_keys: mx.array,
        cached_values: mx.array,
        length: mx.array,
        start: mx.array,
    ) -> mx.array:
        capacity = cached_keys.shape[-2]
        new_slot = length + mx.arange(k.shape[-2])
        old_slot = mx.arange(capacity)
        slots = mx.concatenate([old_slot, new_slot])
        written = mx.concatenate([old_slot < length, new_slot >= length])
        visible = written & (slots <= new_slot[:, None]) & (slots >= start[:, None, None])
        if op.window is not None:
            visible = visible & (new_slot[:, None] - slots < op.window)
        # The scores are joined, not the keys, so that the cache is not copied.
        scores = mx.concatenate([_scores(op, q, cached_keys), _scores(op, q, k)], axis=-1)
        weights = _masked_softmax(scores, visible[:, None])
        # A weight of 0 does not silence what a slot beyond `length` holds if it is not finite.
        values = mx.where((old_slot < length)[:, None], cached_values, 0)
        mixed = _mix(weights[..., :capacity], values) + _mix(weights[..., capacity:], v)
        return mixed.astype(q.dtype)

    return cached_attention


def _attend(
    op: AttentionLayer | AttentionPullback, q: mx.array, k: mx.array, v: mx.array, *mask: mx.array
) -> mx.array:
    visible = _visible(op, q, k, *mask)
    if visible is not None and (mask or op.window is not None):
        k, v = _drop_unseen(k, v, visible)
    scores = _scores(op, q, k)
    if mask and mask[0].dtype != mx.bool_:
        bias = mx.where(mask[0] > -math.inf, mask[0], 0)
        scores = scores + bias.astype(scores.dtype)
    return _mix(_masked_softmax(scores, visible), v).astype(q.dtype)


def _visible(
    op: AttentionLayer | AttentionPullback, q: mx.array, k: mx.array, *mask: mx.array
) -> mx.array | None:
    """Return where a query may see a key, or None if every query sees every key."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    lag = mx.arange(n_keys - n_queries, n_keys)[:, None] - mx.arange(n_keys)
    conditions = [m if m.dtype == mx.bool_ else m > -math.inf for m in mask]
    if op.is_causal:
        conditions.append(lag >= 0)
    if op.window is not None:
        conditions.append(lag < op.window)
    return reduce(mx.logical_and, conditions) if conditions else None


def _drop_unseen(k: mx.array, v: mx.array, visible: mx.array) -> tuple[mx.array, mx.array]:
    """Replace keys and values that no query of their batch row may see by 0."""
    over_queries_and_heads = (-2, -3)[: visible.ndim - 1]
    seen = mx.any(visible, axis=over_queries_and_heads)[..., None, :, None]
    return mx.where(seen, k, 0), mx.where(seen, v, 0)


def _masked_softmax(scores: mx.array, visible: mx.array | None) -> mx.array:
    if visible is None:
        return mx.softmax(scores, axis=-1)
    # A row that sees nothing would be NaN with -inf, and so would its gradient.
    scores = mx.where(visible, scores, mx.finfo(scores.dtype).min)
    return mx.where(visible, mx.softmax(scores, axis=-1), 0)


def _scores(
    op: AttentionLayer | AttentionPullback | CachedAttentionLayer, q: mx.array, k: mx.array
) -> mx.array:
    """Return the scaled products, of shape (..., n_head, n_queries, n_keys)."""
    products = _group(_wide(q) * op.scale, k) @ _wide(k).swapaxes(-1, -2)
    scores = products.reshape(*q.shape[:-1], k.shape[-2])
    return scores if op.softcap is None else op.softcap * mx.tanh(scores / op.softcap)


def _mix(weights: mx.array, v: mx.array) -> mx.array:
    mixed = _group(weights, v) @ _wide(v)
    return mixed.reshape(*weights.shape[:-1], v.shape[-1])


def _group(x: mx.array, k: mx.array) -> mx.array:
    """Join the rows of the heads of ``x`` that share a head of ``k``."""
    n_kv_head = k.shape[-3]
    n_rows = x.shape[-3] // n_kv_head * x.shape[-2]
    return x.reshape(*x.shape[:-3], n_kv_head, n_rows, x.shape[-1])


def _wide(x: mx.array) -> mx.array:
    return x.astype(mx.float32) if x.dtype == mx.float16 else x
