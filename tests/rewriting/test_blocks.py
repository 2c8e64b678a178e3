"""What pullbacks of whole blocks keep of the forward pass, and what they compute anew."""

import time

import numpy as np
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from pytensor.compile.mode import Mode
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.graph.traversal import applys_between

from pytensor_ml.activations import SiLU
from pytensor_ml.base import BlockOp, BlockPullback, BlockWithResiduals
from pytensor_ml.layers import (
    DecoderBlock,
    GatedFeedForward,
    Input,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerStack,
    call_as_block,
)
from pytensor_ml.layers.linear import LinearLayer
from pytensor_ml.layers.norm import RMSNormLayer
from pytensor_ml.pretrained import load_network, save_network
from pytensor_ml.pytensorf import collect_trainable_params, function
from pytensor_ml.rewriting.blocks import keep_residuals

HOW = {"keep": {}, "recompute": {"recompute": True}}


def network():
    """Return a layer of two outputs, the second of which is made of the first."""
    norm, up = RMSNorm("norm", n_in=6), Linear("up", n_in=6, n_out=4)
    down, act = Linear("down", n_in=4, n_out=6), SiLU()

    def layer(x):
        hidden = act(up(norm(x)))
        y = x + down(hidden.reshape((x.shape[0], -1, 2)).reshape((x.shape[0], 4)))
        return [y, pt.sin(y).sum(axis=1)]

    return layer


def count(nodes, kind):
    return sum(type(node.op) is kind for node in nodes)


def nodes_after_the_rewrite(outputs):
    graph = FunctionGraph(outputs=outputs, clone=True)
    MergeOptimizer().rewrite(graph)
    keep_residuals(graph)
    return list(graph.toposort())


def test_both_ways_give_the_gradients_of_the_graph_spelled_out():
    rng = np.random.default_rng(0)
    x = Input("x", shape=(None, 6), dtype="float32")
    layer = network()
    ways = [layer(x), *(call_as_block(layer, x, **options) for options in HOW.values())]
    parameters = collect_trainable_params(ways[0])
    for parameter in parameters:
        parameter.set_value(rng.normal(size=parameter.get_value().shape).astype("float32"))
    weight = rng.normal(size=(5, 6)).astype("float32")
    results = []
    for y, total in ways:
        loss = (y * weight).sum() + (total**2).sum()
        results += [y, *pt.grad(loss, [x, *parameters])]
    found = function([x], results)(rng.normal(size=(5, 6)).astype("float32"))
    n = len(found) // 3
    spelled_out, *others = (found[i : i + n] for i in (0, n, 2 * n))
    for other in others:
        for ours, expected in zip(other, spelled_out, strict=True):
            assert_close(ours, expected, 1e-6)


@pytest.mark.xfail(
    "config.getoption('backend') == 'mlx'",
    reason="mx.compile fails on the twin of a block in the block's second derivative",
    strict=True,
)
def test_second_derivatives_are_those_of_the_graph_spelled_out():
    """A maximum leaves a residual of truth values, which has no cotangent."""
    x = Input("x", shape=(3, 4), dtype="float32")

    def layer(x):
        return pt.concatenate([x**3, pt.sin(x) * 2], axis=1).max(axis=1)

    def derivatives(y):
        gradient = pt.grad(y.sum(dtype="float32"), x)
        return [gradient, pt.grad((gradient**2).sum(dtype="float32"), x)]

    value = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    # Without blocks there is nothing of this package to compile.
    spelled_out = function([x], derivatives(layer(x)), mode=Mode(linker="py", optimizer=None))
    blocks = [call_as_block(layer, x, **options) for options in HOW.values()]
    found = function([x], [v for y in blocks for v in derivatives(y)])(value)
    for ours, expected in zip(found, 2 * spelled_out(value), strict=True):
        assert_close(ours, expected, 1e-6)


@pytest.mark.compiles_nothing
def test_long_chains_are_followed_in_time():
    x = Input("x", shape=(3,), dtype="float32")

    def layer(x):
        h = x
        for _ in range(40):
            h = pt.tanh(h + 1) + 2 * h
        return h

    start = time.thread_time()
    pt.grad(call_as_block(layer, x).sum(), x)
    assert time.thread_time() - start < 20


@pytest.fixture
def stack():
    blocks = [
        DecoderBlock(
            f"block_{i}",
            attention=MultiheadAttention(f"attention_{i}", n_embd=8, n_head=2, is_causal=True),
            feed_forward=GatedFeedForward(f"feed_forward_{i}", d_model=8, hidden_dim=12),
            attention_norm=RMSNorm(f"norm_{i}", n_in=8),
            feed_forward_norm=RMSNorm(f"other_norm_{i}", n_in=8),
        )
        for i in range(3)
    ]

    def build(**options):
        x = Input("x", shape=(2, None, 8), dtype="float32")
        y, _ = TransformerStack("stack", blocks, rotary=None, **options)(x, pt.arange(4))
        return y, pt.grad((y**2).sum(), [x, *collect_trainable_params(y)])

    return build


@pytest.mark.compiles_nothing
def test_a_block_with_a_gradient_runs_once_and_leaves_residuals(stack):
    y, gradients = stack()
    nodes = nodes_after_the_rewrite([y, *gradients])
    assert count(nodes, BlockOp) == 0
    assert count(nodes, BlockWithResiduals) == count(nodes, BlockPullback) == 3
    assert len({node.op for node in nodes if isinstance(node.op, BlockOp)}) == 2
    [inner] = {n.op for n in nodes if type(n.op) is BlockPullback}
    forward = (LinearLayer, RMSNormLayer)
    assert not [n for n in inner.fgraph.apply_nodes if isinstance(n.op, forward)]
    # Both norms, q, k, v, what attention gives, the branch's sum, the two projections up, and their
    # gated product.
    [block] = {n.op for n in nodes if type(n.op) is BlockWithResiduals}
    assert len(block.fgraph.outputs) - block.n_outputs == 10


@pytest.mark.compiles_nothing
def test_a_block_that_recomputes_leaves_nothing(stack):
    y, gradients = stack(recompute=True)
    nodes = nodes_after_the_rewrite([y, *gradients])
    assert count(nodes, BlockWithResiduals) == 0
    assert count(nodes, BlockOp) == count(nodes, BlockPullback) == 3
    [inner] = {n.op for n in nodes if type(n.op) is BlockPullback}
    assert sum(isinstance(n.op, LinearLayer) for n in inner.fgraph.apply_nodes) >= 6


@pytest.mark.compiles_nothing
def test_without_a_gradient_there_are_no_residuals(stack):
    y, _ = stack()
    assert count(nodes_after_the_rewrite([y]), BlockOp) == 3


@pytest.mark.compiles_nothing
def test_equal_blocks_of_a_stack_are_one_object(stack):
    y, gradients = stack()
    ops = [n.op for n in applys_between([], [y, *gradients]) if isinstance(n.op, BlockOp)]
    assert len(ops) == 9
    assert len(set(map(id, ops))) == 3


@pytest.mark.compiles_nothing
def test_what_is_kept_is_not_shared_by_blocks_that_recompute(stack):
    kept, recomputing = (block_of(stack(**options)[0]) for options in HOW.values())
    assert kept.fgraph == recomputing.fgraph
    assert kept != recomputing


def block_of(y):
    return next(n.op for n in applys_between([], [y]) if isinstance(n.op, BlockOp))


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("how", HOW)
def test_a_saved_network_keeps_its_way(stack, tmp_path, how):
    y, [gradient, *_] = stack(**HOW[how])
    save_network([y, gradient], tmp_path / "config.json")
    _, [new, new_gradient] = load_network(tmp_path / "config.json")
    assert block_of(new) == block_of(y)
    assert block_of(new).recompute == bool(HOW[how])
    before, after = (
        nodes_after_the_rewrite([a, b]) for a, b in ((y, gradient), (new, new_gradient))
    )
    assert [type(n.op) for n in after] == [type(n.op) for n in before]
