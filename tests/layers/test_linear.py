import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from pytensor_ml.activations import Sigmoid
from pytensor_ml.layers import Embedding, FeedForward, GatedFeedForward, Input, Linear
from pytensor_ml.layers.linear import LinearPullback
from pytensor_ml.pytensorf import function

pytestmark = pytest.mark.skipif(
    "pytensor.config.floatX != 'float32'", reason="the layers follow floatX"
)


@pytest.fixture(scope="module")
def network():
    """Embedding, linear layer, tied head, compiled once with all gradients of a weighted sum."""
    embedding = Embedding("tokens", n_embeddings=5, n_features=3)
    linear = Linear("fc", n_in=3, n_out=3)
    ids = Input("ids", shape=(None, None), dtype="int64")
    weight = Input("weight", shape=(None, None, 5), dtype="float32")
    y = embedding.head(linear(embedding(ids)))
    gradients = pt.grad((y * weight).sum(), [embedding.W, linear.W, linear.b])
    rng = np.random.default_rng(0)
    for parameter in (embedding.W, linear.W, linear.b):
        parameter.set_value(rng.normal(size=parameter.get_value().shape).astype("float32"))
    weight_value = rng.normal(size=(2, 3, 5)).astype("float32")
    ids_value = np.array([[1, 1, 2], [4, 0, 1]])
    result = function([ids, weight], [y, *gradients])(ids_value, weight_value)
    values = [p.get_value().astype("float64") for p in (embedding.W, linear.W, linear.b)]
    return y, gradients, values, ids_value, weight_value, result


def test_embedding_linear_and_tied_head_match_numpy(network):
    y, _, (table, W, b), ids, _, result = network
    assert y.type.shape == (None, None, 5)
    assert_close(result[0], (table[ids] @ W + b) @ table.T)


def test_gradients_of_embedding_linear_and_tied_head_match_numpy(network):
    """The shared table gets what flows through the lookup and what flows through the head."""
    _, _, (table, W, b), ids, weight, result = network
    hidden = table[ids] @ W + b
    d_hidden = weight @ table
    d_table = np.einsum("btv,btf->vf", weight, hidden)
    for row, gradient in zip(ids.ravel(), (d_hidden @ W.T).reshape(-1, 3), strict=True):
        d_table[row] += gradient
    assert_close(result[1], d_table)
    assert_close(result[2], np.einsum("bti,btj->ij", table[ids], d_hidden))
    assert_close(result[3], d_hidden.sum(axis=(0, 1)))


def test_gradient_of_a_linear_layer_is_one_op(network):
    _, gradients, *_ = network
    nodes = pytensor.graph.traversal.applys_between([], gradients)
    # One for the layer, one for the head.
    assert len([node for node in nodes if isinstance(node.op, LinearPullback)]) == 2


def test_embedding_gradient_counts_repeated_ids():
    embedding = Embedding("tokens", n_embeddings=3, n_features=4)
    gradient = pt.grad(embedding(pt.constant([1, 1, 2])).sum(), embedding.W)
    [rows] = function([], [gradient.sum(axis=1)])()
    assert_close(rows, [0, 8, 4])


def test_an_id_without_a_row_never_gives_another_row(backend):
    embedding = Embedding("tokens", n_embeddings=3, n_features=2)
    embedding.W.set_value(np.ones((3, 2), "float32"))
    ids = Input("ids", shape=(None,), dtype="int64")
    look_up = function([ids], embedding(ids))
    for id_ in (3, -1, -4):
        if backend in ("c", "numba"):
            with pytest.raises(IndexError, match=r"embedding got an id|out of bounds"):
                look_up(np.array([0, id_]))
        else:
            np.testing.assert_array_equal(look_up(np.array([0, id_])), [[1, 1], [np.nan] * 2])


@pytest.mark.parametrize(("dtype", "n_rows"), [("uint8", 256), ("int8", 300), ("uint16", 2**17)])
def test_a_table_may_have_more_rows_than_ids_can_count(dtype, n_rows):
    embedding = Embedding("tokens", n_embeddings=n_rows, n_features=1)
    embedding.W.set_value(np.arange(n_rows, dtype="float32")[:, None])
    ids = Input("ids", shape=(None,), dtype=dtype)
    value = np.array([0, 5, np.iinfo(dtype).max], dtype)
    outputs = [embedding(ids), embedding(pt.constant(3))]
    made, one = function([ids], outputs)(value)
    np.testing.assert_array_equal(np.asarray(made)[:, 0], value)
    assert np.asarray(one) == 3


def test_feed_forwards_match_numpy():
    """Gate 2 and up 3 through SiLU give 5.28478; the fused weight has the value first."""
    gated = GatedFeedForward("gated", d_model=1, hidden_dim=2)
    fused = FeedForward("fused", d_model=1, hidden_dim=2, gated=True, activation=Sigmoid())
    gated.gate.W.set_value(np.array([[2, 0]], "float32"))
    gated.up.W.set_value(np.array([[3, 5]], "float32"))
    gated.down.W.set_value(np.array([[1], [7]], "float32"))
    fused.fc_in.W.set_value(np.array([[2, 3, 0, 1]], "float32"))
    fused.fc_in.b.set_value(np.array([0, 1, 0, 0], "float32"))
    fused.fc_out.W.set_value(np.array([[1], [10]], "float32"))
    x = Input("x", shape=(None, 1), dtype="float32")
    [a, b] = function([x], [gated(x), fused(x)])(np.ones((1, 1), "float32"))
    assert_close(a, [[2 / (1 + np.exp(-2)) * 3]])
    assert_close(a, [[5.28478]], 1e-6)
    assert_close(b, [[2 * 0.5 + 10 * 4 / (1 + np.exp(-1))]])


@pytest.mark.compiles_nothing
def test_errors_name_the_value_and_the_fix():
    x = Input("x", shape=(None, 7), dtype="float32")
    with pytest.raises(ValueError, match=r"fc maps a last axis of width 3.*\(None, 7\)"):
        Linear("fc", n_in=3, n_out=2)(x)
    with pytest.raises(TypeError, match=r"Linear got 16 where its name belongs.*help\(Linear\)"):
        Linear(16, n_in=2, n_out=2)
    with pytest.raises(TypeError, match="tokens looks rows up by integer id"):
        Embedding("tokens", n_embeddings=3, n_features=4)(x)
