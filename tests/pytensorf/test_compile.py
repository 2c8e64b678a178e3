import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from pytensor_ml.layers import Dropout, Input, Linear, Sequential
from pytensor_ml.pytensorf import (
    backend_mode,
    collect_data_inputs,
    collect_trainable_params,
    compile_predict,
    function,
)
from pytensor_ml.pytensorf import compile as compile_module


@pytest.mark.compiles_nothing
def test_an_unknown_backend_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'cuda'.*c, numba, jax, mlx"):
        backend_mode("cuda")


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("name", ["jax", "mlx"])
def test_a_backend_that_is_not_installed_comes_with_the_command(name, monkeypatch):
    monkeypatch.setattr(compile_module, "find_spec", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install '{name}"):
        backend_mode(name)


def test_a_seed_makes_draws_reproducible_and_calls_differ(backend):
    y = Dropout("drop", p=0.5)(pt.ones((100,), dtype="float32"))
    first, again = [function([], y, random_seed=7) for _ in range(2)]
    draws = first()
    assert 30 < np.count_nonzero(draws) < 70
    assert set(np.unique(draws)) == {0, 2}
    # JAX and MLX copy the generator when they compile, so there the second call advances the copy.
    assert not np.array_equal(draws, first())
    if backend in ("c", "numba"):
        function([], y, random_seed=7)
        np.testing.assert_array_equal(again(), draws)


@pytest.mark.compiles_nothing
def test_two_draws_from_one_state_are_refused():
    rng = pytensor.shared(np.random.default_rng(0))
    draws = pt.random.normal(rng=rng) + pt.random.uniform(rng=rng)
    with pytest.raises(ValueError, match="Two draws read the same state"):
        function([], draws)


def test_inputs_come_in_the_order_in_which_they_were_made():
    first, second = (Input(name, shape=(), dtype="float32") for name in ("first", "second"))
    for y in (first - second, -second + first):
        assert collect_data_inputs(y) == [first, second]
    assert compile_predict(-second + first)(3.0, 1.0) == 2


def test_predict_is_deterministic_and_collects_its_inputs():
    x = Input("x", shape=(None, 4), dtype="float32")
    network = Sequential(Linear("a", n_in=4, n_out=3), Dropout("drop", p=0.5))
    y = network(x)
    assert collect_data_inputs(y) == [x]
    assert {p.name for p in collect_trainable_params(y)} == {"a_W", "a_b"}
    predict = compile_predict(y)
    data = np.ones((2, 4), "float32")
    np.testing.assert_array_equal(predict(data), predict(data))
    assert np.count_nonzero(predict(data)) == 6
