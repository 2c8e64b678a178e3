"""Oracles of a decoder, in float64 or, for derivatives by complex step, complex128."""

import numpy as np


def rms_norm(x, scale, epsilon):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / x.shape[-1] + epsilon) * scale


def layer_norm(x, loc, scale, epsilon):
    centered = x - x.sum(axis=-1, keepdims=True) / x.shape[-1]
    return rms_norm(centered, scale, epsilon) + loc


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))


def gated_feed_forward(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def rotate_halves(x, positions, base):
    """Rotate x (tokens, width): channel i with i + d/2, by position * base^(-2i/d)."""
    width = x.shape[1]
    angles = np.outer(positions, base ** (-2 * np.arange(width // 2) / width))
    a, b = x[:, : width // 2], x[:, width // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def attention(x, projections, *, n_head, n_kv_head, positions=None, base=None, visible):
    """Attend from each token of x (batch, t, width) to the ``visible[row, query, key]`` ones."""
    q_proj, k_proj, v_proj, out_proj = projections
    q, k, v = x @ q_proj, x @ k_proj, x @ v_proj
    width = q.shape[-1] // n_head
    mixed = np.zeros_like(q)
    for row in range(len(x)):
        for head in range(n_head):
            own = slice(head * width, (head + 1) * width)
            shared_head = head // (n_head // n_kv_head)
            shared = slice(shared_head * width, (shared_head + 1) * width)
            queries, keys = q[row, :, own], k[row, :, shared]
            if base is not None:
                queries = rotate_halves(queries, positions[row], base)
                keys = rotate_halves(keys, positions[row], base)
            scores = queries @ keys.T / np.sqrt(width)
            shift = scores.real.max(axis=1, keepdims=True)
            weights = np.where(visible[row], np.exp(scores - shift), 0)
            total = weights.sum(axis=1, keepdims=True)
            mixed[row, :, own] = weights @ v[row, :, shared] / np.where(total == 0, 1, total)
    return mixed @ out_proj


def llama_block(x, p, *, epsilon, **attention_options):
    """The block of Llama; ``p`` maps short names to weights stored as (n_in, n_out).

    The branches' outputs are normalized if there are weights for it.
    """
    h = rms_norm(x, p["attention_norm"], epsilon)
    branch = attention(h, [p["q"], p["k"], p["v"], p["out"]], **attention_options)
    if "post_attention_norm" in p:
        branch = rms_norm(branch, p["post_attention_norm"], epsilon)
    x = x + branch
    h = rms_norm(x, p["feed_forward_norm"], epsilon)
    branch = gated_feed_forward(h, p["gate"], p["up"], p["down"])
    if "post_feed_forward_norm" in p:
        branch = rms_norm(branch, p["post_feed_forward_norm"], epsilon)
    return x + branch


def causal(n_rows, n_tokens):
    return np.broadcast_to(np.tri(n_tokens, dtype=bool), (n_rows, n_tokens, n_tokens))


def gradients(loss, arguments):
    """Return d loss / d argument for each named real array, by complex step."""
    step = 1e-30
    found = {}
    for name, value in arguments.items():
        found[name] = np.zeros(value.shape)
        for index in np.ndindex(value.shape):
            moved = {k: v.astype("complex128") for k, v in arguments.items()}
            moved[name][index] += 1j * step
            found[name][index] = loss(**moved).imag / step
    return found
