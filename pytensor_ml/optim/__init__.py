"""Optimizers, schedules of their rates, and compiling a training step."""

from pytensor_ml.optim.accumulation import accumulate_gradients
from pytensor_ml.optim.alias import adam, adamw, lion, matrices_except, sgd
from pytensor_ml.optim.base import (
    Gradients,
    Steps,
    Updates,
    chain,
    get_gradients,
    scalar_state,
    state_for,
    to_updates,
)
from pytensor_ml.optim.clipping import clip_by_global_norm
from pytensor_ml.optim.schedules import (
    constant_schedule,
    cosine_schedule,
    join_schedules,
    linear_schedule,
)
from pytensor_ml.optim.train import TrainStep, compile_train

__all__ = [
    "Gradients",
    "Steps",
    "TrainStep",
    "Updates",
    "accumulate_gradients",
    "adam",
    "adamw",
    "chain",
    "clip_by_global_norm",
    "compile_train",
    "constant_schedule",
    "cosine_schedule",
    "get_gradients",
    "join_schedules",
    "linear_schedule",
    "lion",
    "matrices_except",
    "scalar_state",
    "sgd",
    "state_for",
    "to_updates",
]
