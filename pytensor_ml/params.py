"""Shared variables that say what they are: a parameter to train, or state to keep."""

from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.type import TensorType

if TYPE_CHECKING:
    from pytensor_ml.state import Initializer


class TrainableParameter(TensorSharedVariable):
    """A shared variable that an optimizer updates."""

    initializer: "Initializer | None" = None
    layer_name: str | None = None


class NonTrainableParameter(TensorSharedVariable):
    """A shared variable that belongs to the model and that no optimizer updates."""

    layer_name: str | None = None


def _make_parameter[T: TensorSharedVariable](
    kind: type[T],
    value: Any,
    name: str | None,
    shape: tuple[int | None, ...] | None,
    strict: bool,
    **kwargs: Any,
) -> T:
    array = np.asarray(value)
    return kind(
        type=TensorType(dtype=array.dtype, shape=array.shape if shape is None else shape),
        value=array,
        strict=strict,
        name=name,
        **kwargs,
    )


def trainable(
    value: Any,
    name: str | None = None,
    shape: tuple[int | None, ...] | None = None,
    strict: bool = False,
    initializer: "Initializer | None" = None,
    layer_name: str | None = None,
    **kwargs: Any,
) -> TrainableParameter:
    """Create a shared variable that an optimizer updates.

    Parameters
    ----------
    value : array-like
        The value to hold; its dtype is the parameter's.
    name : str, optional
        Name, by which state and checkpoints are matched.
    shape : tuple, optional
        Static shape. Default is the shape of ``value``; None leaves a dimension open.
    strict : bool, optional
        Whether later values must have exactly this dtype.
    initializer : Initializer, optional
        The law the parameter is redrawn from.
    layer_name : str, optional
        Name of the layer that owns the parameter.
    **kwargs
        Passed on to the shared variable.
    """
    parameter = _make_parameter(TrainableParameter, value, name, shape, strict, **kwargs)
    parameter.initializer = initializer
    parameter.layer_name = layer_name
    return parameter


def non_trainable(
    value: Any,
    name: str | None = None,
    shape: tuple[int | None, ...] | None = None,
    strict: bool = False,
    layer_name: str | None = None,
    **kwargs: Any,
) -> NonTrainableParameter:
    """Create a shared variable that no optimizer updates; arguments as for :func:`trainable`."""
    parameter = _make_parameter(NonTrainableParameter, value, name, shape, strict, **kwargs)
    parameter.layer_name = layer_name
    return parameter


def trainable_parameter(
    name: str,
    shape: tuple[int, ...],
    initializer: "Initializer | None" = None,
    default: "Initializer | None" = None,
    layer_name: str | None = None,
) -> TrainableParameter:
    """Create a trainable parameter of dtype floatX, drawn by ``initializer`` or by ``default``."""
    chosen = default if initializer is None else initializer
    if chosen is None:
        raise ValueError(
            f"Parameter {name} has neither an initializer nor a default, so it would have no "
            "value. Pass one of the initializers in pytensor_ml.state."
        )
    if not all(isinstance(n, Integral) and n >= 1 for n in shape):
        raise ValueError(
            f"Parameter {name} would have the shape {shape} and hold nothing. Pass sizes of at "
            "least 1."
        )
    return trainable(chosen.initial_value(shape), name, initializer=chosen, layer_name=layer_name)
