"""Layers compiled by PyTensor: ours, or those of a published pytensor-ml."""

import numpy as np
import pytensor
import pytensor.tensor as pt

from benchmarks.contestants import Task
from pytensor_ml.layers import RMSNorm, TransformerBlock
from pytensor_ml.pytensorf import function

PACKAGES = ("pytensor_ml", "pytensor")
MODES = {"c": "CVM", "numba": "NUMBA", "jax": "JAX", "mlx": "MLX"}


def rms_norm(inputs, backend, epsilon):
    norm, x = make_norm(inputs, epsilon)
    return compiled([x], [norm(x)], [inputs["x"]], backend, parameters=[norm.scale])


def rms_norm_gradient(inputs, backend, epsilon):
    norm, x = make_norm(inputs, epsilon)
    dy = x.clone(name="dy")
    gradients = pt.grad(None, [x, norm.scale], known_grads={norm(x): dy})
    values = [inputs["x"], inputs["dy"]]
    return compiled([x, dy], gradients, values, backend, parameters=[norm.scale])


def nothing(inputs, backend):
    """Call a compiled function that does nothing with its input."""
    x = pt.tensor("x", shape=(None, inputs["x"].shape[1]), dtype="float32")
    return compiled([x], [], [inputs["x"]], backend)


def rotary(inputs, backend, pairing):
    from pytensor_ml.layers import apply_rotary

    x, table, _ = rotary_inputs(inputs)
    y = apply_rotary(x, table, pairing=pairing)
    return compiled([x, table], [y], [inputs["x"], inputs["table"]], backend)


def rotary_gradient(inputs, backend, pairing):
    from pytensor_ml.layers import apply_rotary

    x, table, dy = rotary_inputs(inputs)
    y = apply_rotary(x, table, pairing=pairing)
    return rotary_gradient_of(y, x, table, dy, inputs, backend)


def sliced_rotary(inputs, backend, pairing):
    """Rotate by slices of the input, as a user would without an op for it."""
    x, table, _ = rotary_inputs(inputs)
    y = rotate_slices(x, table, pairing)
    return compiled([x, table], [y], [inputs["x"], inputs["table"]], backend)


def sliced_rotary_gradient(inputs, backend, pairing):
    x, table, dy = rotary_inputs(inputs)
    y = rotate_slices(x, table, pairing)
    return rotary_gradient_of(y, x, table, dy, inputs, backend)


def plain_stack(inputs, backend, n_layers):
    """Compile the blocks that the published package has, and run them once."""
    blocks = []
    for i in range(n_layers):
        block = TransformerBlock(
            f"block_{i}", d_model=inputs["x"].shape[-1], n_head=9, bias=False, is_causal=True
        )
        attention, feed_forward = block.attn, block.ff
        set_values(
            inputs,
            i,
            {
                "q": attention.q_proj.W,
                "k": attention.k_proj.W,
                "v": attention.v_proj.W,
                "out": attention.out_proj.W,
                "in": feed_forward.fc_in.W,
                "down": feed_forward.fc_out.W,
                "norm1": block.norm1.scale,
                "norm2": block.norm2.scale,
                "loc1": block.norm1.loc,
                "loc2": block.norm2.loc,
            },
        )
        blocks.append(block)

    def run():
        x = pt.tensor("x", shape=(None, None, inputs["x"].shape[-1]), dtype="float32")
        try:
            from pytensor_ml.layers import TransformerStack
        except ImportError:
            y = x
            for block in blocks:
                y = block(y)
        else:
            stack = TransformerStack("stack", blocks, rotary=None)
            y, _ = stack(x, pt.arange(x.shape[1]))
        return compiled([x], [y], [inputs["x"]], backend).run()

    return Task(run)


def stack(inputs, backend, n_layers):
    """Compile a decoder's stack and run it once."""
    from pytensor_ml.layers import (
        DecoderBlock,
        GatedFeedForward,
        MultiheadAttention,
        RotaryEmbedding,
        TransformerStack,
    )

    width, hidden_width = inputs["gate"].shape
    blocks = []
    for i in range(n_layers):
        name = f"block_{i}"
        attention = MultiheadAttention(
            f"{name}_attn", n_embd=width, n_head=9, n_kv_head=3, bias=False, is_causal=True
        )
        feed_forward = GatedFeedForward(f"{name}_mlp", d_model=width, hidden_dim=hidden_width)
        norms = [RMSNorm(f"{name}_norm{j}", n_in=width, epsilon=1e-5) for j in (1, 2)]
        set_values(
            inputs,
            i,
            {
                "q": attention.q_proj.W,
                "k": attention.k_proj.W,
                "v": attention.v_proj.W,
                "out": attention.out_proj.W,
                "gate": feed_forward.gate.W,
                "up": feed_forward.up.W,
                "down": feed_forward.down.W,
                "norm1": norms[0].scale,
                "norm2": norms[1].scale,
            },
        )
        blocks.append(
            DecoderBlock(
                name,
                attention=attention,
                feed_forward=feed_forward,
                attention_norm=norms[0],
                feed_forward_norm=norms[1],
            )
        )
    rotary = RotaryEmbedding("rotary", rotary_dim=width // 9, base=10_000.0)

    def run():
        x = pt.tensor("x", shape=(None, None, width), dtype="float32")
        positions = pt.tensor("positions", shape=(None, None), dtype="int64")
        y, _ = TransformerStack("stack", blocks, rotary=rotary)(x, positions)
        values = [inputs["x"], inputs["positions"]]
        return compiled([x, positions], [y], values, backend).run()

    return Task(run)


def compiled(variables, outputs, values, backend, parameters=()):
    """Return the task of calling the compiled graph with values that are where it computes."""
    run = function(variables, outputs, mode=MODES[backend], on_unused_input="ignore")
    # Without this, arrays of JAX and MLX would be converted to NumPy's in each call.
    run.trust_input = True
    place, wait = placing(backend)
    for parameter in parameters:
        parameter.container.storage[0] = place(parameter.get_value())
    arguments = [place(value) for value in values]
    if wait is None:
        return Task(lambda: run(*arguments) or [])
    return Task(lambda: wait(run(*arguments)))


def placing(backend):
    """Return what puts an array where the backend computes, and what waits for outputs, if any."""
    if backend == "jax":
        import jax

        return jax.device_put, lambda outputs: jax.block_until_ready(outputs or [])
    if backend == "mlx":
        import mlx.core as mx

        def wait(outputs):
            mx.eval(outputs)
            return outputs or []

        return mx.array, wait
    return lambda value: value, None


def make_norm(inputs, epsilon):
    width = inputs["x"].shape[-1]
    norm = RMSNorm("norm", n_in=width, epsilon=epsilon)
    norm.scale.set_value(inputs["scale"])
    return norm, pt.tensor("x", shape=(None, width), dtype="float32")


def rotary_inputs(inputs):
    _, n_head, _, head_dim = inputs["x"].shape
    shape = (None, n_head, None, head_dim)
    x, dy = (pt.tensor(name, shape=shape, dtype="float32") for name in ("x", "dy"))
    return x, pt.tensor("table", shape=(None, head_dim // 2, 2), dtype="float32"), dy


def rotary_gradient_of(y, x, table, dy, inputs, backend):
    gradient = pt.grad(None, x, known_grads={y: dy})
    values = [inputs["x"], inputs["table"], inputs["dy"]]
    return compiled([x, table, dy], [gradient], values, backend)


def rotate_slices(x, table, pairing):
    cos, sin = table[..., 0], table[..., 1]
    half = x.type.shape[-1] // 2
    if pairing == "half":
        a, b = x[..., :half], x[..., half:]
        return pt.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return pt.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def set_values(inputs, layer, parameters):
    """Set the parameters of a layer, each layer's being those of the first moved by a row."""
    for name, parameter in parameters.items():
        parameter.set_value(np.roll(inputs[name], layer, axis=0))


pytensor.config.floatX = "float32"
