"""What contestants have to compute, in float64."""

import math
from functools import lru_cache

import numpy as np


def rms_norm(x, scale, epsilon):
    x = np.asarray(x, "float64")
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def rms_norm_gradients(x, scale, dy, epsilon):
    x, g = np.asarray(x, "float64"), np.asarray(dy, "float64")
    rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)
    normalized = x / rms
    along = np.mean(g * scale * normalized, axis=-1, keepdims=True)
    return (g * scale - normalized * along) / rms, np.sum(g * normalized, axis=0)


def layer_norm(x, scale, loc, epsilon):
    centered = x - x.mean(axis=-1, keepdims=True)
    return rms_norm(centered, scale, epsilon) + loc


def angles(positions, head_dim, base):
    return np.asarray(positions)[..., None] * base ** (-2 * np.arange(head_dim // 2) / head_dim)


def rotate(x, angle, pairing):
    """Rotate the pairs of the last axis by the angles, which may be negated for the way back."""
    x = np.asarray(x, "float64")
    half = x.shape[-1] // 2
    first, second = (
        (slice(half), slice(half, None))
        if pairing == "half"
        else (slice(0, None, 2), slice(1, None, 2))
    )
    y, turned = np.empty_like(x), (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    y[..., first], y[..., second] = turned.real, turned.imag
    return y


def causal_attention(q, k, v):
    """Attend from queries (n_head, tokens, head_dim) to keys of as many heads or fewer."""
    k, v = (np.repeat(a, len(q) // len(a), axis=0) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores[:, ~np.tri(scores.shape[-1], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def split_heads(x, n_head):
    return x.reshape(len(x), n_head, -1).swapaxes(0, 1)


def join_heads(x):
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def llama_block(x, w, angle, *, n_head, n_kv_head, epsilon, pairing):
    """Run a block on tokens (tokens, width); weights are (n_in, n_out)."""
    h = rms_norm(x, w["norm1"], epsilon)
    q = rotate(split_heads(h @ w["q"], n_head), angle, pairing)
    k = rotate(split_heads(h @ w["k"], n_kv_head), angle, pairing)
    v = split_heads(h @ w["v"], n_kv_head)
    x = x + join_heads(causal_attention(q, k, v)) @ w["out"]
    h = rms_norm(x, w["norm2"], epsilon)
    return x + (silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def llama_loss(inputs, *, n_layers, n_head, n_kv_head, epsilon):
    """Return the mean cross-entropy of each token given those before it.

    Weights have the names and shapes that transformers gives them.
    """
    w = {name: np.asarray(v, "float64") for name, v in inputs.items() if name != "ids"}
    losses = []
    for ids in inputs["ids"]:
        x = w["model.embed_tokens.weight"][ids[:-1]]
        for i in range(n_layers):
            layer = {
                short: w[f"model.layers.{i}.{name}.weight"].T for short, name in _NAMES.items()
            }
            head_dim = layer["q"].shape[1] // n_head
            x = llama_block(
                x,
                layer,
                angles(np.arange(len(x)), head_dim, 10_000.0),
                n_head=n_head,
                n_kv_head=n_kv_head,
                epsilon=epsilon,
                pairing="half",
            )
        logits = rms_norm(x, w["model.norm.weight"], epsilon) @ w["lm_head.weight"].T
        logits -= logits.max(axis=-1, keepdims=True)
        taken = logits[np.arange(len(x)), ids[1:]]
        losses.append(np.log(np.exp(logits).sum(axis=-1)) - taken)
    return np.mean(losses)


def plain_block(x, w, *, n_head, epsilon):
    h = layer_norm(x, w["norm1"], w["loc1"], epsilon)
    q, k, v = (split_heads(h @ w[name], n_head) for name in "qkv")
    x = x + join_heads(causal_attention(q, k, v)) @ w["out"]
    return x + gelu(layer_norm(x, w["norm2"], w["loc2"], epsilon) @ w["in"]) @ w["down"]


class Llama:
    """The model in a GGUF file of the Llama architecture with tied embeddings."""

    def __init__(self, path):
        from gguf import GGUFReader

        reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        setting = {name: field.contents for name, field in reader.fields.items()}
        self.n_layers = setting["llama.block_count"]()
        self.n_head = setting["llama.attention.head_count"]()
        self.n_kv_head = setting["llama.attention.head_count_kv"]()
        self.epsilon = setting["llama.attention.layer_norm_rms_epsilon"]()
        self.base = setting["llama.rope.freq_base"]()
        self.head_dim = setting["llama.rope.dimension_count"]()
        self.vocabulary = setting["llama.vocab_size"]()

    @property
    def n_weights(self):
        return sum(int(np.prod(tensor.shape)) for tensor in self.tensors.values())

    @lru_cache(maxsize=4)  # noqa: B019
    def logits(self, ids, n_last):
        """Score what follows each of the last tokens."""
        table = self._weight("token_embd")
        x = table[list(ids)]
        angle = angles(np.arange(len(ids)), self.head_dim, self.base)
        for i in range(self.n_layers):
            w = {short: self._weight(f"blk.{i}.{name}") for short, name in _TENSORS.items()}
            x = llama_block(
                x,
                w,
                angle,
                n_head=self.n_head,
                n_kv_head=self.n_kv_head,
                epsilon=self.epsilon,
                # The files of this architecture hold queries and keys so that neighbors are pairs.
                pairing="adjacent",
            )
        x = rms_norm(x[-n_last:], self._weight("output_norm"), self.epsilon)
        return x @ table.T

    def _weight(self, name):
        from gguf.quants import dequantize

        tensor = self.tensors[f"{name}.weight"]
        values = dequantize(tensor.data, tensor.tensor_type).astype("float64")
        return values if name == "token_embd" else values.T


_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
_TENSORS = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
}
