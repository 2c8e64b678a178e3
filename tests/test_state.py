import numpy as np
import pytest

from pytensor_ml.params import non_trainable, trainable, trainable_parameter
from pytensor_ml.state import (
    NormalInitializer,
    OneInitializer,
    XavierNormalInitializer,
    XavierUniformInitializer,
    ZeroInitializer,
    initial_values_from,
    initialize_params,
)

pytestmark = pytest.mark.compiles_nothing


@pytest.mark.parametrize("law", [XavierNormalInitializer(), XavierUniformInitializer()])
def test_xavier_laws_have_the_variance_of_the_fans(law):
    draws = law.sample((300, 500), "float64", np.random.default_rng(0))
    assert abs(draws.std() / np.sqrt(2 / 800) - 1) < 0.01
    assert abs(draws.mean()) < 1e-3


def test_one_seed_redraws_all_parameters_from_their_own_laws():
    parameters = [
        trainable_parameter("w", (4, 5), default=NormalInitializer(mean=3, std=0.1)),
        trainable_parameter("b", (5,), initializer=OneInitializer(), default=ZeroInitializer()),
    ]
    weight, bias = initialize_params(parameters, rng=1)
    again, _ = initialize_params(parameters, rng=1)
    np.testing.assert_array_equal(weight, again)
    assert abs(weight.mean() - 3) < 0.1
    assert (bias == 1).all()
    [zero] = initialize_params(parameters[:1], initializers={parameters[0]: ZeroInitializer()})
    assert not zero.any()


def test_birth_values_may_be_skipped_while_laws_stay():
    with initial_values_from(ZeroInitializer()):
        parameter = trainable_parameter("w", (2, 3), default=OneInitializer())
    assert not parameter.get_value().any()
    assert (initialize_params([parameter])[0] == 1).all()


def test_parameters_keep_shape_dtype_and_layer():
    parameter = trainable(np.zeros((2, 3), "float32"), "w", shape=(None, 3), layer_name="fc")
    assert parameter.type.shape == (None, 3)
    assert parameter.type.dtype == "float32"
    assert parameter.layer_name == "fc"
    assert non_trainable(np.zeros(3), "n").type.shape == (3,)


def test_errors_name_the_parameter():
    with pytest.raises(ValueError, match="w declares no initializer"):
        initialize_params([trainable(np.zeros(2), "w")])
    with pytest.raises(ValueError, match="w has neither an initializer nor a default"):
        trainable_parameter("w", (2,))
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        XavierNormalInitializer().sample((3,), "float32", np.random.default_rng())
