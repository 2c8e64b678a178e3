"""Networks as the published package saves them, and what they give: golden/published_*.

Run with pytensor-ml==0.3.0 and safetensors in an environment of their own:
python tests/golden/make_published.py
"""

from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt

from pytensor_ml.activations import GELU, ReLU, Softmax
from pytensor_ml.layers import (
    RNN,
    CausalSelfAttention,
    Dropout,
    Embedding,
    FeedForward,
    Input,
    LayerNorm,
    Linear,
    MultiheadAttention,
    RMSNorm,
    Sequential,
    TransformerBlock,
)
from pytensor_ml.params import non_trainable, trainable
from pytensor_ml.pretrained import save_pretrained
from pytensor_ml.pytensorf import collect_shared_variables, compile_predict
from pytensor_ml.state import XavierNormalInitializer

HERE = Path(__file__).parent


def mlp():
    x = Input("x", shape=(None, 12))
    layers = [
        # Unnamed, so their parameters are called the same.
        Linear(n_in=12, n_out=8),
        ReLU(),
        LayerNorm("norm", n_in=8),
        Dropout("dropout", p=0.3, random_state=0),
        Linear(n_in=8, n_out=8),
        RMSNorm("rms", n_in=8, affine=False),
        Linear(n_in=8, n_out=5, bias=False),
        Softmax(),
    ]
    return [x], Sequential(*layers)(x)


def decoder():
    ids = Input("ids", shape=(None, 6), dtype="int64")
    table = Embedding("tokens", n_embeddings=13, n_features=8)
    h = table(ids)
    h = TransformerBlock("block", d_model=8, n_head=2, dropout=0.1, is_causal=True)(h)
    h = h + CausalSelfAttention("attention", n_embd=8, n_head=4, n_kv_head=2)(h)
    # The head is the table again.
    return [ids], h @ table.W.T


def encoder():
    x, y = Input("x", shape=(3, 5, 8)), Input("y", shape=(3, 7, 6))
    # The published package adds it to the scores, although it holds truths.
    mask = Input("mask", shape=(3, 1, 5, 7), dtype="bool")
    h = MultiheadAttention("attention", n_embd=8, n_head=2, kv_dim=6)(x, y, mask=mask)
    h = FeedForward("feed_forward", d_model=8, activation=GELU(approximate=False), gated=True)(h)
    block = TransformerBlock("block", d_model=8, n_head=2, norm_first=False, fused_qkv=True)
    return [x, y, mask], block(h)


def recurrent():
    x = Input("x", shape=(None, 5, 4))
    layer = RNN("rnn", n_in=4, n_hidden=6, recurrent_initializer=XavierNormalInitializer())
    return [x], layer(x)


def operations():
    x = Input("x", shape=(None, 9))
    w = trainable(np.eye(9, 4, dtype="float32"), "w")
    shift = non_trainable(np.zeros(4, "float32"), "shift")
    scale = pytensor.shared(np.ones(4, "float32"), "scale", shape=(4,))
    y = pt.log1p(pt.exp(x @ w)) * scale + shift
    table = pt.constant(np.array([[1, np.inf, -2, np.nan]], "float32"))
    outputs = [
        pt.where(pt.isfinite(table), y, pt.zeros((x.shape[0], 4))),
        pt.concatenate([y[:, ::-1], x[1:2, :4]], axis=0).max(axis=1),
        pt.argsort(x, axis=-1),
        pt.cumsum(x.mean(axis=0), axis=0).astype("int32"),
        pt.set_subtensor(y[0], pt.arange(4, dtype="float32")).T,
        pt.take(y, [2, 0], axis=1),
    ]
    return [x], outputs


def main():
    pytensor.config.floatX = "float32"
    for make in (mlp, decoder, encoder, recurrent, operations):
        rng = np.random.default_rng(7)
        inputs, outputs = make()
        for variable in collect_shared_variables(outputs):
            value = variable.get_value(borrow=True)
            if isinstance(value, np.ndarray):
                variable.set_value(rng.normal(0.1, 0.6, value.shape).astype("float32"))
        folder = HERE / f"published_{make.__name__}"
        save_pretrained(outputs, folder, inputs=inputs)
        values = [
            rng.integers(0, 2, [n or 3 for n in x.type.shape]).astype(x.type.dtype)
            if x.type.dtype in ("int64", "bool")
            else rng.normal(size=[n or 3 for n in x.type.shape]).astype("float32")
            for x in inputs
        ]
        results = compile_predict(outputs, inputs=inputs)(*values)
        results = results if isinstance(outputs, list) else [results]
        named = {f"input{i}": value for i, value in enumerate(values)}
        named |= {f"output{i}": value for i, value in enumerate(results)}
        np.savez(folder / "expected.npz", **named)


if __name__ == "__main__":
    main()
