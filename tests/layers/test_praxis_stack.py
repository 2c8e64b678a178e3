"""The Praxis trunk against its reference: dense, mixture and dense block, modulated and tapped."""

import math

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from pytensor.graph.traversal import ancestors, applys_between
from references import praxis as reference
from references.transformer import gradients

from pytensor_ml.base import BlockOp
from pytensor_ml.layers import (
    Input,
    IntegerRotaryEmbedding,
    modulate,
    praxis_stack,
)
from pytensor_ml.layers.moe import build_moe_config
from pytensor_ml.layers.positional import IntegerRotaryTable
from pytensor_ml.pytensorf import (
    collect_non_trainable_params,
    collect_non_trainable_updates,
    function,
)

pytestmark = pytest.mark.skipif(
    "pytensor.config.floatX != 'float32'", reason="blocks are specified for float32"
)

DIM, N_HEAD, N_KV_HEAD, HEAD_DIM, CONDITIONING = 6, 4, 2, 6, 3
EPSILON, QK_EPSILON = 1e-3, 1e-2
MOE = {"top_k": 2, "routed_scaling_factor": 2.5}
# Two frames of two tokens; a frame sees itself and the one before.
FRAME = np.arange(4) // 2
MASK = FRAME[None, :] <= FRAME[:, None]
POSITIONS = np.array([[2_000_001, 2_000_002, 2_345_678, 2_345_679], [3, 2, 1, 3_999_999]])


def trunk(depth=3, dense_blocks=(0, 2), **options):
    return praxis_stack(
        "trunk",
        depth=depth,
        dense_blocks=dense_blocks,
        dim=DIM,
        num_heads=N_HEAD,
        num_kv_heads=N_KV_HEAD,
        head_dim=HEAD_DIM,
        qk_norm_eps=QK_EPSILON,
        norm_eps=EPSILON,
        dense_hidden=5,
        rotary=IntegerRotaryEmbedding(HEAD_DIM, 4, 100, 1024),
        moe=build_moe_config(
            dim=DIM,
            expert_hidden=3,
            num_routed_experts=4,
            top_k_routed=MOE["top_k"],
            routed_scaling_factor=MOE["routed_scaling_factor"],
            gate_bias_update_factor=1e-2,
        ),
        modulation_dim=CONDITIONING,
        **options,
    )


def parameters(block):
    """Name a block's parameters as the reference does."""
    attention, feed_forward = block.attention, block.feed_forward
    named = {
        "modulator": block.modulator.W,
        "modulator_bias": block.modulator.b,
        "ln_in": block.attention_norm.weight,
        "ln_out": block.feed_forward_norm.weight,
        "q_norm": attention.q_norm.weight,
        "k_norm": attention.k_norm.weight,
        "out_proj": attention.out_proj.W,
        "out_bias": attention.out_proj.b,
        **{
            name: getattr(attention, name).W for name in ("q_proj", "k_proj", "v_proj", "gate_proj")
        },
    }
    parts = ("gate", "up", "down")
    if not hasattr(feed_forward, "router"):
        return named | {part: getattr(feed_forward, part).W for part in parts}
    return (
        named
        | {"router": feed_forward.router.W}
        | {f"experts_{part}": getattr(feed_forward, part) for part in parts}
        | {f"shared_{part}": getattr(feed_forward.shared, part).W for part in parts}
    )


@pytest.fixture(scope="module")
def step():
    """A compiled training step: the outputs, taps, what is watched, and every gradient."""
    rng = np.random.default_rng(5)
    stack = trunk()
    x = Input("x", shape=(None, None, DIM), dtype="float32")
    positions = Input("positions", shape=(None, None), dtype="int64")
    mask = Input("mask", shape=(None, None), dtype="bool")
    x_mod = Input("x_mod", shape=(None, None, CONDITIONING), dtype="float32")
    weight = Input("weight", shape=(None, None, DIM), dtype="float32")
    wrt = {f"{i} {k}": v for i, b in enumerate(stack.blocks) for k, v in parameters(b).items()}
    for parameter in wrt.values():
        shape = parameter.get_value().shape
        parameter.set_value(rng.normal(size=shape).astype("float32") / 2)
    moe = stack.blocks[1].feed_forward
    moe.bias.set_value(np.array([0.0, 0.3, -0.2, 0.1], "float32"))
    y, taps = stack(x, positions, mask, x_mod, tap_blocks=(1, 0))
    wrt |= {"x": x, "x_mod": x_mod}
    gradient = pt.grad((y * weight).sum(), list(wrt.values()))
    run = function([x, positions, mask, x_mod, weight], [y, *taps, moe.load, *gradient])
    values = {k: v.get_value() for k, v in wrt.items() if k not in ("x", "x_mod")}
    values["x"] = rng.normal(size=(2, 4, DIM)).astype("float32")
    values["x_mod"] = rng.normal(size=(2, 4, CONDITIONING)).astype("float32")
    g = rng.normal(size=(2, 4, DIM)).astype("float32")
    fixed = {
        f"{i} s": b.branch_scale.get_value().astype("float64") for i, b in enumerate(stack.blocks)
    }
    fixed["1 router_bias"] = moe.bias.get_value().astype("float64")
    results = run(values["x"], POSITIONS, MASK, values["x_mod"], g)
    named = dict(zip(["y", "tap 1", "tap 0", "load", *wrt], map(np.asarray, results), strict=True))
    return stack, values, fixed, g, named


def reference_outputs(values, fixed, first=0):
    """Return the outputs of the blocks from ``first`` on, where ``values["x"]`` enters."""
    blocks = [
        {k[2:]: v for k, v in (values | fixed).items() if k.startswith(f"{i} ")}
        for i in range(first, 3)
    ]
    theta = np.array([1.0, np.float32(0.1), 0.0])
    return reference.trunk(
        values["x"],
        blocks,
        POSITIONS,
        MASK,
        values["x_mod"],
        epsilon=EPSILON,
        theta=theta,
        n_head=N_HEAD,
        n_kv_head=N_KV_HEAD,
        qk_epsilon=QK_EPSILON,
        moe=MOE,
    )


def test_outputs_and_taps_match_reference(step):
    _, values, fixed, _, result = step
    outputs = reference_outputs({k: v.astype("float64") for k, v in values.items()}, fixed)
    assert_close(result["y"], outputs[2], 1e-5)
    assert_close(result["tap 1"], outputs[1], 1e-5)
    assert_close(result["tap 0"], outputs[0], 1e-5)


def test_every_gradient_matches_reference(step):
    _, values, fixed, g, result = step
    values = {k: v.astype("float64") for k, v in values.items()}
    outputs = reference_outputs(values, fixed)
    expected = {}
    for first in range(3):
        entering = values["x"] if first == 0 else outputs[first - 1]

        def loss(first=first, entering=entering, **moved):
            own = values | {"x": entering} | moved
            return (reference_outputs(own, fixed, first)[-1] * g).sum()

        inputs = ("x", "x_mod") if first == 0 else ()
        moved = {k: v for k, v in values.items() if k[0] == str(first) or k in inputs}
        expected |= gradients(loss, moved)
    assert expected.keys() == values.keys()
    for name, gradient in expected.items():
        assert_close(result[name], gradient, 1e-4)


def test_the_step_counted_loads_and_moved_the_selection_bias(step):
    stack, _, fixed, _, result = step
    assert result["load"].sum() == POSITIONS.size * MOE["top_k"]
    moved = fixed["1 router_bias"] + 1e-2 * np.sign(result["load"].mean() - result["load"])
    assert_close(stack.blocks[1].feed_forward.bias.get_value(), moved)


@pytest.mark.compiles_nothing
def test_branch_scales_follow_depth_and_are_saved():
    stack = trunk(depth=4, dense_blocks=range(4))
    x, positions = pt.tensor3("x", dtype="float32"), pt.lmatrix("positions")
    x = pt.specify_shape(x, (None, None, DIM))
    y, _ = stack(x, positions, None, pt.zeros((*x.shape[:2], CONDITIONING), dtype="float32"))
    scales = {
        v.name: float(v.get_value())
        for v in collect_non_trainable_params(y)
        if v.name.endswith("_s")
    }
    assert [scales[f"trunk_blocks_{i}_s"] for i in range(4)] == pytest.approx(
        [1, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5]
    )


@pytest.mark.compiles_nothing
def test_two_kinds_of_block_and_one_table_whatever_the_depth():
    x = Input("x", shape=(None, None, DIM), dtype="float32")
    x_mod = Input("x_mod", shape=(None, None, CONDITIONING), dtype="float32")
    stack = trunk(depth=9, dense_blocks=(0, 4))
    y, _ = stack(x, pt.lmatrix("positions"), pt.tensor("mask", shape=(None, None)) > 0, x_mod)
    nodes = list(applys_between([], [y]))
    assert len({node.op for node in nodes if isinstance(node.op, BlockOp)}) == 2
    assert sum(isinstance(node.op, BlockOp) for node in nodes) == 9
    assert sum(isinstance(node.op, IntegerRotaryTable) for node in nodes) == 1
    assert len(collect_non_trainable_updates(y)) == 7
    assert y.type.shape == (None, None, DIM)


@pytest.mark.compiles_nothing
def test_a_modulator_starts_with_shifts_of_0_and_scales_of_1():
    [block] = trunk(depth=1, dense_blocks=(0,)).blocks
    bias = block.modulator.b
    assert not block.modulator.W.get_value().any()
    np.testing.assert_array_equal(bias.get_value(), [0] * DIM + [1] * DIM)
    np.testing.assert_array_equal(bias.initializer(bias, 3).get_value(), [0] * DIM + [1] * DIM)


def test_modulation_computes_in_its_dtype_and_keeps_that_of_x(backend):
    x = pt.tensor("x", shape=(None, 3), dtype="float16")
    shift, scale = pt.fvector("shift"), pt.fvector("scale")
    outputs = [modulate(x, shift, scale, dtype) for dtype in ("mixed", "float32", "float16")]
    assert {y.type.dtype for y in outputs} == {"float16"}
    if backend == "numba":
        with pytest.raises(NotImplementedError, match="float16"):
            pytensor.function([x, shift, scale], outputs)
        return
    value = np.array([[1024, 3, -7]], "float16")
    # Float32 holds every product here exactly; in float16 the first two scales round to 1.
    scale_value = np.float32([1 + 2**-12, 1 + 2**-12, 0.5])
    shift_value = np.float32([-1024, 1, 2])
    mixed, wide, narrow = map(
        np.asarray, pytensor.function([x, shift, scale], outputs)(value, shift_value, scale_value)
    )
    np.testing.assert_array_equal(mixed, [[0.25, 4, -1.5]])
    np.testing.assert_array_equal(wide, [[0.25, 4, -1.5]])
    np.testing.assert_array_equal(narrow, [[0, 4, -1.5]])


def test_modulation_of_float32_in_float16_is_refused_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")
    x, shift, scale = pt.fmatrix("x"), pt.fvector("shift"), pt.fvector("scale")
    with pytest.raises(NotImplementedError, match="float16"):
        pytensor.function([x, shift, scale], modulate(x, shift, scale, "float16"))


@pytest.mark.compiles_nothing
def test_padding_is_not_counted_by_a_mixture_in_a_stack():
    stack = trunk(depth=2, dense_blocks=(0,))
    x = Input("x", shape=(None, None, DIM), dtype="float32")
    x_mod = Input("x_mod", shape=(None, None, CONDITIONING), dtype="float32")
    valid = Input("valid", shape=(None, None), dtype="bool")
    stack(x, pt.lmatrix("positions"), None, x_mod, valid=valid)
    moe = stack.blocks[1].feed_forward
    assert valid in ancestors([moe.load])
    assert valid in ancestors([moe.balance_loss])


@pytest.mark.compiles_nothing
def test_errors():
    with pytest.raises(ValueError, match=r"blocks 0 to 2, so \[3\] cannot be dense"):
        trunk(dense_blocks=(3,))
    with pytest.raises(ValueError, match="heads of width 4 and a rotary embedding of 8"):
        praxis_stack(
            depth=1,
            dense_blocks=(0,),
            dim=DIM,
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            qk_norm_eps=1e-6,
            norm_eps=1e-6,
            dense_hidden=4,
            rotary=IntegerRotaryEmbedding(8, 8, 100, 64),
        )
    with pytest.raises(ValueError, match="without x_mod"):
        trunk()(pt.tensor(shape=(2, 3, DIM), dtype="float32"), pt.zeros((2, 3), dtype="int64"))
    with pytest.raises(TypeError, match="int64"):
        modulate(pt.lmatrix(), 0.0, 1.0)
    with pytest.raises(ValueError, match="'bfloat16'"):
        modulate(pt.fvector(), 0.0, 1.0, "bfloat16")
