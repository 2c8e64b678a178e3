"""The feed-forward halves of a block."""

import math
from collections.abc import Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor import TensorLike
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.activations import GELU, Activation, QuickGELU, SiLU, Swish
from pytensor_ml.base import BinaryLayerOp, Layer, LayerOp, resolve_layer_name
from pytensor_ml.layers.linear import Linear
from pytensor_ml.state import Initializer


class FeedForward(Layer):
    r"""Widen, activate, and map back.

    .. math:: y = f(x W_1 + b_1) W_2 + b_2

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    d_model : int
        Width of the input and of the output.
    hidden_dim : int, optional
        Width between. Default is ``mlp_ratio * d_model``.
    mlp_ratio : int
        What gives the width between where ``hidden_dim`` is not given.
    activation : Activation, optional
        The function f. Default is GELU.
    gated : bool
        Whether the first map has twice the width and the second half of its output gates the first
        half: :math:`y = (u \odot f(g)) W_2 + b_2` with :math:`(u, g) = x W_1 + b_1` [1]_.
    bias : bool
        Whether the maps have biases.
    fc_out_initializer : Initializer, optional
        Law of the second weight.

    Examples
    --------
    >>> from pytensor_ml.layers import FeedForward, Input
    >>> FeedForward("ff", d_model=64, gated=True)(Input("x", shape=(None, 64))).type.shape
    (None, 64)

    References
    ----------
    .. [1] Shazeer (2020). GLU Variants Improve Transformer. arXiv:2002.05202.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        d_model: int,
        hidden_dim: int | None = None,
        mlp_ratio: int = 4,
        activation: Activation | None = None,
        gated: bool = False,
        bias: bool = True,
        fc_out_initializer: Initializer | None = None,
    ):
        self.name = resolve_layer_name(name, "FeedForward")
        self.hidden_dim = mlp_ratio * d_model if hidden_dim is None else hidden_dim
        self.activation = GELU() if activation is None else activation
        self.gated = gated
        self.fc_in = Linear(
            f"{self.name}_fc_in",
            n_in=d_model,
            n_out=2 * self.hidden_dim if gated else self.hidden_dim,
            bias=bias,
        )
        self.fc_out = Linear(
            f"{self.name}_fc_out",
            n_in=self.hidden_dim,
            n_out=d_model,
            bias=bias,
            weight_initializer=fc_out_initializer,
        )

    def __call__(self, x: TensorLike) -> TensorVariable:
        h = self.fc_in(x)
        if self.gated:
            value, gate = h[..., : self.hidden_dim], h[..., self.hidden_dim :]
            h = gated(self.activation, gate, value)
        else:
            h = self.activation(h)
        y = self.fc_out(h)
        y.name = f"{self.name}_output"
        return y


class GatedFeedForward(Layer):
    r"""Feed-forward with separate gate, up and down maps [1]_.

    .. math:: y = (f(x W_\mathrm{gate}) \odot x W_\mathrm{up}) W_\mathrm{down}

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    d_model : int
        Width of the input and of the output.
    hidden_dim : int
        Width between.
    activation : Activation, optional
        The function f. Default is SiLU, which makes this SwiGLU.

    Examples
    --------
    >>> from pytensor_ml.layers import GatedFeedForward, Input
    >>> GatedFeedForward("ff", d_model=64, hidden_dim=128)(Input("x", shape=(None, 64))).type.shape
    (None, 64)

    References
    ----------
    .. [1] Shazeer (2020). GLU Variants Improve Transformer. arXiv:2002.05202.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        d_model: int,
        hidden_dim: int,
        activation: Activation | None = None,
    ):
        self.name = resolve_layer_name(name, "GatedFeedForward")
        self.activation = SiLU() if activation is None else activation
        self.gate = Linear(f"{self.name}_gate", n_in=d_model, n_out=hidden_dim, bias=False)
        self.up = Linear(f"{self.name}_up", n_in=d_model, n_out=hidden_dim, bias=False)
        self.down = Linear(f"{self.name}_down", n_in=hidden_dim, n_out=d_model, bias=False)

    def __call__(self, x: TensorLike) -> TensorVariable:
        y = self.down(gated(self.activation, self.gate(x), self.up(x)))
        y.name = f"{self.name}_output"
        return y


class GatedActivationLayer(BinaryLayerOp):
    """The op of :func:`gated_activation`: inputs gate and value, of one shape."""

    __props__ = ("beta", "cubic")

    beta: float
    cubic: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        gate, value = inputs
        return [gated_activation(gate, value, beta=self.beta, cubic=self.cubic)]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        gate: Any = node.inputs[0]
        axes = zip(gate.type.broadcastable, *shapes, strict=True)
        return [tuple(of_value if is_one else of_gate for is_one, of_gate, of_value in axes)]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        op = GatedActivationPullback(beta=self.beta, cubic=self.cubic)
        return op(*inputs, output_grads[0])


class GatedActivationPullback(LayerOp):
    """The gradients of :class:`GatedActivationLayer`: inputs gate, value, the output's gradient."""

    __props__ = ("beta", "cubic")

    beta: float
    cubic: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        gate, value, g = inputs
        one, beta, cubic = (
            pt.constant(c, dtype=gate.type.dtype) for c in (1, self.beta, 3 * self.cubic)
        )
        sigmoid = pt.sigmoid(_argument(gate, self.beta, self.cubic))
        activation = gate * sigmoid
        inner_slope = beta * (one + cubic * gate * gate) if self.cubic else beta
        slope = sigmoid + activation * (one - sigmoid) * inner_slope
        return [g * value * slope, g * activation]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[0], shapes[1]]


def gated(activation: Activation, gate: TensorVariable, value: TensorVariable) -> TensorVariable:
    """Return f(gate) times the value, as one op where f is a Swish or the tanh form of GELU."""
    if (gate.type.dtype, gate.type.broadcastable) != (value.type.dtype, value.type.broadcastable):
        return activation(gate) * value
    # What another subclass computes is not known.
    if isinstance(activation, Swish) and type(activation) in (Swish, SiLU, QuickGELU):
        return GatedActivationLayer(beta=activation.beta, cubic=0.0)(gate, value)
    if type(activation) is GELU and activation.approximate:
        return GatedActivationLayer(beta=2 * (2 / math.pi) ** 0.5, cubic=0.044715)(gate, value)
    return activation(gate) * value


def gated_activation(
    gate: TensorVariable, value: TensorVariable, *, beta: float, cubic: float
) -> TensorVariable:
    r"""Return an activation of the gate times the value.

    .. math:: y = g \, \sigma(\beta (g + c g^3)) \odot v

    With c = 0 the activation is Swish; with c = 0.044715 and :math:`\beta = 2 \sqrt{2 / \pi}` the
    tanh form of GELU, since :math:`(1 + \tanh z) / 2 = \sigma(2 z)`.
    """
    return gate * pt.sigmoid(_argument(gate, beta, cubic)) * value


def _argument(gate: TensorVariable, beta: float, cubic: float) -> TensorVariable:
    if cubic:
        gate = gate + pt.constant(cubic, dtype=gate.type.dtype) * gate * gate * gate
    return gate if beta == 1 else pt.constant(beta, dtype=gate.type.dtype) * gate
