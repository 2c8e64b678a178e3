"""What the kernels of attention must do on every backend."""

import numpy as np
import pytensor
import pytensor.tensor as pt
from helpers import assert_close
from pytensor.compile.mode import Mode

from pytensor_ml.layers.attention import KVCache, cached_attention, scaled_dot_product_attention

SCALE = 0.3


def emptied(outputs):
    """Return what ops whose inner graphs are replaced by zeros give for ``outputs``."""
    copies = []
    for node in dict.fromkeys(output.owner for output in outputs):
        inner = node.op.fgraph.unfreeze()
        inner.replace_all([(out, pt.zeros_like(out)) for out in inner.outputs], import_missing=True)
        zeros = node.op.clone_with_inner_graph(inner).make_node(*node.inputs).outputs
        copies += [zeros[output.index or 0] for output in outputs if output.owner is node]
    return copies


def in_python(inputs, outputs):
    """Compile the inner graphs of the ops that give ``outputs``, without compiling any code."""
    spelled_out = []
    for node in dict.fromkeys(output.owner for output in outputs):
        inner = node.op.build_inner_graph(*node.inputs)
        spelled_out += [inner[output.index or 0] for output in outputs if output.owner is node]
    return pytensor.function(inputs, spelled_out, mode=Mode(linker="py", optimizer=None))


def normal(*shape, dtype="float32"):
    return np.random.default_rng(shape).normal(size=shape).astype(dtype)


def laid_out_by_token(*shape, dtype="float32"):
    """Values of shape (batch, heads, tokens, width) as the projections leave them in memory."""
    n_batch, n_heads, n_tokens, width = shape
    return normal(n_batch, n_tokens, n_heads, width, dtype=dtype).swapaxes(1, 2)


def check_attention(dtype="float32"):
    """Kernels give, for any shape and layout, what the inner graph and its gradient give."""
    q, k, v, g = (
        pt.tensor(name, shape=(None, heads, None, None), dtype=dtype)
        for name, heads in (("q", 4), ("k", 2), ("v", 2), ("g", 4))
    )
    mask = pt.tensor("mask", shape=(None, 1, None, None), dtype="bool")
    bias = pt.tensor("bias", shape=(1, 1, None, None), dtype=dtype)
    outputs = []
    for options in ({"mask": mask, "scale": SCALE}, {"mask": bias, "scale": SCALE, "window": 3}):
        y = scaled_dot_product_attention(q, k, v, **options)
        wrt = [q, k, v] if options["mask"] is mask else [q, k, v, bias]
        outputs += [y, *pt.grad(None, wrt, known_grads={y: g})]
    inputs = [q, k, v, g, mask, bias]
    run = pytensor.function(inputs, emptied(outputs))
    run_inner_graphs = in_python(inputs, outputs)

    spoiled = [normal(2, *shape, dtype=dtype) for shape in ((4, 3, 8), (2, 4, 8), (2, 4, 6))]
    spoiled[1][0, 0, 2, 1] = np.nan
    cases = [spoiled]
    for make, n_batch, n_queries, n_keys, width, v_width in [
        (normal, 1, 1, 1, 8, 8),
        (laid_out_by_token, 2, 3, 37, 19, 5),
        (laid_out_by_token, 2, 40, 20, 1, 1),
    ]:
        shapes = ((4, n_queries, width), (2, n_keys, width), (2, n_keys, v_width))
        cases.append([make(n_batch, *shape, dtype=dtype) for shape in shapes])
    for q, k, v in cases:
        g = laid_out_by_token(*q.shape[:3], v.shape[3], dtype=dtype)
        mask = normal(len(q), 1, q.shape[2], k.shape[2]) > -0.5
        # The key that is spoiled is seen by every query.
        mask[..., 2:3] = True
        bias = normal(1, 1, q.shape[2], k.shape[2], dtype=dtype)
        bias[:, :, 0, 0] = -np.inf
        values = [q, k, v, g, mask, bias]
        for result, right in zip(run(*values), run_inner_graphs(*values), strict=True):
            assert_same(result, right)
    no_rows = [*(x[:0] for x in values[:-1]), bias]
    assert run(*no_rows)[0].shape == (0, 4, 40, 1)


def check_cached_attention(dtype="float32", capacity=10):
    """The kernel gives, for any number of tokens in the cache, what the inner graph gives."""
    q, k, v, keys, values = (
        pt.tensor(name, shape=(None, heads, None, None), dtype=dtype)
        for name, heads in (("q", 4), ("k", 2), ("v", 2), ("keys", 2), ("values", 2))
    )
    cache = KVCache(keys, values, pt.iscalar("length"), pt.ivector("start"))
    y = cached_attention(q, k, v, cache, scale=SCALE, window=6)
    run = pytensor.function([q, k, v, *cache], emptied([y]))
    run_inner_graph = in_python([q, k, v, *cache], [y])
    for make, n_batch, n_new, length, start in [
        (normal, 2, 1, 0, (0, 0)),
        (laid_out_by_token, 2, 1, capacity, (0, 3)),
        (laid_out_by_token, 2, 30, 9, (0, 12)),
    ]:
        new = [(4, n_new, 19), (2, n_new, 19), (2, n_new, 5)]
        arguments = [make(n_batch, *shape, dtype=dtype) for shape in new]
        for width in (19, 5):
            arguments.append(normal(n_batch, 2, capacity, width, dtype=dtype))
        arguments += [np.int32(length), np.array(start, "int32")]
        assert_same(run(*arguments)[0], run_inner_graph(*arguments)[0])
    no_rows = [x[:0] if x.ndim else x for x in arguments]
    assert run(*no_rows)[0].shape == (0, 4, 30, 5)


def assert_same(result, right):
    np.testing.assert_array_equal(np.isnan(result), np.isnan(right))
    # Some gradients are 0 but for rounding.
    assert_close(1 + np.nan_to_num(result), 1 + np.nan_to_num(right))


def check_tensors_without_a_batch_axis():
    """Nothing but four axes has a kernel on some backends; the inner graph then runs."""
    q, k, v = (pt.tensor(name, shape=(2, 3, 4), dtype="float32") for name in "qkv")
    y = scaled_dot_product_attention(q, k, v)
    arguments = [normal(2, 3, 4), normal(2, 3, 4) + 1, normal(2, 3, 4) - 1]
    assert_close(
        pytensor.function([q, k, v], y)(*arguments),
        in_python([q, k, v], [y])(*arguments)[0],
    )
