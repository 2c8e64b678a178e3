"""The classes every layer and every symbolic op of the package derives from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

from pytensor.compile.builders import OpFromGraph, SymbolicOp
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor import TensorLike
from pytensor.tensor.variable import TensorVariable


class Layer(ABC):
    """A callable that owns parameters and adds its op to the graph of one input."""

    @abstractmethod
    def __call__(self, x: TensorLike) -> TensorVariable: ...


class BinaryLayer(ABC):
    """A callable that owns parameters and adds its op to the graph of two inputs."""

    @abstractmethod
    def __call__(self, x: TensorLike, y: TensorLike) -> TensorVariable: ...


class VariadicLayer(ABC):
    """A callable that owns parameters and takes whatever inputs it documents."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


_made_ops: ContextVar[dict[Any, "LayerOp"] | None] = ContextVar("made_ops", default=None)


@contextmanager
def sharing_ops() -> Iterator[None]:
    """Make ops of one class, props and input types one object, whose inner graph is built once."""
    token = _made_ops.set({})
    try:
        yield
    finally:
        _made_ops.reset(token)


class LayerOp(SymbolicOp):
    """A symbolic op made of ``__props__`` and ``build_inner_graph``, with any number of outputs."""

    __props__: ClassVar[tuple[str, ...]] = ()

    # PyTensor's metaclass gives it to every class that has ``__props__``.
    _props_dict: Callable[[], dict[str, Any]]

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        made = _made_ops.get()
        if made is None:
            return super().__call__(*inputs, **kwargs)
        props = tuple(self._props_dict().values())
        key = (type(self), props, tuple(x.type for x in inputs))
        if key in made:
            return super(LayerOp, made[key]).__call__(*inputs, **kwargs)
        outputs = super().__call__(*inputs, **kwargs)
        made[key] = (outputs[0] if isinstance(outputs, list | tuple) else outputs).owner.op
        return outputs

    def do_constant_folding(self, fgraph: FunctionGraph, node: Apply) -> bool:
        """Leave an op of constant inputs in the graph: to run it now, PyTensor would compile C."""
        return False

    def for_prediction(self, inputs: list[Variable]) -> list[Variable] | None:
        """Return what stands in for the outputs outside of training, or None to keep the op."""
        return None


class VariadicLayerOp(LayerOp):
    """A :class:`LayerOp` with exactly one output."""

    __props__: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *inputs: Any, **kwargs: Any) -> TensorVariable:
        return cast(TensorVariable, super().__call__(*inputs, **kwargs))


class UnaryLayerOp(VariadicLayerOp):
    """A :class:`VariadicLayerOp` of one data input, followed by parameters."""

    __props__: ClassVar[tuple[str, ...]] = ()


class BinaryLayerOp(VariadicLayerOp):
    """A :class:`VariadicLayerOp` of two data inputs, followed by parameters."""

    __props__: ClassVar[tuple[str, ...]] = ()


class BlockOp(OpFromGraph):
    """The graph of a whole layer as one op, the layer's parameters among its inputs.

    Parameters
    ----------
    inputs, outputs : list of Variable
        The graph; equal graphs make equal ops.
    update_map : dict from int to int
        Which outputs are new values of which inputs (:class:`StatefulOp`).
    **kwargs
        Passed on to OpFromGraph.
    """

    def __init__(
        self,
        inputs: list[Variable],
        outputs: list[Variable],
        *,
        update_map: dict[int, int] | None = None,
        **kwargs: Any,
    ):
        super().__init__(inputs, outputs, **kwargs)
        self._update_map = update_map or {}

    def update_map(self) -> dict[int, int]:
        return self._update_map


@runtime_checkable
class StatefulOp(Protocol):
    """An op that writes some of its outputs back to shared variables it takes as inputs."""

    def update_map(self) -> dict[int, int]:
        """Map from an output's index to the index of the input that it updates."""
        ...


def resolve_layer_name(name: object, default: str) -> str:
    """Return ``name``, or ``default`` if it is None; raise if it is not a string."""
    if name is None:
        return default
    if not isinstance(name, str):
        raise TypeError(
            f"{default} got {name!r} where its name belongs; everything after the name is "
            f"keyword-only. Pass the value by keyword, as in {default}(size={name!r})."
        )
    return name
