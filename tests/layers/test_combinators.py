import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from pytensor.tensor.random.op import RNGConsumerOp

from pytensor_ml.base import BlockOp, LayerOp
from pytensor_ml.layers import (
    Concatenate,
    Dropout,
    Flatten,
    Input,
    Linear,
    Sequential,
    Squeeze,
    call_as_block,
)
from pytensor_ml.params import non_trainable
from pytensor_ml.pytensorf import (
    collect_rng_updates,
    collect_trainable_params,
    function,
    rewrite_for_prediction,
)


class RunningCount(LayerOp):
    """Pass x on and count the calls."""

    __props__ = ()

    def build_inner_graph(self, x, count):
        return [x * 2, count + 1]

    def update_map(self):
        return {1: 1}


def nodes(outputs):
    return list(pytensor.graph.traversal.applys_between([], outputs))


@pytest.fixture(scope="module")
def dropout_block():
    """Dropout, a counter and dropout of twice the width in one op, compiled with its gradient."""
    count = non_trainable(np.zeros((), "float32"), name="count")
    widen = Linear("widen", n_in=3, n_out=6, bias=False)
    dropout = Dropout("drop", p=0.5, random_state=3)
    x = Input("x", shape=(None, 3), dtype="float32")

    def layer(x):
        doubled, _ = RunningCount()(dropout(x), count)
        return dropout(widen(doubled))

    y = call_as_block(layer, x, name="layer")
    gradient = pt.grad(y.sum(), x)
    return y, count, widen, function([x], [y, gradient])


def test_random_draws_are_made_outside_the_block(dropout_block):
    y, *_ = dropout_block
    [block] = [node.op for node in nodes([y]) if isinstance(node.op, BlockOp)]
    assert not [n for n in block.fgraph.apply_nodes if isinstance(n.op, RNGConsumerOp)]
    assert len(collect_rng_updates(y)) == 2


def test_gradient_sees_the_mask_of_the_forward_pass(dropout_block):
    *_, widen, compiled = dropout_block
    x = np.full((200, 3), 1, "float32")
    weight = np.random.default_rng(0).normal(size=(3, 6)).astype("float32")
    widen.W.set_value(weight)
    y, gradient = compiled(x)
    # x is one, so the gradient of the sum of y, which is linear in each row, sums to it.
    assert_close(gradient.sum(axis=1), y.sum(axis=1), 1e-5)
    assert 0.4 < (y == 0).mean() < 0.7
    assert not np.array_equal(y, compiled(x)[0])


def test_state_inside_a_block_is_written_back(dropout_block):
    _, count, _, compiled = dropout_block
    before = count.get_value()
    compiled(np.ones((1, 3), "float32"))
    assert count.get_value() == before + 1


@pytest.mark.compiles_nothing
def test_two_writes_of_one_state_are_refused():
    count = non_trainable(np.zeros((), "float32"), name="count")
    x = Input("x", shape=(None, 3), dtype="float32")
    outputs = [RunningCount()(x, count)[0], RunningCount()(x + 1, count)[0]]
    with pytest.raises(ValueError, match="Two ops read the same state count"):
        function([x], outputs)


def test_prediction_drops_dropout_inside_a_block(dropout_block):
    y, *_ = dropout_block
    specialized = rewrite_for_prediction(y)
    assert not collect_rng_updates(specialized)
    assert collect_trainable_params(specialized) == collect_trainable_params(y)
    [block] = [node for node in nodes([specialized]) if isinstance(node.op, BlockOp)]
    assert len(block.inputs) == 3  # x, the weight and the count; no mask


@pytest.mark.compiles_nothing
def test_a_block_refuses_a_draw_that_depends_on_values():
    x = Input("x", shape=(None,), dtype="float32")
    rng = pytensor.shared(np.random.default_rng())
    with pytest.raises(ValueError, match="Draw them first"):
        call_as_block(lambda x: pt.random.normal(x, rng=rng), x)


@pytest.mark.compiles_nothing
def test_a_block_takes_any_number_of_outputs_and_hands_none_on():
    x = Input("x", shape=(None,), dtype="float32")
    outputs = call_as_block(lambda x, mask: [x, mask is None, x * 2][::2], x, None)
    assert len(outputs) == 2


def test_combinators_join_and_reshape():
    x = Input("x", shape=(2, 3, 1), dtype="float32")
    layer = Sequential(Squeeze, lambda h: Concatenate([h, h * 2], axis=1), lambda h: h[:, :, None])
    data = np.arange(6, dtype="float32").reshape(2, 3, 1)
    [joined] = function([x], [Flatten(layer(x))])(data)
    np.testing.assert_array_equal(joined, np.hstack([data[..., 0], data[..., 0] * 2]))


@pytest.mark.compiles_nothing
def test_a_sequence_refuses_what_is_no_layer():
    with pytest.raises(TypeError, match=r"Sequential got a list.*Sequential\(\*layers\)"):
        Sequential([Flatten])
