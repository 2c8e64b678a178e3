import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close

from dispatch.attention_checks import emptied
from pytensor_ml.layers import Embedding


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


def test_embedding_kernel_looks_up_rows_and_refuses_ids_beyond_the_table():
    embedding, ids = Embedding("tokens", n_embeddings=5, n_features=3), pt.lmatrix("ids")
    run = pytensor.function([ids], emptied([embedding(ids)]))
    value = np.array([[4, 0], [1, 1]])
    assert_close(run(value)[0], embedding.W.get_value()[value])
    assert run(value[:0])[0].shape == (0, 2, 3)
    for wrong in (5, -1):
        with pytest.raises(IndexError, match="no row"):
            run(np.array([[0, wrong]]))
