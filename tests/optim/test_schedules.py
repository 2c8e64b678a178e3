import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from references import optim as reference

from pytensor_ml.optim import (
    constant_schedule,
    cosine_schedule,
    join_schedules,
    linear_schedule,
)
from pytensor_ml.pytensorf import function


def test_schedules_match_numpy():
    schedules = {
        constant_schedule(0.5): lambda i: 0.5,
        constant_schedule(0.5, warmup_steps=3): lambda i: reference.warmed_up(
            i, 3, 0.5, lambda j: 0.5
        ),
        linear_schedule(0.5, 6, 0.1, 2): lambda i: reference.linear(i, 0.5, 0.1, 6, 2),
        linear_schedule(0.5, 6, warmup_steps=4): lambda i: reference.warmed_up(
            i, 4, 0.5, lambda j: reference.linear(j, 0.5, 0.0, 6)
        ),
        cosine_schedule(0.5, 6, 0.1): lambda i: reference.cosine(i, 0.5, 0.1, 6),
        cosine_schedule(0.5, 6, warmup_steps=4): lambda i: reference.warmed_up(
            i, 4, 0.5, lambda j: reference.cosine(j, 0.5, 0.0, 6)
        ),
        join_schedules([linear_schedule(0.0, 4, 0.5), cosine_schedule(0.5, 3)], [4]): lambda i: (
            reference.linear(i, 0, 0.5, 4) if i < 4 else reference.cosine(i - 4, 0.5, 0, 3)
        ),
    }
    step = pt.scalar("step", dtype="float32")
    rates = pt.stack([schedule(step) for schedule in schedules])
    assert rates.type.dtype == "float32"
    run = function([step], rates)
    for i in range(14):
        expected = [oracle(i) for oracle in schedules.values()]
        np.testing.assert_allclose(run(np.float32(i)), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.compiles_nothing
def test_a_schedule_of_an_integer_step_follows_floatX():
    assert cosine_schedule(0.1, 10)(3).type.dtype == pytensor.config.floatX


@pytest.mark.compiles_nothing
def test_errors_name_the_value():
    with pytest.raises(ValueError, match="total_steps=0"):
        cosine_schedule(0.1, 0)
    with pytest.raises(ValueError, match="2 schedules and 2 boundaries"):
        join_schedules([constant_schedule(0.1)] * 2, [1, 2])
    for boundaries in ([0, 2], [3, 3], [3, 2], [-1, 2]):
        with pytest.raises(ValueError, match=rf"boundaries \[{boundaries[0]}, {boundaries[1]}\]"):
            join_schedules([constant_schedule(0.1)] * 3, boundaries)
    for warmup_steps in (-1, 2.5):
        with pytest.raises(ValueError, match=f"warmup_steps={warmup_steps}"):
            constant_schedule(0.1, warmup_steps=warmup_steps)
