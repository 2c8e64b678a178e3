"""What the kernels of attention must do on every backend."""

import numpy as np
import pytensor
import pytensor.tensor as pt
from helpers import assert_close
from pytensor.compile.mode import Mode

from pytensor_ml.layers.attention import KVCache, cached_attention, scaled_dot_product_attention

SCALE = 0.3


def emptied(outputs):
    """Return what ops whose inner graphs are replaced by constants give for ``outputs``."""
    copies = []
    for i, node in enumerate(dict.fromkeys(output.owner for output in outputs)):
        inner = node.op.fgraph.unfreeze()
        # Not the same for all: equal graphs make equal ops, which are merged.
        constants = [(out, pt.zeros_like(out) + np.array(i, out.dtype)) for out in inner.outputs]
        inner.replace_all(constants, import_missing=True)
        made = node.op.clone_with_inner_graph(inner).make_node(*node.inputs).outputs
        copies += [made[output.index or 0] for output in outputs if output.owner is node]
    return copies


def in_python(inputs, outputs):
    """Compile the inner graphs of the ops that give ``outputs``, without compiling any code."""
    spelled_out = []
    for node in dict.fromkeys(output.owner for output in outputs):
        inner = node.op.build_inner_graph(*node.inputs)
        spelled_out += [inner[output.index or 0] for output in outputs if output.owner is node]
    mode = Mode(linker="py", optimizer=None)
    # What is left of ops with inner graphs compiles these for the default mode.
    with pytensor.config.change_flags(mode=mode, cxx=""):
        return pytensor.function(inputs, spelled_out, mode=mode)


def normal(*shape, dtype="float32"):
    return np.random.default_rng(shape).normal(size=shape).astype(dtype)


def by_token_tensors(dtype, **heads):
    """Inputs of shape (batch, tokens, heads, width), which leaves heads scattered in memory."""
    return [pt.tensor(name, shape=(None, None, n, None), dtype=dtype) for name, n in heads.items()]


def check_attention(dtype="float32", spoils_hidden=False, takes_backward=True):
    """Kernels give, for any shape and layout, what the inner graph and its gradient give.

    ``spoils_hidden`` is whether a NaN among the scores of a row reaches the gradients of what a
    mask hides from that row, ``takes_backward`` whether PyTensor takes arrays of negative strides.
    """
    by_token = by_token_tensors(dtype, q=4, k=2, v=2, g=4)
    q, k, v, g = (x.swapaxes(1, 2) for x in by_token)
    mask = pt.tensor("mask", shape=(None, 1, None, None), dtype="bool")
    bias = pt.tensor("bias", shape=(1, 1, None, None), dtype=dtype)
    outputs = []
    for options in (
        {"mask": mask, "scale": SCALE},
        {"mask": bias, "scale": SCALE, "window": 3, "is_causal": True},
    ):
        y = scaled_dot_product_attention(q, k, v, **options)
        wrt = [q, k, v] if options["mask"] is mask else [q, k, v, bias]
        outputs += [y, *pt.grad(None, wrt, known_grads={y: g})]
    inputs = [*by_token, mask, bias]
    run = pytensor.function(inputs, emptied(outputs))
    run_inner_graphs = in_python(inputs, outputs)

    for n_batch, n_queries, n_keys, width, v_width, is_spoiled in [
        (2, 3, 4, 8, 6, True),
        (1, 1, 1, 8, 8, False),
        (2, 3, 37, 19, 5, False),
        (2, 150, 20, 3, 2, False),
    ]:
        q, k, v, g = (
            normal(n_batch, *shape, dtype=dtype)
            for shape in (
                (n_queries, 4, width),
                (n_keys, 2, width),
                (n_keys, 2, v_width),
                (n_queries, 4, v_width),
            )
        )
        mask = normal(n_batch, 1, n_queries, n_keys) > -0.5
        bias = normal(1, 1, n_queries, n_keys, dtype=dtype)
        bias[:, :, 0, 0] = -np.inf
        if is_spoiled:
            k[0, 2, 0, 1] = np.nan
            mask[..., 2] = True
        values = [q, k, v, g, mask, bias]
        *results, dbias = run(*values)
        *expected, right_dbias = run_inner_graphs(*values)
        for result, right in zip(results, expected, strict=True):
            assert_same(result, right)
        if not (is_spoiled and spoils_hidden):
            assert_same(dbias, right_dbias)
    no_rows = [*(x[:0] for x in values[:-1]), bias]
    assert run(*no_rows)[0].shape == (0, 4, 150, 2)
    layouts = [[np.repeat(x, 2, axis=-1)[..., ::2] for x in values]]
    if takes_backward:
        layouts.append([x[::-1, ::-1] for x in values])
    for given in layouts:
        for result, right in zip(run(*given), run_inner_graphs(*given), strict=True):
            assert_same(result, right)


def check_cached_attention(dtype="float32", capacity=10):
    """The kernel gives, for any number of tokens in the cache, what the inner graph gives."""
    by_token = by_token_tensors(dtype, q=4, k=2, v=2)
    q, k, v = (x.swapaxes(1, 2) for x in by_token)
    cache = KVCache(
        pt.tensor("keys", shape=(None, 2, None, None), dtype=dtype),
        pt.tensor("values", shape=(None, 2, None, None), dtype=dtype),
        pt.iscalar("length"),
        pt.ivector("start"),
    )
    y = cached_attention(q, k, v, cache, scale=SCALE, window=6)
    run = pytensor.function([*by_token, *cache], emptied([y]))
    run_inner_graph = in_python([*by_token, *cache], [y])
    for n_new, length, start in [(1, 0, (0, 0)), (1, capacity, (0, 3)), (150, 9, (0, 12))]:
        new = [(n_new, 4, 19), (n_new, 2, 19), (n_new, 2, 5)]
        old = [(2, capacity, 19), (2, capacity, 5)]
        values = [normal(2, *shape, dtype=dtype) for shape in (*new, *old)]
        values += [np.int32(length), np.array(start, "int32")]
        assert_same(run(*values)[0], run_inner_graph(*values)[0])
    no_rows = [x[:0] if x.ndim else x for x in values]
    assert run(*no_rows)[0].shape == (0, 4, 150, 5)


def assert_same(result, right):
    np.testing.assert_array_equal(np.isnan(result), np.isnan(right))
    # Some gradients are 0 but for rounding.
    assert_close(1 + np.nan_to_num(result), 1 + np.nan_to_num(right))
