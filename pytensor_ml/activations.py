"""Elementwise layers."""

import math

import pytensor.tensor as pt
from pytensor.tensor import TensorLike
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import Layer


def _constant_like(value: float, x: TensorVariable) -> TensorVariable:
    """Return ``value`` in the dtype of ``x``, which a bare float would widen to float64."""
    return pt.constant(value, dtype=x.type.dtype)


class Activation(Layer):
    """A layer that maps each element, or normalizes along an axis, and has no parameters."""

    def _floating(self, x: TensorLike) -> TensorVariable:
        x = pt.as_tensor(x)
        if not x.type.dtype.startswith(("float", "complex")):
            raise TypeError(
                f"{type(self).__name__} got dtype {x.type.dtype}, in which its constants would be "
                "truncated. Cast the input first, as in x.astype('float32')."
            )
        return x

    def _named(self, y: TensorVariable) -> TensorVariable:
        y.name = type(self).__name__
        return y


class ReLU(Activation):
    r"""Cut negative values off.

    .. math:: y = \max(x, 0)
    """

    def __call__(self, x: TensorLike) -> TensorVariable:
        x = pt.as_tensor(x)
        return self._named(pt.maximum(x, _constant_like(0, x)))


class LeakyReLU(Activation):
    r"""Shrink negative values by a slope.

    .. math:: y = x \text{ if } x > 0 \text{ else } a x

    Parameters
    ----------
    negative_slope : float
        The slope :math:`a`.
    """

    def __init__(self, negative_slope: float = 0.01):
        self.negative_slope = negative_slope

    def __call__(self, x: TensorLike) -> TensorVariable:
        x = self._floating(x)
        slope = _constant_like(self.negative_slope, x)
        return self._named(pt.switch(pt.gt(x, _constant_like(0, x)), x, slope * x))


class Tanh(Activation):
    r"""Squash to (-1, 1).

    .. math:: y = \tanh(x)
    """

    def __call__(self, x: TensorLike) -> TensorVariable:
        return self._named(pt.tanh(x))


class Sigmoid(Activation):
    r"""Squash to (0, 1).

    .. math:: y = 1 / (1 + e^{-x})
    """

    def __call__(self, x: TensorLike) -> TensorVariable:
        return self._named(pt.sigmoid(x))


class SoftPlus(Activation):
    r"""A smooth version of ReLU.

    .. math:: y = \log(1 + e^x)
    """

    def __call__(self, x: TensorLike) -> TensorVariable:
        return self._named(pt.softplus(x))


class GELU(Activation):
    r"""Gaussian error linear unit [1]_.

    .. math:: y = x \, \Phi(x)

    Parameters
    ----------
    approximate : bool
        Whether :math:`\Phi` is the tanh approximation or exact.

    References
    ----------
    .. [1] Hendrycks and Gimpel (2016). Gaussian Error Linear Units. arXiv:1606.08415.
    """

    def __init__(self, approximate: bool = True):
        self.approximate = approximate

    def __call__(self, x: TensorLike) -> TensorVariable:
        x = self._floating(x)
        if self.approximate:
            inner = _constant_like((2 / math.pi) ** 0.5, x) * (
                x + _constant_like(0.044715, x) * x**3
            )
            gate = _constant_like(1, x) + pt.tanh(inner)
        else:
            gate = _constant_like(1, x) + pt.erf(x * _constant_like(0.5**0.5, x))
        return self._named(_constant_like(0.5, x) * x * gate)


class Swish(Activation):
    r"""Swish [1]_, which for :math:`\beta = 1` is SiLU.

    .. math:: y = x / (1 + e^{-\beta x})

    Parameters
    ----------
    beta : float
        The steepness :math:`\beta`.

    Raises
    ------
    ValueError
        If the steepness is not finite.

    References
    ----------
    .. [1] Ramachandran, Zoph and Le (2017). Searching for Activation Functions. arXiv:1710.05941.
    """

    def __init__(self, beta: float = 1.0):
        if not math.isfinite(beta):
            raise ValueError(
                f"Swish got beta={beta}, with which its outputs would be NaN. Pass a finite number."
            )
        self.beta = float(beta)

    def __call__(self, x: TensorLike) -> TensorVariable:
        x = self._floating(x)
        gate = x if self.beta == 1.0 else _constant_like(self.beta, x) * x
        return self._named(x * pt.sigmoid(gate))


class SiLU(Swish):
    """Swish with beta 1, under its usual name."""

    def __init__(self) -> None:
        super().__init__(beta=1.0)


class QuickGELU(Swish):
    """Swish with beta 1.702, an approximation of GELU."""

    def __init__(self) -> None:
        super().__init__(beta=1.702)


class Softmax(Activation):
    r"""Make positive numbers that sum to one along an axis.

    .. math:: y_i = e^{x_i} / \sum_j e^{x_j}

    Parameters
    ----------
    axis : int
        The axis that sums to one.
    """

    def __init__(self, axis: int = -1):
        self.axis = axis

    def __call__(self, x: TensorLike) -> TensorVariable:
        return self._named(pt.special.softmax(x, axis=self.axis))
