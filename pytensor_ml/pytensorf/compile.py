"""Compiling graphs, with the updates a network declares threaded in."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytensor
from pytensor.compile.executor import Function
from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.basic import Variable
from pytensor.link.numba import NumbaLinker

from pytensor_ml.pytensorf.collect import (
    as_output_list,
    collect_data_inputs,
    collect_non_trainable_updates,
)
from pytensor_ml.pytensorf.rewrite import rewrite_for_prediction
from pytensor_ml.pytensorf.rng import RandomSeed, collect_rng_updates, reseed_rngs

BACKENDS = {"c": "CVM", "numba": "NUMBA", "jax": "JAX", "mlx": "MLX"}
PACKAGES = {"jax": "jax", "mlx": "mlx[cpu]" if sys.platform == "linux" else "mlx"}


def backend_mode(backend: str) -> Mode:
    """Return the PyTensor mode that compiles for ``backend``: "c", "numba", "jax" or "mlx".

    Raises
    ------
    ValueError
        If there is no such backend.
    ModuleNotFoundError
        If the backend's package is not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"Unknown backend {backend!r}, so there is nothing to compile for. "
            f"Choose one of {', '.join(BACKENDS)}."
        )
    if backend in PACKAGES and find_spec(backend) is None:
        raise ModuleNotFoundError(
            f"The {backend} backend needs the package {backend}, which is not installed. "
            f"Install it with: python -m pip install '{PACKAGES[backend]}'"
        )
    return _with_blocks_apart(get_mode(BACKENDS[backend]))


def function(
    inputs: Sequence[Any],
    outputs: Variable | Sequence[Variable] | None,
    random_seed: RandomSeed = None,
    mode: Mode | str | None = None,
    **kwargs: Any,
) -> Function:
    """Compile with :func:`pytensor.function`, threading in the updates that the graph declares.

    These are the next state of every generator drawn from, and the state that ops write back
    (:meth:`~pytensor_ml.base.StatefulOp.update_map`).

    Parameters
    ----------
    inputs : sequence of Variable
        Inputs of the compiled function.
    outputs : Variable or sequence of Variable
        Its outputs.
    random_seed : int, array-like of int or SeedSequence, optional
        Seed given to the graph's generators; without it they keep their state.
    mode : Mode or str, optional
        PyTensor mode; :func:`backend_mode` gives one by the backend's name.
    **kwargs
        Passed on to :func:`pytensor.function`. An entry in ``updates`` wins over a threaded one.
    """
    updates = dict(kwargs.pop("updates", None) or {})
    graph = [*as_output_list(outputs if outputs is not None else []), *updates.values()]
    rng_updates = collect_rng_updates(graph)
    if random_seed is not None:
        reseed_rngs(list(rng_updates), random_seed)
    state_updates = collect_non_trainable_updates(graph, already_written=updates)
    threaded: dict[Any, Any] = {**rng_updates, **state_updates, **updates}
    mode = _with_blocks_apart(get_mode(mode))
    return pytensor.function(inputs, outputs, updates=threaded, mode=mode, **kwargs)


def compile_predict(
    prediction: Variable | Sequence[Variable],
    *,
    inputs: Sequence[Variable] | None = None,
    compile_kwargs: dict[str, Any] | None = None,
) -> Function:
    """Compile a forward pass without the layers that only act in training.

    Parameters
    ----------
    prediction : Variable or sequence of Variable
        Outputs of the network.
    inputs : sequence of Variable, optional
        Data inputs in calling order. Default is those the graph has, in the order in which they
        were made.
    compile_kwargs : dict, optional
        Passed on to :func:`function`.
    """
    specialized = rewrite_for_prediction(prediction)
    data_inputs = collect_data_inputs(prediction) if inputs is None else inputs
    return function(list(data_inputs), specialized, **(compile_kwargs or {}))


def _with_blocks_apart(mode: Mode) -> Mode:
    """Return ``mode`` with the linker of this package if it has PyTensor's for Numba."""
    if type(mode.linker) is not NumbaLinker:
        return mode
    from pytensor_ml.dispatch.numba.linker import BlockwiseNumbaLinker

    linker = BlockwiseNumbaLinker(allow_gc=mode.linker.allow_gc)
    return Mode(linker=linker, optimizer=mode.provided_optimizer)
