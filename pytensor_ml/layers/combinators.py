"""Inputs, and ways of joining layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.compile.builders import infer_shape
from pytensor.graph.basic import Constant, Variable, clone_get_equiv
from pytensor.graph.traversal import ancestors, applys_between, graph_inputs
from pytensor.tensor import TensorLike
from pytensor.tensor.random.op import RNGConsumerOp
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import BlockOp, Layer, shared_op
from pytensor_ml.pytensorf.collect import as_output_list, collect_non_trainable_updates
from pytensor_ml.pytensorf.rewrite import rewrite_for_prediction


def Input(name: str, shape: tuple[int | None, ...], dtype: str | None = None) -> TensorVariable:
    """Create a named graph input.

    Parameters
    ----------
    name : str
        Name, by which a compiled function also takes it.
    shape : tuple of int or None
        Static shape; None leaves a dimension open.
    dtype : str, optional
        Default is floatX.
    """
    return pt.tensor(name, shape=shape, dtype=dtype)


class Sequential(Layer):
    """Layers composed, the first one applied first.

    Parameters
    ----------
    *layers : callable
        Layers, or any functions from one variable to one.

    Raises
    ------
    TypeError
        If one is not callable, such as a list of layers.
    """

    def __init__(self, *layers: Callable):
        for layer in layers:
            if not callable(layer):
                raise TypeError(
                    f"Sequential got a {type(layer).__name__}, which is no layer. Pass layers one "
                    "by one, as in Sequential(*layers)."
                )
        self.layers = layers

    def __call__(self, x: TensorLike) -> TensorVariable:
        for layer in self.layers:
            x = layer(x)
        return pt.as_tensor(x)


def Flatten(X: TensorLike) -> TensorVariable:
    """Join all axes but the first."""
    return pt.as_tensor(X).flatten(2)


def Squeeze(X: TensorLike, axis: int | Sequence[int] | None = None) -> TensorVariable:
    """Drop axes of length one."""
    return pt.squeeze(X, axis)


def Concatenate(tensors: Sequence[TensorLike], axis: int = 0) -> TensorVariable:
    """Join tensors along an existing axis."""
    return pt.concatenate(tensors, axis=axis)


def call_as_block(
    call: Callable,
    *inputs: Variable | None,
    name: str | None = None,
    recompute: bool = False,
) -> Variable | list[Variable]:
    """Add ``call(*inputs)`` to the graph as one op that takes its parameters as inputs.

    Calls that differ only in their parameters give equal ops, which backends compile once. Random
    draws are made outside the op, so that a pullback sees the same ones, and state that ops inside
    write back is written back by the block.

    Parameters
    ----------
    call : callable
        A layer, or any function from variables to one variable or several.
    *inputs : Variable or None
        What to call it with. None is handed on as it is and is no input of the op.
    name : str, optional
        Name of the op in printed graphs.
    recompute : bool
        Whether the pullback computes anew what it reads of the forward pass: a third more work, and
        only the inputs are kept between the two. By default the op keeps what the pullback reads.

    Returns
    -------
    Variable or list of Variable
        As ``call`` returns it.

    Raises
    ------
    ValueError
        If a random draw depends on more than the shapes of the data.

    Examples
    --------
    >>> from pytensor_ml.layers import Input, Linear, call_as_block
    >>> x = Input("x", shape=(None, 64))
    >>> y = call_as_block(Linear("fc", n_in=64, n_out=64), x, name="block")
    >>> [str(v) for v in y.owner.inputs]
    ['x', 'fc_b', 'fc_W']
    """
    given = [x for x in inputs if x is not None]
    stand_ins = [x.type(name=x.name) for x in given]
    remaining = iter(stand_ins)
    result = call(*(None if x is None else next(remaining) for x in inputs))
    outputs = as_output_list(result)
    updates = collect_non_trainable_updates(outputs)
    inner = [*outputs, *updates.values()]

    draws = [node for node in applys_between([], inner) if isinstance(node.op, RNGConsumerOp)]
    drawn = [v for node in draws for v in node.outputs]
    roots = [
        v
        for v in dict.fromkeys(ancestors(inner, blockers=[*stand_ins, *drawn]))
        if (v.owner is None or v in drawn) and not isinstance(v, Constant) and v not in stand_ins
    ]
    captured = [v for v in roots if v not in drawn]
    hoisted = [v for v in roots if v in drawn]

    made = BlockOp(
        [*stand_ins, *captured, *hoisted],
        inner,
        update_map={
            len(outputs) + i: len(stand_ins) + captured.index(parameter)
            for i, parameter in enumerate(updates)
        },
        recompute=recompute,
        name=name,
    )
    op = shared_op(made)
    made_outside = _draw_outside(hoisted, stand_ins, given) if hoisted else []
    block_outputs = as_output_list(op(*given, *captured, *made_outside))[: len(outputs)]
    for inner_output, output in zip(outputs, block_outputs, strict=True):
        output.name = inner_output.name
    return block_outputs[0] if isinstance(result, Variable) else block_outputs


def _draw_outside(
    draws: Sequence[Variable], stand_ins: Sequence[Variable], given: Sequence[Any]
) -> list[Variable]:
    """Rebuild random draws, whose sizes follow from the shapes of ``stand_ins``, on ``given``."""
    lengths = [tuple(pt.lscalar() for _ in range(x.type.ndim)) for x in given]
    sizes: dict[Variable, Variable] = {}
    for v in ancestors(draws):
        op = None if v.owner is None else v.owner.op
        if isinstance(op, Shape | Shape_i):
            sized = rewrite_for_prediction(v.owner.inputs[0])
            [shape] = infer_shape([sized], stand_ins, lengths)
            sizes[v] = pt.as_tensor(shape[op.i]) if isinstance(op, Shape_i) else pt.stack(shape)
    sized_draws = _substitute(draws, sizes)
    if set(stand_ins) & set(graph_inputs(sized_draws)):
        raise ValueError(
            f"The random draws {list(draws)} depend on values of the block's inputs, so they "
            "cannot be made outside of it. Draw them first and pass them in as inputs."
        )
    known = {n: x.shape[i] for x, ns in zip(given, lengths, strict=True) for i, n in enumerate(ns)}
    return _substitute(sized_draws, known)


def _substitute(
    outputs: Sequence[Variable], replacements: Mapping[Variable, Variable]
) -> list[Variable]:
    """Rebuild ``outputs`` on ``replacements``, which stay as they are.

    ``clone_replace`` would clone what they come from too, and with it the draws made there.
    """
    memo: Any = dict(replacements)
    clone_get_equiv([], outputs, copy_inputs=False, copy_orphans=False, memo=memo)
    return [memo[output] for output in outputs]
