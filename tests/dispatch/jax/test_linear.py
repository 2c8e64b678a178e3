import jax
import numpy as np
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from pytensor_ml.layers import Embedding
from pytensor_ml.pytensorf import function


@pytest.fixture(autouse=True)
def _only_on_jax(backend):
    if backend != "jax":
        pytest.skip("about JAX")


@pytest.mark.parametrize("kind", ["float32", "uint16"])
def test_a_tied_head_of_one_row_does_not_transpose_its_table(kind):
    rng = np.random.default_rng(0)
    x = pt.tensor("x", shape=(None, None, 7), dtype="float32")
    table = pt.tensor("table", shape=(33, 7), dtype=kind)
    embedding = Embedding(n_embeddings=33, n_features=7)
    embedding.W = table
    run = function([x, table], embedding.head(x), mode="JAX")
    values = rng.normal(size=(33, 7)).astype("float16" if kind == "uint16" else "float32")
    given = values.view("uint16") if kind == "uint16" else values
    for shape in [(1, 1, 7), (2, 1, 7), (1, 3, 7), (0, 1, 7)]:
        rows = rng.normal(size=shape).astype("float32")
        assert_close(np.asarray(run(rows, given)), rows @ values.astype("float32").T, 1e-6)

    jitted = run.vm.jit_fn
    traced = str(jax.make_jaxpr(jitted)(np.ones((1, 1, 7), "float32"), given))
    assert ":f32[33] = dot_general" in traced
