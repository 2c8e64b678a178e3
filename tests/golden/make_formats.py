"""One network for each format version that this package writes, frozen: golden/format_*.

They are made once, by the first version that writes the format. Later versions must open them.
python tests/golden/make_formats.py
"""

from pathlib import Path

import numpy as np
import pytensor

pytensor.config.floatX = "float32"

from pytensor_ml.activations import SiLU, Softmax  # noqa: E402
from pytensor_ml.layers import (  # noqa: E402
    DecoderBlock,
    Embedding,
    GatedFeedForward,
    Input,
    LayerNorm,
    Linear,
    MoE,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    TransformerStack,
    ZeroCenteredRMSNorm,
)
from pytensor_ml.pretrained import save_pretrained  # noqa: E402
from pytensor_ml.pytensorf import collect_shared_variables, compile_predict  # noqa: E402
from pytensor_ml.state import NormalInitializer  # noqa: E402

HERE = Path(__file__).parent


def format_4():
    x = Input("x", shape=(None, 6))
    layers = [
        Linear("fc", n_in=6, n_out=8, weight_initializer=NormalInitializer(std=0.5)),
        SiLU(),
        RMSNorm("rms", n_in=8),
        Linear("out", n_in=8, n_out=5),
        LayerNorm("norm", n_in=5),
        Softmax(),
    ]
    return [x], Sequential(*layers)(x)


def format_5():
    ids, positions = (Input(name, shape=(None, 5), dtype="int64") for name in ("ids", "positions"))
    table = Embedding("tokens", n_embeddings=11, n_features=8)
    blocks = [
        DecoderBlock(
            f"block_{i}",
            attention=MultiheadAttention(
                f"block_{i}_attention", n_embd=8, n_head=2, n_kv_head=1, is_causal=True, window=3
            ),
            feed_forward=(
                MoE(
                    f"block_{i}_moe",
                    d_model=8,
                    hidden_dim=4,
                    n_experts=4,
                    top_k=2,
                    selection_bias=True,
                    bias_update_factor=0.01,
                )
                if i == 2
                else GatedFeedForward(f"block_{i}_ff", d_model=8, hidden_dim=12)
            ),
            attention_norm=RMSNorm(f"block_{i}_norm_1", n_in=8),
            feed_forward_norm=ZeroCenteredRMSNorm(f"block_{i}_norm_2", n_in=8),
            branch_scale=0.5,
            dropout=0.1 if i == 0 else 0.0,
        )
        for i in range(3)
    ]
    stack = TransformerStack("stack", blocks, rotary=RotaryEmbedding("rotary", rotary_dim=4))
    h, [tap] = stack(table(ids), positions, tap_blocks=[0])
    return [ids, positions], [table.head(h), tap]


def main():
    for make in (format_4, format_5):
        rng = np.random.default_rng(3)
        inputs, outputs = make()
        for variable in collect_shared_variables(outputs):
            value = variable.get_value(borrow=True)
            if isinstance(value, np.ndarray):
                variable.set_value(rng.normal(0.1, 0.6, value.shape).astype("float32"))
        folder = HERE / make.__name__
        save_pretrained(outputs, folder, inputs=inputs)
        values = [
            rng.integers(0, 11, [n or 3 for n in x.type.shape])
            if x.type.dtype == "int64"
            else rng.normal(size=[n or 3 for n in x.type.shape]).astype("float32")
            for x in inputs
        ]
        predict = compile_predict(outputs, inputs=inputs, compile_kwargs={"mode": "CVM"})
        results = predict(*values)
        results = results if isinstance(outputs, list) else [results]
        named = {f"input{i}": value for i, value in enumerate(values)}
        named |= {f"output{i}": value for i, value in enumerate(results)}
        np.savez(folder / "expected.npz", **named)


if __name__ == "__main__":
    main()
