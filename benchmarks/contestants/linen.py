"""Layers of flax, and a decoder made of them."""

import jax
import jax.numpy as jnp
import optax
from flax import linen

from benchmarks.contestants import TRAINING_STEPS, Task

PACKAGES = ("flax", "jax")


def rms_norm(inputs, epsilon):
    x, scale = jax.device_put((inputs["x"], inputs["scale"]))
    run = jax.jit(normalize(epsilon))
    return Task(lambda: [run(x, scale).block_until_ready()])


def rms_norm_gradient(inputs, epsilon):
    x, scale, dy = jax.device_put((inputs["x"], inputs["scale"], inputs["dy"]))
    run = jax.jit(lambda x, scale, dy: jax.vjp(normalize(epsilon), x, scale)[1](dy))
    return Task(lambda: list(jax.block_until_ready(run(x, scale, dy))))


def normalize(epsilon):
    norm = linen.RMSNorm(epsilon=epsilon)
    return lambda x, scale: norm.apply({"params": {"scale": scale}}, x)


def train_step(inputs, config):
    """Take steps of AdamW and return the loss before the first."""
    decoder = Decoder(config)
    weights = {"params": tree_of({name: v for name, v in inputs.items() if name != "ids"})}
    rule = optax.adamw(1e-3, weight_decay=0.01)
    state = [jax.device_put(weights), jax.device_put(rule.init(weights))]
    ids = jax.device_put(inputs["ids"].astype("int32"))

    def loss_of(weights, ids):
        logits = decoder.apply(weights, ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    def step(weights, moments, ids):
        loss, gradients = jax.value_and_grad(loss_of)(weights, ids)
        changes, moments = rule.update(gradients, moments, weights)
        return optax.apply_updates(weights, changes), moments, loss

    step = jax.jit(step, donate_argnums=(0, 1))

    def run():
        losses = []
        for _ in range(TRAINING_STEPS):
            state[0], state[1], loss = step(*state, ids)
            losses.append(loss.block_until_ready())
        return losses[:1]

    return Task(run, steps=TRAINING_STEPS)


def tree_of(weights):
    """Return transformers' tensors as the parameters of a :class:`Decoder`."""
    tree = {}
    for name, value in weights.items():
        *parts, _ = name.removeprefix("model.").replace("layers.", "layers_").split(".")
        kind = "embedding" if "embed" in name else "scale" if "norm" in name else "kernel"
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[kind] = value.T if kind == "kernel" else value
    return tree


class Decoder(linen.Module):
    """A Llama, its modules named as transformers names them."""

    config: dict

    @linen.compact
    def __call__(self, ids):
        c = self.config
        x = linen.Embed(c["vocab_size"], c["hidden_size"], name="embed_tokens")(ids)
        for i in range(c["num_hidden_layers"]):
            x = Block(c, name=f"layers_{i}")(x)
        x = linen.RMSNorm(epsilon=c["rms_norm_eps"], name="norm")(x)
        return linen.Dense(c["vocab_size"], use_bias=False, name="lm_head")(x)


class Block(linen.Module):
    config: dict

    @linen.compact
    def __call__(self, x):
        c = self.config
        h = linen.RMSNorm(epsilon=c["rms_norm_eps"], name="input_layernorm")(x)
        x = x + Attention(c, name="self_attn")(h)
        h = linen.RMSNorm(epsilon=c["rms_norm_eps"], name="post_attention_layernorm")(x)
        return x + FeedForward(c, name="mlp")(h)


class Attention(linen.Module):
    config: dict

    @linen.compact
    def __call__(self, x):
        c = self.config

        def heads(name, n_head):
            y = linen.Dense(n_head * c["head_dim"], use_bias=False, name=name)(x)
            return y.reshape(*x.shape[:2], n_head, c["head_dim"])

        q = rotated(heads("q_proj", c["num_attention_heads"]))
        k = rotated(heads("k_proj", c["num_key_value_heads"]))
        v = heads("v_proj", c["num_key_value_heads"])
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        y = y.reshape(*x.shape[:2], -1)
        return linen.Dense(c["hidden_size"], use_bias=False, name="o_proj")(y)


class FeedForward(linen.Module):
    config: dict

    @linen.compact
    def __call__(self, x):
        c = self.config
        gate, up = (
            linen.Dense(c["intermediate_size"], use_bias=False, name=name)(x)
            for name in ("gate_proj", "up_proj")
        )
        return linen.Dense(c["hidden_size"], use_bias=False, name="down_proj")(
            linen.silu(gate) * up
        )


def rotated(x):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
