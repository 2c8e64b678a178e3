"""Bounds on gradients."""

from collections.abc import Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable

from pytensor_ml.base import VariadicLayerOp, sharing_ops
from pytensor_ml.layers.norm import PreciseSum
from pytensor_ml.optim.base import (
    Gradients,
    LossGradientsOrUpdates,
    Parameter,
    Rate,
    Transform,
    UpdateOp,
    Updates,
    at_least_float32,
    gradients_for,
    scalar_dtype,
)


def clip_by_global_norm(max_norm: Rate = 1.0) -> Transform:
    r"""Shorten the gradients, as one vector, to a length [1]_.

    .. math:: g \leftarrow g \min(1, c / \lVert g \rVert)

    with the norm of all gradients together.

    Parameters
    ----------
    max_norm : float or scalar variable
        The length c, above 0.

    Returns
    -------
    callable
        A transform of gradients, to be put before an optimizer with
        :func:`~pytensor_ml.optim.chain`. Where a gradient is NaN, the others stay as they are.

    Raises
    ------
    ValueError
        If the length is not positive, or, in a chain, an optimizer comes first.

    Examples
    --------
    >>> from pytensor_ml.optim import clip_by_global_norm
    >>> from pytensor_ml.params import trainable
    >>> w = trainable([3.0, 4.0], name="w")
    >>> clipped = clip_by_global_norm(1.0)((w**2).sum(), [w])
    >>> print(clipped[w].eval(mode="NUMBA").round(6))
    [0.6 0.8]

    References
    ----------
    .. [1] Pascanu, Mikolov and Bengio (2012). On the difficulty of training recurrent neural
       networks. arXiv:1211.5063.
    """
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise ValueError(
            f"clip_by_global_norm got max_norm={max_norm}, to which nothing that still trains can "
            "be shortened. Pass a number above 0."
        )

    def transform(
        loss_gradients_or_updates: LossGradientsOrUpdates, parameters: Sequence[Parameter]
    ) -> Updates:
        gradients = gradients_for("clip_by_global_norm", loss_gradients_or_updates, parameters)
        dtype = scalar_dtype(parameters)
        bound = (
            pt.as_tensor(max_norm, dtype=dtype)
            if isinstance(max_norm, int | float)
            else max_norm.astype(dtype)
        )
        total: Any = pt.constant(0, dtype=dtype)
        with sharing_ops():
            # One after another, so that no loop over all of them is compiled.
            for parameter in parameters:
                total = AddedSquares()(total, gradients[parameter])
            norm = pt.sqrt(total)
            factor = pt.where(pt.gt(norm, bound), bound / norm, pt.constant(1, dtype=dtype))
            clipped = Gradients(gradients)
            clipped.update((p, ScaledGradient()(gradients[p], factor)) for p in parameters)
        return clipped

    return transform


class AddedSquares(VariadicLayerOp):
    """Add the squares of a gradient: inputs the total so far, a scalar, and the gradient."""

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        total, gradient = inputs
        squares = pt.sqr(gradient.astype(at_least_float32(gradient.type.dtype)))
        if gradient.type.ndim:
            squares = PreciseSum(axes=tuple(range(gradient.type.ndim)))(squares)
        return [total + squares.astype(total.type.dtype)]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [()]


class ScaledGradient(UpdateOp):
    """Multiply a gradient: inputs the gradient and the factor, a scalar."""

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        gradient, factor = inputs
        dtype = at_least_float32(gradient.type.dtype)
        return [gradient.astype(dtype) * factor.astype(dtype)]
