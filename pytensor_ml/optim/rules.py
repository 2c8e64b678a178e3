"""The ops of optimizers: one step of one parameter."""

from collections.abc import Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from pytensor_ml.optim.base import UpdateOp, at_least_float32


class GradientStep(UpdateOp):
    """The op of plain gradient descent.

    Its inputs are the parameter, the gradient and the rate. Its output is the new parameter.
    """

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        dtype = inputs[0].type.dtype
        parameter, gradient, rate = widened(inputs)
        return [(parameter - rate * gradient).astype(dtype)]


class MomentumStep(UpdateOp):
    """The op of gradient descent with momentum.

    Its inputs are the parameter, the gradient, the velocity and the rate. Its outputs are the new
    parameter and the new velocity.
    """

    __props__ = ("momentum", "nesterov")

    momentum: float
    nesterov: bool

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        dtype = inputs[0].type.dtype
        parameter, gradient, velocity, rate = widened(inputs)
        momentum = pt.constant(self.momentum, dtype=parameter.type.dtype)
        velocity = momentum * velocity + gradient
        direction = gradient + momentum * velocity if self.nesterov else velocity
        return [(parameter - rate * direction).astype(dtype), velocity]


class AdamStep(UpdateOp):
    """The op of Adam and AdamW.

    Its inputs are the parameter, the gradient, the moments (first, second, and with ``amsgrad`` the
    largest second one), the rate, and the bias corrections by which each kind of moment is divided.
    Its outputs are the new parameter and the new moments.
    """

    __props__ = ("beta1", "beta2", "epsilon", "weight_decay", "amsgrad")

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    amsgrad: bool

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        parameter, gradient, first, second, *largest, rate, correction1, correction2 = widened(
            inputs
        )
        dtype = parameter.type.dtype

        def average(old: Any, new: Any, beta: float) -> Any:
            return pt.constant(beta, dtype=dtype) * old + pt.constant(1 - beta, dtype=dtype) * new

        first = average(first, gradient, self.beta1)
        second = average(second, gradient * gradient, self.beta2)
        moments = [first, second]
        if self.amsgrad:
            moments.append(pt.maximum(largest[0], second))
        scale = pt.sqrt(moments[-1]) * pt.reciprocal(pt.sqrt(correction2))
        scale = scale + pt.constant(self.epsilon, dtype=dtype)
        kept = decayed(parameter, rate, self.weight_decay)
        return [
            (kept - rate / correction1 * first / scale).astype(inputs[0].type.dtype),
            *moments,
        ]


class LionStep(UpdateOp):
    """The op of Lion.

    Its inputs are the parameter, the gradient, the momentum and the rate. Its outputs are the new
    parameter and the new momentum.
    """

    __props__ = ("beta1", "beta2", "weight_decay")

    beta1: float
    beta2: float
    weight_decay: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        parameter, gradient, momentum, rate = widened(inputs)
        dtype = parameter.type.dtype

        def average(beta: float) -> Any:
            kept, new = (pt.constant(weight, dtype=dtype) for weight in (beta, 1 - beta))
            return kept * momentum + new * gradient

        kept = decayed(parameter, rate, self.weight_decay)
        new = kept - rate * pt.sign(average(self.beta1))
        return [new.astype(inputs[0].type.dtype), average(self.beta2)]


def widened(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a step in the dtype in which it is computed, that of the state."""
    dtype = at_least_float32(inputs[0].type.dtype)
    return [v.astype(dtype) for v in inputs]


def decayed(parameter: Any, rate: Any, weight_decay: float) -> Any:
    """Return a parameter moved towards 0 by the share ``rate * weight_decay``."""
    if not weight_decay:
        return parameter
    share = rate * pt.constant(weight_decay, dtype=parameter.type.dtype)
    return parameter - share * parameter
