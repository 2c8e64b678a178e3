import ctypes
import math
import re
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from dispatch.attention_checks import in_python
from helpers import assert_close
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.traversal import applys_between
from references import attention as reference
from references import norm as norms
from references import positional

from pytensor_ml.layers.attention import (
    AttentionLayer,
    CausalSelfAttention,
    GatedAttention,
    KVCache,
    MultiheadAttention,
    cached_attention,
    scaled_dot_product_attention,
)
from pytensor_ml.layers.norm import RMSNorm
from pytensor_ml.layers.positional import rotary_table

inf = np.inf


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def tensors(**shapes):
    return [pt.tensor(name, shape=shape, dtype="float32") for name, shape in shapes.items()]


def compile_with_gradients(mask, **settings):
    """Return a function of q, k, v, mask and the gradient of y that gives y and all gradients."""
    q, k, v, g = tensors(q=(2, 4, 3, 8), k=(2, 2, 5, 8), v=(2, 2, 5, 6), g=(2, 4, 3, 6))
    y = scaled_dot_product_attention(q, k, v, mask=mask, **settings)
    wrt = [x for x in (q, k, v, mask) if x.type.dtype != "bool"]
    run = pytensor.function([q, k, v, mask, g], [y, *pt.grad(None, wrt, known_grads={y: g})])
    return lambda *values: [np.asarray(out) for out in run(*values)]


QKV = normal(2, 4, 3, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 6)
G = normal(2, 4, 3, 6)


def expected_with_gradients(q, k, v, mask, g, **settings):
    y = reference.attention(q, k, v, mask=mask, **settings)
    return [y, *reference.attention_gradients(q, k, v, g, mask=mask, **settings)]


@pytest.fixture(scope="module")
def masked():
    return compile_with_gradients(pt.tensor("mask", shape=(2, 1, 3, 5), dtype="bool"), scale=0.3)


# Key 1 is hidden from every query of the first batch row, and query 1 of the second sees nothing.
BOOLEAN = np.array(
    [
        [[1, 0, 0, 1, 0], [0, 0, 1, 0, 1], [1, 0, 1, 1, 1]],
        [[1, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]],
    ],
    dtype=bool,
)[:, None]


def test_boolean_mask(masked):
    results = masked(*QKV, BOOLEAN, G)
    for result, right in zip(
        results, expected_with_gradients(*QKV, BOOLEAN, G, scale=0.3), strict=True
    ):
        assert_close(result, right)
    y, dq, _, _ = results
    assert not y[1, :, 1].any()
    assert not dq[1, :, 1].any()


@pytest.mark.parametrize("spoiled", [np.nan, inf])
def test_an_unseen_key_has_no_influence(masked, spoiled):
    q, k, v = (x.copy() for x in QKV)
    k[0, :, 1], v[0, :, 1] = spoiled, -spoiled
    for result, right in zip(masked(q, k, v, BOOLEAN, G), masked(*QKV, BOOLEAN, G), strict=True):
        np.testing.assert_array_equal(result, right)


def test_a_visible_key_has_influence(masked):
    q, k, v = (x.copy() for x in QKV)
    k[1, 0, 4, 2] = np.nan
    y = masked(q, k, v, BOOLEAN, G)[0]
    assert np.isnan(y[1, :2, 0]).all()
    assert not np.isnan(y[0]).any()


@pytest.fixture(scope="module")
def added():
    mask = pt.tensor("mask", shape=(4, 3, 5), dtype="float32")
    return compile_with_gradients(mask, is_causal=True, window=3, softcap=1.5)


def test_float_mask(added):
    """A mask that lacks the batch axis, with a corner, a window and a bound on the scores."""
    mask = normal(4, 3, 5)
    mask[0, 1, 2] = mask[2, :, 3] = mask[3, 2] = -inf
    settings = {"is_causal": True, "window": 3, "softcap": 1.5}
    results = added(*QKV, mask, G)
    for result, right in zip(
        results, expected_with_gradients(*QKV, mask, G, **settings), strict=True
    ):
        assert_close(result, right)
    assert not results[0][:, 3, 2].any()
    assert not results[-1][mask == -inf].any()


NEAR = {"is_causal": True, "window": 4, "softcap": 1.5}


@pytest.fixture(scope="module")
def variants():
    """Attention without a mask: of all keys, of those up to a corner, and of those in a window."""
    q, k, v = tensors(q=(1, 4, None, 8), k=(1, 2, None, 8), v=(1, 2, None, None))
    outputs = [
        scaled_dot_product_attention(q, k, v),
        scaled_dot_product_attention(q, k, v, is_causal=True),
        scaled_dot_product_attention(q, k, v, **NEAR),
    ]
    # A rewrite that fails only prints a page of tracebacks by default.
    with pytensor.config.change_flags(on_opt_error="raise"):
        run = pytensor.function([q, k, v], outputs)
    # Numba compiles again for another layout.
    return lambda *values: [np.asarray(out) for out in run(*map(np.ascontiguousarray, values))]


def test_no_mask(variants):
    q, k, v = normal(1, 4, 5, 8), normal(1, 2, 7, 8), normal(1, 2, 7, 6)
    for result, settings in zip(
        variants(q, k, v),
        [{}, {"is_causal": True}, NEAR],
        strict=True,
    ):
        assert_close(result, reference.attention(q, k, v, **settings))


def seen_by(variants, n_queries, n_keys):
    """Return which keys each query of the last two variants sees."""
    q, k = np.zeros((1, 4, n_queries, 8), "float32"), normal(1, 2, n_keys, 8)
    one_hot = np.broadcast_to(np.eye(n_keys, dtype="float32"), (1, 2, n_keys, n_keys))
    return [y[0, 0] > 0 for y in variants(q, k, one_hot)[1:]]


def test_the_last_query_stands_at_the_last_key(variants):
    causal, _ = seen_by(variants, 2, 5)
    np.testing.assert_array_equal(causal, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    causal, _ = seen_by(variants, 3, 2)
    np.testing.assert_array_equal(causal, [[0, 0], [1, 0], [1, 1]])


def test_a_window_counts_the_query_itself(variants):
    _, near = seen_by(variants, 6, 6)
    np.testing.assert_array_equal(near.sum(-1), [1, 2, 3, 4, 4, 4])
    _, near = seen_by(variants, 1, 800)
    np.testing.assert_array_equal(np.flatnonzero(near), range(796, 800))


def test_more_queries_than_a_block_of_any_kernel(variants):
    q, k, v = normal(1, 4, 70, 8), normal(1, 2, 70, 8), normal(1, 2, 70, 3)
    for result, settings in zip(variants(q, k, v)[1:], [{"is_causal": True}, NEAR], strict=True):
        assert_close(result, reference.attention(q, k, v, **settings))


def test_query_heads_share_keys_in_contiguous_groups(variants):
    v = np.broadcast_to(np.arange(2, dtype="float32")[:, None, None], (1, 2, 5, 3))
    y = variants(normal(1, 4, 5, 8), normal(1, 2, 5, 8), v)[0]
    assert_close(y[0, :, 0, 0], [0, 0, 1, 1])


def test_long_sums_are_accurate(variants):
    q, k, v = normal(1, 4, 1, 8), normal(1, 2, 8192, 8), normal(1, 2, 8192, 4)
    assert_close(variants(q, k, v)[0], reference.attention(q, k, v + 1) - 1)


def test_sums_over_a_mean_are_accurate(backend, request, variants):
    if backend == "mlx":
        reason = "MLX's softmax and matrix product add serially on a CPU"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    q, k, v = normal(1, 4, 1, 8), normal(1, 2, 2**15, 8), 1 + normal(1, 2, 2**15, 4)
    assert_close(variants(q, k, v)[0], reference.attention(q, k, v))


def test_float16(backend):
    q, k, v = (
        pt.tensor(name, shape=(1, heads, None, 8), dtype="float16")
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    y = scaled_dot_product_attention(q, k, v)
    if backend == "numba":
        with pytest.raises(NotImplementedError, match="float16"):
            pytensor.function([q, k, v], y)
        return
    run = pytensor.function([q, k, v], y)

    # Scores that float16 would round by more than their exponentials may err.
    values = [3 * normal(1, 4, 3, 8), 3 * normal(1, 2, 5, 8), normal(1, 2, 5, 8)]
    values = [x.astype("float16") for x in values]
    result, right = np.asarray(run(*values)), reference.attention(*values)
    assert result.dtype == "float16"
    assert np.all(np.abs(result - right) <= np.spacing(np.abs(right).astype("float16")))

    ones = np.ones((1, 2, 4096, 8), "float16")
    assert_close(run(0 * ones[:, [0, 0, 0, 0], :1], ones, ones), ones[:, [0, 0, 0, 0], :1], 1e-3)


CAPACITY = 16
CACHE = normal(2, 2, CAPACITY, 8, seed=1), normal(2, 2, CAPACITY, 6, seed=2)


@pytest.fixture(scope="module")
def cached():
    q, k, v = tensors(q=(2, 4, None, 8), k=(2, 2, None, 8), v=(2, 2, None, 6))
    keys, values = tensors(keys=CACHE[0].shape, values=CACHE[1].shape)
    length, start = (
        pt.scalar("length", dtype="int32"),
        pt.tensor("start", shape=(2,), dtype="int32"),
    )
    cache = KVCache(keys, values, length, start)
    outputs = [
        cached_attention(q, k, v, cache),
        cached_attention(q, k, v, cache, window=3, softcap=1.5, scale=0.3),
    ]
    run = pytensor.function([q, k, v, keys, values, length, start], outputs)

    def call(q, k, v, length, start, keys=CACHE[0], values=CACHE[1]):
        tensors = map(np.ascontiguousarray, (q, k, v, keys, values))
        outputs = run(*tensors, np.int32(length), np.array(start, "int32"))
        return [np.asarray(out) for out in outputs]

    return call


def new_tokens(n):
    return normal(2, 4, n, 8, seed=3), normal(2, 2, n, 8, seed=4), normal(2, 2, n, 6, seed=5)


@pytest.mark.parametrize(
    ("n_new", "length", "start"),
    [(1, 5, (0, 2)), (3, 0, (0, 1)), (3, 6, (4, 8)), (1, CAPACITY, (0, 0)), (40, 5, (0, 30))],
)
def test_cached_attention(cached, n_new, length, start):
    tokens = new_tokens(n_new)
    settings = [{}, {"window": 3, "softcap": 1.5, "scale": 0.3}]
    for result, options in zip(cached(*tokens, length, start), settings, strict=True):
        assert_close(result, reference.cached_attention(*tokens, *CACHE, length, start, **options))


def test_tokens_at_once_are_single_steps(cached):
    tokens = new_tokens(3)
    at_once = cached(*tokens, 6, (0, 7))
    keys, values = (x.copy() for x in CACHE)
    for i in range(3):
        q, k, v = (x[:, :, i : i + 1] for x in tokens)
        for step, whole in zip(cached(q, k, v, 6 + i, (0, 7), keys, values), at_once, strict=True):
            assert_close(step, whole[:, :, i : i + 1])
        keys[:, :, 6 + i : 7 + i], values[:, :, 6 + i : 7 + i] = k, v


def test_slots_beyond_the_length_have_no_influence(cached):
    tokens = new_tokens(3)
    keys, values = (x.copy() for x in CACHE)
    keys[:, :, 6:] = values[:, :, 6:] = np.nan
    for result, right in zip(
        cached(*tokens, 6, (0, 2), keys, values), cached(*tokens, 6, (0, 2)), strict=True
    ):
        np.testing.assert_array_equal(result, right)


def test_padding_on_the_left_has_no_influence(cached):
    """A row whose first two slots are padding is the row that starts two slots earlier."""
    tokens = new_tokens(3)
    keys, values = (np.roll(x, -2, axis=2) for x in CACHE)
    for padded, plain in zip(
        cached(*tokens, 6, (2, 2)), cached(*tokens, 4, (0, 0), keys, values), strict=True
    ):
        assert_close(padded, plain)


def test_multihead_attention():
    """Heads of a width of their own, rotated and normalized, and either source of keys."""
    n_tokens, positions = 5, np.arange(100, 105)
    x, kv = tensors(x=(2, n_tokens, 12), kv=(2, n_tokens, 10))
    rope = rotary_table(pt.constant(positions), rotary_dim=4, base=50.0)
    options = {"n_embd": 12, "n_head": 4, "n_kv_head": 2, "head_dim": 6}
    scores = {"scale": 0.3, "window": 3, "softcap": 1.5}
    from_kv = MultiheadAttention(
        **options,
        kv_dim=10,
        q_norm=RMSNorm("q_norm", n_in=6, epsilon=1e-3),
        k_norm=RMSNorm("k_norm", n_in=6, epsilon=1e-3),
        qk_norm_order="before_rotary",
    )
    fused = MultiheadAttention(
        **options,
        **scores,
        fused_qkv=True,
        is_causal=True,
        pairing="adjacent",
        q_norm=RMSNorm("q_norm", n_in=6, epsilon=1e-3),
        k_norm=RMSNorm("k_norm", n_in=6, epsilon=1e-3),
        qk_norm_order="after_rotary",
    )
    gated = GatedAttention(
        dim=12, num_heads=4, num_kv_heads=2, head_dim=6, qk_norm_eps=1e-3, gate="channel"
    )
    layers = (from_kv, fused, gated)
    for layer in layers:
        for i, norm in enumerate((layer.q_norm, layer.k_norm)):
            weight = norm.weight if layer is gated else norm.scale
            weight.set_value(weight.get_value() + normal(6, seed=i))
        for linear in linears_of(layer):
            for parameter in [linear.W] if linear.b is None else [linear.W, linear.b]:
                parameter.set_value(normal(*parameter.get_value().shape) / 4)
    values = [normal(2, n_tokens, 12), normal(2, n_tokens, 10)]
    outputs = [from_kv(x, kv, rope=rope), fused(x, rope=rope), gated(x, rope)]
    results = pytensor.function([x, kv], outputs)(*values)
    theta, _ = positional.frequencies("default", 4, 50.0)
    for result, layer in zip(results, layers, strict=True):
        q, k, v = projected(layer, values[0], values[1] if layer is from_kv else values[0])
        turned = []
        for heads, norm in ((q, layer.q_norm), (k, layer.k_norm)):
            scale = 1 + norm.weight.get_value() if layer is gated else norm.scale.get_value()
            if layer is from_kv:
                heads = norms.forward(norms.rms_norm, heads, scale, epsilon=1e-3)
            heads = positional.rotate(heads, positions, theta, layer.pairing)
            if layer is not from_kv:
                heads = norms.forward(norms.rms_norm, heads, scale, epsilon=1e-3)
            turned.append(heads)
        options = {**scores, "is_causal": True} if layer is fused else {}
        heads = reference.attention(*turned, v, **options)
        if layer is gated:
            gates = values[0].astype("float64") @ layer.gate_proj.W.get_value()
            heads *= split(1 / (1 + np.exp(-gates)), 6)
        joined = heads.swapaxes(1, 2).reshape(2, n_tokens, -1)
        W, b = (parameter.get_value() for parameter in (layer.out_proj.W, layer.out_proj.b))
        assert_close(result, joined @ W.astype("float64") + b)


def linears_of(layer):
    if layer.fused_qkv:
        return [layer.qkv_proj, layer.out_proj]
    linears = [layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj]
    return [layer.gate_proj, *linears] if hasattr(layer, "gate_proj") else linears


def projected(layer, x, source):
    """Return queries, keys and values of shape (batch, heads, tokens, head_dim)."""
    weights = [linear.W.get_value() for linear in linears_of(layer)[-4:-1]]
    biases = [
        np.zeros(linear.n_out) if linear.b is None else linear.b.get_value()
        for linear in linears_of(layer)[-4:-1]
    ]
    if layer.fused_qkv:
        ends = layer.head_dim * np.cumsum([layer.n_head, layer.n_kv_head])
        weights, biases = np.split(weights[0], ends, axis=1), np.split(biases[0], ends)
    heads = []
    for made_from, weight, bias in zip((x, source, source), weights, biases, strict=True):
        heads.append(split(made_from.astype("float64") @ weight + bias, layer.head_dim))
    return heads


def split(y, width):
    return y.reshape(*y.shape[:2], -1, width).swapaxes(1, 2)


def attention_op_of(layer):
    (x,) = tensors(x=(1, 3, layer.out_proj.n_out))
    nodes = applys_between([x], [layer(x)])
    return next(node.op for node in nodes if isinstance(node.op, AttentionLayer))


@pytest.mark.compiles_nothing
def test_head_width_does_not_follow_the_hidden_size():
    layer = MultiheadAttention(n_embd=2560, n_head=32, head_dim=128)
    assert layer.q_proj.W.type.shape == (2560, 4096)
    assert attention_op_of(layer).scale == 1 / math.sqrt(128)


@pytest.mark.compiles_nothing
def test_causal_self_attention_is_causal():
    layer = CausalSelfAttention(n_embd=12, n_head=4, n_kv_head=2)
    assert attention_op_of(layer).is_causal
    assert layer.k_proj.W.type.shape == (12, 6)


@pytest.mark.compiles_nothing
def test_no_float64():
    q, k, v, mask = tensors(q=(2, 4, 3, 8), k=(2, 2, 5, 8), v=(2, 2, 5, 6), mask=(3, 5))
    keys, values = tensors(keys=CACHE[0].shape, values=CACHE[1].shape)
    cache = KVCache(keys, values, pt.iscalar(), pt.ivector())
    outputs = [
        scaled_dot_product_attention(q, k, v, mask=mask, is_causal=True, window=2, softcap=3.0),
        cached_attention(q, k, v, cache, window=2, softcap=3.0),
    ]
    accumulators = {getattr(node.op, "acc_dtype", None) for node in nodes_of(outputs)}
    assert accumulators == {None, "float32"}
    y = outputs[0]
    outputs += pt.grad(None, [q, k, v, mask], known_grads={y: pt.ones_like(y)})
    found = {x.type.dtype for node in nodes_of(outputs) for x in (*node.inputs, *node.outputs)}
    assert found >= {"float32", "bool"}
    assert "float64" not in found


def nodes_of(outputs):
    """Return the nodes of a graph and of its inner graphs."""
    nodes = list(applys_between([], outputs))
    for node in [node for node in nodes if isinstance(node.op, OpFromGraph)]:
        nodes += nodes_of(node.op.inner_outputs)
    return nodes


def test_more_than_one_batch_axis(backend):
    q, k, v = tensors(q=(2, 3, 4, 3, 8), k=(2, 3, 2, 5, 8), v=(2, 3, 2, 5, 6))
    y = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert y.type.shape == (2, 3, 4, 3, 6)
    values = [normal(*x.type.shape) for x in (q, k, v)]
    # JAX and MLX have kernels for these; on C and Numba the inner graph takes long to compile.
    compiling = pytensor.function if backend in ("jax", "mlx") else in_python
    [result] = compiling([q, k, v], [y])(*values)
    assert_close(result, reference.attention(*values, is_causal=True))


@pytest.mark.compiles_nothing
def test_heads_without_a_batch_axis_take_the_kernels_of_four_axes():
    q, k, v, mask = tensors(q=(4, 3, 8), k=(2, 5, 8), v=(2, 5, 6), mask=(3, 5))
    y = scaled_dot_product_attention(q, k, v, mask=mask)
    [node] = [node for node in applys_between([], [y]) if isinstance(node.op, AttentionLayer)]
    assert {x.type.ndim for x in node.inputs} == {4}
    assert (y.type.shape, y.name) == ((4, 3, 6), "attention_output")


@pytest.mark.compiles_nothing
def test_a_batch_that_one_input_knows_is_known():
    q, k, v = tensors(q=(None, 4, 3, 8), k=(2, 2, 5, 8), v=(None, 2, 5, 6))
    assert scaled_dot_product_attention(q, k, v).type.shape == (2, 4, 3, 6)


@pytest.mark.compiles_nothing
def test_static_shapes():
    q, k, v = tensors(q=(2, 4, 3, 8), k=(2, 2, None, 8), v=(2, 2, None, 6))
    assert scaled_dot_product_attention(q, k, v).type.shape == (2, 4, 3, 6)
    keys, values = tensors(keys=(2, 2, 16, 8), values=(2, 2, 16, 6))
    cache = KVCache(keys, values, pt.iscalar(), pt.tensor("start", shape=(2,), dtype="int32"))
    assert cached_attention(q, k, v, cache).type.shape == (2, 4, 3, 6)
    layer = MultiheadAttention(n_embd=12, n_head=4, head_dim=5)
    (x,) = tensors(x=(None, 3, 12))
    assert layer(x).type.shape == (None, 3, 12)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"k": (2, 3, 5, 8)}, {}, "4 query heads.*3 key and value heads"),
        ({"v": (2, 4, 5, 6)}, {}, "2 heads and v has 4"),
        ({"k": (2, 5, 8), "v": (2, 5, 6)}, {}, "4, 3 and 3 axes"),
        ({"k": (2, 2, 5, 7)}, {}, "width 8 and k of width 7"),
        ({"q": (2, None, 3, 8)}, {}, "q of shape.*static number of heads"),
        ({"q": (2, 4, 3, None)}, {}, "scale"),
        ({}, {"window": 0, "is_causal": True}, "window of 0"),
        ({}, {"window": 2}, "Pass is_causal=True"),
        ({}, {"softcap": 0.0}, "softcap of 0.0"),
        ({}, {"scale": np.nan}, "scale of nan"),
        ({"k": (3, 2, 5, 8)}, {}, "batch axes of 2, 3, 2"),
        ({"v": (2, 2, 6, 8)}, {}, "5 keys and 6 values"),
        ({}, {"mask": np.ones((2, 3, 5), bool)}, r"\(2, 3, 5\) does not broadcast"),
    ],
)
def test_errors(shapes, options, message):
    q, k, v = tensors(**{"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6), **shapes})
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.compiles_nothing
def test_layer_errors():
    with pytest.raises(ValueError, match=r"n_embd=10.*n_head=4"):
        MultiheadAttention(n_embd=10, n_head=4)
    with pytest.raises(ValueError, match="4 query heads"):
        MultiheadAttention(n_embd=12, n_head=4, n_kv_head=3)
    with pytest.raises(ValueError, match="softcap of -1"):
        MultiheadAttention(n_embd=12, n_head=4, softcap=-1.0)
    with pytest.raises(ValueError, match="pairing 'both'"):
        MultiheadAttention(n_embd=12, n_head=4, pairing="both")
    with pytest.raises(ValueError, match=r"shape \(12, 0\)"):
        MultiheadAttention(n_embd=12, n_head=4, head_dim=0)
    with pytest.raises(ValueError, match="fused_qkv"):
        MultiheadAttention(n_embd=12, n_head=4, kv_dim=6, fused_qkv=True)
    x, kv = tensors(x=(2, 3, 12), kv=(2, 3, 12))
    table = pt.zeros((4, 3, 1, 2), dtype="float32")
    with pytest.raises(ValueError, match="positions with 2 axes for an input of 2"):
        MultiheadAttention(n_embd=12, n_head=4)(x[0], rope=table)
    cache = KVCache(*tensors(keys=(2, 4, 8, 3), values=(2, 4, 8, 3)), pt.lscalar(), pt.lvector())
    with pytest.raises(ValueError, match="kv beside a cache"):
        MultiheadAttention(n_embd=12, n_head=4)(x, kv, cache=cache)
    with pytest.raises(ValueError, match="fused_qkv=False"):
        MultiheadAttention(n_embd=12, n_head=4, fused_qkv=True)(x, kv)


@pytest.fixture
def peak_growth():
    """A function that returns by how many bytes a call raises the memory in use at its peak."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not clear.exists():
        pytest.skip("measured through /proc")

    def kilobytes(field):
        return int(re.search(rf"{field}:\s+(\d+) kB", status.read_text())[1])

    def measure(call):
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")
        before = kilobytes("VmRSS")
        call()
        return 1024 * (kilobytes("VmHWM") - before)

    return measure


def test_memory(backend, variants, peak_growth):
    """Neither one query of many keys nor many queries of many keys need copies or all scores."""
    if backend not in ("numba", "c"):
        pytest.skip("JAX and MLX hold the scores")
    variants(*(normal(1, heads, 70, 8) for heads in (4, 2, 2)))
    k, v = normal(1, 2, 2**17, 8), normal(1, 2, 2**17, 8)
    for q, k_used, v_used in [
        (normal(1, 4, 1, 8), k, v),
        (normal(1, 4, 1024, 8), normal(1, 2, 1024, 8), normal(1, 2, 1024, 8)),
    ]:
        grown = peak_growth(lambda q=q, k=k_used, v=v_used: variants(q, k, v))
        assert grown < k.nbytes
