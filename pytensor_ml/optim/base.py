"""What optimizers are made of: gradients, the state they keep, and rules after one another."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable, shared
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import LayerOp

type Parameter = TensorSharedVariable
type Rate = float | TensorVariable
type Schedule = Callable[[TensorVariable], TensorVariable]
type LearningRate = Rate | Schedule


class Updates(dict[SharedVariable, TensorVariable]):
    """What each shared variable is to become."""


class Gradients(Updates):
    """Updates that hold, for the parameters, gradients."""


class Steps(Updates):
    """Updates that hold, for the parameters, their values after a step."""


type LossGradientsOrUpdates = TensorVariable | Updates
type Transform = Callable[[LossGradientsOrUpdates, Sequence[Parameter]], Updates]


class UpdateOp(LayerOp):
    """An op from a parameter, or its gradient, and state of its shape to new values of that shape.

    Updates are ops so that PyTensor does not fuse those of all parameters, which share the learning
    rate, into one loop that takes minutes to compile, and compiles equal ones once.
    """

    __props__: ClassVar[tuple[str, ...]] = ()

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[0] for _ in node.outputs]


def get_gradients(loss: TensorVariable, parameters: Sequence[Parameter]) -> list[TensorVariable]:
    """Return the gradient of a loss by each parameter.

    Raises
    ------
    ValueError
        If the loss is no scalar, or does not depend on a parameter through something that has a
        gradient.

    Examples
    --------
    >>> from pytensor_ml.optim import get_gradients
    >>> from pytensor_ml.params import trainable
    >>> w = trainable([1.0, 2.0], name="w")
    >>> [gradient] = get_gradients((w**2).sum(), [w])
    >>> print(gradient.eval(mode="NUMBA"))
    [2. 4.]
    """
    if loss.type.ndim:
        raise ValueError(
            f"The loss has shape {loss.type.shape}, but only a scalar can be made small. Take its "
            "mean or its sum."
        )
    gradients = cast(
        list[TensorVariable],
        pytensor.grad(
            loss, list(parameters), disconnected_inputs="ignore", return_disconnected="none"
        ),
    )
    unreached = [
        str(p.name) for p, gradient in zip(parameters, gradients, strict=True) if gradient is None
    ]
    if unreached:
        raise ValueError(
            f"The loss does not reach {', '.join(unreached)}: there is no gradient, so training "
            "would leave them as they are. Leave them out of `parameters`, or build a loss that "
            "depends on them."
        )
    return gradients


def to_updates(
    loss_gradients_or_updates: LossGradientsOrUpdates, parameters: Sequence[Parameter]
) -> Updates:
    """Return the updates given, or the gradients of a loss as updates."""
    if isinstance(loss_gradients_or_updates, Updates):
        return loss_gradients_or_updates
    gradients = get_gradients(loss_gradients_or_updates, parameters)
    return Gradients(zip(parameters, gradients, strict=True))


def gradients_for(
    name: str, loss_gradients_or_updates: LossGradientsOrUpdates, parameters: Sequence[Parameter]
) -> Gradients:
    """Return the gradients that the rule ``name`` takes, or raise if it is given steps."""
    updates = to_updates(loss_gradients_or_updates, parameters)
    if not isinstance(updates, Gradients):
        raise ValueError(
            f"{name} takes gradients, but what comes before it has already made steps of them. "
            f"Put {name} before it in the chain, and one optimizer at its end."
        )
    return updates


def chain(*transforms: Transform) -> Transform:
    """Make one rule of several, each of which takes what the one before it gives.

    Parameters
    ----------
    *transforms : callable
        Transforms of gradients, and an optimizer as the last.

    Raises
    ------
    ValueError
        If there are none.

    Examples
    --------
    >>> from pytensor_ml.optim import adam, chain, clip_by_global_norm
    >>> from pytensor_ml.params import trainable
    >>> w = trainable([1.0, 2.0], name="w")
    >>> rule = chain(clip_by_global_norm(1.0), adam(1e-3))
    >>> [variable.name for variable in rule((w**2).sum(), [w])]
    ['w', 'adam/step_count', 'w/adam/first_moment', 'w/adam/second_moment']
    """
    if not transforms:
        raise ValueError("chain got no transforms, so it is no rule. Pass at least an optimizer.")

    def combined(
        loss_gradients_or_updates: LossGradientsOrUpdates, parameters: Sequence[Parameter]
    ) -> Updates:
        updates = to_updates(loss_gradients_or_updates, parameters)
        for transform in transforms:
            updates = transform(updates, parameters)
        return updates

    return combined


def scalar_state(name: str, fill_value: float = 0.0, dtype: str | None = None) -> Parameter:
    """Create a scalar that is kept between steps, such as a learning rate to change by hand.

    Parameters
    ----------
    name : str
        Name, by which it is saved.
    fill_value : float
        Its first value.
    dtype : str, optional
        Default is floatX.
    """
    return shared(np.asarray(fill_value, config.floatX if dtype is None else dtype), name=name)


def state_for(parameter: Parameter, slot: str, fill_value: float = 0.0) -> Parameter:
    """Create state of a parameter's shape and at least float32, called ``parameter/slot``."""
    shape = np.shape(parameter.get_value(borrow=True))
    value = np.full(shape, fill_value, at_least_float32(parameter.type.dtype))
    return shared(value, name=f"{parameter.name}/{slot}", shape=parameter.type.shape)


def step_count(namespace: str) -> Parameter:
    """Create the count of the steps taken by a rule."""
    return scalar_state(f"{namespace}/step_count", 0, "int64")


def at_least_float32(dtype: str) -> str:
    """Return the dtype in which steps of parameters of a dtype are computed.

    In float16, squares of gradients and the epsilon beside their root are 0.
    """
    return "float64" if dtype == "float64" else "float32"


def scalar_dtype(parameters: Sequence[Parameter]) -> str:
    """Return the dtype in which rates are computed."""
    return "float64" if any(p.type.dtype == "float64" for p in parameters) else "float32"


def rate_at(
    learning_rate: LearningRate, count: TensorVariable | None, dtype: str
) -> TensorVariable:
    """Return the rate after ``count`` steps."""
    if isinstance(learning_rate, TensorVariable):
        return learning_rate.astype(dtype)
    if callable(learning_rate):
        assert count is not None
        # As a float: with an integer's step count, constants would make float64 nodes.
        return pt.as_tensor(learning_rate(count.astype(dtype))).astype(dtype)
    return pt.constant(learning_rate, dtype=dtype)
