"""Compiling a training step."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.executor import Function
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import applys_between, toposort
from pytensor.tensor import as_tensor
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.loss import (
    CrossEntropyLayer,
    ProbabilityCrossEntropyLayer,
    not_probabilities,
)
from pytensor_ml.optim.base import (
    Gradients,
    Parameter,
    Transform,
    Updates,
    get_gradients,
    scalar_state,
)
from pytensor_ml.pytensorf import collect_data_inputs, collect_trainable_params, function


def compile_train(
    loss: TensorVariable,
    rule: Transform | Updates,
    *,
    parameters: Sequence[Parameter] | None = None,
    inputs: Sequence[Variable] | None = None,
    extra_outputs: Sequence[Variable] | None = None,
    extra_updates: Mapping[SharedVariable, TensorVariable] | None = None,
    compile_kwargs: dict[str, Any] | None = None,
) -> "TrainStep":
    """Compile a function that takes a batch and makes the loss smaller.

    It also writes back what layers keep (:meth:`~pytensor_ml.base.StatefulOp.update_map`) and moves
    the generators that layers draw from.

    Parameters
    ----------
    loss : scalar tensor
        What to make small.
    rule : callable or Updates
        An optimizer, a chain that ends with one, or what it has returned.
    parameters : sequence of parameters, optional
        What to train. Default is every trainable parameter of the loss.
    inputs : sequence of Variable, optional
        Inputs in calling order. Default is those of the loss and the extra outputs.
    extra_outputs : sequence of Variable, optional
        What to return besides the loss.
    extra_updates : mapping from shared variable to tensor, optional
        What to update besides.
    compile_kwargs : dict, optional
        Passed on to :func:`pytensor_ml.pytensorf.function`: ``mode``, ``random_seed``.

    Returns
    -------
    TrainStep

    Raises
    ------
    ValueError
        If there is nothing to train, the loss does not reach a parameter or is no scalar, or the
        rule does not end with an optimizer. Updates that are ready are held to the same.

    Examples
    --------
    >>> import numpy as np
    >>> from pytensor_ml.optim import compile_train, sgd
    >>> from pytensor_ml.params import trainable
    >>> from pytensor_ml.pytensorf import backend_mode
    >>> w = trainable(np.array([1.0, 2.0], "float32"), name="w")
    >>> step = compile_train(
    ...     (w**2).sum(), sgd(0.25), compile_kwargs={"mode": backend_mode("numba")}
    ... )
    >>> print(step(), w.get_value())
    5.0 [0.5 1. ]
    """
    parameters = collect_trainable_params(loss) if parameters is None else list(parameters)
    if not parameters:
        raise ValueError(
            "There is nothing to train: the loss depends on no trainable parameter. Build it from "
            "layers, or name shared variables in `parameters`."
        )
    if isinstance(rule, Updates):
        # Nobody else has asked yet whether the loss reaches all parameters.
        get_gradients(loss, parameters)
        updates = rule
    else:
        updates = rule(loss, parameters)
    if isinstance(updates, Gradients):
        raise ValueError(
            "The rule gives gradients, along which parameters would go uphill. End the chain with "
            "an optimizer, such as adam(1e-3)."
        )
    new_values = {
        variable: variable.type.filter_variable(value)
        for variable, value in {**updates, **(extra_updates or {})}.items()
    }
    outputs = [loss, *(extra_outputs or ())]
    inputs = collect_data_inputs(outputs) if inputs is None else list(inputs)
    return TrainStep(
        function(list(inputs), [*outputs, *new_values.values()], **(compile_kwargs or {})),
        list(new_values),
        loss=loss,
        parameters=parameters,
        inputs=inputs,
        compile_kwargs=compile_kwargs or {},
    )


class TrainStep:
    """A compiled training step: called with a batch, it returns the loss before the step.

    With extra outputs it returns a list of the loss and these. New values take the place of the old
    ones only if the loss is finite, and stay where the backend computes. Otherwise parameters,
    state of the optimizer, what layers keep and generators are all as they were.

    Attributes
    ----------
    function : Function
        What was compiled. Its outputs are followed by the new values.
    step_count : shared variable
        How many steps have been taken, called ``train/step_count``.

    Raises
    ------
    FloatingPointError
        When called, if the loss is not finite. The message has the number of the step, counted from
        1, and the parameter whose gradient was the first not to be finite on the way back from the
        loss; to find it, the gradients are compiled, the first time, and computed once more with
        the draws of the step.
    ValueError
        When called, if targets are ids of no class, or predictions that are to be probabilities
        of classes with ids are none.
    """

    def __init__(
        self,
        function: Function,
        updated: Sequence[SharedVariable],
        *,
        loss: TensorVariable,
        parameters: Sequence[Parameter],
        inputs: Sequence[Variable],
        compile_kwargs: dict[str, Any],
    ):
        self.function = function
        self.step_count = scalar_state("train/step_count", 0, "int64")
        self._updated = list(updated)
        self._cells = [variable.container.storage for variable in updated]
        self._written = list(_cells_written_by(function).values())
        self._loss = loss
        self._parameters = list(parameters)
        self._inputs = list(inputs)
        self._compile_kwargs = compile_kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = [_Kept(cell) for cell in self._written]
        try:
            results = self.function(*args, **kwargs)
        except Exception as error:
            error.add_note(f"The step was called with {self._named(args, kwargs)}.")
            raise
        outputs = results[: len(results) - len(self._cells)]
        if not np.isfinite(np.asarray(outputs[0])):
            for value in kept:
                value.restore()
            try:
                self._raise_for(np.asarray(outputs[0]), *args, **kwargs)
            finally:
                for value in kept:
                    value.restore()
        for cell, new in zip(self._cells, results[len(outputs) :], strict=True):
            cell[0] = new
        self.step_count.set_value(self.step_count.get_value() + 1)
        return outputs[0] if len(outputs) == 1 else outputs

    def _named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        given = [*zip((v.name for v in self._inputs), args, strict=False), *kwargs.items()]
        return ", ".join(
            f"{name} of dtype {x.dtype} and shape {x.shape}"
            if isinstance(x, np.ndarray)
            else f"{name}, a {type(x).__name__}"
            for name, x in given
        )

    def get_shared(self) -> list[SharedVariable]:
        """Return all that a step reads or updates, for ``save_state`` and ``load_state``.

        These are parameters and what layers keep, state and step count of the optimizer,
        generators, and learning rates that are shared variables.
        """
        return list(dict.fromkeys([*self.function.get_shared(), *self._updated, self.step_count]))

    @cached_property
    def _diagnosis(self) -> tuple[Function, list[Parameter], list[Apply]]:
        """A function to what a fault may be found in, and whose that is.

        These are gradients of parameters, then for each loss its ids and whether it takes such
        predictions.
        """
        scored = [
            node
            for node in applys_between([], [self._loss])
            if isinstance(node.op, CrossEntropyLayer | ProbabilityCrossEntropyLayer)
        ]
        parameters = in_backward_order(self._parameters, self._loss)
        graph = [
            *get_gradients(self._loss, parameters),
            *(v for node in scored for v in (node.inputs[1], _takes_its_predictions(node))),
        ]
        options = {**self._compile_kwargs, "on_unused_input": "ignore"}
        for which in ("random_seed", "updates"):
            options.pop(which, None)
        return function(self._inputs, graph, **options), parameters, scored

    def _raise_for(self, loss: np.ndarray, *args: Any, **kwargs: Any) -> None:
        """Find out why the loss is not finite, and raise."""
        diagnose, parameters, scored = self._diagnosis
        # JAX and MLX compile with generators of their own, which are to draw what the step drew.
        cells = _cells_written_by(self.function)
        for variable, cell in _cells_written_by(diagnose).items():
            if variable in cells:
                cell[0] = cells[variable][0]
        values = [np.asarray(value) for value in diagnose(*args, **kwargs)]
        fault = f"The loss is {loss} at step {int(self.step_count.get_value()) + 1}: "
        kept = " Nothing was updated: parameters and optimizer are as they were before this step."

        for node, ids in zip(scored, values[len(parameters) :: 2], strict=True):
            n_classes: Any = node.inputs[0].type.shape[-1]
            ids = ids[ids != node.op.ignore_index]
            if ids.size and (ids.min() < 0 or ids.max() >= n_classes):
                raise ValueError(
                    f"{fault}targets run from {ids.min()} to {ids.max()}, but there are "
                    f"{n_classes} classes, 0 to {n_classes - 1}.{kept} Pass ids of classes, or "
                    "ignore_index for targets that do not count."
                )
        for parameter in parameters:
            if not _is_finite(parameter.get_value(borrow=True)):
                raise FloatingPointError(
                    f"{fault}{parameter.name} is the first parameter on the way back from the loss "
                    f"that is not finite, because its gradient was not in the step before.{kept} "
                    "Go back to a checkpoint, and lower the learning rate."
                )
        gradients = values[: len(parameters)]
        faulty = [
            parameter.name
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if not _is_finite(gradient)
        ]
        if faulty:
            raise FloatingPointError(
                f"{fault}the gradient of {faulty[0]} is the first on the way back from the loss "
                f"that is not finite, and so are {len(faulty)} of {len(parameters)}.{kept} Look at "
                "this batch, lower the learning rate, or clip gradients with clip_by_global_norm."
            )
        if not all(values[len(parameters) + 1 :: 2]):
            raise ValueError(
                f"{fault}predictions are negative or sum to more than 1 over the classes, so they "
                f"are no probabilities.{kept} If they are logits, use "
                "CrossEntropy(expect_logits=True)."
            )
        raise FloatingPointError(
            f"{fault}every gradient is finite.{kept} Look at this batch and at the loss."
        )


def in_backward_order(parameters: Sequence[Parameter], loss: TensorVariable) -> list[Parameter]:
    """Return the parameters, those first that are used last on the way to the loss."""
    last_use = {v: i for i, node in enumerate(toposort([loss])) for v in node.inputs}
    # The loss can be a parameter, which no node uses.
    return sorted(parameters, key=lambda parameter: -last_use.get(parameter, -1))


def _takes_its_predictions(node: Apply) -> TensorVariable:
    """Return whether a loss of probabilities got only such; those of logits take all."""
    if isinstance(node.op, ProbabilityCrossEntropyLayer):
        return ~pt.any(not_probabilities(as_tensor(node.inputs[0])))
    return pt.constant(True)


class _Kept:
    """The value of a cell before a step, which on C and Numba may write into it."""

    def __init__(self, cell: list[Any]):
        self._cell = cell
        self._value = cell[0]
        self._copy: Any = None
        if isinstance(self._value, np.ndarray):
            self._copy = self._value.copy()
        elif isinstance(self._value, np.random.Generator):
            self._copy = self._value.bit_generator.state

    def restore(self) -> None:
        """Put the value back, any number of times."""
        if isinstance(self._value, np.random.Generator):
            self._value.bit_generator.state = self._copy
        is_array = isinstance(self._value, np.ndarray)
        self._cell[0] = self._copy.copy() if is_array else self._value


def _cells_written_by(function: Function) -> dict[Variable, list[Any]]:
    """Return where a function keeps the shared variables that it updates itself."""
    return {
        given.variable: container.storage
        for given, container in zip(function.maker.inputs, function.input_storage, strict=True)
        if given.update is not None
    }


def _is_finite(value: Any) -> bool:
    return bool(np.isfinite(np.asarray(value)).all())
