"""What the kernels of gated activations must do on every backend that has them."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied, in_python, normal
from pytensor_ml.activations import GELU, SiLU
from pytensor_ml.layers.feedforward import GatedActivationLayer, gated


def check_gated_activations():
    """Kernels give, for any shape and layout, what the inner graphs give."""
    cases = [(SiLU(), "float32", 3), (GELU(), "float32", 2), (GELU(), "float64", 1)]
    inputs, outputs = [], []
    for i, (activation, dtype, ndim) in enumerate(cases):
        gate, value, g = (pt.tensor(f"{k}_{i}", shape=(None,) * ndim, dtype=dtype) for k in "xvg")
        y = gated(activation, gate, value)
        inputs += [gate, value, g]
        outputs += [y, *pt.grad(None, [gate, value], known_grads={y: g})]
    run, run_inner_graphs = pytensor.function(inputs, emptied(outputs)), in_python(inputs, outputs)

    def values(*shapes):
        rows = [(shape, dtype) for shape, (_, dtype, _) in zip(shapes, cases, strict=True)]
        return [
            normal(*shape, i + 1, dtype=dtype)[..., 0] * 3
            for shape, dtype in rows
            for i in range(3)
        ]

    plain, empty = values((2, 5, 7), (3, 33), (50,)), values((2, 0, 7), (0, 4), (0,))
    scattered = [*values((7, 5, 2), (33, 3), (50,))]
    scattered = [x.T[::-1] for x in scattered]
    spoiled = [x.copy() for x in plain]
    for x in spoiled:
        x.flat[3] = np.nan
    extreme = [x * np.array(1000, x.dtype) for x in plain]
    for x in extreme[:3]:
        x.flat[:4] = [1e20, -1e20, np.inf, -np.inf]
    for case in (plain, scattered, empty, spoiled, extreme):
        for result, right in zip(run(*case), run_inner_graphs(*case), strict=True):
            assert result.dtype == right.dtype
            np.testing.assert_array_equal(np.isnan(result), np.isnan(right))
            assert_close(np.nan_to_num(result), np.nan_to_num(right), 2e-6)

    for i in (1, 2):
        wrong = list(plain)
        wrong[i] = wrong[i][:, :4]
        with pytest.raises(ValueError, match="shape"):
            run(*wrong)


def check_inputs_that_are_not_alike():
    """What broadcasts, has no axes or is of two dtypes gives what NumPy gives."""
    op = GatedActivationLayer(beta=1.5, cubic=0.0)
    row, matrix, scalar = (
        pt.tensor("x", shape=shape, dtype="float32") for shape in ((1, 3), (None, 3), ())
    )
    wide = pt.tensor("wide", shape=(None, 3), dtype="float64")
    outputs = [op(row, matrix), op(scalar, scalar), op(matrix, wide), op(row, matrix).shape[0]]
    run = pytensor.function([row, matrix, scalar, wide], outputs)
    a, b, c, d = normal(1, 3), normal(4, 3), np.float32(0.3), normal(4, 3, dtype="float64")
    *results, n_rows = run(a, b, c, d)
    for result, gate, value in zip(results, (a, c, b), (b, c, d), strict=True):
        gate = gate.astype("float64")
        assert_close(result, gate / (1 + np.exp(-1.5 * gate)) * value, 2e-6)
    assert n_rows == 4
