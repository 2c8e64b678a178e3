"""Normalization of the last axis."""

import math
from abc import abstractmethod
from typing import Any, Literal

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.scalar import upcast
from pytensor.tensor import TensorLike
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import Layer, LayerOp, UnaryLayerOp, resolve_layer_name
from pytensor_ml.layers.linear import check_width
from pytensor_ml.params import TrainableParameter, trainable_parameter
from pytensor_ml.state import Initializer, OneInitializer, ZeroInitializer


class Norm(Layer):
    """A layer that normalizes the last axis and makes its parameters once it knows the width.

    Parameters
    ----------
    name : str
        Name of the layer.
    n_in : int, optional
        Width of the last axis.
    epsilon : float
        What is added under the root.

    Raises
    ------
    ValueError
        If epsilon is negative or not finite.
    """

    def __init__(self, name: str, n_in: int | None, epsilon: float):
        if not 0 <= epsilon < math.inf:
            raise ValueError(
                f"{name} got epsilon={epsilon}, with which a root may be NaN. Pass a small number "
                "that is not negative."
            )
        self.name = name
        self.epsilon = epsilon
        self.n_in = n_in
        if n_in is not None:
            self.make_parameters(n_in)

    @abstractmethod
    def make_parameters(self, n_in: int) -> None:
        """Make the parameters for a last axis of width ``n_in``."""

    def sized(self, X: TensorLike) -> TensorVariable:
        """Return ``X`` with a last axis of known width, which the first call may set."""
        X = pt.as_tensor(X)
        if X.type.dtype not in ("float16", "float32", "float64"):
            raise TypeError(
                f"{self.name} normalizes float16, float32 or float64, but its input has dtype "
                f"{X.type.dtype}, in which the result could not be held. Cast the input first, as "
                "in X.astype('float32')."
            )
        if self.n_in is None:
            self.n_in = X.type.shape[-1] if X.type.ndim else None
            if self.n_in is None:
                raise ValueError(
                    f"{self.name} cannot tell how wide the last axis is from an input of shape "
                    f"{X.type.shape}, so it cannot make its parameters. Pass n_in to the layer, or "
                    "an input with a static last dimension."
                )
            self.make_parameters(self.n_in)
        check_width(X, self.n_in, self.name)
        return pt.specify_shape(X, (*X.type.shape[:-1], self.n_in))


class RMSNorm(Norm):
    r"""Divide the last axis by its root mean square [1]_.

    .. math:: y = \frac{x}{\sqrt{\frac{1}{n} \sum_i x_i^2 + \epsilon}} \cdot \gamma

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    n_in : int, optional
        Width :math:`n`. Default is that of the first input.
    epsilon : float
        The constant :math:`\epsilon`.
    affine : bool
        Whether there is a :math:`\gamma`.
    scale_initializer : Initializer, optional
        Law of :math:`\gamma`, of shape (n,). Default is ones.

    Examples
    --------
    >>> from pytensor_ml.layers import Input, RMSNorm
    >>> RMSNorm("norm")(Input("x", shape=(None, 64))).type.shape
    (None, 64)

    References
    ----------
    .. [1] Zhang and Sennrich (2019). Root Mean Square Layer Normalization. arXiv:1910.07467.
    """

    scale: TrainableParameter | None = None

    def __init__(
        self,
        name: str | None = None,
        *,
        n_in: int | None = None,
        epsilon: float = 1e-6,
        affine: bool = True,
        scale_initializer: Initializer | None = None,
    ):
        self.affine = affine
        self.scale_initializer = scale_initializer
        super().__init__(resolve_layer_name(name, "RMSNorm"), n_in, epsilon)

    def make_parameters(self, n_in: int) -> None:
        if self.affine:
            self.scale = trainable_parameter(
                f"{self.name}_scale",
                shape=(n_in,),
                initializer=self.scale_initializer,
                default=OneInitializer(),
                layer_name=self.name,
            )

    def __call__(self, X: TensorLike) -> TensorVariable:
        X = self.sized(X)
        op = RMSNormLayer(n_in=self.n_in, epsilon=self.epsilon, affine=self.affine)
        parameters = [] if self.scale is None else [self.scale]
        return op(X, *parameters, name=f"{self.name}_output")


class ZeroCenteredRMSNorm(Norm):
    r"""Divide the last axis by its root mean square [1]_ and scale it by one plus a weight [2]_.

    .. math:: y = \frac{x}{\sqrt{\frac{1}{n} \sum_i x_i^2 + \epsilon}} \cdot (1 + w)

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    n_in : int, optional
        Width :math:`n`. Default is that of the first input.
    epsilon : float
        The constant :math:`\epsilon`.
    compute_dtype : "float32" or None
        Dtype of :math:`1 + w` and of the product with it, at least that of the input; None takes
        the input's own. The root mean square is always computed in at least float32.

    Examples
    --------
    >>> from pytensor_ml.layers import Input, ZeroCenteredRMSNorm
    >>> ZeroCenteredRMSNorm("norm")(Input("x", shape=(None, 64))).type.shape
    (None, 64)

    References
    ----------
    .. [1] Zhang and Sennrich (2019). Root Mean Square Layer Normalization. arXiv:1910.07467.
    .. [2] Gemma Team (2024). Gemma: Open Models Based on Gemini Research and Technology.
       arXiv:2403.08295.
    """

    weight: TrainableParameter

    def __init__(
        self,
        name: str | None = None,
        *,
        n_in: int | None = None,
        epsilon: float = 1e-6,
        compute_dtype: Literal["float32"] | None = "float32",
    ):
        if compute_dtype not in ("float32", None):
            raise ValueError(
                f"compute_dtype={compute_dtype!r} is not a dtype this norm can scale in. Pass "
                "'float32', or None for the dtype of the input."
            )
        self.compute_dtype = compute_dtype
        super().__init__(resolve_layer_name(name, "ZeroCenteredRMSNorm"), n_in, epsilon)

    def make_parameters(self, n_in: int) -> None:
        self.weight = trainable_parameter(
            f"{self.name}_weight",
            shape=(n_in,),
            default=ZeroInitializer(),
            layer_name=self.name,
        )

    def __call__(self, X: TensorLike) -> TensorVariable:
        X = self.sized(X)
        op = ZeroCenteredRMSNormLayer(
            n_in=self.n_in, epsilon=self.epsilon, compute_dtype=self.compute_dtype
        )
        return op(X, self.weight, name=f"{self.name}_output")


class LayerNorm(Norm):
    r"""Bring the last axis to mean zero and variance one [1]_.

    .. math::

        y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \gamma + \beta, \qquad
        \mu = \frac{1}{n} \sum_i x_i, \qquad \sigma^2 = \frac{1}{n} \sum_i (x_i - \mu)^2

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    n_in : int, optional
        Width :math:`n`. Default is that of the first input.
    epsilon : float
        The constant :math:`\epsilon`.
    affine : bool
        Whether there are :math:`\gamma` and :math:`\beta`.
    scale_initializer, loc_initializer : Initializer, optional
        Laws of :math:`\gamma` and :math:`\beta`, of shape (n,). Defaults are ones and zeros.

    Examples
    --------
    >>> from pytensor_ml.layers import Input, LayerNorm
    >>> LayerNorm("norm")(Input("x", shape=(None, 64))).type.shape
    (None, 64)

    References
    ----------
    .. [1] Ba, Kiros and Hinton (2016). Layer Normalization. arXiv:1607.06450.
    """

    scale: TrainableParameter | None = None
    loc: TrainableParameter | None = None

    def __init__(
        self,
        name: str | None = None,
        *,
        n_in: int | None = None,
        epsilon: float = 1e-5,
        affine: bool = True,
        scale_initializer: Initializer | None = None,
        loc_initializer: Initializer | None = None,
    ):
        self.affine = affine
        self.scale_initializer = scale_initializer
        self.loc_initializer = loc_initializer
        super().__init__(resolve_layer_name(name, "LayerNorm"), n_in, epsilon)

    def make_parameters(self, n_in: int) -> None:
        if self.affine:
            self.scale = trainable_parameter(
                f"{self.name}_scale",
                shape=(n_in,),
                initializer=self.scale_initializer,
                default=OneInitializer(),
                layer_name=self.name,
            )
            self.loc = trainable_parameter(
                f"{self.name}_loc",
                shape=(n_in,),
                initializer=self.loc_initializer,
                default=ZeroInitializer(),
                layer_name=self.name,
            )

    def __call__(self, X: TensorLike) -> TensorVariable:
        X = self.sized(X)
        op = LayerNormLayer(n_in=self.n_in, epsilon=self.epsilon, affine=self.affine)
        parameters = [] if self.loc is None or self.scale is None else [self.loc, self.scale]
        return op(X, *parameters, name=f"{self.name}_output")


class RMSNormLayer(UnaryLayerOp):
    """The op of :class:`RMSNorm`: inputs X and, if ``affine``, scale."""

    __props__ = ("n_in", "epsilon", "affine")

    n_in: int
    epsilon: float
    affine: bool

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        X, *scale = inputs
        dtype = upcast(X.type.dtype, "float32")
        normalized, _ = divide_by_rms(X.astype(dtype), self.epsilon, self.n_in)
        y = normalized * scale[0].astype(dtype) if self.affine else normalized
        return [y.astype(X.type.dtype)]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Variable]:
        op = RMSNormPullback(n_in=self.n_in, epsilon=self.epsilon, offset=0)
        X, *scale = inputs
        return op(X, *output_grads, *scale, return_list=True)


class ZeroCenteredRMSNormLayer(UnaryLayerOp):
    """The op of :class:`ZeroCenteredRMSNorm`: inputs X and weight."""

    __props__ = ("n_in", "epsilon", "compute_dtype")

    n_in: int
    epsilon: float
    compute_dtype: str | None

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        X, weight = inputs
        normalized, _ = divide_by_rms(
            X.astype(upcast(X.type.dtype, "float32")), self.epsilon, self.n_in
        )
        dtype = upcast(X.type.dtype, self.compute_dtype or X.type.dtype)
        y = normalized.astype(dtype) * (pt.constant(1, dtype=dtype) + weight.astype(dtype))
        return [y.astype(X.type.dtype)]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Variable]:
        op = RMSNormPullback(n_in=self.n_in, epsilon=self.epsilon, offset=1)
        X, weight = inputs
        return op(X, *output_grads, weight, return_list=True)


class RMSNormPullback(LayerOp):
    """The pullback of both RMS norms, whose factor is ``offset`` plus a parameter.

    Inputs are X, dY and, if there is one, the parameter; outputs the gradients of all but dY.
    """

    __props__ = ("n_in", "epsilon", "offset")

    n_in: int
    epsilon: float
    offset: int

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        X, dY, *parameters = inputs
        dtype = upcast(X.type.dtype, "float32")
        normalized, rms = divide_by_rms(X.astype(dtype), self.epsilon, self.n_in)
        g = dY.astype(dtype)
        gradients = [
            sum_leading_axes(g * normalized).astype(parameter.type.dtype)
            for parameter in parameters
        ]
        for parameter in parameters:
            g = g * (pt.constant(self.offset, dtype=dtype) + parameter.astype(dtype))
        dX = (g - normalized * row_mean(g * normalized, self.n_in)) / rms
        return [dX.astype(X.type.dtype), *gradients]


class LayerNormLayer(UnaryLayerOp):
    """The op of :class:`LayerNorm`: inputs X and, if ``affine``, loc and scale."""

    __props__ = ("n_in", "epsilon", "affine")

    n_in: int
    epsilon: float
    affine: bool

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        X, *loc_and_scale = inputs
        dtype = upcast(X.type.dtype, "float32")
        y, _ = divide_by_rms(center(X.astype(dtype), self.n_in), self.epsilon, self.n_in)
        if self.affine:
            loc, scale = (parameter.astype(dtype) for parameter in loc_and_scale)
            y = y * scale + loc
        return [y.astype(X.type.dtype)]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Variable]:
        op = LayerNormPullback(n_in=self.n_in, epsilon=self.epsilon)
        X, *loc_and_scale = inputs
        return op(X, *output_grads, *loc_and_scale, return_list=True)


class LayerNormPullback(LayerOp):
    """The pullback of :class:`LayerNorm`.

    Inputs are X, dY and, if there are any, loc and scale; outputs the gradients of all but dY.
    """

    __props__ = ("n_in", "epsilon")

    n_in: int
    epsilon: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        X, dY, *loc_and_scale = inputs
        dtype = upcast(X.type.dtype, "float32")
        normalized, deviation = divide_by_rms(
            center(X.astype(dtype), self.n_in), self.epsilon, self.n_in
        )
        g = dY.astype(dtype)
        gradients = []
        if loc_and_scale:
            loc, scale = loc_and_scale
            gradients = [
                sum_leading_axes(g).astype(loc.type.dtype),
                sum_leading_axes(g * normalized).astype(scale.type.dtype),
            ]
            g = g * scale.astype(dtype)
        dX = g - row_mean(g, self.n_in) - normalized * row_mean(g * normalized, self.n_in)
        return [(dX / deviation).astype(X.type.dtype), *gradients]


class PreciseSum(UnaryLayerOp):
    """Sum over ``axes`` with an error that does not grow with the number of terms.

    The inner graph only says what is summed: compiled loops add serially, and beside one large
    term lose every small one. Every backend has a kernel.
    """

    __props__ = ("axes",)

    axes: tuple[int, ...]

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        (X,) = inputs
        return [pt.sum(X, axis=self.axes, dtype=X.type.dtype, acc_dtype=X.type.dtype)]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Variable]:
        (X,), (g,) = inputs, output_grads
        return [pt.expand_dims(g, self.axes) * pt.ones_like(X)]


def row_mean(x: TensorVariable, n: int) -> TensorVariable:
    """Return the mean over the last axis, of width ``n``, which is kept."""
    total = PreciseSum(axes=(x.type.ndim - 1,))(x)
    return total[..., None] / pt.constant(n, dtype=x.type.dtype)


def sum_leading_axes(x: TensorVariable) -> TensorVariable:
    """Return the sum over every axis but the last."""
    return PreciseSum(axes=tuple(range(x.type.ndim - 1)))(x) if x.type.ndim > 1 else x


def divide_by_rms(
    x: TensorVariable, epsilon: float, n: int
) -> tuple[TensorVariable, TensorVariable]:
    """Return ``x`` divided by the root mean square of its last axis, and that root."""
    rms = pt.sqrt(row_mean(x * x, n) + pt.constant(epsilon, dtype=x.type.dtype))
    return x / rms, rms


def center(x: TensorVariable, n: int) -> TensorVariable:
    """Subtract the mean of the last axis, of width ``n``.

    What the row's range has nearest to zero goes first. The mean of a row far from zero is rounded
    by more than the row varies, and differently where a compiler contracts it with a subtraction.
    """
    lowest, highest = (bound(x, axis=-1, keepdims=True) for bound in (pt.min, pt.max))
    x = x - pt.maximum(lowest, pt.minimum(highest, pt.constant(0, dtype=x.type.dtype)))
    return x - row_mean(x, n)
