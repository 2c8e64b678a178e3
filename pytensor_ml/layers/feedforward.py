"""The feed-forward halves of a block."""

from pytensor.tensor import TensorLike
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.activations import GELU, Activation, SiLU
from pytensor_ml.base import Layer, resolve_layer_name
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
            h = value * self.activation(gate)
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
        y = self.down(self.activation(self.gate(x)) * self.up(x))
        y.name = f"{self.name}_output"
        return y
