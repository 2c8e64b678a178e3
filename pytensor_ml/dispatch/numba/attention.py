"""Numba kernels of attention."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.base import LayerOp
from pytensor_ml.dispatch.numba.basic import (
    apart,
    empty_like_heads,
    exp,
    kernel_key,
    largest,
    memory,
    place,
    register_kernel,
    with_whole_vectors,
)
from pytensor_ml.dispatch.numba.products import multiply
from pytensor_ml.dispatch.numba.threads import count_parts, in_threads
from pytensor_ml.layers.attention import AttentionLayer, AttentionPullback, CachedAttentionLayer

Array = np.ndarray

# Rows of scores that are held at a time.
BLOCK = 128

NO_WINDOW = 2**62

NO_MASK = (0, 0, 0, 0)


def is_covered(op: AttentionLayer | AttentionPullback | CachedAttentionLayer) -> bool:
    """Return whether all have four axes, the floats one dtype, and batches may be equal."""
    n_floats = {AttentionLayer: 3, AttentionPullback: 4, CachedAttentionLayer: 5}[type(op)]
    floats, others = op.input_types[:n_floats], op.input_types[n_floats:]
    masks = () if isinstance(op, CachedAttentionLayer) else others
    batches = {kind.shape[0] for kind in floats if kind.ndim} - {None}
    return (
        all(kind.ndim == 4 for kind in (*floats, *masks))
        and len({kind.dtype for kind in floats}) == 1
        and len(batches) < 2
    )


@register_kernel(AttentionLayer, covers=is_covered)
def numba_funcify_attention(op: AttentionLayer, node: Apply, **kwargs: Any) -> Any:
    options = options_of(op)

    @numba_njit
    def attention(q: Array, k: Array, v: Array, mask: Any = None) -> Array:
        check_shapes(q, k, v, mask)
        visible, bias = parts_of_mask(mask, q)
        heads = with_whole_vectors(q), with_whole_vectors(k), with_whole_vectors(v)
        return attend(*heads, visible, bias, *options)

    return attention, cache_key(op, node)


@register_kernel(AttentionPullback, covers=is_covered)
def numba_funcify_attention_pullback(op: AttentionPullback, node: Apply, **kwargs: Any) -> Any:
    options = options_of(op)
    has_mask_gradient = len(node.outputs) == 4

    @numba_njit
    def gradients(q: Array, k: Array, v: Array, g: Array, mask: Any = None) -> Any:
        check_shapes(q, k, v, mask)
        if g.shape[:3] != q.shape[:3] or g.shape[3] != v.shape[3]:
            raise ValueError("Attention got a gradient whose shape differs from its output's")
        visible, bias = parts_of_mask(mask, q)
        dmask = np.zeros(mask.shape if has_mask_gradient else NO_MASK)
        heads = with_whole_vectors(q), with_whole_vectors(k), with_whole_vectors(v)
        dq, dk, dv = pull_back(*heads, with_whole_vectors(g), visible, bias, dmask, *options)
        if has_mask_gradient:
            return dq, dk, dv, dmask.astype(mask.dtype)
        return dq, dk, dv

    return gradients, cache_key(op, node)


@register_kernel(CachedAttentionLayer, covers=is_covered)
def numba_funcify_cached_attention(op: CachedAttentionLayer, node: Apply, **kwargs: Any) -> Any:
    scale, softcap, _, window = options_of(op)

    @numba_njit
    def cached_attention(
        q: Array,
        k: Array,
        v: Array,
        cached_keys: Array,
        cached_values: Array,
        length: Array,
        start: Array,
    ) -> Array:
        check_shapes(q, k, v, None)
        check_shapes(q, cached_keys, cached_values, None)
        n_old = int(length.item())
        if n_old < 0 or n_old > cached_keys.shape[2] or len(start) != q.shape[0]:
            raise ValueError("Attention got a cache whose length or start does not fit it")
        y = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
        n_items = count_blocks(q, k)
        n_parts = count_parts(n_items, q.size * (n_old + k.shape[2]))
        attend_to_cache_in_threads(
            n_items,
            n_parts,
            with_whole_vectors(q),
            k,
            v,
            cached_keys,
            cached_values,
            n_old,
            start,
            scale,
            softcap,
            window,
            y,
        )
        return y

    return cached_attention, cache_key(op, node)


def options_of(
    op: AttentionLayer | AttentionPullback | CachedAttentionLayer,
) -> tuple[float, float, bool, int]:
    """Return the scale, the softcap or 0, whether attention is causal, and the window."""
    window = NO_WINDOW if op.window is None else op.window
    is_causal = isinstance(op, CachedAttentionLayer) or op.is_causal
    return float(op.scale), float(op.softcap or 0), is_causal, int(window)


def parts_of_mask(mask: Any, q: Any) -> Any:
    """Which keys a mask lets queries see, and what it adds to their scores; empty for all, none."""


@overload(parts_of_mask)
def overload_parts_of_mask(mask: Any, q: Any) -> Callable:
    def nothing(mask: Any, q: Any) -> Any:
        return np.empty(NO_MASK, np.bool_)[::1], np.empty(NO_MASK, q.dtype)[::1]

    def selection(mask: Any, q: Any) -> Any:
        return mask[::1], np.empty(NO_MASK, q.dtype)[::1]

    def addition(mask: Any, q: Any) -> Any:
        entries = np.ascontiguousarray(mask).reshape(mask.size)
        visible = np.empty(mask.size, np.bool_)
        for i in range(mask.size):
            visible[i] = entries[i] > -np.inf
        return visible.reshape(mask.shape)[::1], mask[::1]

    if not isinstance(mask, types.Array):
        return nothing
    return selection if isinstance(mask.dtype, types.Boolean) else addition


@numba_njit
def attend_blocks(
    first: int,
    stop: int,
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    bias: Array,
    scale: float,
    softcap: float,
    is_causal: bool,
    window: int,
    y: Array,
) -> None:
    n_head, n_queries = q.shape[1:3]
    n_kv_head, n_keys = k.shape[1:3]
    group = n_head // n_kv_head
    per_block = block_size(group)
    n_blocks = -(-n_queries // per_block)
    seen = np.empty(0, np.bool_)
    for item in range(first, stop):
        b, h = item // n_blocks // n_kv_head, item // n_blocks % n_kv_head
        i = item % n_blocks * per_block
        if item == first or (h == 0 and i == 0):
            seen = seen_keys(visible, b, n_queries, n_keys, is_causal, window)
        if item == first or i == 0:
            keys, values = seen_rows(k, b, h, seen), seen_rows(v, b, h, seen)
        n = min(per_block, n_queries - i)
        position = n_keys - n_queries + i
        low, end = reach(position, n, n_keys, is_causal, window)
        rows = gather(q, b, h * group, group, i, n, scale)
        scores = inner_products(rows, keys, low, end)
        if softcap > 0:
            cap(scores, softcap)
        total = weigh(scores, visible, bias, b, h * group, i, n, low, position, is_causal, window)
        mixed = weighted_sums(scores, values, low, end)
        scatter(mixed, inverse_or_zero(total), y, b, h * group, i, n)


attend_in_threads = in_threads(attend_blocks)


@apart
@numba_njit
def attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    bias: Array,
    scale: float,
    softcap: float,
    is_causal: bool,
    window: int,
) -> Array:
    y = empty_like_heads(q, v.shape[3])
    n_items = count_blocks(q, k)
    n_parts = count_parts(n_items, cost(q, k))
    attend_in_threads(
        n_items, n_parts, q, k, v, visible, bias, scale, softcap, is_causal, window, y
    )
    return y


@numba_njit
def pull_back_heads(
    first: int,
    stop: int,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    visible: Array,
    bias: Array,
    scale: float,
    softcap: float,
    is_causal: bool,
    window: int,
    dq: Array,
    dk: Array,
    dv: Array,
    dmask: Array,
) -> None:
    n_head, n_queries = q.shape[1:3]
    n_kv_head, n_keys = k.shape[1:3]
    group = n_head // n_kv_head
    per_block = block_size(group)
    seen = np.empty(0, np.bool_)
    for item in range(first, stop):
        b, h = item // n_kv_head, item % n_kv_head
        if item == first or h == 0:
            seen = seen_keys(visible, b, n_queries, n_keys, is_causal, window)
        keys, values = seen_rows(k, b, h, seen), seen_rows(v, b, h, seen)
        clear_rows(dk, b, h)
        clear_rows(dv, b, h)
        for i in range(0, n_queries, per_block):
            n = min(per_block, n_queries - i)
            position = n_keys - n_queries + i
            low, end = reach(position, n, n_keys, is_causal, window)
            rows = gather(q, b, h * group, group, i, n, scale)
            scores = inner_products(rows, keys, low, end)
            capped = scores
            if softcap > 0:
                cap(scores, softcap)
                capped = scores.copy()
            total = weigh(
                scores, visible, bias, b, h * group, i, n, low, position, is_causal, window
            )
            dy = gather(g, b, h * group, group, i, n, 1.0)
            dscores = inner_products(dy, values, low, end)
            softmax_pullback(scores, total, dscores)
            if dmask.size > 0:
                add_block(dmask, dscores, b, h * group, i, n, low)
            if softcap > 0:
                cap_pullback(capped, softcap, dscores)
            total[:] = scale
            scatter(weighted_sums(dscores, keys, low, end), total, dq, b, h * group, i, n)
            add_rows(dk, b, h, low, weighted_sums(dscores.T, rows, 0, len(rows)))
            add_rows(dv, b, h, low, weighted_sums(scores.T, dy, 0, len(dy)))


pull_back_in_threads = in_threads(pull_back_heads)


@apart
@numba_njit
def pull_back(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    visible: Array,
    bias: Array,
    dmask: Array,
    scale: float,
    softcap: float,
    is_causal: bool,
    window: int,
) -> Any:
    dq = empty_like_heads(q, q.shape[3])
    dk, dv = empty_like_heads(k, k.shape[3]), empty_like_heads(v, v.shape[3])
    n_items = k.shape[0] * k.shape[1]
    # Heads may share a mask, whose gradient is then a sum over them.
    n_parts = 1 if dmask.size > 0 else count_parts(n_items, 2 * cost(q, k))
    pull_back_in_threads(
        n_items,
        n_parts,
        q,
        k,
        v,
        g,
        visible,
        bias,
        scale,
        softcap,
        is_causal,
        window,
        dq,
        dk,
        dv,
        dmask,
    )
    return dq, dk, dv


@numba_njit
def attend_blocks_to_cache(
    first: int,
    stop: int,
    q: Array,
    k: Array,
    v: Array,
    cached_keys: Array,
    cached_values: Array,
    n_old: int,
    start: Array,
    scale: float,
    softcap: float,
    window: int,
    y: Array,
) -> None:
    n_kv_head, n_new = k.shape[1:3]
    group = q.shape[1] // n_kv_head
    per_block = block_size(group)
    n_blocks = -(-n_new // per_block)
    for item in range(first, stop):
        b, h = item // n_blocks // n_kv_head, item // n_blocks % n_kv_head
        i = item % n_blocks * per_block
        n = min(per_block, n_new - i)
        slot = n_old + i
        low = max(int(start[b]), slot + 1 - window, 0)
        low_old = min(low, n_old)
        low_new = min(max(low - n_old, 0), i + n)
        rows = gather(q, b, h * group, group, i, n, scale)
        old = inner_products(rows, cached_keys[b, h, :n_old], low_old, n_old)
        new = inner_products(rows, k[b, h, : i + n], low_new, i + n)
        high, total = np.empty(len(rows), q.dtype), np.empty(len(rows), q.dtype)
        high[:] = -np.inf
        total[:] = 0
        for scores, position in ((old, low_old), (new, n_old + low_new)):
            if softcap > 0:
                cap(scores, softcap)
            hide(scores, n, position, slot, True, window)
            update_maximum(high, scores)
        exponentiate(old, high, total)
        exponentiate(new, high, total)
        mixed = weighted_sums(old, cached_values[b, h, :n_old], low_old, n_old)
        mixed += weighted_sums(new, v[b, h, : i + n], low_new, i + n)
        scatter(mixed, inverse_or_zero(total), y, b, h * group, i, n)


attend_to_cache_in_threads = in_threads(attend_blocks_to_cache)


def cache_key(op: LayerOp, node: Apply) -> str:
    masks = [x.type.dtype for x in node.inputs[3:]]
    return kernel_key(type(op), op._props_dict(), masks)


@numba_njit
def block_size(group: int) -> int:
    """Return how many queries of heads that share a key are computed at a time."""
    return max(1, BLOCK // group)


@numba_njit
def count_blocks(q: Array, k: Array) -> int:
    return k.shape[0] * k.shape[1] * -(-q.shape[2] // block_size(q.shape[1] // k.shape[1]))


@numba_njit
def cost(q: Array, k: Array) -> int:
    """Return how many bytes could be read and written in the time of attention."""
    return q.size * k.shape[2]


@numba_njit
def check_shapes(q: Array, k: Array, v: Array, mask: Any) -> None:
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError("Attention got queries, keys and values whose shapes do not match")
    if mask is not None:
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        for axis in range(4):
            if mask.shape[axis] != 1 and mask.shape[axis] != full[axis]:
                raise ValueError("Attention got a mask whose shape does not match the scores'")


@numba_njit
def reach(position: int, n: int, n_keys: int, is_causal: bool, window: int) -> tuple[int, int]:
    """Return the first and one past the last key that n queries from a position on see."""
    stop = max(min(position + n, n_keys), 0) if is_causal else n_keys
    return min(max(position + 1 - window, 0), stop), stop


@numba_njit
def gather(x: Array, b: int, first_head: int, n_heads: int, i: int, n: int, factor: float) -> Array:
    """Return rows i to i + n of several heads, one head below another, times a factor."""
    width = x.shape[3]
    rows = np.empty((n_heads * n, width), x.dtype)
    source, made, scale = memory(x), memory(rows), x.dtype.type(factor)
    for r in range(len(rows)):
        begin, at = place(x, b, first_head + r // n, i + r % n), np.uintp(r * width)
        for d in range(np.uintp(width)):
            made[at + d] = source[begin + d] * scale
    # Numba frees what it does not see used.
    return rows


@numba_njit
def scatter(
    rows: Array, factor: Array, out: Array, b: int, first_head: int, i: int, n: int
) -> None:
    """Undo :func:`gather`, with each row times its factor, or 0 where that is 0."""
    width = out.shape[3]
    source, made = memory(rows), memory(out)
    for r in range(len(rows)):
        begin, at = place(out, b, first_head + r // n, i + r % n), np.uintp(r * width)
        scale = factor[r]
        for d in range(np.uintp(width)):
            made[begin + d] = source[at + d] * scale if scale != 0 else scale


@numba_njit
def inverse_or_zero(total: Array) -> Array:
    inverse = np.zeros_like(total)
    for r in range(len(total)):
        if total[r] != 0:
            inverse[r] = 1 / total[r]
    return inverse


@numba_njit
def clear_rows(out: Array, b: int, h: int) -> None:
    made = memory(out)
    for j in range(out.shape[2]):
        begin = place(out, b, h, j)
        for d in range(np.uintp(out.shape[3])):
            made[begin + d] = 0


@numba_njit
def add_rows(out: Array, b: int, h: int, low: int, rows: Array) -> None:
    width = out.shape[3]
    source, made = memory(rows), memory(out)
    for j in range(len(rows)):
        begin, at = place(out, b, h, low + j), np.uintp(j * width)
        for d in range(np.uintp(width)):
            made[begin + d] += source[at + d]


@numba_njit
def add_block(out: Array, block: Array, b: int, first_head: int, i: int, n: int, low: int) -> None:
    """Add a block of scores to what may have axes of length 1 in the place of those of scores."""
    for r in range(len(block)):
        at_b, at_head = min(b, out.shape[0] - 1), min(first_head + r // n, out.shape[1] - 1)
        at_query = min(i + r % n, out.shape[2] - 1)
        for j in range(block.shape[1]):
            out[at_b, at_head, at_query, min(low + j, out.shape[3] - 1)] += block[r, j]


@numba_njit
def seen_keys(
    visible: Array, b: int, n_queries: int, n_keys: int, is_causal: bool, window: int
) -> Array:
    """Return which keys some query of a batch row sees; nothing if there is no mask."""
    if visible.size == 0:
        return np.empty(0, np.bool_)
    seen = np.zeros(n_keys, np.bool_)
    at_b = min(b, visible.shape[0] - 1)
    for h in range(visible.shape[1]):
        for i in range(n_queries):
            at_query = min(i, visible.shape[2] - 1)
            low, stop = reach(n_keys - n_queries + i, 1, n_keys, is_causal, window)
            for j in range(low, stop):
                seen[j] |= visible[at_b, h, at_query, min(j, visible.shape[3] - 1)]
    return seen


@numba_njit
def seen_rows(x: Array, b: int, h: int, seen: Array) -> Array:
    """Return the rows of a head, with 0 in the place of those that are known not to be seen."""
    if len(seen) == 0:
        return x[b, h]
    rows = np.zeros(x.shape[2:], x.dtype)
    for j in range(len(rows)):
        if seen[j]:
            for d in range(x.shape[3]):
                rows[j, d] = x[b, h, j, d]
    return rows[::1]


@numba_njit
def inner_products(x: Array, y: Array, low: int, stop: int) -> Array:
    products = np.empty((len(x), stop - low), x.dtype)
    multiply(x, y[low:stop].T, products)
    return products


@numba_njit
def weighted_sums(weights: Array, x: Array, low: int, stop: int) -> Array:
    mixed = np.empty((len(weights), x.shape[1]), x.dtype)
    multiply(weights, x[low:stop], mixed)
    return mixed


@numba_njit
def cap(scores: Array, softcap: float) -> None:
    bound = scores.dtype.type(softcap)
    for r in range(len(scores)):
        for j in range(scores.shape[1]):
            scores[r, j] = bound * np.tanh(scores[r, j] / bound)


@numba_njit
def cap_pullback(capped: Array, softcap: float, dscores: Array) -> None:
    for r in range(len(capped)):
        for j in range(capped.shape[1]):
            ratio = capped[r, j] / dscores.dtype.type(softcap)
            # A score that is hidden may be NaN.
            if dscores[r, j] != 0:
                dscores[r, j] *= 1 - ratio * ratio


@numba_njit
def hide_masked(
    scores: Array, visible: Array, b: int, first_head: int, i: int, n: int, low: int
) -> None:
    """Put -inf into a block of scores where a mask hides a key."""
    at_b = min(b, visible.shape[0] - 1)
    for r in range(len(scores)):
        at_head = min(first_head + r // n, visible.shape[1] - 1)
        at_query = min(i + r % n, visible.shape[2] - 1)
        for j in range(scores.shape[1]):
            if not visible[at_b, at_head, at_query, min(low + j, visible.shape[3] - 1)]:
                scores[r, j] = -np.inf


@numba_njit
def add_bias(scores: Array, bias: Array, b: int, first_head: int, i: int, n: int, low: int) -> None:
    """Add a mask to those of a block of scores that are not hidden."""
    at_b = min(b, bias.shape[0] - 1)
    for r in range(len(scores)):
        at_head = min(first_head + r // n, bias.shape[1] - 1)
        at_query = min(i + r % n, bias.shape[2] - 1)
        for j in range(scores.shape[1]):
            entry = bias[at_b, at_head, at_query, min(low + j, bias.shape[3] - 1)]
            if entry > -np.inf:
                scores[r, j] += entry


@numba_njit
def hide(scores: Array, n: int, low: int, position: int, is_causal: bool, window: int) -> None:
    """Put -inf where a query, from ``position`` on, does not see a key, from ``low`` on."""
    for r in range(len(scores)):
        own = position + r % n - low
        for j in range(min(own + 1 - window, scores.shape[1])):
            scores[r, j] = -np.inf
        if is_causal:
            for j in range(max(own + 1, 0), scores.shape[1]):
                scores[r, j] = -np.inf


@numba_njit
def update_maximum(high: Array, scores: Array) -> None:
    """Raise ``high`` to the largest score of each row."""
    for r in range(len(scores)):
        high[r] = max(high[r], largest(scores[r]))


@numba_njit
def exponentiate(scores: Array, high: Array, total: Array) -> None:
    """Replace scores by their exponentials, shifted by ``high``, and add those to ``total``."""
    for r in range(len(scores)):
        shift = high[r] if np.isfinite(high[r]) else scores.dtype.type(0)
        row_total = scores.dtype.type(0)
        for j in range(scores.shape[1]):
            scores[r, j] = exp(scores[r, j] - shift)
            row_total += scores[r, j]
        total[r] += row_total


@numba_njit
def weigh(
    scores: Array,
    visible: Array,
    bias: Array,
    b: int,
    first_head: int,
    i: int,
    n: int,
    low: int,
    position: int,
    is_causal: bool,
    window: int,
) -> Array:
    """Replace a block of scores by weights and return what their rows add up to."""
    if visible.size > 0:
        hide_masked(scores, visible, b, first_head, i, n, low)
    if bias.size > 0:
        add_bias(scores, bias, b, first_head, i, n, low)
    hide(scores, n, low, position, is_causal, window)
    high, total = np.full(len(scores), -np.inf, scores.dtype), np.zeros(len(scores), scores.dtype)
    update_maximum(high, scores)
    exponentiate(scores, high, total)
    return total


@numba_njit
def softmax_pullback(weights: Array, total: Array, dweights: Array) -> None:
    """Normalize the weights and turn their gradients into those of the scores."""
    for r in range(len(weights)):
        inverse = 1 / total[r] if total[r] != 0 else total[r]
        mean = weights.dtype.type(0)
        for j in range(weights.shape[1]):
            # A hidden weight is 0, but its gradient and the factor may be NaN.
            if weights[r, j] == 0:
                dweights[r, j] = 0
            else:
                weights[r, j] *= inverse
            mean += weights[r, j] * dweights[r, j]
        for j in range(weights.shape[1]):
            slope = weights[r, j] * (dweights[r, j] - mean)
            dweights[r, j] = 0 if weights[r, j] == 0 else slope
