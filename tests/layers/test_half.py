import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from dispatch.attention_checks import in_python
from helpers import assert_close

from pytensor_ml.layers import (
    Embedding,
    Input,
    Linear,
    MoE,
    RMSNorm,
    Sequential,
    call_as_block,
)
from pytensor_ml.layers.half import Widen
from pytensor_ml.models import halve_weights
from pytensor_ml.params import NonTrainableParameter
from pytensor_ml.pytensorf import collect_shared_variables, function

pytestmark = pytest.mark.skipif(
    pytensor.config.floatX != "float32", reason="the layers follow floatX"
)


def test_every_word_is_widened_to_its_number():
    words = np.arange(2**16, dtype="uint16").reshape(4, -1)
    x = pt.tensor("x", shape=(4, None), dtype="uint16")
    made = Widen()(x)
    values = words.view("float16").astype("float32")
    known = ~np.isnan(values)
    for run in (function([x], [made]), in_python([x], [made])):
        [result] = run(words)
        assert np.asarray(result).dtype == "float32"
        np.testing.assert_array_equal(np.asarray(result)[known], values[known])
        np.testing.assert_array_equal(np.signbit(result)[known], np.signbit(values)[known])


def test_halved_layers_compute_in_float32_with_rounded_weights():
    embedding = Embedding("tokens", n_embeddings=5, n_features=3)
    linear = Linear("fc", n_in=3, n_out=3)
    rng = np.random.default_rng(0)
    for parameter in (embedding.W, linear.W, linear.b):
        parameter.set_value(rng.normal(size=parameter.get_value().shape).astype("float32"))
    E, W = (v.get_value().astype("float16").astype("float64") for v in (embedding.W, linear.W))
    b = linear.b.get_value()
    halve_weights(Sequential(embedding, linear))
    ids = Input("ids", shape=(None, None), dtype="int64")
    x = embedding(ids)
    y = embedding.head(linear(x))
    held = {v.name: v for v in collect_shared_variables(y)}
    assert {name: v.type.dtype for name, v in held.items()} == {
        "tokens_W": "uint16",
        "fc_W": "uint16",
        "fc_b": "float32",
    }
    assert isinstance(held["fc_W"], NonTrainableParameter)
    dx, db = pt.grad(pt.sqr(y).sum(), [x, linear.b])
    value = np.array([[1, 4, 0], [2, 2, 3]])
    made, made_dx, made_db = function([ids], [y, dx, db])(value)
    hidden = E[value] @ W + b
    assert_close(made, hidden @ E.T)
    right = 2 * (hidden @ E.T) @ E
    assert_close(made_db, right.sum((0, 1)))
    assert_close(made_dx, right @ W.T)


@pytest.mark.compiles_nothing
def test_what_float16_cannot_hold_is_left_as_it_is():
    first, last = (Linear(name, n_in=2, n_out=2) for name in ("first", "last"))
    last.W.set_value(np.array([[1, 2], [3, -7e4]], "float32"))
    with pytest.raises(ValueError, match=r"last_W holds -70000\.0, which is no number of float16"):
        halve_weights(Sequential(first, last))
    assert first.W.type.dtype == "float32"
    with pytest.raises(ValueError, match="RMSNorm has no linear layer or embedding"):
        halve_weights(RMSNorm("norm", n_in=2))


def test_a_halved_block_routes_and_trains_through():
    """A mixture reads its router's matrix itself, and a block keeps what its gradient reads."""
    moe = MoE("moe", d_model=6, hidden_dim=4, n_experts=4, top_k=2)
    rounded = moe.router.W.get_value().astype("float16").astype("float32")
    fc = Linear("fc", n_in=6, n_out=6)
    x = Input("x", shape=(None, None, 6))
    value = np.random.default_rng(0).normal(size=(2, 3, 6)).astype("float32")
    made = []
    for is_halved in (False, True):
        if is_halved:
            halve_weights([moe, fc])
        else:
            moe.router.W.set_value(rounded)
            fc.W.set_value(fc.W.get_value().astype("float16").astype("float32"))
        y = call_as_block(lambda x: x + moe(fc(x)), x, name="block")
        made.append(function([x], [y, pt.grad(pt.sqr(y).sum(), x)])(value))
    assert moe.router.W.type.dtype == fc.W.type.dtype == "uint16"
    for one, other in zip(*made, strict=True):
        assert_close(np.asarray(one), np.asarray(other), 1e-5)
