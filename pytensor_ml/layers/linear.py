"""Affine maps of the last axis."""

from collections.abc import Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import Layer, LayerOp, UnaryLayerOp, resolve_layer_name
from pytensor_ml.layers.half import floats_of
from pytensor_ml.params import trainable_parameter
from pytensor_ml.state import Initializer, XavierNormalInitializer, ZeroInitializer


class LinearLayer(UnaryLayerOp):
    """The op of :class:`Linear`: inputs X, W, of floats or words of float16, and b, if ``bias``."""

    # Its graph does without them; saved graphs name them.
    __props__ = ("n_in", "n_out", "bias")

    n_in: int
    n_out: int
    bias: bool

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        X, W, *b = inputs
        product = X @ floats_of(W)
        return [product + b[0] if b else product]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(*shapes[0][:-1], shapes[1][-1])]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        X, W, *b = inputs
        op = LinearPullback(n_in=self.n_in, n_out=self.n_out)
        dX, dW, *db = op(X, floats_of(W), output_grads[0], *b)
        return [dX, disconnected_type() if W.type.dtype == "uint16" else dW, *db]


class LinearPullback(LayerOp):
    """The gradients of :class:`LinearLayer` by X, W and b: inputs X, W, the output's gradient, b.

    The inner graph of the layer would give one product a row of the batch, and their sum.
    """

    __props__ = ("n_in", "n_out")

    n_in: int
    n_out: int

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        X, W, g, *b = inputs
        rows = g.reshape((-1, self.n_out))
        dX = pt.specify_shape(g @ W.T, X.type.shape).astype(X.type.dtype)
        dW = (X.reshape((-1, self.n_in)).T @ rows).astype(W.type.dtype)
        db = [pt.sum(rows, axis=0, acc_dtype=rows.type.dtype).astype(v.type.dtype) for v in b]
        return [dX, dW, *db]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        X, W, _, *b = shapes
        return [X, W, *b]


class Linear(Layer):
    r"""Map the last axis of the input affinely.

    .. math:: Y = X W + b

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    n_in : int
        Width of the input.
    n_out : int
        Width of the output.
    bias : bool
        Whether there is a :math:`b`.
    weight_initializer, bias_initializer : Initializer, optional
        Laws of W, of shape (n_in, n_out), and of b. Defaults are Xavier-normal and zero.

    Examples
    --------
    >>> from pytensor_ml.layers import Input, Linear
    >>> Linear("fc", n_in=64, n_out=10)(Input("x", shape=(None, 64))).type.shape
    (None, 10)
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        n_in: int,
        n_out: int,
        bias: bool = True,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
    ):
        self.name = resolve_layer_name(name, "Linear")
        self.n_in = n_in
        self.n_out = n_out
        self.W = trainable_parameter(
            f"{self.name}_W",
            shape=(n_in, n_out),
            initializer=weight_initializer,
            default=XavierNormalInitializer(),
            layer_name=self.name,
        )
        self.b = (
            trainable_parameter(
                f"{self.name}_b",
                shape=(n_out,),
                initializer=bias_initializer,
                default=ZeroInitializer(),
                layer_name=self.name,
            )
            if bias
            else None
        )

    def __call__(self, X: TensorLike) -> TensorVariable:
        X = as_tensor(X)
        check_width(X, self.n_in, self.name)
        parameters: list[Any] = [self.W] if self.b is None else [self.W, self.b]
        op = LinearLayer(n_in=self.n_in, n_out=self.n_out, bias=self.b is not None)
        return op(X, *parameters, name=f"{self.name}_output")


def check_width(X: TensorVariable, n_in: int, name: str) -> None:
    """Raise if ``X`` holds no floats or its last axis is known not to be ``n_in`` wide."""
    if not X.type.dtype.startswith("float"):
        raise TypeError(
            f"{name} takes floats, but its input has dtype {X.type.dtype}, by which there is no "
            "gradient. Cast it, as in X.astype('float32')."
        )
    if X.type.ndim == 0 or X.type.shape[-1] not in (None, n_in):
        raise ValueError(
            f"{name} maps a last axis of width {n_in}, but its input has shape {X.type.shape}. "
            f"Pass an input of width {n_in}, or build {name} for the width it has."
        )
