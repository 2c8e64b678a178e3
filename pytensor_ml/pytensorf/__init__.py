"""Compiling functions, collecting parameters, specializing graphs."""

from pytensor_ml.pytensorf.collect import (
    as_output_list,
    collect_data_inputs,
    collect_graph_inputs,
    collect_non_trainable_params,
    collect_non_trainable_updates,
    collect_shared_variables,
    collect_trainable_params,
)
from pytensor_ml.pytensorf.compile import BACKENDS, backend_mode, compile_predict, function
from pytensor_ml.pytensorf.export import to_jax
from pytensor_ml.pytensorf.rewrite import rewrite_for_prediction
from pytensor_ml.pytensorf.rng import RandomSeed, SeedSequenceSeed, collect_rng_updates, reseed_rngs

__all__ = [
    "BACKENDS",
    "RandomSeed",
    "SeedSequenceSeed",
    "as_output_list",
    "backend_mode",
    "collect_data_inputs",
    "collect_graph_inputs",
    "collect_non_trainable_params",
    "collect_non_trainable_updates",
    "collect_rng_updates",
    "collect_shared_variables",
    "collect_trainable_params",
    "compile_predict",
    "function",
    "reseed_rngs",
    "rewrite_for_prediction",
    "to_jax",
]
