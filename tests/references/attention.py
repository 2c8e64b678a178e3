"""Attention one score at a time, in float64."""

import math

import numpy as np


def attention(q, k, v, **settings):
    """Return the output of attention; :func:`rows` has the settings."""
    y = np.zeros((*q.shape[:-1], v.shape[-1]))
    for at, weights, _, v_at in rows(q, k, v, **settings):
        for j, weight in weights.items():
            y[at] += weight * np.asarray(v[v_at][j], "float64")
    return y


def attention_gradients(q, k, v, g, *, mask=None, scale=None, softcap=None, **settings):
    """Return the gradients of ``sum(g * attention(...))`` by q, k, v and a floating mask."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dscores = np.zeros((*q.shape[:-1], k.shape[-2]))
    for at, weights, capped, v_at in rows(
        q, k, v, mask=mask, scale=scale, softcap=softcap, **settings
    ):
        q_row, g_row = np.asarray(q[at], "float64"), np.asarray(g[at], "float64")
        dweights = {j: g_row @ np.asarray(v[v_at][j], "float64") for j in weights}
        mean = sum(weights[j] * dweights[j] for j in weights)
        for j, weight in weights.items():
            dv[v_at][j] += weight * g_row
            dscore = weight * (dweights[j] - mean)
            dscores[at][j] = dscore
            if softcap is not None:
                dscore *= 1 - (capped[j] / softcap) ** 2
            dq[at] += scale * dscore * np.asarray(k[v_at][j], "float64")
            dk[v_at][j] += scale * dscore * q_row
    if mask is None or mask.dtype == bool:
        return dq, dk, dv
    padded = (1,) * (dscores.ndim - mask.ndim) + mask.shape
    broadcast = tuple(axis for axis, n in enumerate(padded) if n == 1)
    return dq, dk, dv, dscores.sum(axis=broadcast, keepdims=True).reshape(mask.shape)


def cached_attention(q, k, v, cached_keys, cached_values, length, start, **settings):
    """Return causal attention to slots ``start`` to ``length`` of a cache and to new tokens."""
    outputs = []
    for b in range(len(q)):
        keys = np.concatenate([cached_keys[b, :, :length], k[b]], axis=1)
        values = np.concatenate([cached_values[b, :, :length], v[b]], axis=1)
        real = np.arange(keys.shape[1])[None] >= start[b]
        outputs.append(attention(q[b], keys, values, mask=real, is_causal=True, **settings))
    return np.stack(outputs)


def rows(q, k, v, *, mask=None, is_causal=False, scale=None, window=None, softcap=None):
    """Yield, for each query, its index, the weights and capped scores by key, and its head of k."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    group = q.shape[-3] // k.shape[-3]
    if mask is not None:
        mask = np.broadcast_to(mask, (*q.shape[:-1], n_keys))
    for at in np.ndindex(q.shape[:-1]):
        *batch, head, i = at
        kv_at = (*batch, head // group)
        position = n_keys - n_queries + i
        capped, scores = {}, {}
        for j in range(n_keys):
            if is_causal and j > position:
                continue
            if window is not None and position - j >= window:
                continue
            if mask is not None and (
                not mask[at][j] if mask.dtype == bool else mask[at][j] == -math.inf
            ):
                continue
            score = scale * sum(
                float(x) * float(y) for x, y in zip(q[at], k[kv_at][j], strict=True)
            )
            capped[j] = score if softcap is None else softcap * math.tanh(score / softcap)
            added = 0.0 if mask is None or mask.dtype == bool else float(mask[at][j])
            scores[j] = capped[j] + added
        high = max(scores.values(), default=0.0)
        exponentials = {j: math.exp(score - high) for j, score in scores.items()}
        total = math.fsum(exponentials.values())
        weights = {j: x / total for j, x in exponentials.items()}
        yield at, weights, capped, kv_at
