"""What the kernels of mixtures of experts must do on every backend."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied, in_python, normal
from pytensor_ml.layers.moe import ExpertsLayer, RouterLayer, RouterPullback

ROUTERS = [
    {
        "top_k": 3,
        "score": "sigmoid",
        "selection_bias": True,
        "n_groups": 4,
        "top_k_groups": 2,
        "renormalize": True,
        "routed_scaling_factor": 2.5,
        "bias_update_factor": 0.25,
    },
    {
        "top_k": 2,
        "score": "softmax",
        "selection_bias": False,
        "n_groups": 1,
        "top_k_groups": 1,
        "renormalize": False,
        "routed_scaling_factor": 1.0,
        "bias_update_factor": 0.0,
    },
]


def experts_and_gradients(dtype):
    x, g = (pt.tensor(name, shape=(None, None, None), dtype=dtype) for name in "xg")
    ids = pt.tensor("ids", shape=(None, None, None), dtype="int32")
    weights = pt.tensor("weights", shape=(None, None, None), dtype=dtype)
    parameters = [pt.tensor(name, shape=(4, None, None), dtype=dtype) for name in ("a", "b", "c")]
    y = ExpertsLayer()(x, ids, weights, *parameters)
    gradients = pt.grad(None, [x, weights, *parameters], known_grads={y: g})
    return [x, ids, weights, *parameters, g], [y, *gradients]


def draw_experts(n_rows, n_tokens, k, width, hidden, skewed, dtype):
    rng = np.random.default_rng(n_tokens)
    ids = np.argsort(rng.random((n_rows, n_tokens, 4)), axis=-1)[..., :k]
    if skewed:
        ids[...] = np.arange(k)
    parameters = [normal(4, width, hidden, dtype=dtype), normal(4, width, hidden, dtype=dtype) + 1]
    return [
        normal(n_rows, n_tokens, width, dtype=dtype),
        ids.astype("int32"),
        rng.random((n_rows, n_tokens, k)).astype(dtype),
        *parameters,
        normal(4, hidden, width, dtype=dtype),
        normal(n_rows, n_tokens, width, dtype=dtype) + 0.5,
    ]


def check_experts(dtype="float32", is_strided=False, is_checked=False):
    """Kernels give, for any shape, load and layout, what the inner graphs give.

    Numba compiles anew for what is not contiguous. Where the kernel reads memory itself,
    ``is_checked``, it must not read past the end of its inputs.
    """
    inputs, outputs = experts_and_gradients(dtype)
    run = pytensor.function(inputs, emptied(outputs))
    run_inner_graphs = in_python(inputs, outputs)
    for shape in [(2, 9, 2, 5, 3, False), (1, 700, 1, 3, 2, True), (1, 1, 4, 4, 7, False)]:
        values = draw_experts(*shape, dtype)
        for result, right in zip(run(*values), run_inner_graphs(*values), strict=True):
            assert_close(np.asarray(result), right, {"float32": 4e-6, "float64": 1e-14}[dtype])

    values = draw_experts(2, 9, 2, 5, 3, False, dtype)
    plain = [np.asarray(v) for v in run(*values)]
    if is_strided:
        strided = [np.repeat(v, 2, axis=-1)[..., ::2] for v in values]
        for result, right in zip(run(*strided), plain, strict=True):
            assert_close(np.asarray(result), right, 1e-6)

    def refuses(at, value, message):
        changed = [np.ascontiguousarray(value) if i == at else v for i, v in enumerate(values)]
        with pytest.raises(ValueError, match=message):
            run(*changed)

    if is_checked:
        refuses(1, values[1] + np.int32(4), "id of an expert")
        refuses(1, values[1] - np.int32(4), "id of an expert")
        refuses(1, values[1][:, :-1], "ids and weights")
        refuses(0, values[0][..., :-1], "width")
        refuses(5, values[5][:, :-1], "gate, up and down")
        refuses(6, values[6][..., :-1], "gradient whose shape")

    values[0][1, 3] = np.nan
    y, dx, *_ = (np.array(v) for v in run(*values))
    for result, right in ((y, plain[0]), (dx, plain[1])):
        assert np.isnan(result[1, 3]).all()
        result[1, 3] = right[1, 3]
        np.testing.assert_array_equal(result, right)

    values = draw_experts(2, 0, 2, 5, 3, False, dtype)
    y, *gradients = run(*values)
    assert y.shape == (2, 0, 5)
    assert not any(np.asarray(gradient).any() for gradient in gradients)


def check_routers(dtype="float32"):
    """Kernels give what the inner graphs give, ties and NaN included."""
    logits = pt.tensor("logits", shape=(None, None, 12), dtype=dtype)
    bias = pt.tensor("bias", shape=(12,), dtype=dtype)
    valid = pt.tensor("valid", shape=(None, None), dtype="bool")
    ids = pt.tensor("ids", shape=(None, None, None), dtype="int32")
    g = pt.tensor("g", shape=(None, None, None), dtype=dtype)
    outputs, gradients = [], []
    for settings, options in zip(ROUTERS, ([bias, valid], [valid]), strict=True):
        outputs += RouterLayer(**settings)(logits, *options)
        read = ("score", "renormalize", "routed_scaling_factor")
        pullback = RouterPullback(**{name: settings[name] for name in read})
        gradients.append(pullback(logits, ids, g))
    inputs = [logits, bias, valid, ids, g]
    run = pytensor.function(inputs, emptied([*outputs, *gradients]))
    run_inner_graphs = in_python(inputs, [*outputs, *gradients])
    values = [normal(3, 7, 12, dtype=dtype), normal(12, dtype=dtype), normal(3, 7) > 0]
    values += [np.argsort(normal(3, 7, 12))[..., :3].astype("int32"), normal(3, 7, 3, dtype=dtype)]
    values[0][0] = np.round(values[0][0])
    values[0][1, 3] = -200
    no_tokens = [v[:, :0] if v.ndim > 1 else v for v in values]
    no_tokens = [np.ascontiguousarray(v) for v in no_tokens]
    for case in (values, no_tokens):
        for result, right in zip(run(*case), run_inner_graphs(*case), strict=True):
            assert result.dtype == right.dtype
            assert_close(result, right, 0 if right.dtype.kind == "i" else 1e-6)

    values[0][1, 2] = np.nan
    results, right = run(*values), run_inner_graphs(*values)
    for at in (0, 2, 3, 4, 6):
        np.testing.assert_array_equal(results[at], right[at])
    assert np.isnan(results[1][1, 2]).all()

    with pytest.raises(ValueError, match="valid tokens"):
        run(*values[:2], values[2][:, :-1].copy(), *values[3:])
    with pytest.raises(ValueError, match="gradient whose shape"):
        run(*values[:4], values[4][:, :-1].copy())
    with pytest.raises(ValueError, match="id of an expert"):
        run(*values[:3], values[3] + np.int32(12), values[4])
