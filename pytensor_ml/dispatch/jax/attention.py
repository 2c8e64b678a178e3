"""JAX kernels of attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.link.jax.dispatch.basic import jax_funcify

from pytensor_ml.layers.attention import AttentionLayer, AttentionPullback, CachedAttentionLayer

# Slots of the cache that are read at a time.
BLOCK = 512

# With fewer queries than this, XLA on a CPU reads the keys faster as the first factor.
FEW_ROWS = 16


@jax_funcify.register(AttentionLayer)
def jax_funcify_attention(op: AttentionLayer, **kwargs: Any) -> Callable[..., jax.Array]:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *mask: jax.Array) -> jax.Array:
        return _attend(op, q, k, v, *mask)

    return attention


@jax_funcify.register(AttentionPullback)
def jax_funcify_attention_pullback(
    op: AttentionPullback, **kwargs: Any
) -> Callable[..., tuple[jax.Array, ...]]:
    def attention_pullback(
        q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, *mask: jax.Array
    ) -> tuple[jax.Array, ...]:
        if mask and mask[0].dtype == bool:
            return jax.vjp(lambda *qkv: _attend(op, *qkv, *mask), q, k, v)[1](g)
        return jax.vjp(lambda *inputs: _attend(op, *inputs), q, k, v, *mask)[1](g)

    return attention_pullback


@jax_funcify.register(CachedAttentionLayer)
def jax_funcify_cached_attention(
    op: CachedAttentionLayer, **kwargs: Any
) -> Callable[..., jax.Array]:
    def cached_attention(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cached_keys: jax.Array,
        cached_values: jax.Array,
        length: jax.Array,
        start: jax.Array,
    ) -> jax.Array:
        n_new, capacity = q.shape[-2], cached_keys.shape[-2]
        block = min(BLOCK, capacity)
        slot = length + jnp.arange(n_new)

        def read(
            state: tuple[jax.Array, ...], keys: jax.Array, values: jax.Array, visible: jax.Array
        ) -> tuple[jax.Array, ...]:
            scores = jnp.where(visible, _scores(op, q, keys), -jnp.inf)
            high, total, mixed = state
            new_high = jnp.maximum(high, jnp.max(scores, axis=-1, keepdims=True))
            shift = jnp.where(jnp.isinf(new_high), 0, new_high)
            weights = jnp.where(visible, jnp.exp(scores - shift), 0)
            shrink = jnp.exp(high - shift)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            return new_high, total, mixed * shrink + _mix(weights, values)

        def visible_slots(slots: jax.Array) -> jax.Array:
            visible = (slots <= slot[:, None]) & (slots >= start[:, None, None])
            if op.window is not None:
                visible &= slot[:, None] - slots < op.window
            return visible[:, None]

        def read_block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            # The last block is moved back where it would pass the end, over slots already read.
            first = jnp.minimum(i * block, capacity - block)
            slots = first + jnp.arange(block)
            keys = jax.lax.dynamic_slice_in_dim(cached_keys, first, block, axis=-2)
            values = jax.lax.dynamic_slice_in_dim(cached_values, first, block, axis=-2)
            unread = (slots >= i * block) & (slots < length)
            # A weight of 0 does not silence what a slot beyond `length` holds if it is not finite.
            values = jnp.where((slots < length)[:, None], values, 0)
            return read(state, keys, values, visible_slots(slots) & unread)

        one_a_row = jnp.zeros((*q.shape[:-1], 1), _wide(q).dtype)
        nothing = (
            one_a_row - jnp.inf,
            one_a_row,
            jnp.zeros((*q.shape[:-1], v.shape[-1]), one_a_row.dtype),
        )
        state = read(nothing, k, v, visible_slots(slot))
        if block:
            n_blocks = (length + block - 1) // block
            state = jax.lax.fori_loop(0, n_blocks, read_block, state)
        _, total, mixed = state
        return (mixed / jnp.where(total == 0, 1, total)).astype(q.dtype)

    return cached_attention


def _attend(
    op: AttentionLayer | AttentionPullback,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *mask: jax.Array,
) -> jax.Array:
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    visible, bias = jnp.ones((n_queries, n_keys), bool), None
    if mask and mask[0].dtype == bool:
        visible = mask[0]
    elif mask:
        visible = mask[0] > -jnp.inf
        bias = jnp.where(visible, mask[0], 0)
    lag = jnp.arange(n_keys - n_queries, n_keys)[:, None] - jnp.arange(n_keys)
    if op.is_causal:
        visible &= lag >= 0
    if op.window is not None:
        visible &= lag < op.window
    if mask or op.window is not None:
        over_queries_and_heads = (-2, -3)[: visible.ndim - 1]
        seen = jnp.any(visible, axis=over_queries_and_heads)[..., None, :, None]
        k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    scores = _scores(op, q, k)
    if bias is not None:
        scores += bias.astype(scores.dtype)
    scores = jnp.where(visible, scores, -jnp.inf)
    shift = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(jnp.isinf(shift), 0, shift))
    # Without this a hidden score would get the gradient 0 * inf.
    weights = jnp.where(visible, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (_mix(weights, v) / jnp.where(total == 0, 1, total)).astype(q.dtype)


def _scores(
    op: AttentionLayer | AttentionPullback | CachedAttentionLayer, q: jax.Array, k: jax.Array
) -> jax.Array:
    """Return the scaled products, of shape (..., n_head, n_queries, n_keys)."""
    grouped, k = _group(_wide(q) * op.scale, k), _wide(k)
    if grouped.shape[-2] < FEW_ROWS:
        products = jnp.einsum("...kd,...qd->...kq", k, grouped).swapaxes(-1, -2)
    else:
        products = grouped @ k.swapaxes(-1, -2)
    scores = products.reshape(*q.shape[:-1], k.shape[-2])
    return scores if op.softcap is None else op.softcap * jnp.tanh(scores / op.softcap)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    mixed = _group(weights, v) @ _wide(v)
    return mixed.reshape(*weights.shape[:-1], v.shape[-1])


def _group(x: jax.Array, k: jax.Array) -> jax.Array:
    """Join the rows of the heads of ``x`` that share a head of ``k``."""
    n_kv_head = k.shape[-3]
    n_rows = x.shape[-3] // n_kv_head * x.shape[-2]
    return x.reshape(*x.shape[:-3], n_kv_head, n_rows, x.shape[-1])


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x
