"""Mixtures of experts one token at a time, in float64."""

import math

import numpy as np


def scores_of(logits, score):
    """Return the scores of one token, and their derivatives: [i, j] is that of i by logit j."""
    if score == "sigmoid":
        scores = np.array([1 / (1 + math.exp(-x)) for x in logits])
        return scores, np.diag(scores * (1 - scores))
    exponentials = [math.exp(x - max(logits)) for x in logits]
    scores = np.array(exponentials) / math.fsum(exponentials)
    return scores, np.diag(scores) - np.outer(scores, scores)


def choose(preferences, k, n_groups=1, top_k_groups=1):
    """Return the indices of the k largest of one token's preferences, ties in index order."""

    def largest(values, n):
        return sorted(values, key=lambda i: (-values[i], i))[:n]

    size = len(preferences) // n_groups
    groups = {j: sum(sorted(preferences[j * size : (j + 1) * size])[-2:]) for j in range(n_groups)}
    kept = largest(groups, top_k_groups)
    return largest({i: p for i, p in enumerate(preferences) if i // size in kept}, k)


def moe(
    x,
    g,
    router,
    gate,
    up,
    down,
    *,
    top_k,
    score,
    bias=None,
    valid=None,
    shared=None,
    n_groups=1,
    top_k_groups=1,
    renormalize=True,
    routed_scaling_factor=1.0,
    aux_loss_coeff=0.0,
):
    """Return output, load and balance loss, and the gradients of ``sum(g * output) + loss``.

    The gradients are by x, router, gate, up and down, and the three weights of ``shared``.
    """
    x, g, router, gate, up, down = (
        np.asarray(v, "float64") for v in (x, g, router, gate, up, down)
    )
    n_experts = router.shape[1]
    tokens = list(np.ndindex(x.shape[:-1]))
    counted = [t for t in tokens if valid is None or valid[t]]
    ids, load = {}, np.zeros(n_experts, int)
    for t in tokens:
        scores, _ = scores_of(x[t] @ router, score)
        preferences = scores if bias is None else scores + np.asarray(bias, "float64")
        ids[t] = choose(list(preferences), top_k, n_groups, top_k_groups)
    for t in counted:
        load[ids[t]] += 1
    fractions = load / max(load.sum(), 1)

    y, loss, dx = np.zeros(x.shape), 0.0, np.zeros(x.shape)
    drouter, dgate, dup, ddown = (np.zeros(v.shape) for v in (router, gate, up, down))
    dshared = [np.zeros(v.shape) for v in shared or ()]
    for t in tokens:
        scores, by_logits = scores_of(x[t] @ router, score)
        chosen = ids[t]
        total = scores[chosen].sum() if renormalize else 1.0
        dscores = np.zeros(n_experts)
        for i in chosen:
            weight = routed_scaling_factor * scores[i] / total
            out, pull_back = expert(x[t], gate[i], up[i], down[i])
            y[t] += weight * out
            slope = routed_scaling_factor * (g[t] @ out) / total
            dscores[i] += slope
            if renormalize:
                dscores[chosen] -= slope * scores[i] / total
            for into, d in zip(
                (dx[t], dgate[i], dup[i], ddown[i]), pull_back(weight * g[t]), strict=True
            ):
                into += d
        if shared:
            out, pull_back = expert(x[t], *(np.asarray(v, "float64") for v in shared))
            y[t] += out
            for into, d in zip((dx[t], *dshared), pull_back(g[t]), strict=True):
                into += d
        if t in counted:
            factor = aux_loss_coeff * n_experts / len(counted)
            share = scores / scores.sum()
            loss += factor * (fractions @ share)
            dscores += factor * (fractions - fractions @ share) / scores.sum()
        dlogits = by_logits.T @ dscores
        dx[t] += router @ dlogits
        drouter += np.outer(x[t], dlogits)
    return y, load, loss, dx, drouter, dgate, dup, ddown, *dshared


def expert(x, gate, up, down):
    """Return what an expert makes of a token, and its gradients by x, gate, up and down."""
    inner, value = x @ gate, x @ up
    sigmoid = 1 / (1 + np.exp(-inner))
    hidden = inner * sigmoid * value

    def pull_back(dy):
        dhidden = down @ dy
        dinner = dhidden * value * (sigmoid + inner * sigmoid * (1 - sigmoid))
        dvalue = dhidden * inner * sigmoid
        dx = gate @ dinner + up @ dvalue
        return dx, np.outer(x, dinner), np.outer(x, dvalue), np.outer(hidden, dy)

    return hidden @ down, pull_back
