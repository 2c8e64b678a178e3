"""What the kernels of rotary embeddings must do on every backend that has them."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied, in_python, normal
from pytensor_ml.layers.positional import IntegerRotaryEmbedding, apply_rotary, rotary_table


def check_rotations():
    """Kernels rotate, either way and for other layouts and dtypes, as the inner graphs do."""
    # Scattered in memory: the heads of a token lie side by side.
    by_token = pt.tensor("x", shape=(None, None, 3, 12), dtype="float32")
    x = by_token.swapaxes(1, 2)
    partial = pt.tensor("partial", shape=(None, 4, 2), dtype="float32")
    batched = pt.tensor("batched", shape=(None, None, 6, 2), dtype="float64")
    half, adjacent = apply_rotary(x, partial), apply_rotary(x, batched, pairing="adjacent")
    outputs = [half, adjacent, pt.grad(None, x, known_grads={adjacent: x})]
    inputs = [by_token, partial, batched]
    run, run_inner_graphs = pytensor.function(inputs, emptied(outputs)), in_python(inputs, outputs)

    values = [normal(2, 5, 3, 12), normal(5, 4, 2), normal(2, 5, 6, 2, dtype="float64")]
    for result, expected in zip(run(*values), run_inner_graphs(*values), strict=True):
        assert_close(result, expected)
    by_head = normal(2, 3, 5, 12).swapaxes(1, 2)
    for x_value in (by_head, values[0][::-1, ::-1], values[0][::-1, ::-1, :, ::-1]):
        placed = [x_value, *values[1:]]
        for result, expected in zip(run(*placed), run_inner_graphs(*placed), strict=True):
            assert_close(result, expected)
    assert run(values[0][:0], values[1], values[2][:0])[0].shape == (0, 3, 5, 12)
    for wrong in ((4, 4, 2), (6, 4, 2)):
        with pytest.raises(ValueError, match="shape"):
            run(values[0], normal(*wrong), values[2])


def check_tables():
    """Kernels make tables as the inner graphs do, whatever the positions' layout."""
    p = pt.lmatrix("p")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    outputs = [
        rotary_table(p, rotary_dim=8, scaling=yarn),
        rotary_table(p, rotary_dim=8, dtype="float64"),
        rotary_table(p, rotary_dim=8, base=100.0),
        IntegerRotaryEmbedding(8, 4, 100, 64)(p),
    ]
    run, run_inner_graphs = pytensor.function([p], emptied(outputs)), in_python([p], outputs)
    positions = np.array([[0, 1, 1_000_000], [-5, 2**31 - 1, 77]])
    for value in (positions, positions.T):
        for result, expected in zip(run(value), run_inner_graphs(value), strict=True):
            assert_close(result, expected, 4e-7)
