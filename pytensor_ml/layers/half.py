"""Float16 numbers held as words of 16 bits, which every backend can hold, and read as float32."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor import as_tensor
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import UnaryLayerOp

FRACTIONS = 2**10
# By the exponent's field: what a unit of the last bit of the fraction is worth. The largest field
# is that of infinity.
UNITS = np.ldexp(np.float32(1), np.maximum(np.arange(32), 1) - 25).astype("float32")
UNITS[31] = np.inf


class Widen(UnaryLayerOp):
    """The float32 values of float16 words of dtype uint16, of any shape; NaN may be infinite."""

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        [words] = inputs
        return [widened(words)]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[0]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False]]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        return [disconnected_type()]


def widened(words: TensorVariable) -> TensorVariable:
    """Return the values of words of a sign, five bits of exponent and ten of a fraction [1]_.

    References
    ----------
    .. [1] IEEE 754-2008, binary16.
    """
    bits = words.astype("int32")
    exponent = bits // FRACTIONS % 32
    # Numbers but the smallest have a leading 1 that is not written down.
    fraction = bits % FRACTIONS + pt.where(exponent > 0, FRACTIONS, 0)
    magnitude = fraction.astype("float32") * pt.constant(UNITS)[exponent]
    return pt.where(bits >= 2**15, -magnitude, magnitude)


def floats_of(W: Any) -> TensorVariable:
    """Return a parameter's values, which are float32 where it holds words."""
    return Widen()(W) if W.type.dtype == "uint16" else as_tensor(W)


def dtype_of(W: TensorVariable) -> str:
    """Return the dtype of a parameter's values."""
    return "float32" if W.type.dtype == "uint16" else W.type.dtype
