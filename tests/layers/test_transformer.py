import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from references import transformer as reference

from pytensor_ml.base import BlockOp, Layer
from pytensor_ml.layers import (
    DecoderBlock,
    GatedFeedForward,
    Input,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    TransformerBlock,
    TransformerStack,
)
from pytensor_ml.layers.norm import RMSNormLayer
from pytensor_ml.pytensorf import (
    collect_non_trainable_params,
    collect_rng_updates,
    collect_trainable_params,
    function,
    rewrite_for_prediction,
)

pytestmark = pytest.mark.skipif(
    "pytensor.config.floatX != 'float32'", reason="blocks are specified for float32"
)

WIDTH, N_HEAD, N_KV_HEAD, HEAD_DIM, HIDDEN = 6, 4, 2, 4, 10
EPSILON, BASES = 1e-3, {"near": 100.0, "far": 3.0}


def decoder_block(name):
    return DecoderBlock(
        name,
        attention=MultiheadAttention(
            f"{name}_attn",
            n_embd=WIDTH,
            n_head=N_HEAD,
            n_kv_head=N_KV_HEAD,
            head_dim=HEAD_DIM,
            bias=False,
            is_causal=True,
        ),
        feed_forward=GatedFeedForward(f"{name}_mlp", d_model=WIDTH, hidden_dim=HIDDEN),
        attention_norm=RMSNorm(f"{name}_norm1", n_in=WIDTH, epsilon=EPSILON),
        feed_forward_norm=RMSNorm(f"{name}_norm2", n_in=WIDTH, epsilon=EPSILON),
    )


def decoder_stack(n_blocks):
    rotary = RotaryEmbedding("rotary", base=100.0, rotary_dim=HEAD_DIM)
    return TransformerStack(
        "stack", [decoder_block(f"b{i}") for i in range(n_blocks)], rotary=rotary
    )


def parameters(block):
    attention, feed_forward = block.attention, block.feed_forward
    return {
        "attention_norm": block.attention_norm.scale,
        "q": attention.q_proj.W,
        "k": attention.k_proj.W,
        "v": attention.v_proj.W,
        "out": attention.out_proj.W,
        "feed_forward_norm": block.feed_forward_norm.scale,
        "gate": feed_forward.gate.W,
        "up": feed_forward.up.W,
        "down": feed_forward.down.W,
    } | {
        name: norm.scale
        for name, norm in (
            ("post_attention_norm", block.post_attention_norm),
            ("post_feed_forward_norm", block.post_feed_forward_norm),
        )
        if norm is not None
    }


def block_ops(graph):
    nodes = pytensor.graph.traversal.applys_between([], [graph])
    return [node.op for node in nodes if isinstance(node.op, BlockOp)]


@pytest.fixture(scope="module")
def trained_step():
    """Two blocks with norms after their branches: output, one tap, gradients of a weighted sum.

    Each has a rotary table of its own.
    """
    rng = np.random.default_rng(1)
    blocks = [decoder_block("b0"), decoder_block("b1")]
    blocks[0].rotary_kind, blocks[1].rotary_kind = "near", "far"
    for block in blocks:
        block.post_attention_norm = RMSNorm(f"{block.name}_norm3", n_in=WIDTH, epsilon=EPSILON)
        block.post_feed_forward_norm = RMSNorm(f"{block.name}_norm4", n_in=WIDTH, epsilon=EPSILON)
    rotary = {
        kind: RotaryEmbedding(kind, base=base, rotary_dim=HEAD_DIM) for kind, base in BASES.items()
    }
    stack = TransformerStack("stack", blocks, rotary=rotary)
    for block in stack.blocks:
        for parameter in parameters(block).values():
            value = rng.normal(size=parameter.get_value().shape) / 2
            parameter.set_value((value + (value.ndim == 1)).astype("float32"))
    x = Input("x", shape=(None, None, WIDTH), dtype="float32")
    positions = Input("positions", shape=(None, None), dtype="int64")
    mask = Input("mask", shape=(None, 1, 1, None), dtype="bool")
    weight = Input("weight", shape=(None, None, WIDTH), dtype="float32")
    y, taps = stack(x, positions, mask, tap_blocks=(0,))
    wrt = {
        "x": x,
        **{f"{i} {k}": v for i, b in enumerate(stack.blocks) for k, v in parameters(b).items()},
    }
    gradient = pt.grad((y * weight).sum(), list(wrt.values()))
    compiled = function([x, positions, mask, weight], [y, *taps, *gradient])
    data = rng.normal(size=(2, 4, WIDTH)).astype("float32")
    weight = rng.normal(size=data.shape).astype("float32")
    positions = np.array([[0, 0, 1, 2], [5, 6, 7, 40]])
    mask = np.array([[False, True, True, True], [True, True, False, True]])
    weight[0, 0] = 0
    values = {k: v.get_value() for k, v in wrt.items() if k != "x"} | {"x": data}
    result = compiled(data, positions, mask[:, None, None], weight)
    named = dict(zip(["y", "tap", *wrt], result, strict=True))
    return stack, values, positions, mask, weight, named


def forward(values, positions, mask, n_blocks=2):
    options = {
        "epsilon": EPSILON,
        "n_head": N_HEAD,
        "n_kv_head": N_KV_HEAD,
        "positions": positions,
        "visible": reference.causal(*positions.shape) & mask[:, None, :],
    }
    y = values["x"]
    for i in range(n_blocks):
        p = {k.split()[1]: v for k, v in values.items() if k.startswith(f"{i} ")}
        y = reference.llama_block(y, p, base=list(BASES.values())[i], **options)
    return y


def test_stack_and_tap_match_reference(trained_step):
    _, values, positions, mask, _, result = trained_step
    values = {k: v.astype("float64") for k, v in values.items()}
    real = mask[..., None]
    assert_close(result["y"] * real, forward(values, positions, mask) * real, 1e-5)
    assert_close(result["tap"] * real, forward(values, positions, mask, n_blocks=1) * real, 1e-5)


def test_stack_gradients_match_reference(trained_step):
    _, values, positions, mask, weight, result = trained_step

    def loss(**moved):
        return (forward(moved, positions, mask) * weight).sum()

    for name, expected in reference.gradients(loss, values).items():
        assert_close(result[name], expected, 1e-5)


@pytest.mark.compiles_nothing
def test_equal_blocks_are_equal_ops_whatever_the_depth():
    x = Input("x", shape=(None, None, WIDTH), dtype="float32")
    positions = Input("positions", shape=(None, None), dtype="int64")
    for n_blocks in (1, 2, 5):
        y, _ = decoder_stack(n_blocks)(x, positions)
        ops = block_ops(y)
        assert len(ops) == n_blocks
        assert len(set(ops)) == 1
        assert y.type.shape == x.type.shape
        assert len(collect_trainable_params(y)) == 9 * n_blocks


@pytest.mark.compiles_nothing
def test_the_graphs_of_equal_layers_are_built_once_a_stack(monkeypatch):
    x = Input("x", shape=(None, None, WIDTH), dtype="float32")
    positions = Input("positions", shape=(None, None), dtype="int64")
    built, build = [], RMSNormLayer.build_inner_graph
    monkeypatch.setattr(
        RMSNormLayer,
        "build_inner_graph",
        lambda op, *inputs: built.append(op) or build(op, *inputs),
    )
    decoder_stack(3)(x, positions)
    assert len(built) == 1


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("shape", [(1, None, WIDTH), (2, 3, WIDTH), (None, None, WIDTH)])
def test_a_block_keeps_the_static_shape_it_is_given(shape):
    y, _ = decoder_stack(2)(
        Input("x", shape=shape, dtype="float32"),
        Input("positions", shape=shape[:2], dtype="int64"),
    )
    assert y.type.shape == shape
    assert len(set(block_ops(y))) == 1


@pytest.mark.compiles_nothing
def test_a_layer_that_forgets_a_static_length_leaves_blocks_equal():
    class Forgetful(Layer):
        def __call__(self, x):
            return x[pt.arange(x.shape[0])]

    blocks = [decoder_block(f"b{i}") for i in range(2)]
    for block in blocks:
        block.feed_forward = Forgetful()
    x = Input("x", shape=(1, None, WIDTH), dtype="float32")
    y, _ = TransformerStack("stack", blocks, rotary=None)(x, pt.arange(3))
    assert y.type.shape == x.type.shape
    assert len(set(block_ops(y))) == 1


def test_no_float64_in_a_float32_stack(trained_step):
    stack, *_ = trained_step
    x = Input("x", shape=(None, None, WIDTH), dtype="float32")
    y, _ = stack(x, Input("positions", shape=(None, None), dtype="int64"))
    gradient = pt.grad(y.sum(dtype="float32", acc_dtype="float32"), collect_trainable_params(y))

    def dtypes(outputs):
        for node in pytensor.graph.traversal.applys_between([], outputs):
            yield from (v.type.dtype for v in node.outputs if hasattr(v.type, "dtype"))
            if hasattr(node.op, "fgraph"):
                yield from dtypes(node.op.fgraph.outputs)

    assert "float64" not in set(dtypes([y, *gradient]))


@pytest.mark.compiles_nothing
def test_dropout_in_every_block_of_a_stack_draws_once_a_block():
    blocks = [TransformerBlock(f"b{i}", d_model=4, n_head=2, dropout=0.5) for i in range(3)]
    x = Input("x", shape=(None, None, 4), dtype="float32")
    y, _ = TransformerStack("stack", blocks, rotary=None)(x, pt.arange(3))
    gradients = pt.grad(y.sum(), collect_trainable_params(y))
    assert len(collect_rng_updates([y, *gradients])) == 6
    assert len(set(block_ops(y))) == 1


@pytest.mark.compiles_nothing
def test_a_pairing_that_differs_from_the_tables_is_refused():
    rotary = RotaryEmbedding("rotary", rotary_dim=HEAD_DIM, pairing="adjacent")
    with pytest.raises(ValueError, match="pairing 'adjacent', but b0 rotates by 'half'"):
        TransformerStack("stack", [decoder_block("b0")], rotary=rotary)


@pytest.mark.compiles_nothing
def test_a_rotary_kind_that_is_not_there_is_refused():
    rotary = {"near": RotaryEmbedding("near", rotary_dim=HEAD_DIM)}
    with pytest.raises(ValueError, match="b0 names the rotary kind None, but stack has 'near'"):
        TransformerStack("stack", [decoder_block("b0")], rotary=rotary)


@pytest.mark.compiles_nothing
def test_a_branch_scale_of_its_own_leaves_blocks_equal():
    blocks = [decoder_block(f"b{i}") for i in range(2)]
    for block, scale in zip(blocks, (0.5, 0.25), strict=True):
        scaled = DecoderBlock(
            block.name,
            attention=block.attention,
            feed_forward=block.feed_forward,
            attention_norm=block.attention_norm,
            feed_forward_norm=block.feed_forward_norm,
            branch_scale=scale,
        )
        blocks[blocks.index(block)] = scaled
    x = Input("x", shape=(1, None, WIDTH), dtype="float32")
    y, _ = TransformerStack("stack", blocks, rotary=None)(x, pt.arange(3))
    assert len(set(block_ops(y))) == 1
    scales = {v.name: float(v.get_value()) for v in collect_non_trainable_params(y)}
    assert scales == {"b0_branch_scale": 0.5, "b1_branch_scale": 0.25}


@pytest.mark.compiles_nothing
def test_a_branch_of_another_width_is_refused():
    block = decoder_block("b0")
    block.feed_forward = Linear(n_in=WIDTH, n_out=1)
    with pytest.raises(ValueError, match="b0 has an input of width 6 and a branch of width 1"):
        block(Input("x", shape=(2, 3, WIDTH), dtype="float32"))


@pytest.mark.compiles_nothing
def test_an_unknown_tap_is_named():
    x = Input("x", shape=(None, None, WIDTH), dtype="float32")
    with pytest.raises(ValueError, match=r"blocks 0 to 1.*\[2\]"):
        decoder_stack(2)(x, Input("positions", shape=(None, None), dtype="int64"), tap_blocks=(2,))


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_block_matches_reference(norm_first):
    rng = np.random.default_rng(2)
    block = TransformerBlock(
        "b", d_model=8, n_head=2, mlp_ratio=2, norm_first=norm_first, dropout=0.3, epsilon=EPSILON
    )
    x = Input("x", shape=(None, None, 8), dtype="float32")
    y = rewrite_for_prediction(block(x))
    for parameter in collect_trainable_params(y):
        parameter.set_value(rng.normal(size=parameter.get_value().shape).astype("float32") / 2)
    data = rng.normal(size=(2, 3, 8)).astype("float32")
    [actual] = function([x], [y])(data)

    def linear(h, layer):
        return h @ layer.W.get_value().astype("float64") + layer.b.get_value()

    class Biased:
        """A weight that adds its bias where the reference multiplies."""

        __array_ufunc__ = None

        def __init__(self, layer):
            self.layer = layer

        def __rmatmul__(self, h):
            return linear(h, self.layer)

    def attend(h):
        layers = [block.attn.q_proj, block.attn.k_proj, block.attn.v_proj, block.attn.out_proj]
        everything = np.ones((2, 3, 3), bool)
        return reference.attention(
            h, [Biased(layer) for layer in layers], n_head=2, n_kv_head=2, visible=everything
        )

    def feed(h):
        return linear(reference.gelu_tanh(linear(h, block.ff.fc_in)), block.ff.fc_out)

    expected = data.astype("float64")
    for branch, norm in ((attend, block.norm1), (feed, block.norm2)):
        loc, scale = norm.loc.get_value(), norm.scale.get_value()
        if norm_first:
            expected = expected + branch(reference.layer_norm(expected, loc, scale, EPSILON))
        else:
            expected = reference.layer_norm(expected + branch(expected), loc, scale, EPSILON)
    assert_close(actual, expected, 1e-5)
