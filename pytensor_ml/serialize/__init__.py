"""Graphs as JSON, and JSON as graphs, without trusting what it names.

The form is that of the published package, format version 4, where that holds the graph, and
version 5 otherwise: types, constants and ops, whole blocks among them, are listed once, and nodes
refer to them by number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pytensor.graph.basic import Variable, equal_computations

from pytensor_ml.serialize.allowed import register_initializer, register_op
from pytensor_ml.serialize.read import GraphReader
from pytensor_ml.serialize.version4 import from_version_4, to_version_4
from pytensor_ml.serialize.write import GraphWriter

__all__ = ["deserialize_graph", "register_initializer", "register_op", "serialize_graph"]


def serialize_graph(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> dict[str, Any]:
    """Describe a graph by JSON values.

    Parameters
    ----------
    inputs : sequence of Variable
        All of its inputs, shared variables included; values are not written.
    outputs : sequence of Variable
        Its outputs.

    Returns
    -------
    dict
        What :func:`deserialize_graph` reads.

    Raises
    ------
    ValueError
        If an input is missing, or the graph has something that a file cannot hold or that loading
        would refuse.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.serialize import deserialize_graph, serialize_graph
    >>> x = pt.fvector("x")
    >>> description = serialize_graph([x], [pt.tanh(x)])
    >>> inputs, [y] = deserialize_graph(description)
    >>> y.type.dtype
    'float32'
    """
    if len(set(inputs)) < len(inputs):
        raise ValueError(f"An input is given twice among {inputs}. Give each once.")
    writer = GraphWriter()
    graph = writer.graph(inputs, outputs)
    document = {
        "types": writer.types,
        "constants": writer.constants,
        "ops": writer.ops,
        **graph,
    }
    description = to_version_4(document) or document
    # What could not be opened is not worth saving.
    _, opened = deserialize_graph(description, inputs)
    if not equal_computations([*opened], [*outputs], [*inputs], [*inputs]):
        raise ValueError(
            f"The graph of {outputs} would open as another one: one of its ops is not told by "
            "its __props__. Declare all that it depends on there."
        )
    return description


def deserialize_graph(
    graph_dict: Mapping[str, Any], inputs: Sequence[Variable] | None = None
) -> tuple[list[Variable], list[Variable]]:
    """Build the graph that :func:`serialize_graph` described.

    Only ops of PyTensor, of this package and those given to :func:`register_op` are built, whatever
    the description names.

    Parameters
    ----------
    graph_dict : dict
        The description.
    inputs : sequence of Variable, optional
        What to build on, in the order of the inputs described. Default is new variables.

    Returns
    -------
    inputs : list of Variable
        The inputs.
    outputs : list of Variable
        The outputs.

    Raises
    ------
    ValueError
        If the description is not that of a graph, or names what files may not name. Entries are
        named as in version 5; one of version 4 is turned into that first.
    """
    try:
        document = graph_dict if "ops" in graph_dict else from_version_4(graph_dict)
        reader = GraphReader(document)
        types = reader.input_types(document)
        given = [graph_type() for graph_type in types] if inputs is None else list(inputs)
        if [v.type for v in given] != types:
            raise ValueError(
                f"the inputs are {', '.join(map(str, types))}, but what to build on is "
                f"{', '.join(str(v.type) for v in given)}"
            )
        return given, reader.outputs(document, given)
    except RecursionError as error:
        raise ValueError("the graph is nested too deep to be read") from error
