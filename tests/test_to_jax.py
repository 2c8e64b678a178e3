"""Networks as functions of JAX, whatever the suite's backend: run once, with JAX."""

import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from pytensor.gradient import disconnected_grad, grad_clip, grad_scale, zero_grad
from references import transformer as reference

from pytensor_ml import save_state, to_jax
from pytensor_ml.layers import (
    DecoderBlock,
    Dropout,
    Embedding,
    GatedFeedForward,
    Input,
    KVCache,
    Linear,
    MoE,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    TransformerStack,
    cached_attention,
    call_as_block,
)
from pytensor_ml.loss import CrossEntropy, supervised_loss
from pytensor_ml.models import CausalLM
from pytensor_ml.models.loading import SafetensorsCheckpoint
from pytensor_ml.params import non_trainable, trainable
from pytensor_ml.pytensorf import (
    collect_non_trainable_updates,
    collect_shared_variables,
    collect_trainable_params,
    compile_predict,
    function,
)

pytestmark = pytest.mark.skipif(
    "pytensor.config.floatX != 'float32'", reason="the layers follow floatX"
)
WIDTH, HEAD_DIM, HIDDEN, EPSILON, BASE, VOCABULARY = 6, 4, 10, 1e-3, 100.0, 11


@pytest.fixture(scope="module", autouse=True)
def _with_jax_only(backend):
    if backend != "jax":
        pytest.skip("uses JAX whatever the backend")


@pytest.fixture(scope="module")
def jax():
    import jax

    return jax


def block(name, feed_forward=None, **options):
    return DecoderBlock(
        name,
        attention=MultiheadAttention(
            f"{name}_attn",
            n_embd=WIDTH,
            n_head=4,
            n_kv_head=2,
            head_dim=HEAD_DIM,
            bias=False,
            is_causal=True,
        ),
        feed_forward=feed_forward
        or GatedFeedForward(f"{name}_mlp", d_model=WIDTH, hidden_dim=HIDDEN),
        attention_norm=RMSNorm(f"{name}_norm1", n_in=WIDTH, epsilon=EPSILON),
        feed_forward_norm=RMSNorm(f"{name}_norm2", n_in=WIDTH, epsilon=EPSILON),
        **options,
    )


def stack_of(*blocks, **options):
    rotary = RotaryEmbedding("rotary", base=BASE, rotary_dim=HEAD_DIM)
    return TransformerStack("stack", blocks, rotary=rotary, **options)


def fill(outputs, seed=0):
    rng = np.random.default_rng(seed)
    for parameter in collect_trainable_params(outputs):
        value = rng.normal(size=parameter.get_value().shape) / 2
        parameter.set_value((value + (value.ndim == 1)).astype("float32"))


def as_float64(values):
    return {name: np.asarray(value, "float64") for name, value in values.items()}


@pytest.fixture(scope="module")
def decoder(jax):
    """One block: its function, what to call it with, and the cotangent of its output."""
    x = Input("x", (None, None, WIDTH))
    positions = Input("positions", (None, None), dtype="int64")
    mask = Input("mask", (None, 1, 1, None), dtype="bool")
    given = [x, positions, mask]
    y, _ = stack_of(block("b"))(*given)
    fill(y)
    rng = np.random.default_rng(1)
    data = rng.normal(size=(2, 4, WIDTH)).astype("float32")
    positions = np.array([[0, 0, 1, 2], [5, 6, 7, 40]])
    mask = np.array([[False, True, True, True], [True, True, False, True]])[:, None, None]
    cotangent = rng.normal(size=data.shape).astype("float32")
    cotangent[0, 0] = 0
    return *to_jax(y, inputs=given), [data, positions, mask], cotangent


def reference_block(params, x, positions, mask):
    short = {
        "b_norm1_scale": "attention_norm",
        "b_norm2_scale": "feed_forward_norm",
        **{f"b_attn_{name}_proj_W": name for name in ("q", "k", "v", "out")},
        **{f"b_mlp_{name}_W": name for name in ("gate", "up", "down")},
    }
    return reference.llama_block(
        x,
        {short[name]: value for name, value in params.items()},
        epsilon=EPSILON,
        n_head=4,
        n_kv_head=2,
        positions=positions,
        base=BASE,
        visible=reference.causal(*positions.shape) & mask[:, 0],
    )


def test_outputs_and_gradients_match_reference(decoder, jax):
    f, params, [x, positions, mask], cotangent = decoder

    @jax.jit
    def run(params, x):
        y, pull_back = jax.vjp(lambda params, x: f(params, x, positions, mask), params, x)
        return y, *pull_back(cotangent)

    y, gradients, dx = run(params, x)
    values = as_float64(params)
    expected = reference_block(values, x.astype("float64"), positions, mask)
    seen = cotangent != 0
    assert_close(y * seen, expected * seen, 1e-5)

    def loss(x, **params):
        return (reference_block(params, x, positions, mask) * cotangent).sum()

    expected = reference.gradients(loss, {"x": x.astype("float64"), **values})
    assert_close(dx, expected.pop("x"), 1e-5)
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(gradients[name], value, 1e-5)


def test_gradients_of_each_example_add_up_to_those_of_the_batch(decoder, jax):
    f, params, inputs, cotangent = decoder

    def loss(params, *inputs_and_cotangent):
        *inputs, cotangent = (v[None] for v in inputs_and_cotangent)
        return (f(params, *inputs) * cotangent).sum()

    batch = [*inputs, cotangent]
    of_each = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0, 0, 0)))(params, *batch)
    of_all = jax.jit(jax.grad(lambda params: (f(params, *inputs) * cotangent).sum()))(params)
    for name, expected in of_all.items():
        assert of_each[name].shape == (2, *expected.shape)
        assert_close(of_each[name].sum(axis=0), expected, 1e-5)


def test_loss_of_mixtures_has_the_gradients_that_pytensor_takes(jax):
    moe = MoE(
        "moe",
        d_model=WIDTH,
        hidden_dim=5,
        n_experts=4,
        top_k=2,
        n_shared_experts=1,
        selection_bias=True,
        bias_update_factor=0.01,
        aux_loss_coeff=0.5,
    )
    model = CausalLM(
        embedding=Embedding("tokens", n_embeddings=VOCABULARY, n_features=WIDTH),
        stack=stack_of(block("b", moe, branch_scale=0.7)),
        norm=RMSNorm("norm", n_in=WIDTH),
        max_positions=8,
    )
    ids = Input("ids", (None, None), "int64")
    loss, target = supervised_loss(model(ids), CrossEntropy(expect_logits=True))
    loss = loss + moe.balance_loss
    fill(loss)
    parameters = collect_shared_variables(loss)
    updates = collect_non_trainable_updates(loss)
    gradients = pytensor.grad(loss, parameters, disconnected_inputs="ignore")
    compiled = function([ids, target], [loss, *gradients])
    f, params = to_jax([loss, *updates.values()], inputs=[ids, target])

    rng = np.random.default_rng(2)
    batch = rng.integers(VOCABULARY, size=(2, 3, 5))
    before = moe.bias.get_value()

    def loss_and_bias(params):
        value, bias = f(params, *batch)
        return value, bias

    (value, bias), gradients = jax.jit(jax.value_and_grad(loss_and_bias, has_aux=True))(params)
    np.testing.assert_array_equal(moe.bias.get_value(), before)
    expected = compiled(*batch)
    assert_close(value, expected[0], 1e-5)
    # The compiled function has written its update back.
    assert_close(bias, moe.bias.get_value(), 1e-6)
    assert np.any(bias != before)
    assert gradients.keys() == {p.name for p in parameters}
    assert gradients["b_branch_scale"] != 0
    for parameter, value in zip(parameters, expected[1:], strict=True):
        assert_close(gradients[parameter.name], value, 1e-5)


def test_mixture_maps_over_examples(jax):
    moe = MoE("moe", d_model=WIDTH, hidden_dim=5, n_experts=4, top_k=2)
    y = moe(Input("x", (None, None, WIDTH)))
    fill(y)
    f, params = to_jax(y)
    x = np.random.default_rng(3).normal(size=(3, 5, WIDTH)).astype("float32")

    def loss(params, x):
        return (f(params, x) ** 2).sum()

    of_each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, x[:, None])
    of_all = jax.jit(jax.grad(loss))(params, x)
    for name, expected in of_all.items():
        assert_close(of_each[name].sum(axis=0), expected, 1e-5)


def test_attention_to_a_cache_maps_over_its_length(jax):
    shapes = {"q": (1, 4, 3, 8), "k": (1, 2, 3, 8), "v": (1, 2, 3, 8)}
    shapes |= {"keys": (1, 2, 16, 8), "values": (1, 2, 16, 8)}
    q, k, v, keys, values = (Input(name, shape) for name, shape in shapes.items())
    length, start = Input("length", (), "int64"), Input("start", (1,), "int64")
    y = cached_attention(q, k, v, KVCache(keys, values, length, start))
    f, _ = to_jax(y, inputs=[q, k, v, keys, values, length, start])
    rng = np.random.default_rng(5)
    data = [rng.normal(size=shape).astype("float32") for shape in shapes.values()]
    lengths = np.array([5, 3])
    mapped = jax.vmap(lambda length: f({}, *data, length, [0]))(lengths)
    for n, result in zip(lengths, mapped, strict=True):
        assert_close(result, f({}, *data, n, [0]))


def test_ops_that_only_change_gradients_change_them_in_jax(jax):
    x = Input("x", (3,))
    inner = call_as_block(lambda x: x * disconnected_grad(x), x)
    terms = inner + grad_scale(x**2, -2.0) + grad_clip(x**3, -1, 1) * zero_grad(x)
    f, _ = to_jax(terms)
    value = np.array([1.0, -2.0, 0.1], "float32")
    cotangent = np.array([1.0, 3.0, -2.0], "float32")
    y, pull_back = jax.vjp(lambda x: f({}, x), value)
    assert_close(y, 2 * value**2 + value**4)
    clipped = np.clip(cotangent * value, -1, 1) * 3 * value**2
    assert_close(pull_back(cotangent)[0], cotangent * (value - 4 * value) + clipped)


def test_recomputing_blocks_keep_little_between_the_passes(jax):
    def kept(recompute):
        x, positions = Input("x", (None, None, WIDTH)), Input("positions", (None,), "int64")
        y, _ = stack_of(block("a"), block("b"), recompute=recompute)(x, positions)
        f, params = to_jax(y, inputs=[x, positions])
        data = jax.ShapeDtypeStruct((8, 64, WIDTH), "float32")
        _, pull_back = jax.eval_shape(
            lambda params, x: jax.vjp(lambda params, x: f(params, x, np.arange(64)), params, x),
            params,
            data,
        )
        return sum(leaf.size for leaf in jax.tree.leaves(pull_back))

    assert kept(recompute=True) < kept(recompute=False) / 4


def test_key_decides_what_is_drawn(jax):
    x = Input("x", (None, 40))
    fc, dropout = Linear("fc", n_in=40, n_out=40, bias=False), Dropout("dropout", p=0.5)
    y = dropout(dropout(x) * fc(x))
    f, params = to_jax(y, inputs=[x])
    ones = np.ones((8, 40), "float32")
    keys = jax.random.split(jax.random.key(0), 2)
    first, again, second = (f(params, ones, key=key) for key in (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(first, again)
    dropped = np.array([np.asarray(first) == 0, np.asarray(second) == 0])
    # Two masks of a half each, drawn apart.
    assert np.all(np.abs(dropped.mean(axis=(1, 2)) - 0.75) < 0.08)
    assert 0.5 < (dropped[0] == dropped[1]).mean() < 0.8
    mapped = jax.vmap(lambda key: f(params, ones, key=key))(keys)
    np.testing.assert_array_equal(np.asarray(mapped) == 0, dropped)

    # The output is linear in the weight, with the same draws in both passes.
    y, gradient = jax.value_and_grad(lambda params: f(params, ones, key=keys[0]).sum())(params)
    assert_close((gradient["fc_W"] * params["fc_W"]).sum(), y, 1e-5)

    with pytest.raises(ValueError, match=r"draws random numbers \(dropout/rng_.*Pass key="):
        f(params, ones)
    predict, params = to_jax(y_without_draws := dropout(fc(x)), for_prediction=True)
    assert_close(predict(params, ones), ones @ params["fc_W"], 1e-5)
    assert_close(predict(params, ones), compile_predict(y_without_draws)(ones), 1e-5)


def test_names_are_those_of_files(tmp_path):
    y = Linear("second", n_in=3, n_out=2)(Linear("first", n_in=4, n_out=3)(Input("x", (None, 4))))
    scale = non_trainable(np.float32(2), "scale")
    counter = pytensor.shared(np.int32(3), "counter")
    y = y * scale * counter.astype("float32")
    _, params = to_jax(y)
    save_state(collect_shared_variables(y), tmp_path / "state.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path / "state.safetensors")
    assert params.keys() == checkpoint.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(value, checkpoint.read(name))
        assert value.dtype == checkpoint.dtype(name)


def test_parameters_are_copies():
    W = trainable(np.ones((256, 256), "float32"), "W")
    _, params = to_jax(pt.exp(W))
    W.get_value(borrow=True)[:] = 2
    assert np.all(params["W"] == 1)


def test_inputs_come_in_the_order_asked_for():
    x, y = Input("x", (2,)), Input("y", (2,))
    given = np.array([5.0, 7.0], "float32"), np.array([1.0, 2.0], "float32")
    f, _ = to_jax([x - y, x], inputs=[y, x])
    difference, same = f({}, *given)
    np.testing.assert_array_equal(difference, [-4, -5])
    np.testing.assert_array_equal(same, given[1])


def test_values_are_brought_to_the_dtypes_of_the_graph(jax):
    x, n = Input("x", (None,)), Input("n", (), dtype="int64")
    y = x * trainable(np.float32([1, 2, 3]), "w")
    f, params = to_jax([y, n + 1], inputs=[x, n])
    half = {"w": params["w"].astype("bfloat16")}
    value = jax.numpy.full(3, 1 / 3, "bfloat16")
    product, following = f(half, value, np.uint8(255))
    # In bfloat16 the products would be rounded.
    assert product.dtype == "float32"
    np.testing.assert_array_equal(product, np.float32(value) * np.float32([1, 2, 3]))
    assert following == 256
    gradient = jax.grad(lambda params: f(params, value, 4)[0].sum())(half)["w"]
    assert gradient.dtype == "bfloat16"
    with pytest.raises(TypeError, match=r"n is of dtype int64, to which float32"):
        f(params, value, 4.5)


def test_integers_that_would_wrap_around_are_refused(jax):
    n = Input("n", (None,), dtype="int8")
    f, params = to_jax(n + n, inputs=[n])
    assert f(params, np.array([63, -64])).tolist() == [126, -128]
    with pytest.raises(TypeError, match=r"int8, which cannot hold -1 to 300"):
        f(params, np.array([300, -1]))
    with pytest.raises(TypeError, match="int8, to which int32 would be truncated"):
        f(params, jax.numpy.array([1]))
    positions = Input("positions", (None,), dtype="int64")
    f, params = to_jax(positions, inputs=[positions])
    with pytest.raises(TypeError, match="x64"):
        f(params, np.array([2**31]))


def test_training_by_optax_moves_what_is_trained(jax):
    optax = pytest.importorskip("optax")
    x, target = Input("x", (None, 4)), Input("target", (None, 2))
    y = Linear("fc", n_in=4, n_out=2)(x) * non_trainable(np.float32(0.5), "scale")
    loss = pt.mean((y - target) ** 2)
    f, params = to_jax(loss, inputs=[x, target])
    kept = {"scale": params.pop("scale")}
    rng = np.random.default_rng(4)
    data = rng.normal(size=(32, 4)).astype("float32")
    targets = (data @ rng.normal(size=(4, 2))).astype("float32")
    optimizer = optax.adamw(0.1)

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(lambda params: f(params | kept, data, targets))(
            params
        )
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    state, losses = optimizer.init(params), []
    for _ in range(60):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.05 * losses[0]


def test_float64_needs_x64_and_an_import_leaves_it_on(jax):
    x = pt.dvector("x")
    with pytest.raises(TypeError, match=r"x is of dtype float64.*jax_enable_x64"):
        to_jax(x.astype("float32"))
    with pytest.raises(TypeError, match="w is of dtype float64"):
        to_jax(pt.sum(trainable(np.ones(3), "w").astype("float32")))
    wide = Input("narrow", (None,)).astype("float64")
    wide.name = "wide"
    with pytest.raises(TypeError, match="wide is of dtype float64"):
        to_jax(wide)
    script = (
        "import jax; jax.config.update('jax_enable_x64', True)\n"
        "import pytensor.tensor as pt; from pytensor_ml import to_jax\n"
        "from pytensor_ml.layers import Input, Linear\n"
        "f, _ = to_jax(pt.exp(pt.dvector('x')))\n"
        "print(repr(float(f({}, [1.0])[0])))\n"
        "f, params = to_jax(Linear('fc', n_in=2, n_out=2)(Input('x', (None, 2))))\n"
        "print(f(params, [[1.0, 2.0]]).dtype)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    value, dtype = result.stdout.split()
    assert abs(float(value) - np.e) < 1e-15
    assert dtype == "float32"


class TestErrors:
    def test_one_name_for_two_parameters(self):
        y = Linear("fc", n_in=3, n_out=3)(Linear("fc", n_in=3, n_out=3)(Input("x", (None, 3))))
        with pytest.raises(ValueError, match=r"called fc_b, fc_W.*names that differ"):
            to_jax(y)

    def test_parameter_without_a_name(self):
        with pytest.raises(ValueError, match="has no name"):
            to_jax(pt.exp(trainable(np.ones(3, "float32"))))

    def test_input_not_named(self):
        x, y = Input("x", (2,)), Input("y", (2,))
        with pytest.raises(ValueError, match=r"needs y, which inputs does not name.*beside x"):
            to_jax(x + y, inputs=[x])

    def test_what_is_no_tensor(self):
        rng = pt.random.shared_rng(np.random.default_rng(0), name="rng")
        next_rng, _ = pt.random.normal(rng=rng, return_next_rng=True)
        with pytest.raises(TypeError, match="is of type RandomGeneratorType"):
            to_jax(next_rng)

    def test_arguments_that_do_not_fit(self):
        f, params = to_jax(Linear("fc", n_in=3, n_out=2)(Input("x", (None, 3))))
        x = np.ones((4, 3), "float32")
        with pytest.raises(TypeError, match=r"takes 1 inputs .*\(x\), but got 2"):
            f(params, x, x)
        with pytest.raises(ValueError, match="lacks fc_W"):
            f({"fc_b": params["fc_b"]}, x)
        with pytest.raises(ValueError, match=r"x takes an array of shape \(None, 3\).*\(4, 2\)"):
            f(params, x[:, :2])
        with pytest.raises(ValueError, match=r"fc_b takes an array of shape \(2,\).*\(1, 2\)"):
            f(params | {"fc_b": params["fc_b"][None]}, x)
