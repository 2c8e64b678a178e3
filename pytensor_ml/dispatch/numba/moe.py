"""Numba kernels of mixtures of experts."""

from collections.abc import Callable
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.base import LayerOp
from pytensor_ml.dispatch.numba.basic import apart, kernel_key, register_kernel, rows_of, sigmoid
from pytensor_ml.dispatch.numba.products import multiply
from pytensor_ml.layers.moe import ExpertsLayer, ExpertsPullback, RouterLayer, RouterPullback

Array = np.ndarray

# Rows that pass through an expert at a time, so that what is in between stays in the cache.
BLOCK = 256


@register_kernel(RouterLayer)
def numba_funcify_router(op: RouterLayer, node: Apply, **kwargs: Any) -> tuple[Callable, str]:
    k, n_groups, n_kept, renormalize = op.top_k, op.n_groups, op.top_k_groups, op.renormalize
    is_softmax, factor, step = (
        op.score == "softmax",
        op.routed_scaling_factor,
        op.bias_update_factor,
    )

    if not op.selection_bias:

        @numba_njit
        def router(logits: Array, valid: Any = None) -> Any:
            return route(logits, None, valid, k, is_softmax, n_groups, n_kept, renormalize, factor)

    elif not step:

        @numba_njit
        def router(logits: Array, bias: Array, valid: Any = None) -> Any:
            return route(logits, bias, valid, k, is_softmax, n_groups, n_kept, renormalize, factor)

    else:

        @numba_njit
        def router(logits: Array, bias: Array, valid: Any = None) -> Any:
            ids, weights, load = route(
                logits, bias, valid, k, is_softmax, n_groups, n_kept, renormalize, factor
            )
            return ids, weights, load, moved(bias, load, step)

    return router, cache_key(op, node)


@register_kernel(RouterPullback)
def numba_funcify_router_pullback(
    op: RouterPullback, node: Apply, **kwargs: Any
) -> tuple[Callable, str]:
    is_softmax, renormalize, factor = (
        op.score == "softmax",
        op.renormalize,
        op.routed_scaling_factor,
    )

    @numba_njit
    def router_pullback(logits: Array, ids: Array, g: Array) -> Array:
        return route_pullback(logits, ids, g, is_softmax, renormalize, factor)

    return router_pullback, cache_key(op, node)


@register_kernel(ExpertsLayer)
def numba_funcify_experts(op: ExpertsLayer, node: Apply, **kwargs: Any) -> tuple[Callable, str]:
    @numba_njit
    def experts(x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
        check_shapes(x, ids, weights, gate, up, down)
        y = run_experts(
            rows_of(x),
            rows_of(ids),
            rows_of(weights),
            np.ascontiguousarray(gate),
            np.ascontiguousarray(up),
            np.ascontiguousarray(down),
        )
        return y.reshape((*x.shape[:-1], down.shape[2]))

    return experts, cache_key(op, node)


@register_kernel(ExpertsPullback)
def numba_funcify_experts_pullback(
    op: ExpertsPullback, node: Apply, **kwargs: Any
) -> tuple[Callable, str]:
    @numba_njit
    def experts_pullback(
        x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array, g: Array
    ) -> Any:
        check_shapes(x, ids, weights, gate, up, down)
        if g.shape[:-1] != x.shape[:-1] or g.shape[-1] != down.shape[2]:
            raise ValueError("Experts got a gradient whose shape differs from their output's")
        dx, dweights, dgate, dup, ddown = pull_back_experts(
            rows_of(x),
            rows_of(ids),
            rows_of(weights),
            np.ascontiguousarray(gate),
            np.ascontiguousarray(up),
            np.ascontiguousarray(down),
            rows_of(g),
        )
        return (
            dx.reshape(x.shape),
            dweights.reshape(weights.shape),
            dgate,
            dup,
            ddown,
        )

    return experts_pullback, cache_key(op, node)


def cache_key(op: LayerOp, node: Apply) -> str:
    ranks = [v.type.ndim for v in node.inputs]
    return kernel_key(type(op), op._props_dict(), ranks)


@numba_njit
def put_best(preferences: Array, is_left: Array, chosen: Array) -> None:
    """Fill ``chosen`` with the indices of the largest entries that are left, the lowest first."""
    for j in range(len(chosen)):
        best = -1
        for e in range(len(preferences)):
            if is_left[e] and (best < 0 or preferences[e] > preferences[best]):
                best = e
        chosen[j] = best
        is_left[best] = False


@numba_njit
def put_scores(logits: Array, is_softmax: bool, scores: Array) -> None:
    one = scores.dtype.type(1)
    if is_softmax:
        high = logits[0]
        for e in range(len(logits)):
            high = max(high, logits[e])
        total = scores.dtype.type(0)
        for e in range(len(logits)):
            scores[e] = np.exp(logits[e] - high)
            total += scores[e]
        for e in range(len(logits)):
            scores[e] /= total
    else:
        for e in range(len(logits)):
            small = np.exp(-abs(logits[e]))
            scores[e] = (one if logits[e] > 0 else small) / (one + small)


@numba_njit
def drop_groups(preferences: Array, n_groups: int, n_kept: int) -> None:
    """Put -inf in the place of what is outside of the best groups."""
    size = len(preferences) // n_groups
    group_scores = np.zeros(n_groups, preferences.dtype)
    best_two = np.empty(min(2, size), np.int32)
    for group in range(n_groups):
        members = preferences[group * size : (group + 1) * size]
        put_best(members, np.ones(size, np.bool_), best_two)
        for member in best_two:
            group_scores[group] += members[member]
    is_dropped = np.ones(n_groups, np.bool_)
    put_best(group_scores, is_dropped, np.empty(n_kept, np.int32))
    for e in range(len(preferences)):
        if is_dropped[e // size]:
            preferences[e] = -np.inf


@numba_njit
def weigh(scores: Array, chosen: Array, renormalize: bool, factor: float, weights: Array) -> Any:
    """Fill ``weights`` and return what the scores chosen were divided by."""
    total = scores.dtype.type(0)
    for e in chosen:
        total += scores[e]
    if not renormalize or total == 0:
        total = scores.dtype.type(1)
    for j in range(len(chosen)):
        weights[j] = scores[chosen[j]] / total * scores.dtype.type(factor)
    return total


@apart
@numba_njit
def route(
    logits: Array,
    bias: Any,
    valid: Any,
    k: int,
    is_softmax: bool,
    n_groups: int,
    n_kept: int,
    renormalize: bool,
    factor: float,
) -> Any:
    rows = rows_of(logits)
    n_experts = rows.shape[1]
    if bias is not None and len(bias) != n_experts:
        raise ValueError("A router got a bias whose length is not the number of experts")
    if valid is not None:
        if valid.shape != logits.shape[:-1]:
            raise ValueError("A router got valid tokens whose shape is not that of the tokens")
        counts = np.ascontiguousarray(valid).reshape(valid.size)
    else:
        counts = np.ones(len(rows), np.bool_)
    ids, weights = np.empty((len(rows), k), np.int32), np.empty((len(rows), k), rows.dtype)
    load = np.zeros(n_experts, np.int32)
    scores, preferences = np.empty(n_experts, rows.dtype), np.empty(n_experts, rows.dtype)
    is_left = np.empty(n_experts, np.bool_)
    for row in range(len(rows)):
        put_scores(rows[row], is_softmax, scores)
        for e in range(n_experts):
            preference = scores[e]
            if bias is not None:
                preference += rows.dtype.type(bias[e])
            preferences[e] = -np.inf if np.isnan(preference) else preference
        if n_kept < n_groups:
            drop_groups(preferences, n_groups, n_kept)
        is_left[:] = True
        put_best(preferences, is_left, ids[row])
        weigh(scores, ids[row], renormalize, factor, weights[row])
        if counts[row]:
            for e in ids[row]:
                load[e] += 1
    shape = (*logits.shape[:-1], k)
    return ids.reshape(shape), weights.reshape(shape), load


@numba_njit
def moved(bias: Array, load: Array, step: float) -> Array:
    """Return the next bias."""
    total = 0
    for n in load:
        total += n
    next_bias = np.empty_like(bias)
    for e in range(len(bias)):
        next_bias[e] = bias[e] + bias.dtype.type(step * np.sign(total - len(bias) * load[e]))
    return next_bias


@apart
@numba_njit
def route_pullback(
    logits: Array, ids: Array, g: Array, is_softmax: bool, renormalize: bool, factor: float
) -> Array:
    if ids.shape != g.shape or ids.shape[:-1] != logits.shape[:-1]:
        raise ValueError("A router got a gradient whose shape differs from its weights'")
    rows, id_rows, g_rows = rows_of(logits), rows_of(ids), rows_of(g)
    for e in ids.flat:
        if e < 0 or e >= logits.shape[-1]:
            raise ValueError("A router got the id of an expert that there is not")
    dlogits, one = np.zeros(rows.shape, rows.dtype), rows.dtype.type(1)
    scores, weights = np.empty(rows.shape[1], rows.dtype), np.empty(ids.shape[-1], rows.dtype)
    for row in range(len(rows)):
        put_scores(rows[row], is_softmax, scores)
        total = weigh(scores, id_rows[row], renormalize, 1.0, weights)
        mean = rows.dtype.type(0)
        if renormalize:
            for j in range(len(weights)):
                mean += weights[j] * g_rows[row, j]
        shift = rows.dtype.type(0)
        for j in range(len(weights)):
            e = id_rows[row, j]
            dscore = (g_rows[row, j] - mean) / total * rows.dtype.type(factor)
            shift += dscore * scores[e]
            slope = scores[e] if is_softmax else scores[e] * (one - scores[e])
            dlogits[row, e] += dscore * slope
        if is_softmax:
            for e in range(len(scores)):
                dlogits[row, e] -= scores[e] * shift
    return dlogits.reshape(logits.shape)


@numba_njit
def check_shapes(x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array) -> None:
    if x.shape[-1] != gate.shape[1]:
        raise ValueError("Experts got tokens of another width than theirs")
    if ids.shape != weights.shape or ids.shape[:-1] != x.shape[:-1]:
        raise ValueError("Experts got ids and weights whose shapes do not match the tokens'")
    if gate.shape != up.shape or gate.shape[0] != down.shape[0] or gate.shape[2] != down.shape[1]:
        raise ValueError("Experts got gate, up and down weights whose shapes do not match")


@numba_njit
def sort_slots(ids: Array, n_experts: int) -> tuple[Array, Array]:
    """Return the slots (token * top_k + rank) by expert, and where each expert's begin."""
    experts = ids.reshape(ids.size)
    starts = np.zeros(n_experts + 1, np.int64)
    for e in experts:
        if e < 0 or e >= n_experts:
            raise ValueError("Experts got the id of an expert that there is not")
        starts[e + 1] += 1
    for e in range(n_experts):
        starts[e + 1] += starts[e]
    ends = starts.copy()
    order = np.empty(len(experts), np.int64)
    for slot in range(len(experts)):
        order[ends[experts[slot]]] = slot
        ends[experts[slot]] += 1
    return order, starts


@numba_njit
def gather(rows: Array, slots: Array, k: int, out: Array) -> None:
    for r in range(len(slots)):
        out[r] = rows[slots[r] // k]


@apart
@numba_njit
def run_experts(x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
    k = ids.shape[1]
    slot_weights = weights.reshape(weights.size)
    order, starts = sort_slots(ids, len(gate))
    y = np.zeros((len(x), down.shape[2]), x.dtype)
    size = min(BLOCK, len(order))
    tokens, outputs = np.empty((size, x.shape[1]), x.dtype), np.empty((size, y.shape[1]), x.dtype)
    inner = np.empty((size, gate.shape[2]), x.dtype)
    value = np.empty_like(inner)
    for e in range(len(gate)):
        for start in range(starts[e], starts[e + 1], BLOCK):
            slots = order[start : min(start + BLOCK, starts[e + 1])]
            n = len(slots)
            gather(x, slots, k, tokens)
            multiply(tokens[:n], gate[e], inner[:n])
            multiply(tokens[:n], up[e], value[:n])
            for r in range(n):
                for h in range(inner.shape[1]):
                    inner[r, h] *= sigmoid(inner[r, h]) * value[r, h]
            multiply(inner[:n], down[e], outputs[:n])
            for r in range(n):
                weight = slot_weights[slots[r]]
                token = slots[r] // k
                for d in range(y.shape[1]):
                    y[token, d] += weight * outputs[r, d]
    return y


@apart
@numba_njit
def pull_back_experts(
    x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array, g: Array
) -> Any:
    k, one = ids.shape[1], x.dtype.type(1)
    slot_weights = weights.reshape(weights.size)
    order, starts = sort_slots(ids, len(gate))
    dx, dweights = np.zeros_like(x), np.empty_like(slot_weights)
    dgate, dup, ddown = np.zeros_like(gate), np.zeros_like(up), np.zeros_like(down)
    size = np.max(np.diff(starts))
    tokens, dtokens = np.empty((size, x.shape[1]), x.dtype), np.empty((size, x.shape[1]), x.dtype)
    dy = np.empty((size, g.shape[1]), x.dtype)
    inner, value = (
        np.empty((size, gate.shape[2]), x.dtype),
        np.empty((size, gate.shape[2]), x.dtype),
    )
    hidden, dhidden = np.empty_like(inner), np.empty_like(inner)
    for e in range(len(gate)):
        slots = order[starts[e] : starts[e + 1]]
        n = len(slots)
        if n == 0:
            continue
        gather(x, slots, k, tokens)
        gather(g, slots, k, dy)
        multiply(tokens[:n], gate[e], inner[:n])
        multiply(tokens[:n], up[e], value[:n])
        multiply(dy[:n], down[e].T, dhidden[:n])
        for r in range(n):
            weight = slot_weights[slots[r]]
            dweight = 0.0
            for h in range(inner.shape[1]):
                s = sigmoid(inner[r, h])
                silu = inner[r, h] * s
                hidden[r, h] = silu * value[r, h]
                dweight += dhidden[r, h] * hidden[r, h]
                by_hidden = dhidden[r, h] * weight
                dsilu = s + silu * (one - s)
                inner[r, h] = by_hidden * value[r, h] * dsilu
                value[r, h] = by_hidden * silu
            dweights[slots[r]] = dweight
            for d in range(dy.shape[1]):
                dy[r, d] *= weight
        multiply(hidden[:n].T, dy[:n], ddown[e])
        multiply(tokens[:n].T, inner[:n], dgate[e])
        multiply(tokens[:n].T, value[:n], dup[e])
        for gradient, parameter in ((inner, gate), (value, up)):
            multiply(gradient[:n], parameter[e].T, dtokens[:n])
            for r in range(n):
                token = slots[r] // k
                for d in range(dx.shape[1]):
                    dx[token, d] += dtokens[r, d]
    return dx, dweights, dgate, dup, ddown
