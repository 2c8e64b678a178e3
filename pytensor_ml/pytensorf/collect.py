"""Finding what a graph reads and what it writes back."""

from collections.abc import Container, Sequence

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import applys_between, graph_inputs

from pytensor_ml.base import StatefulOp
from pytensor_ml.params import NonTrainableParameter, TrainableParameter

type Outputs = Variable | Sequence[Variable]


def as_output_list(outputs: Outputs) -> list[Variable]:
    """Return ``outputs`` as a list."""
    return [outputs] if isinstance(outputs, Variable) else list(outputs)


def _collect_inputs_of_type[T: Variable](outputs: Outputs, kind: type[T]) -> list[T]:
    found = [v for v in graph_inputs(as_output_list(outputs)) if isinstance(v, kind)]
    return list(dict.fromkeys(found))


def collect_graph_inputs(outputs: Outputs) -> list[Variable]:
    """Collect every root of the graph that is not a constant."""
    return [v for v in _collect_inputs_of_type(outputs, Variable) if not isinstance(v, Constant)]


def collect_data_inputs(outputs: Outputs) -> list[Variable]:
    """Collect the roots of the graph that a caller has to supply, those first that were made first.

    By the order of a traversal, which follows from how layers are written, inputs of one type would
    change places unnoticed.
    """
    found = [v for v in collect_graph_inputs(outputs) if not isinstance(v, SharedVariable)]
    return sorted(found, key=lambda v: int(v.auto_name.removeprefix("auto_")))


def collect_shared_variables(outputs: Outputs) -> list[SharedVariable]:
    """Collect the shared variables the graph reads."""
    return _collect_inputs_of_type(outputs, SharedVariable)


def collect_trainable_params(outputs: Outputs) -> list[TrainableParameter]:
    """Collect the parameters that an optimizer updates."""
    return _collect_inputs_of_type(outputs, TrainableParameter)


def collect_non_trainable_params(outputs: Outputs) -> list[NonTrainableParameter]:
    """Collect the parameters that belong to the model and that no optimizer updates."""
    return _collect_inputs_of_type(outputs, NonTrainableParameter)


def collect_non_trainable_updates(
    outputs: Outputs, already_written: Container[SharedVariable] = ()
) -> dict[NonTrainableParameter, Variable]:
    """Collect the new values that stateful ops of the graph give to non-trainable parameters.

    Where one application of an op reads what another wrote, the last value counts.

    Parameters
    ----------
    outputs : Variable or sequence of Variable
        Outputs to trace back from.
    already_written : container of SharedVariable, optional
        Variables to leave out.

    Raises
    ------
    ValueError
        If two ops update one state without one reading what the other wrote.
    """
    written: dict[Variable, Variable] = {}
    for node in applys_between([], as_output_list(outputs)):
        if not isinstance(node.op, StatefulOp):
            continue
        for write, read in node.op.update_map().items():
            before, after = node.inputs[read], node.outputs[write]
            if written.get(before, after) is not after:
                raise ValueError(
                    f"Two ops read the same state {before} and write it back, so one of the "
                    "updates would be lost. Feed the second what the first has written."
                )
            written[before] = after
    updates = {}
    for parameter in [v for v in written if isinstance(v, NonTrainableParameter)]:
        value: Variable = parameter
        while value in written:
            value = written[value]
        if parameter not in already_written:
            updates[parameter] = value
    return updates
