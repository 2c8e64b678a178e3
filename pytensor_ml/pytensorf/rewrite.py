"""Specializing a graph."""

from collections.abc import Sequence
from typing import overload

from pytensor.graph.basic import Variable, clone
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import graph_inputs

from pytensor_ml.pytensorf.collect import as_output_list
from pytensor_ml.rewriting.layers import prediction_rewrites


@overload
def rewrite_for_prediction(graph: FunctionGraph) -> FunctionGraph: ...
@overload
def rewrite_for_prediction(graph: Variable) -> Variable: ...
@overload
def rewrite_for_prediction(graph: Sequence[Variable]) -> list[Variable]: ...
def rewrite_for_prediction(
    graph: FunctionGraph | Variable | Sequence[Variable],
) -> FunctionGraph | Variable | list[Variable]:
    """Drop what only acts in training, such as dropout, inside whole-block ops too.

    Parameters
    ----------
    graph : FunctionGraph, Variable or sequence of Variable
        The graph; a FunctionGraph is changed in place, variables are left alone.

    Returns
    -------
    FunctionGraph, Variable or list of Variable
        The specialized graph, in the form of ``graph``.
    """
    if isinstance(graph, FunctionGraph):
        prediction_rewrites.rewrite(graph)
        return graph
    outputs = as_output_list(graph)
    inputs, cloned = clone(list(dict.fromkeys(graph_inputs(outputs))), outputs, copy_inputs=False)
    fgraph = FunctionGraph(inputs, cloned, clone=False)
    prediction_rewrites.rewrite(fgraph)
    specialized = list(fgraph.outputs)
    return specialized[0] if isinstance(graph, Variable) else specialized
