"""Numba kernels of gated activations."""

from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit

from pytensor_ml.dispatch.numba.basic import apart, empty, kernel_key, register_kernel, sigmoid
from pytensor_ml.dispatch.numba.threads import count_parts, in_threads
from pytensor_ml.layers.feedforward import GatedActivationLayer, GatedActivationPullback

Array = np.ndarray

# Without leave to reorder products, which may overflow in another order.
FASTMATH = {"contract", "nsz"}


def are_alike(op: GatedActivationLayer | GatedActivationPullback) -> bool:
    """Return whether the inputs have one dtype and one axis or more, of which none is broadcast."""
    return (
        op.input_types[0].ndim > 0
        and len({(x.dtype, x.broadcastable) for x in op.input_types}) == 1
    )


@register_kernel(GatedActivationLayer, covers=are_alike)
def numba_funcify_gated_activation(op: GatedActivationLayer, node: Apply, **kwargs: Any) -> Any:
    beta, cubic = op.beta, op.cubic

    @numba_njit
    def gated_activation(gate: Array, value: Array) -> Array:
        if value.shape != gate.shape:
            raise ValueError("A gated activation got a gate and a value of different shapes.")
        return activate(flat(gate), flat(value), beta, cubic).reshape(gate.shape)

    return gated_activation, kernel_key(type(op), beta, cubic)


@register_kernel(GatedActivationPullback, covers=are_alike)
def numba_funcify_gated_activation_pullback(
    op: GatedActivationPullback, node: Apply, **kwargs: Any
) -> Any:
    beta, cubic = op.beta, op.cubic

    @numba_njit
    def gated_activation_pullback(gate: Array, value: Array, g: Array) -> Any:
        if value.shape != gate.shape or g.shape != gate.shape:
            raise ValueError("A gated activation got a gradient of another shape than its gate.")
        dgate, dvalue = gradients(flat(gate), flat(value), flat(g), beta, cubic)
        return dgate.reshape(gate.shape), dvalue.reshape(gate.shape)

    return gated_activation_pullback, kernel_key(type(op), beta, cubic)


@numba_njit
def flat(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(x.size)


@apart
@numba_njit
def activate(gate: Array, value: Array, beta: float, cubic: float) -> Array:
    y = empty(gate.shape, gate.dtype)
    n_parts = count_parts(len(gate), 3 * gate.nbytes)
    activate_in_threads(len(gate), n_parts, gate, value, beta, cubic, y)
    return y


@numba_njit(error_model="numpy", fastmath=FASTMATH)
def activate_part(
    first: int, stop: int, gate: Array, value: Array, beta: float, cubic: float, y: Array
) -> None:
    beta, cubic = gate.dtype.type(beta), gate.dtype.type(cubic)
    # Slices, as LLVM vectorizes no loop whose index might be below 0.
    gate, value, y = gate[first:stop], value[first:stop], y[first:stop]
    for i in range(len(gate)):
        x = gate[i]
        # Without a cubic term it must not be formed: it may overflow.
        argument = x + cubic * x * x * x if cubic != 0 else x
        y[i] = x * sigmoid(beta * argument) * value[i]


activate_in_threads = in_threads(activate_part)


@apart
@numba_njit
def gradients(gate: Array, value: Array, g: Array, beta: float, cubic: float) -> Any:
    dgate, dvalue = empty(gate.shape, gate.dtype), empty(gate.shape, gate.dtype)
    n_parts = count_parts(len(gate), 5 * gate.nbytes)
    gradients_in_threads(len(gate), n_parts, gate, value, g, beta, cubic, dgate, dvalue)
    return dgate, dvalue


@numba_njit(error_model="numpy", fastmath=FASTMATH)
def gradients_part(
    first: int,
    stop: int,
    gate: Array,
    value: Array,
    g: Array,
    beta: float,
    cubic: float,
    dgate: Array,
    dvalue: Array,
) -> None:
    one, three = gate.dtype.type(1), gate.dtype.type(3)
    beta, cubic = gate.dtype.type(beta), gate.dtype.type(cubic)
    gate, value, g = gate[first:stop], value[first:stop], g[first:stop]
    dgate, dvalue = dgate[first:stop], dvalue[first:stop]
    for i in range(len(gate)):
        x = gate[i]
        argument = x + cubic * x * x * x if cubic != 0 else x
        argument_slope = one + three * cubic * x * x if cubic != 0 else one
        s = sigmoid(beta * argument)
        activation = x * s
        slope = s + activation * (one - s) * beta * argument_slope
        dgate[i] = g[i] * value[i] * slope
        dvalue[i] = g[i] * activation


gradients_in_threads = in_threads(gradients_part)
