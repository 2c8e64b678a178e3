from types import SimpleNamespace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close, relative_error
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.traversal import applys_between
from pytensor.scalar import Cast
from references import moe as reference

from pytensor_ml.base import BlockOp
from pytensor_ml.layers.combinators import call_as_block
from pytensor_ml.layers.moe import (
    ExpertsLayer,
    ExpertsPullback,
    MoE,
    RouterLayer,
    RouterPullback,
    build_moe_config,
)
from pytensor_ml.pytensorf import (
    collect_non_trainable_updates,
    function,
    rewrite_for_prediction,
)

pytestmark = pytest.mark.skipif(
    "pytensor.config.floatX != 'float32'", reason="the layers follow floatX"
)

# A gradient passes through one more product than the output, and adds up 18 tokens.
GRADIENT_TOLERANCE = 4e-6

ROUTER = {
    "score": "sigmoid",
    "selection_bias": False,
    "n_groups": 1,
    "top_k_groups": 1,
    "renormalize": True,
    "routed_scaling_factor": 1.0,
    "bias_update_factor": 0.0,
}
SIZES = {"d_model": 8, "hidden_dim": 6}
LAYERS = {
    "sigmoid, groups, bias, shared": {
        "n_experts": 6,
        "top_k": 2,
        "n_shared_experts": 2,
        "selection_bias": True,
        "n_groups": 3,
        "top_k_groups": 2,
        "routed_scaling_factor": 2.5,
        "bias_update_factor": 0.25,
        "aux_loss_coeff": 0.7,
    },
    "softmax": {
        "n_experts": 5,
        "top_k": 3,
        "score": "softmax",
        "renormalize": False,
        "routed_scaling_factor": 3.0,
        "aux_loss_coeff": 0.3,
    },
}


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def parameters_of(moe):
    shared = moe.shared
    dense = [shared.gate.W, shared.up.W, shared.down.W] if shared else []
    return [moe.router.W, moe.gate, moe.up, moe.down, *dense]


def randomize(moe):
    for seed, parameter in enumerate(parameters_of(moe)):
        parameter.set_value(normal(*parameter.get_value().shape, seed=seed) * np.float32(0.7))


def with_gradients(moe, x, valid, g):
    y = moe(x, valid)
    loss = moe.balance_loss
    wrt = [x, *parameters_of(moe)]
    return [y, moe.load, loss, *pt.grad(None, wrt, known_grads={y: g, loss: pt.ones_like(loss)})]


def expected(moe, settings, x, valid, g, **changes):
    router, gate, up, down, *shared = (p.get_value() for p in parameters_of(moe))
    read = ("top_k", "n_groups", "top_k_groups", "renormalize", "routed_scaling_factor")
    arguments = {
        "score": "sigmoid",
        "bias": None if moe.bias is None else moe.bias.get_value(),
        "valid": valid,
        "shared": shared or None,
        **{name: settings[name] for name in (*read, "score", "aux_loss_coeff") if name in settings},
        **changes,
    }
    return reference.moe(x, g, router, gate, up, down, **arguments)


def nodes_within(outputs):
    for node in applys_between([], outputs):
        yield node
        if isinstance(node.op, OpFromGraph):
            yield from nodes_within(node.op.fgraph.outputs)


@pytest.fixture(scope="module", params=LAYERS)
def mixture(request):
    """A layer, compiled once with its load, its loss and all gradients."""
    settings = LAYERS[request.param]
    moe = MoE("moe", **SIZES, **settings)
    randomize(moe)
    x, g = (pt.tensor(name, shape=(None, None, 8), dtype="float32") for name in "xg")
    valid = pt.tensor("valid", shape=(None, None), dtype="bool")
    y, *others = with_gradients(moe, x, valid, g)
    run = function([x, valid, g], [y, *others])

    def call(x, valid, g, bias=0.0):
        randomize(moe)
        if moe.bias is not None:
            moe.bias.set_value(np.broadcast_to(bias, moe.n_experts).astype("float32"))
        before = expected(moe, settings, np.nan_to_num(x), valid, g)
        return [np.asarray(v) for v in run(x, valid, g)], before

    return SimpleNamespace(moe=moe, run=run, call=call, settings=settings)


def test_values_and_gradients_match_numpy(mixture):
    x, g = normal(3, 6, 8), normal(3, 6, 8, seed=1)
    valid = normal(3, 6, seed=2) > -0.5
    n_experts = mixture.moe.n_experts
    bias = normal(n_experts, seed=3) * (mixture.moe.bias is not None)
    results, right = mixture.call(x, valid, g, bias)
    y, load, loss, *gradients = results
    assert_close(y, right[0])
    np.testing.assert_array_equal(load, right[1])
    assert_close(loss, right[2])
    for gradient, expected_gradient in zip(gradients, right[3:], strict=True):
        assert_close(gradient, expected_gradient, GRADIENT_TOLERANCE)


def test_padding_counts_for_nothing_but_its_own_output(mixture):
    """What a padding token holds, NaN included, reaches neither load, loss nor other tokens."""
    x, g = normal(3, 6, 8), normal(3, 6, 8, seed=1)
    valid = np.ones((3, 6), bool)
    valid[0, 2:] = valid[2, 5] = False
    (y, load, loss, *_), _ = mixture.call(x, valid, g)
    spoiled = np.where(valid[..., None], x, np.float32(np.nan))
    (z, spoiled_load, spoiled_loss, *_), _ = mixture.call(spoiled, valid, g)
    np.testing.assert_array_equal(z[valid], y[valid])
    assert np.isnan(z[~valid]).all()
    np.testing.assert_array_equal(spoiled_load, load)
    assert load.sum() == valid.sum() * mixture.moe.top_k
    assert_close(spoiled_loss, loss)


def test_equal_scores_go_to_the_lowest_experts(mixture):
    k, moe = mixture.moe.top_k, mixture.moe
    x = np.zeros((2, 3, 8), "float32")
    (_, load, *_), _ = mixture.call(x, np.ones((2, 3), bool), x)
    np.testing.assert_array_equal(load, [6] * k + [0] * (moe.n_experts - k))


def test_no_tokens(mixture):
    x, valid = np.zeros((2, 0, 8), "float32"), np.zeros((2, 0), bool)
    (y, load, loss, dx, *gradients), _ = mixture.call(x, valid, x)
    assert y.shape == dx.shape == x.shape
    assert not load.any()
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients)


def test_no_valid_token(mixture):
    x = normal(2, 3, 8)
    (_, load, loss, *gradients), right = mixture.call(x, np.zeros((2, 3), bool), x)
    assert not load.any()
    assert loss == 0
    assert_close(gradients[1], right[4], GRADIENT_TOLERANCE)


def test_a_step_moves_the_bias_by_the_load_of_valid_tokens():
    """The bias of the layer, in a function that asks for the output alone."""
    moe = MoE("moe", **SIZES, **LAYERS["sigmoid, groups, bias, shared"])
    randomize(moe)
    x = pt.tensor("x", shape=(None, None, 8), dtype="float32")
    valid = pt.tensor("valid", shape=(None, None), dtype="bool")
    outputs = call_as_block(lambda x, valid: [moe(x, valid), moe.load], x, valid, name="block")
    assert isinstance(outputs[0].owner.op, BlockOp)
    step = function([x, valid], outputs[0])
    data, counted = normal(3, 6, 8), normal(3, 6, seed=2) > -0.5
    settings = LAYERS["sigmoid, groups, bias, shared"]
    for _ in range(2):
        bias = moe.bias.get_value()
        y, load, *_ = expected(moe, settings, data, counted, np.zeros_like(data))
        assert_close(step(data, counted), y)
        assert_close(moe.bias.get_value(), bias + 0.25 * np.sign(load.mean() - load))
    assert np.asarray(moe.bias.get_value()).any()


@pytest.mark.compiles_nothing
def test_prediction_keeps_the_load_and_drops_the_update():
    moe = MoE("moe", **SIZES, **LAYERS["sigmoid, groups, bias, shared"])
    x = pt.tensor("x", shape=(None, 8), dtype="float32")
    outputs = [moe(x), moe.load]
    assert list(collect_non_trainable_updates(outputs)) == [moe.bias]
    specialized = rewrite_for_prediction(outputs)
    assert not collect_non_trainable_updates(specialized)
    assert [v.type for v in specialized] == [v.type for v in outputs]

    block = rewrite_for_prediction(call_as_block(moe, x)).owner.op
    for write, read in block.update_map().items():
        assert block.fgraph.outputs[write] is block.fgraph.inputs[read]


@pytest.fixture(scope="module")
def routers():
    """Routers of the cases, compiled together: from logits and bias to ids and weights by name."""
    logits = pt.tensor("logits", shape=(None, 4), dtype="float32")
    bias = pt.tensor("bias", shape=(4,), dtype="float32")
    wide_logits = pt.tensor("wide_logits", shape=(None, 8), dtype="float32")
    wide_bias = pt.tensor("wide_bias", shape=(8,), dtype="float32")
    valid = pt.tensor("valid", shape=(None,), dtype="bool")
    graphs = {}

    def add(name, *inputs, **changes):
        graphs[name] = RouterLayer(**{**ROUTER, "top_k": 2, **changes})(*inputs)

    add("bias", logits, bias, selection_bias=True)
    groups = {"n_groups": 4, "top_k_groups": 2, "selection_bias": True}
    add("groups", wide_logits, wide_bias, **groups)
    add("groups, scaled", wide_logits, wide_bias, **groups, routed_scaling_factor=2.5)
    add("raw", logits, renormalize=False)
    add("raw, scaled", logits, renormalize=False, routed_scaling_factor=2.5)
    add("scaled", logits, routed_scaling_factor=2.5)
    add("plain", logits)
    add("softmax", logits, score="softmax")
    add("softmax, raw", logits, score="softmax", renormalize=False)
    add("one of softmax, raw", logits, score="softmax", renormalize=False, top_k=1)
    step = {"selection_bias": True, "bias_update_factor": 1e-3}
    add("step", logits, bias, valid, **step, top_k=1)
    gradient = pt.grad(None, logits, known_grads={(w := graphs["one of softmax, raw"][1]): w})
    outputs = [v for graph in graphs.values() for v in graph]
    run = function([logits, bias, wide_logits, wide_bias, valid], [*outputs, gradient])

    def call(logits, bias=(0, 0, 0, 0), wide_logits=None, wide_bias=0.0, valid=None):
        logits = np.atleast_2d(logits).astype("float32")
        wide = np.zeros((1, 8)) if wide_logits is None else np.atleast_2d(wide_logits)
        valid = np.ones(len(logits), bool) if valid is None else valid
        *values, gradient = run(
            logits,
            np.array(bias, "float32"),
            wide.astype("float32"),
            np.full(8, wide_bias, "float32"),
            valid,
        )
        values = iter([np.asarray(v) for v in values])
        results = {name: [next(values) for _ in graph] for name, graph in graphs.items()}
        return {**results, "gradient": np.asarray(gradient)}

    return call


def logits_of(scores):
    scores = np.array(scores)
    return np.log(scores / (1 - scores))


def assert_routes(result, ids, weights):
    np.testing.assert_array_equal(result[0], [ids])
    np.testing.assert_allclose(result[1], [weights], rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh(routers):
    results = routers(logits_of([0.9, 0.8, 0.1, 0.2]), [0, -1, 0, 1])
    assert_routes(results["bias"], [3, 0], [0.1818182, 0.8181818])


def test_groups_left_out_are_not_chosen_even_where_all_preferences_are_negative(routers):
    logits = logits_of([0.9, 0.8, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    results = routers(np.zeros(4), wide_logits=logits, wide_bias=-1)
    assert_routes(results["groups"], [0, 1], [0.5294118, 0.4705882])
    assert_routes(results["groups, scaled"], [0, 1], [1.3235294, 1.1764706])
    # The best expert is alone in its group.
    logits = logits_of([0.95, 0.01, 0.5, 0.6, 0.01, 0.01, 0.4, 0.65])
    results = routers(np.zeros(4), wide_logits=logits, wide_bias=-1)
    assert_routes(results["groups"], [7, 3], [0.52, 0.48])


def test_weights_are_renormalized_then_scaled(routers):
    results = routers(logits_of([0.2, 0.9, 0.1, 0.6]))
    assert_routes(results["raw"], [1, 3], [0.9, 0.6])
    assert_routes(results["plain"], [1, 3], [0.6, 0.4])
    assert_routes(results["raw, scaled"], [1, 3], [2.25, 1.5])
    assert_routes(results["scaled"], [1, 3], [1.5, 1.0])


def test_softmax_is_over_all_experts(routers):
    results = routers([2, 1, 0, -1])
    assert_routes(results["softmax, raw"], [0, 1], [0.6439143, 0.2368828])
    assert_routes(results["softmax"], [0, 1], [0.7310586, 0.2689414])
    weight = 0.6439143
    others = np.array([0.2368828, 0.0871443, 0.0320586])
    assert_routes(results["one of softmax, raw"], [0], [weight])
    assert_close(results["gradient"][0], weight**2 * np.array([1 - weight, *-others]), 1e-6)


def test_ties_go_to_the_lowest_index(routers):
    logits = [[1, 3, 3, 3], [2, 2, 2, 2], [-1, 0, -1, 0]]
    results = routers(logits)
    for name in ("plain", "softmax"):
        np.testing.assert_array_equal(results[name][0], [[1, 2], [0, 1], [1, 3]])
    equal = np.zeros(8)
    results = routers(np.zeros(4), wide_logits=[equal, [0, 0, 1, 0, 0, 1, 1, 0]])
    np.testing.assert_array_equal(results["groups"][0], [[0, 1], [2, 5]])


def test_scores_that_are_all_zero_give_weights_of_zero(routers):
    for weights in (routers([-200, -300, -200, -400])[name][1] for name in ("raw", "plain")):
        np.testing.assert_array_equal(weights, [[0, 0]])


def test_the_bias_moves_by_the_sign_of_what_an_expert_lacks(routers):
    loads = [10, 2, 4, 0]
    one_a_token = np.repeat(np.eye(4), loads, axis=0)
    padding = np.eye(4)[[3, 3, 3, 3, 3, 1]]
    valid = np.arange(22) < 16
    results = routers(5 * np.concatenate([one_a_token, padding]), valid=valid)
    ids, _, load, bias = results["step"]
    assert ids.shape == (22, 1)
    np.testing.assert_array_equal(load, loads)
    np.testing.assert_allclose(bias, [-1e-3, 1e-3, 0, 1e-3], rtol=1e-6)
    results = routers(5 * np.repeat(np.eye(4), 7, axis=0), bias=[0.25, 0, 0, 0])
    np.testing.assert_array_equal(results["step"][3], [0.25, 0, 0, 0])


def test_float16_is_computed_in_float32(backend):
    if backend == "numba":
        pytest.skip("Numba has no float16")
    settings = {"n_experts": 4, "top_k": 2, "n_shared_experts": 1}
    moe = MoE("moe", **SIZES, **settings)
    randomize(moe)
    x = pt.tensor("x", shape=(None, 8), dtype="float16")
    y = moe(x)
    assert y.type.dtype == "float16"
    dx = pt.grad(y.astype("float32").sum(acc_dtype="float32"), x)
    data = normal(5, 8, dtype="float16")
    result, gradient = (np.asarray(v) for v in function([x], [y, dx])(data))
    assert result.dtype == gradient.dtype == "float16"
    right = expected(moe, settings, data, None, np.ones((5, 8)))
    # One rounding of float16.
    assert relative_error(result, right[0]) <= 2**-11 * 1.01
    assert relative_error(gradient, right[3]) <= 3 * 2**-11


def test_float16_is_refused_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")
    moe = MoE("moe", **SIZES, n_experts=4, top_k=2)
    x = pt.tensor("x", shape=(None, 8), dtype="float16")
    with pytest.raises(NotImplementedError, match=r"float16.*C, JAX or MLX"):
        function([x], moe(x))
    wide = pt.tensor("x", shape=(None, 8), dtype="float32")
    narrow = [pt.tensor(shape=p.type.shape, dtype="float16") for p in (moe.gate, moe.up, moe.down)]
    ids, weights = pt.imatrix(), pt.matrix(dtype="float32")
    with pytest.raises(NotImplementedError, match=r"float16.*C, JAX or MLX"):
        function([wide, ids, weights, *narrow], ExpertsLayer()(wide, ids, weights, *narrow))


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("parameter_dtype", ["float32", "float64"])
def test_dtypes_and_static_shapes(name, dtype, parameter_dtype):
    with pytensor.config.change_flags(floatX=parameter_dtype):
        moe = MoE("moe", **SIZES, **LAYERS[name])
        x, g = (pt.tensor(shape=(None, 5, 8), dtype=dtype) for _ in range(2))
        y, load, loss, dx, *gradients = with_gradients(moe, x, None, g)
    assert y.type.dtype == dx.type.dtype == dtype
    assert y.type.shape == dx.type.shape == (None, 5, 8)
    assert y.name == "moe_output"
    assert (load.type.dtype, load.type.shape) == ("int32", (moe.n_experts,))
    assert loss.type.dtype == ("float64" if dtype == "float64" else "float32")
    for parameter, gradient in zip(parameters_of(moe), gradients, strict=True):
        assert gradient.type.dtype == parameter.type.dtype == parameter_dtype
        assert gradient.type.shape == parameter.type.shape


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("parameter_dtype", ["float32", "float64"])
def test_float32_graphs_have_no_float64(name, parameter_dtype):
    """Except for casts of float64 parameters and to their gradients."""
    settings = {**LAYERS[name], "n_shared_experts": 0}
    if parameter_dtype == "float64":
        settings["bias_update_factor"] = 0.0
    with pytensor.config.change_flags(floatX=parameter_dtype):
        moe = MoE("moe", **SIZES, **settings)
        x, g = (pt.tensor(shape=(None, 8), dtype="float32") for _ in range(2))
        graph = with_gradients(moe, x, pt.vector("valid", dtype="bool"), g)
        graph += collect_non_trainable_updates(graph).values()
    for node in nodes_within(graph):
        is_cast = isinstance(getattr(node.op, "scalar_op", None), Cast)
        if parameter_dtype == "float64" and (is_cast or isinstance(node.op, OpFromGraph)):
            continue
        for variable in [*node.inputs, *node.outputs]:
            assert getattr(variable.type, "dtype", "") != "float64", node
        assert getattr(node.op, "acc_dtype", None) != "float64", node


@pytest.mark.compiles_nothing
def test_a_mixture_is_two_ops_and_so_is_its_gradient():
    moe = MoE("moe", **SIZES, **LAYERS["sigmoid, groups, bias, shared"])
    x, g = (pt.tensor(shape=(None, 8), dtype="float32") for _ in range(2))
    ops = [node.op for node in applys_between([], with_gradients(moe, x, None, g))]
    for kind in (RouterLayer, RouterPullback, ExpertsLayer, ExpertsPullback):
        assert len([op for op in ops if isinstance(op, kind)]) == 1


@pytest.mark.compiles_nothing
def test_the_bias_has_no_gradient():
    moe = MoE("moe", **SIZES, **LAYERS["sigmoid, groups, bias, shared"])
    y = moe(pt.tensor(shape=(None, 8), dtype="float32"))
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pt.grad(y.sum() + moe.balance_loss, moe.bias)


@pytest.mark.compiles_nothing
def test_parameters_start_with_the_law_of_each_expert():
    moe = MoE("moe", d_model=40, hidden_dim=60, n_experts=50, top_k=1, selection_bias=True)
    for parameter in (moe.gate, moe.up, moe.down):
        assert 0.14 < parameter.get_value().std() < 0.143  # sqrt(2 / 100)
    assert not moe.bias.get_value().any()
    assert moe.bias.name == "moe_selection_bias"


@pytest.mark.compiles_nothing
def test_praxis_settings():
    settings = build_moe_config(
        dim=8,
        expert_hidden=6,
        num_routed_experts=4,
        top_k_routed=2,
        routed_scaling_factor=2.5,
        gate_bias_update_factor=1e-3,
        aux_loss_coeff=1e-4,
    )
    moe = MoE("moe", **settings)
    x = pt.tensor(shape=(3, 8), dtype="float32")
    moe(x)
    op = moe.load.owner.op
    assert op._props_dict() == {
        **ROUTER,
        "top_k": 2,
        "selection_bias": True,
        "routed_scaling_factor": 2.5,
        "bias_update_factor": 1e-3,
    }
    assert moe.gate.type.shape == (4, 8, 6)
    assert moe.shared.gate.W.type.shape == (8, 6)
    assert moe.aux_loss_coeff == 1e-4


@pytest.mark.compiles_nothing
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "tanh"}, "'tanh'.*sigmoid, softmax"),
        ({"top_k": 7}, "top_k=7.*n_experts=6"),
        ({"top_k": 0}, "top_k=0.*from 1 to 6"),
        ({"n_groups": 4}, "n_experts=6 into n_groups=4"),
        ({"n_groups": 0}, "n_groups=0"),
        ({"n_groups": 3, "top_k_groups": 4}, "top_k_groups=4.*n_groups=3"),
        ({"n_groups": 3, "top_k_groups": 0}, "top_k_groups=0"),
        ({"n_groups": 3, "top_k": 3}, "top_k=3, but only 2 experts are left"),
        ({"bias_update_factor": 0.1}, "bias_update_factor=0.1.*selection_bias=True"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MoE("moe", **{**SIZES, "n_experts": 6, "top_k": 2, **changes})


@pytest.mark.compiles_nothing
def test_inputs_that_do_not_fit_are_refused():
    moe = MoE("moe", **SIZES, n_experts=6, top_k=2)
    x = pt.tensor(shape=(3, 8), dtype="float32")
    with pytest.raises(ValueError, match=r"moe maps a last axis of width 8.*\(3, 7\)"):
        moe(pt.tensor(shape=(3, 7), dtype="float32"))
    with pytest.raises(TypeError, match=r"moe takes floats.*int64"):
        moe(pt.tensor(shape=(3, 8), dtype="int64"))
    with pytest.raises(ValueError, match="no axis of tokens"):
        moe(x[0])
    with pytest.raises(TypeError, match=r"dtype int64.*astype\('bool'\)"):
        moe(x, pt.tensor(shape=(3,), dtype="int64"))
    with pytest.raises(ValueError, match=r"valid of shape \(4,\) for tokens of shape \(3,\)"):
        moe(x, pt.tensor(shape=(4,), dtype="bool"))
    with pytest.raises(ValueError, match=r"valid of shape \(3, 1\)"):
        moe(x, pt.tensor(shape=(3, 1), dtype="bool"))
