"""The Praxis trunk in float64 or, for derivatives by complex step, complex128.

Written from the layers' API page (nemo_automodel.components.models.praxis.layers): a batch is a
list of sequences, blocks are dicts of arrays, weights are stored as (n_in, n_out).
"""

import numpy as np


def zero_centered_norm(x, weight, epsilon):
    mean_square = (x * x).sum(axis=-1, keepdims=True) / x.shape[-1]
    return x / np.sqrt(mean_square + epsilon) * (1 + weight)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu(x, gate, up, down):
    opened = x @ gate
    return (opened * sigmoid(opened) * (x @ up)) @ down


def rotate(head, positions, theta):
    """Rotate one head (tokens, head_dim): channel j with j + head_dim // 2."""
    half = len(theta)
    angles = np.outer(positions, theta)
    first, second = head[:, :half], head[:, half:]
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ],
        axis=1,
    )


def attention(x, p, positions, mask, *, theta, n_head, n_kv_head, qk_epsilon):
    """Project, rotate, normalize queries and keys by head, attend, gate heads, project out."""
    q, k, v, gates = (x @ p[name] for name in ("q_proj", "k_proj", "v_proj", "gate_proj"))
    width = q.shape[1] // n_head
    gated = []
    for h in range(n_head):
        shared = h // (n_head // n_kv_head)
        own, kv = slice(h * width, (h + 1) * width), slice(shared * width, (shared + 1) * width)
        queries = zero_centered_norm(rotate(q[:, own], positions, theta), p["q_norm"], qk_epsilon)
        keys = zero_centered_norm(rotate(k[:, kv], positions, theta), p["k_norm"], qk_epsilon)
        scores = queries @ keys.T / np.sqrt(width)
        shift = scores.real.max(axis=1, keepdims=True)
        weights = np.where(mask, np.exp(scores - shift), 0)
        attended = weights @ v[:, kv] / weights.sum(axis=1, keepdims=True)
        gated.append(attended * sigmoid(gates[:, h : h + 1]))
    return np.concatenate(gated, axis=1) @ p["out_proj"] + p["out_bias"]


def mixture(x, p, *, top_k, routed_scaling_factor):
    """Sigmoid router with a selection bias, renormalized, beside one shared expert."""
    y = swiglu(x, p["shared_gate"], p["shared_up"], p["shared_down"])
    for t, token in enumerate(x):
        scores = sigmoid(token @ p["router"])
        ranking = np.argsort(-(scores.real + p["router_bias"]), kind="stable")
        chosen = ranking[:top_k]
        total = sum(scores[e] for e in chosen)
        for e in chosen:
            out = swiglu(token, p["experts_gate"][e], p["experts_up"][e], p["experts_down"][e])
            y[t] = y[t] + routed_scaling_factor * scores[e] / total * out
    return y


def block(x, p, positions, mask, conditioning, *, epsilon, moe, **attention_options):
    modulation = conditioning @ p["modulator"] + p["modulator_bias"]
    shift, scale = modulation[:, : x.shape[1]], modulation[:, x.shape[1] :]
    x = x * scale + shift
    h = zero_centered_norm(x, p["ln_in"], epsilon) * p["s"]
    x = x + attention(h, p, positions, mask, **attention_options)
    h = zero_centered_norm(x, p["ln_out"], epsilon) * p["s"]
    if "router" in p:
        return x + mixture(h, p, **moe)
    return x + swiglu(h, p["gate"], p["up"], p["down"])


def trunk(x, blocks, positions, mask, conditioning, **options):
    """Return the outputs of every block, each of shape (batch, tokens, dim)."""
    outputs = []
    for p in blocks:
        x = np.array(
            [
                block(sequence, p, positions[row], mask, conditioning[row], **options)
                for row, sequence in enumerate(x)
            ]
        )
        outputs.append(x)
    return outputs
