"""The published package's path to the functions of :mod:`pytensor_ml.serialize`."""

from pytensor_ml.serialize import deserialize_graph, serialize_graph

__all__ = ["deserialize_graph", "serialize_graph"]
