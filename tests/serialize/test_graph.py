import json

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import equal_computations
from pytensor.graph.traversal import applys_between
from pytensor.tensor.math import Sum
from serialize.networks import NETWORKS, heads, network, tokens

from pytensor_ml.base import BlockOp, LayerOp, UnaryLayerOp
from pytensor_ml.json_serialize import deserialize_graph as published_path
from pytensor_ml.layers import RMSNorm, RotaryEmbedding, scaled_dot_product_attention
from pytensor_ml.loss import CrossEntropy
from pytensor_ml.params import non_trainable
from pytensor_ml.pytensorf import (
    collect_non_trainable_updates,
    collect_shared_variables,
    collect_trainable_params,
)
from pytensor_ml.serialize import deserialize_graph, register_op, serialize_graph
from pytensor_ml.serialize.allowed import OPS


def written(inputs, outputs):
    """Return a graph's description as a file would hold it, and all inputs of the graph."""
    inputs = [*inputs, *collect_shared_variables(outputs)]
    return json.loads(json.dumps(serialize_graph(inputs, outputs), allow_nan=False)), inputs


def size_of(description):
    return len(json.dumps(description, separators=(",", ":")))


def ops_of(outputs):
    ops = {node.op for node in applys_between([], outputs)}
    return ops.union(*(ops_of(op.fgraph.outputs) for op in ops if isinstance(op, BlockOp)))


def float_sum(outputs):
    return sum(pt.sum(y.astype("float32")) for y in outputs if y.type.dtype.startswith("float"))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_comes_back(name):
    inputs, outputs = network(name)
    description, inputs = written(inputs, outputs)

    new_inputs, new_outputs = deserialize_graph(description)
    assert [v.type for v in new_inputs] == [v.type for v in inputs]
    assert [v.type for v in new_outputs] == [v.type for v in outputs]
    assert equal_computations(new_outputs, outputs, new_inputs, inputs)
    # What is equal is compiled once.
    assert ops_of(new_outputs) == ops_of(outputs)

    _, same = deserialize_graph(description, inputs)
    updates, new_updates = (collect_non_trainable_updates(ys) for ys in (outputs, same))
    assert list(new_updates) == list(updates)
    assert equal_computations(list(new_updates.values()), list(updates.values()))
    if parameters := collect_trainable_params(outputs):
        gradients, new_gradients = (
            pt.grad(float_sum(ys), parameters, disconnected_inputs="ignore")
            for ys in (outputs, same)
        )
        assert equal_computations(new_gradients, gradients)


def test_networks_cover_every_op_of_the_package_that_a_forward_pass_has():
    covered = {type(op) for name in NETWORKS for op in ops_of(network(name)[1])}
    own = ("pytensor_ml.layers.", "pytensor_ml.generation.")
    layer_ops = {kind for name, kind in OPS.items() if name.startswith(own)}
    missing = {
        kind.__name__ for kind in layer_ops - covered if not kind.__name__.endswith("Pullback")
    }
    # They belong to inner graphs of ops that make them themselves.
    assert missing <= {"PreciseSum", "ConvertLayer", "Widen"}


def test_every_op_of_the_package_may_be_named():
    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    own = {k for k in below(LayerOp) if k.__module__.startswith("pytensor_ml.")}
    # Those of optimizers belong to steps, of which a file has the state.
    others = ("pytensor_ml.dispatch", "pytensor_ml.base", "pytensor_ml.optim")
    own -= {k for k in own if k.__module__.startswith(others)}
    assert own <= set(OPS.values()), "Add these to pytensor_ml/serialize/allowed.py."


@pytest.mark.parametrize("name", ["norms", "mixture", "stack"])
def test_gradients_can_be_saved(name):
    inputs, outputs = network(name)
    gradients = pt.grad(float_sum(outputs), collect_trainable_params(outputs))
    description, inputs = written(inputs, gradients)
    new_inputs, new_gradients = deserialize_graph(description)
    assert equal_computations(new_gradients, gradients, new_inputs, inputs)


def test_the_published_format_is_written_where_it_holds_the_graph():
    x, mask = tokens(), pt.tensor("mask", shape=(None, 1, 5, 5), dtype="bool")
    q = heads("q")
    assert "ops" not in written([x], [RMSNorm(n_in=16)(x)])[0]
    attended = scaled_dot_product_attention(q, q, q)
    [node] = written([q], [attended])[0]["nodes"]
    # The published op has no other props, and takes no others.
    assert set(node["op"]["props"]) == {"is_causal", "scale"}
    # It would add what a mask of truths holds.
    masked = scaled_dot_product_attention(q, q, q, mask=mask)
    assert "ops" in written([q, mask], [masked])[0]
    # It has no accumulator of another dtype than the default one.
    assert "ops" not in written([x], [pt.sum(x, axis=0)])[0]
    assert "ops" in written([x], [pt.sum(x, axis=0, acc_dtype="float32")])[0]
    assert published_path is deserialize_graph


def test_reductions_keep_what_they_accumulate_in():
    x = tokens()
    y = pt.sum(x, axis=0, acc_dtype="float32") + pt.max(x, axis=0, initial=-np.inf)
    _, [new] = deserialize_graph(written([x], [y])[0])
    [op] = {op for op in ops_of([new]) if isinstance(op, Sum)}
    assert op.acc_dtype == op.dtype == "float32"


CONSTANTS = {
    "half": np.array([1.1, -0.0, 6e-8, 65504], "float16"),
    "single": np.array([1 / 3, -0.0, np.inf, -np.inf, np.nan, 1e-45], "float32"),
    "double": np.array([[1 / 3], [5e-324], [1.7976931348623157e308]]),
    "integers": np.array([-(2**63), 2**63 - 1]),
    "unsigned": np.array([2**64 - 1], "uint64"),
    "truths": np.array([True, False]),
    "complex": np.array([1 + 2j, np.inf], "complex64"),
    "matrix": np.linspace(0, 1, 15, dtype="float32").reshape(5, 3),
    "scalar": np.float32(0.1),
    "empty": np.zeros((0, 3), "int8"),
    "many": np.random.default_rng(0).normal(size=(40, 50)).astype("float32"),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_come_back_bit_for_bit(name):
    value = CONSTANTS[name]
    x = pt.tensor("x", shape=value.shape, dtype=value.dtype)
    constant = pt.constant(value)
    description, _ = written([x], [pt.stack([x, constant])])
    _, [y] = deserialize_graph(description)
    [found] = [v for n in applys_between([], [y]) for v in n.inputs if hasattr(v, "data")][-1:]
    data = np.asarray(found.data).reshape(value.shape)
    assert data.dtype == value.dtype
    assert data.tobytes() == value.tobytes()


def test_constants_and_rotary_tables_are_cheap():
    x = pt.fvector("x")
    table = np.random.default_rng(0).normal(size=10_000).astype("float32")
    y = x + pt.constant(table)
    for _ in range(3):
        y = y * pt.constant(table.copy())
    # Once, at four thirds of its bytes.
    assert size_of(written([x], [y])[0]) < 1.4 * table.nbytes
    positions = pt.lvector("positions")
    rope = RotaryEmbedding("r", rotary_dim=128).table(positions)
    assert size_of(written([positions], [rope])[0]) < 1000


def test_zeros_of_either_sign_are_two_constants():
    x = pt.fvector("x")
    y = pt.stack([x, x]) * pt.constant(np.array([[0.0], [-0.0]], "float32"))
    y = y / pt.constant(np.array([[-0.0], [0.0]], "float32"))
    _, [new] = deserialize_graph(written([x], [y])[0])
    data = [v.data for n in applys_between([], [new]) for v in n.inputs if hasattr(v, "data")]
    signs = [np.signbit(d).ravel().tolist() for d in data if np.ndim(d) == 2]
    assert sorted(signs) == [[False, True], [True, False]]


def test_graphs_of_equal_ops_are_built_once():
    x = tokens()
    y = RMSNorm("first", n_in=16)(RMSNorm("second", n_in=16)(x))
    _, [new] = deserialize_graph(written([x], [y])[0])
    assert new.owner.op is new.owner.inputs[0].owner.op


def test_a_loop_comes_back():
    x, w = pt.fmatrix("x"), pytensor.shared(np.eye(3, dtype="float32"), "w", shape=(3, 3))
    states = pytensor.scan(
        lambda row, h, w: pt.tanh(row + h @ w),
        sequences=[x],
        outputs_info=[pt.zeros(3, "float32")],
        non_sequences=[w],
        return_updates=False,
    )
    description, inputs = written([x], [states])
    new_inputs, new = deserialize_graph(description)
    assert equal_computations(new, [states], new_inputs, inputs)


def test_updates_of_a_block_come_back():
    count = non_trainable(np.float32(0), "count")
    x = pt.fvector("x")
    old, given = count.type(), x.type()
    op = BlockOp([given, old], [given * 2, old + 1], update_map={1: 1}, name="counting")
    description, inputs = written([x], [op(x, count)[0]])
    _, [y] = deserialize_graph(description, inputs)
    assert y.owner.op.name == "counting"
    assert equal_computations(list(collect_non_trainable_updates([y]).values()), [op(x, count)[1]])


def test_losses_come_back():
    logits, ids = pt.tensor("logits", shape=(None, 7), dtype="float32"), pt.lvector("ids")
    loss = CrossEntropy(expect_logits=True, ignore_index=50_256, label_smoothing=0.1)(ids, logits)
    description, inputs = written([logits, ids], [loss])
    new_inputs, new = deserialize_graph(description)
    assert equal_computations(new, [loss], new_inputs, inputs)


def test_what_a_file_cannot_hold_is_refused_when_saving():
    x = pt.fvector("x")

    class Unknown(UnaryLayerOp):
        __props__ = ()

        def build_inner_graph(self, *inputs):
            return [inputs[0] * 2]

    with pytest.raises(ValueError, match=r"Unknown.*register_op"):
        serialize_graph([x], [Unknown()(x)])
    overridden = OpFromGraph([x], [x * 2], pullback=lambda inputs, outputs, gradients: gradients)
    with pytest.raises(ValueError, match="pullback_overrides"):
        serialize_graph([x], [overridden(x)])
    with pytest.raises(ValueError, match=r"reads y.*Pass all of its inputs"):
        serialize_graph([x], [x + pt.fvector("y")])
    with pytest.raises(ValueError, match="twice"):
        serialize_graph([x, x], [x])


@pytest.fixture
def own_ops(monkeypatch):
    monkeypatch.setattr("pytensor_ml.serialize.allowed.OPS", OPS)
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def test_registered_ops_are_saved_and_loaded(own_ops):
    @register_op
    class Scaled(UnaryLayerOp):
        __props__ = ("factor", "axes")

        def build_inner_graph(self, *inputs):
            return [inputs[0] * np.float32(self.factor)]

    x = pt.fvector("x")
    description, inputs = written([x], [Scaled(factor=1.5, axes=(0, slice(1, None)))(x)])
    new_inputs, [y] = deserialize_graph(description)
    assert y.owner.op.axes == (0, slice(1, None))
    assert equal_computations([y], [Scaled(factor=1.5, axes=())(x)], new_inputs, inputs)
    with pytest.raises(ValueError, match="axes has no form in a file"):
        serialize_graph([x], [Scaled(factor=1.5, axes=print)(x)])

    @register_op
    class Forgetful(UnaryLayerOp):
        __props__ = ()
        factor = 1.0

        def build_inner_graph(self, *inputs):
            return [inputs[0] * np.float32(self.factor)]

    forgetful = Forgetful()
    y = forgetful(x)
    Forgetful.factor = 3.0
    with pytest.raises(ValueError, match="not told by its __props__"):
        serialize_graph([x], [y])


def test_only_classes_with_props_are_registered(own_ops):
    with pytest.raises(TypeError, match="no subclass of Op"):
        register_op(print)
    with pytest.raises(TypeError, match="no __props__"):
        register_op(type("Bare", (pytensor.graph.op.Op,), {}))
    kind = type("Taken", (UnaryLayerOp,), {"__props__": ()})
    with pytest.raises(ValueError, match="LinearLayer"):
        register_op(kind, name="pytensor_ml.layers.linear.LinearLayer")


def test_inputs_to_build_on_are_of_the_types_described():
    x = tokens()
    description, _ = written([x], [RMSNorm(n_in=16, affine=False)(x)])
    with pytest.raises(ValueError, match="what to build on"):
        deserialize_graph(description, [pt.fvector("x")])
