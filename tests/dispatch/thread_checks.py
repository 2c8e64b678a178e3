"""What only several threads can break, with items that their parts do not divide evenly."""

import numpy as np
import pytensor
import pytensor.tensor as pt
from helpers import assert_close

from dispatch import norm_checks
from dispatch.attention_checks import (
    SCALE,
    assert_same,
    by_token_tensors,
    emptied,
    in_python,
    normal,
)
from pytensor_ml.activations import GELU
from pytensor_ml.layers.attention import scaled_dot_product_attention
from pytensor_ml.layers.feedforward import gated
from pytensor_ml.layers.linear import LinearLayer, LinearPullback
from pytensor_ml.layers.positional import apply_rotary


def check_products():
    """By rows, by columns, and of one row, forward and back, in any layout."""
    x, W, g = (pt.tensor(name, shape=(None, None), dtype="float64") for name in "xWg")
    y = LinearLayer(n_in=5, n_out=3, bias=False)(x, W)
    gradients = LinearPullback(n_in=5, n_out=3)(x, W, g)
    run = pytensor.function([x, W, g], emptied([y, *gradients]))
    for n_rows, n_in, n_out in ((300, 130, 70), (70, 130, 330), (1, 517, 301)):
        shapes = (n_rows, n_in), (n_in, n_out), (n_rows, n_out)
        values = [normal(*shape, dtype="float64") for shape in shapes]
        x_value, weight, g_value = values
        right = [x_value @ weight, g_value @ weight.T, x_value.T @ g_value]
        # What lies in no order that BLAS knows is copied, and the copies must last.
        scattered = [np.zeros([2 * n for n in value.shape])[::2, ::-2] for value in values]
        for copy, value in zip(scattered, values, strict=True):
            copy[:] = value
        for given in (values, [np.asfortranarray(value) for value in values], scattered):
            for made, expected in zip(run(*given), right, strict=True):
                assert_close(made, expected, 1e-12)


def check_norms():
    """Forward and back."""
    x, dy, outputs = norm_checks.norms_and_gradients()
    run, run_inner_graphs = (
        pytensor.function([x, dy], emptied(outputs)),
        in_python([x, dy], outputs),
    )
    pair = np.random.default_rng(13).normal(1, 1, (2, 1003, norm_checks.WIDTH)).astype("float32")
    for result, right in zip(run(*pair), run_inner_graphs(*pair), strict=True):
        assert_close(result, right, 2e-6)


def check_attention():
    """Forward and back."""
    by_token = by_token_tensors("float32", q=4, k=2, v=2, g=4)
    q, k, v, g = (x.swapaxes(1, 2) for x in by_token)
    mask = pt.tensor("mask", shape=(None, 1, None, None), dtype="bool")
    y = scaled_dot_product_attention(q, k, v, mask=mask, scale=SCALE)
    outputs = [y, *pt.grad(None, [q, k, v], known_grads={y: g})]
    run = pytensor.function([*by_token, mask], emptied(outputs))
    run_inner_graphs = in_python([*by_token, mask], outputs)
    shapes = (150, 4, 19), (39, 2, 19), (39, 2, 7), (150, 4, 7)
    q, k, v, g = (normal(7, *shape) for shape in shapes)
    mask = normal(7, 1, 150, 39) > -0.5
    # What no query sees, which a part must know though it begins amid the blocks of a head.
    k[:, 2], v[:, 2], mask[..., 2] = np.nan, np.nan, False
    values = [q, k, v, g, mask]
    for result, right in zip(run(*values), run_inner_graphs(*values), strict=True):
        assert_same(result, right)


def check_rotations():
    """By tables of one and of several batch rows."""
    by_token = pt.tensor("x", shape=(None, None, 3, 12), dtype="float32")
    x = by_token.swapaxes(1, 2)
    partial = pt.tensor("partial", shape=(None, 4, 2), dtype="float32")
    batched = pt.tensor("batched", shape=(None, None, 6, 2), dtype="float64")
    outputs = [apply_rotary(x, partial), apply_rotary(x, batched, pairing="adjacent")]
    inputs = [by_token, partial, batched]
    run, run_inner_graphs = pytensor.function(inputs, emptied(outputs)), in_python(inputs, outputs)
    shapes = (37, 60, 3, 12), (60, 4, 2), (37, 60, 6, 2)
    dtypes = "float32", "float32", "float64"
    values = [normal(*s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    for result, right in zip(run(*values), run_inner_graphs(*values), strict=True):
        assert_close(result, right)


def check_gated_activations():
    """Forward and back."""
    inputs = [pt.tensor(name, shape=(None,), dtype="float64") for name in "xvg"]
    gate, value, g = inputs
    y = gated(GELU(), gate, value)
    outputs = [y, *pt.grad(None, [gate, value], known_grads={y: g})]
    run, run_inner_graphs = pytensor.function(inputs, emptied(outputs)), in_python(inputs, outputs)
    values = np.random.default_rng(15).normal(size=(3, 100_003))
    for result, right in zip(run(*values), run_inner_graphs(*values), strict=True):
        assert_close(result, right, 1e-12)
