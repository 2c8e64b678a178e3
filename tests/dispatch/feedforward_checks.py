"""What the kernels of gated activations must do on every backend that has them."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied, in_python, normal
from pytensor_ml.activations import GELU, SiLU
from pytensor_ml.layers.feedforward import gated


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
