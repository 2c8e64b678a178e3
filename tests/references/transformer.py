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


def rotate_halves(x, position, base):
    """Rotate one head vector: channel i with i + d/2, by position * base^(-2i/d)."""
    y, half = np.array(x), len(x) // 2
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        y[i] = a * np.cos(angle) - b * np.sin(angle)
        y[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return y


def attention(x, projections, *, n_head, n_kv_head, positions=None, base=None, visible):
    """Attend from each token of x (batch, t, width) to the ``visible[row, query, key]`` ones."""
    q_proj, k_proj, v_proj, out_proj = projections
    n_rows, n_tokens, _ = x.shape
    q, k, v = x @ q_proj, x @ k_proj, x @ v_proj
    width = q.shape[-1] // n_head
    mixed = np.zeros_like(q)
    for row in range(n_rows):
        for head in range(n_head):
            own = slice(head * width, (head + 1) * width)
            shared_head = head // (n_head // n_kv_head)
            shared = slice(shared_head * width, (shared_head + 1) * width)
            queries, keys = q[row, :, own], k[row, :, shared]
            if base is not None:
                pairs = list(enumerate(positions[row]))
                queries = np.array([rotate_halves(queries[t], p, base) for t, p in pairs])
                keys = np.array([rotate_halves(keys[t], p, base) for t, p in pairs])
            for t in range(n_tokens):
                seen = [s for s in range(n_tokens) if visible[row, t, s]]
                if not seen:
                    continue
                scores = np.array([queries[t] @ keys[s] / np.sqrt(width) for s in seen])
                weights = np.exp(scores - scores.real.max())
                weights = weights / weights.sum()
                mixed[row, t, own] = sum(
                    w * v[row, s, shared] for w, s in zip(weights, seen, strict=True)
                )
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
