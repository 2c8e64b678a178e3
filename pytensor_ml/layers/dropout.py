"""Random zeroing in training."""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import shared
from pytensor.graph.basic import Variable
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import Layer, UnaryLayerOp, resolve_layer_name


class DropoutLayer(UnaryLayerOp):
    """The op of :class:`Dropout`: inputs X and the mask of what is kept."""

    __props__ = ("p",)

    p: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        X, mask = inputs
        return [X * mask * pt.constant(1 / (1 - self.p), dtype=X.type.dtype)]

    def for_prediction(self, inputs: list[Variable]) -> list[Variable]:
        return inputs[:1]


class Dropout(Layer):
    r"""Zero each element with probability p and scale the others by 1 / (1 - p) [1]_.

    :func:`~pytensor_ml.pytensorf.rewrite_for_prediction` removes it.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    p : float
        Probability of a zero, at least 0 and below 1.
    random_state : int, Generator or symbolic generator, optional
        Where the draws come from. Default is a fresh seed.

    Examples
    --------
    >>> from pytensor_ml.layers import Dropout, Input
    >>> Dropout("dropout", p=0.1, random_state=0)(Input("x", shape=(None, 64))).type.shape
    (None, 64)

    References
    ----------
    .. [1] Srivastava et al. (2014). Dropout: A Simple Way to Prevent Neural Networks from
       Overfitting. JMLR 15.
    """

    def __init__(self, name: str | None = None, *, p: float = 0.5, random_state: Any = None):
        self.name = resolve_layer_name(name, "Dropout")
        if not 0 <= p < 1:
            raise ValueError(
                f"{self.name} got p={p}, but it divides by 1 - p, the probability of keeping an "
                "element. Pass a p of at least 0 and below 1."
            )
        self.p = p
        self._random_state = (
            random_state
            if isinstance(random_state, Variable)
            else np.random.default_rng(random_state)
        )
        self._n_calls = 0

    def __call__(self, X: TensorLike) -> TensorVariable:
        X = as_tensor(X)
        if self.p == 0:
            return X
        _, mask = pt.random.bernoulli(
            p=pt.constant(1 - self.p, dtype=X.type.dtype),
            size=X.shape,
            rng=self._next_generator(),
            return_next_rng=True,
        )
        kept = pt.specify_shape(mask.astype(X.type.dtype), X.type.shape)
        return DropoutLayer(p=self.p)(X, kept, name=f"{self.name}_output")

    def _next_generator(self) -> Variable:
        """Return the generator given, or else a new one, so that two calls draw independently."""
        if isinstance(self._random_state, Variable):
            return self._random_state
        [child] = self._random_state.spawn(1)
        self._n_calls += 1
        return shared(child, name=f"{self.name}/rng_{self._n_calls - 1}")
