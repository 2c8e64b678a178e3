"""The classes every layer and every symbolic op of the package derives from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Protocol, cast, runtime_checkable

from pytensor.compile.builders import OpFromGraph, SymbolicOp
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.null_type import NullType
from pytensor.graph.op import Op
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import graph_inputs
from pytensor.scalar.basic import discrete_dtypes
from pytensor.tensor import TensorLike
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.residuals import (
    find_residuals,
    merged,
    on_stand_ins,
    pull_back,
    shapes_of_inputs,
)
from pytensor_ml.summary import Summarized


class Layer(Summarized, ABC):
    """A callable that owns parameters and adds its op to the graph of one input."""

    @abstractmethod
    def __call__(self, x: TensorLike) -> TensorVariable: ...


class BinaryLayer(Summarized, ABC):
    """A callable that owns parameters and adds its op to the graph of two inputs."""

    @abstractmethod
    def __call__(self, x: TensorLike, y: TensorLike) -> TensorVariable: ...


class VariadicLayer(Summarized, ABC):
    """A callable that owns parameters and takes whatever inputs it documents."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


_made_ops: ContextVar[dict[Any, Any] | None] = ContextVar("made_ops", default=None)


@contextmanager
def sharing_ops() -> Iterator[None]:
    """Make equal ops one object, whose inner graph and pullback are built once."""
    token = _made_ops.set({})
    try:
        yield
    finally:
        _made_ops.reset(token)


def shared_op[T: Op](op: T) -> T:
    """Return the op equal to ``op`` that was made first within :func:`sharing_ops`."""
    made = _made_ops.get()
    found: T = op if made is None else made.setdefault(op, op)
    return found


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
        The graph. Ops of equal graphs are equal, if they also treat states and recompute alike.
    update_map : dict from int to int
        Which outputs are new values of which inputs (:class:`StatefulOp`).
    recompute : bool
        Whether the pullback computes anew what it reads of the forward pass, which then takes no
        memory in the meantime.
    **kwargs
        Passed on to OpFromGraph.
    """

    def __init__(
        self,
        inputs: list[Variable],
        outputs: list[Variable],
        *,
        update_map: dict[int, int] | None = None,
        recompute: bool = False,
        **kwargs: Any,
    ):
        super().__init__(inputs, outputs, **kwargs)
        self.recompute = recompute
        self._update_map = update_map or {}
        # By which of the outputs have a cotangent.
        self._pullbacks: dict[tuple[bool, ...], _Pullback] = {}

    def __eq__(self, other: object) -> bool:
        return (
            super().__eq__(other)
            and isinstance(other, BlockOp)
            and self.recompute == other.recompute
            and self._update_map == other._update_map
        )

    __hash__ = OpFromGraph.__hash__

    def update_map(self) -> dict[int, int]:
        return self._update_map

    @property
    def _are_discrete(self) -> list[bool]:
        return [getattr(kind, "dtype", None) in discrete_dtypes for kind in self.output_types]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [
            [c and not d for c, d in zip(connected, self._are_discrete, strict=True)]
            for connected in super().connection_pattern(node)
        ]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        cotangents: Sequence[Variable],
    ) -> list[Variable]:
        # PyTensor gives zeros for what is counted or compared, which has no cotangent.
        connected = tuple(
            not (isinstance(cotangent.type, DisconnectedType) or is_discrete)
            for cotangent, is_discrete in zip(cotangents, self._are_discrete, strict=True)
        )
        if connected not in self._pullbacks:
            self._pullbacks[connected] = self._make_pullback(connected)
        return self._pullbacks[connected](inputs, cotangents)

    def _make_pullback(self, connected: tuple[bool, ...]) -> "_Pullback":
        graph = self.fgraph.unfreeze()
        inputs, outputs = list(graph.inputs), list(graph.outputs)
        cotangents = [
            v.type() if is_connected else disconnected_type()
            for v, is_connected in zip(outputs, connected, strict=True)
        ]
        given = [v for v, is_connected in zip(cotangents, connected, strict=True) if is_connected]
        gradients = pull_back(inputs, outputs, cotangents)
        made = [v for v in gradients if not isinstance(v.type, DisconnectedType | NullType)]
        # JAX takes lengths from arrays only, so they cannot be handed on.
        lengths = [tuple(getattr(x, "shape", ())) for x in inputs]
        replaced = graph_replace(
            [*outputs, *made], shapes_of_inputs(made, inputs, lengths), strict=False
        )
        replaced = merged([*inputs, *given], replaced)
        outputs, made = replaced[: len(outputs)], replaced[len(outputs) :]
        residuals = [] if self.recompute else find_residuals(inputs, made, given)
        stand_ins, made = on_stand_ins(made, residuals)
        read = set(graph_inputs(made))
        kept = [i for i, v in enumerate(inputs) if v in read]
        return _Pullback(
            forward=BlockWithResiduals(
                inputs, [*outputs, *residuals], n_outputs=len(outputs), name=self.name
            )
            if residuals
            else None,
            op=BlockPullback(
                [*(inputs[i] for i in kept), *stand_ins, *given],
                made,
                name=None if self.name is None else f"{self.name}Pullback",
            ),
            kept=kept,
            connected=connected,
            gradient_types=[v.type for v in gradients],
        )


class BlockWithResiduals(BlockOp):
    """A block whose further outputs are what its pullback reads.

    A rewrite puts it into the block's place where there is a pullback.

    Parameters
    ----------
    inputs, outputs : list of Variable
        The graph: the block's outputs, then residuals.
    n_outputs : int
        How many outputs the block has.
    **kwargs
        Passed on to BlockOp.
    """

    def __init__(
        self, inputs: list[Variable], outputs: list[Variable], *, n_outputs: int, **kwargs: Any
    ):
        super().__init__(inputs, outputs, **kwargs)
        self.n_outputs = n_outputs
        self._block = BlockOp(inputs, outputs[:n_outputs])

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.n_outputs == getattr(other, "n_outputs", None)

    __hash__ = OpFromGraph.__hash__

    def can_replace(self, op: Op) -> bool:
        """Return whether the first outputs are those of ``op``."""
        return type(op) is BlockOp and op.fgraph == self._block.fgraph


class BlockPullback(BlockOp):
    """The pullback of a block: what it reads of inputs, residuals and cotangents, to gradients."""


class _Pullback(NamedTuple):
    """How to add a block's pullback to a graph."""

    forward: BlockWithResiduals | None
    op: BlockPullback
    kept: list[int]
    connected: tuple[bool, ...]
    gradient_types: list[Any]

    def __call__(
        self, inputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        residuals: list[Variable] = []
        if self.forward is not None:
            outputs: Any = self.forward(*inputs, return_list=True)
            residuals = outputs[self.forward.n_outputs :]
        given = [v for v, has in zip(cotangents, self.connected, strict=True) if has]
        read = [inputs[i] for i in self.kept]
        gradients: Any = self.op(*read, *residuals, *given, return_list=True)
        made = iter(gradients)
        return [
            graph_type() if isinstance(graph_type, DisconnectedType | NullType) else next(made)
            for graph_type in self.gradient_types
        ]


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
            f"keyword-only. Pass the value by its keyword; help({default}) lists them."
        )
    return name
