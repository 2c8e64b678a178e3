"""Rotary position embeddings that are exact at every position."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.shape import specify_shape
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import (
    BinaryLayer,
    BinaryLayerOp,
    Layer,
    UnaryLayerOp,
    resolve_layer_name,
)
from pytensor_ml.layers.rotary_scaling import (
    DEFAULT_BASE,
    DIGITS,
    TWO_PI,
    Frequencies,
    ScalingProp,
    check_rotary_dim,
    resolve_scaling,
    rotated_channels,
    scaled_frequencies,
)

POSITION_BITS = 31

# Numba's cache can't hold a larger constant.
MAX_CONSTANT_BYTES = 1_000_000


def rotary_table(
    position_ids: TensorLike,
    *,
    rotary_dim: int | TensorVariable,
    base: float = DEFAULT_BASE,
    scaling: str | Mapping[str, Any] = "none",
    scaling_factor: float = 1.0,
    dtype: str = "float32",
) -> TensorVariable:
    r"""Return the cosine and sine of every rotary angle [1]_.

    .. math:: t_{p,i} = a \, (\cos p\theta_i, \sin p\theta_i), \quad \theta_i = b^{-2i/d}

    with frequencies :math:`\theta` and attention factor a as the scaling kind has them. No angle is
    formed in floats of the graph: p is split into digits, whose cosines and sines come from small
    tables and are joined by the angle-sum identity (Numba's kernel counts turns in integers
    instead). Entries are within 3e-7 a for :math:`|p| < 2^{24}` and 4e-7 a
    for :math:`|p| < 2^{31}`, and may be NaN beyond; of float64 ones, within 2e-12 a.

    Parameters
    ----------
    position_ids : tensor of int, shape (..., seq)
        Positions, of any integer dtype, possibly negative. JAX, unless it is told to hold 64 bits,
        wraps those of int64, uint32 and uint64 to 32 before any op sees them.
    rotary_dim : int or scalar tensor
        Number d of rotated channels, even. If symbolic, the angles are formed in the graph at the
        precision of ``dtype``, the scaling must be "none", "linear" or "ntk", and neither JAX nor
        MLX can compile the table: they know no lengths but those of arrays. For these, see
        :func:`rotary_embedding`.
    base : float
        Base b of the frequencies.
    scaling : str or mapping
        "none", "linear" or "ntk", or a mapping as in checkpoint configs, whose ``rope_type`` is
        default, linear, ntk, dynamic, yarn, llama3, longrope or proportional. "dynamic" and
        "longrope" go by the largest of ``position_ids``. A ``rope_theta`` in it is the base; a
        ``partial_rotary_factor`` should be in ``rotary_dim`` already, except for "proportional".
    scaling_factor : float
        Factor of "linear" and "ntk".
    dtype : str
        "float32" or "float64".

    Returns
    -------
    TensorVariable
        Table of shape (..., seq, d // 2, 2).

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers.positional import rotary_table
    >>> rotary_table(pt.arange(2_000_000, 2_000_100), rotary_dim=64).type.shape
    (100, 32, 2)

    References
    ----------
    .. [1] Su et al. (2021). RoFormer: Enhanced Transformer with Rotary Position Embedding.
       arXiv:2104.09864.
    """
    position_ids = _check_positions(position_ids)
    if dtype not in ("float32", "float64"):
        raise ValueError(
            f"dtype={dtype!r} can't hold rotary angles to the accuracy promised. Choose 'float32' "
            "or 'float64'; apply_rotary casts its result to the dtype of its input."
        )
    base, resolved = resolve_scaling(base, scaling, scaling_factor)
    if isinstance(rotary_dim, Variable):
        pair_ids = pt.arange(rotary_dim // 2)
        return _symbolic_table(position_ids, pair_ids, base, resolved, dtype)
    op = RotaryTable(
        rotary_dim=check_rotary_dim(rotary_dim), base=base, scaling=resolved, dtype=dtype
    )
    return op(position_ids, name="rotary_table")


def apply_rotary(x: TensorLike, table: TensorLike, *, pairing: str = "half") -> TensorVariable:
    r"""Rotate pairs of channels by the angles of a rotary table.

    .. math:: (x_j, x_k) \mapsto (x_j \cos - x_k \sin, \; x_k \cos + x_j \sin)

    in at least float32, with one cast at the end. Channels beyond the table's width pass through.
    The table counts as a constant: no gradient flows to it, positions being integers.

    Parameters
    ----------
    x : tensor of float, shape (..., heads, seq, head_dim)
        Queries or keys, or any tensor with the sequence on the axis before the last.
    table : tensor, shape (..., seq, rotary_dim // 2, 2)
        Cosines and sines as :func:`rotary_table` makes them. Axes that it lacks are put in before
        its sequence axis.
    pairing : str
        "half" rotates channel i with i + rotary_dim // 2, "adjacent" 2i with 2i + 1. Weights are
        trained for one of them.

    Returns
    -------
    TensorVariable
        Rotated tensor, of the shape and dtype of ``x``.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers.positional import apply_rotary, rotary_table
    >>> q, k = pt.tensor("q", shape=(2, 8, 5, 64)), pt.tensor("k", shape=(2, 2, 5, 64))
    >>> table = rotary_table(pt.arange(5), rotary_dim=64)
    >>> q, k = apply_rotary(q, table), apply_rotary(k, table)
    >>> q.type.shape, k.type.shape
    ((2, 8, 5, 64), (2, 2, 5, 64))
    """
    x, table = as_tensor(x), as_tensor(table)
    check_pairing(pairing)
    _check_table(x, table)
    return ApplyRotary(pairing=pairing, inverse=False)(x, table, name="rotated")


def rotary_embedding(
    x: TensorLike,
    position_ids: TensorLike,
    *,
    base: float = DEFAULT_BASE,
    pairing: str = "half",
    scaling: str | Mapping[str, Any] = "none",
    scaling_factor: float = 1.0,
    rotary_dim: int | None = None,
) -> TensorVariable:
    """Rotate ``x`` by its positions: :func:`apply_rotary` with a :func:`rotary_table`.

    Parameters
    ----------
    x : tensor of float, shape (..., heads, seq, head_dim)
        Queries or keys. If head_dim is unknown and ``rotary_dim`` not given, all channels rotate
        and the angles are formed in the graph at the backend's precision.
    position_ids : tensor of int, shape (seq,) or (batch, seq)
        Positions.
    base, scaling, scaling_factor
        As for :func:`rotary_table`.
    pairing : str
        As for :func:`apply_rotary`.
    rotary_dim : int, optional
        Number of rotated channels. Default is head_dim, times the ``partial_rotary_factor`` of a
        mapping.

    Returns
    -------
    TensorVariable
        Rotated tensor, of the shape and dtype of ``x``. The table is float64 if ``x`` is.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers.positional import rotary_embedding
    >>> q = pt.tensor("q", shape=(2, 8, 5, 64))
    >>> rotary_embedding(q, pt.arange(5), pairing="adjacent").type.shape
    (2, 8, 5, 64)
    """
    x, position_ids = as_tensor(x), _check_positions(position_ids)
    if position_ids.type.ndim >= x.type.ndim:
        raise ValueError(
            f"position_ids has {position_ids.type.ndim} dimensions and x has {x.type.ndim}, the "
            "last for features, so some of the positions' would have no counterpart in x. Pass "
            "positions of shape (seq,) or (batch, seq)."
        )
    dtype = "float64" if x.type.dtype == "float64" else "float32"
    head_dim = x.type.shape[-1]
    if rotary_dim is None and head_dim is None:
        if rotated_channels(2, scaling) < 2:
            raise ValueError(
                f"x has shape {x.type.shape}, so how many channels its partial_rotary_factor "
                "rotates is unknown. Give x a static last dimension, or pass rotary_dim."
            )
        pair_ids = _channels(x)[::2] // 2
        base, resolved = resolve_scaling(base, scaling, scaling_factor)
        table = _symbolic_table(position_ids, pair_ids, base, resolved, dtype)
    else:
        table = rotary_table(
            position_ids,
            rotary_dim=rotated_channels(head_dim, scaling) if rotary_dim is None else rotary_dim,
            base=base,
            scaling=scaling,
            scaling_factor=scaling_factor,
            dtype=dtype,
        )
    return apply_rotary(x, table, pairing=pairing)


class RotaryEmbedding(BinaryLayer):
    """Rotate queries or keys by their positions.

    The layer is called with ``(x, position_ids)``; see :func:`rotary_embedding`. It has no
    parameters: one object serves queries and keys of every layer.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    base, scaling, scaling_factor
        As for :func:`rotary_table`.
    pairing : str
        As for :func:`apply_rotary`.
    rotary_dim : int, optional
        Number of rotated channels. Default is all that the input has, times the
        ``partial_rotary_factor`` of a mapping.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers.positional import RotaryEmbedding
    >>> rotary = RotaryEmbedding("rotary", base=500_000.0)
    >>> rotary(pt.tensor("q", shape=(2, 8, 5, 64)), pt.arange(5)).type.shape
    (2, 8, 5, 64)
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        base: float = DEFAULT_BASE,
        pairing: str = "half",
        scaling: str | Mapping[str, Any] = "none",
        scaling_factor: float = 1.0,
        rotary_dim: int | None = None,
    ):
        self.name = resolve_layer_name(name, "RotaryEmbedding")
        check_pairing(pairing)
        resolve_scaling(base, scaling, scaling_factor)
        self.base = base
        self.pairing = pairing
        self.scaling = scaling
        self.scaling_factor = scaling_factor
        self.rotary_dim = None if rotary_dim is None else check_rotary_dim(rotary_dim)

    def __call__(self, x: TensorLike, position_ids: TensorLike) -> TensorVariable:
        rotated = rotary_embedding(
            x,
            position_ids,
            base=self.base,
            pairing=self.pairing,
            scaling=self.scaling,
            scaling_factor=self.scaling_factor,
            rotary_dim=self.rotary_dim,
        )
        rotated.name = f"{self.name}_output"
        return rotated

    def table(self, position_ids: TensorLike, *, dtype: str = "float32") -> TensorVariable:
        """Return the :func:`rotary_table` alone, which needs the layer's ``rotary_dim``."""
        if self.rotary_dim is None:
            raise ValueError(
                f"{self.name} was built without rotary_dim, so the width of its table is unknown. "
                f"Pass it, as in RotaryEmbedding({self.name!r}, rotary_dim=64)."
            )
        return rotary_table(
            position_ids,
            rotary_dim=self.rotary_dim,
            base=self.base,
            scaling=self.scaling,
            scaling_factor=self.scaling_factor,
            dtype=dtype,
        )


class IntegerRotaryEmbedding(Layer):
    r"""Rotary table of the first ``effective_dim`` of ``dim`` channels.

    .. math:: t_{p,i} = (\cos p\theta_i, \sin p\theta_i), \quad
        \theta_i = b^{-2i/d_\text{eff}} \text{ for } i < d_\text{eff}/2, \text{ else } 0

    with frequencies rounded to float32 and angles exact from there on.

    Parameters
    ----------
    dim : int
        Number of channels, even.
    effective_dim : int
        Number of them that rotate, even.
    base : float
        Base b of the frequencies.
    table_size : int
        Base of the digits that a position is split into, for backends that split it; a smaller one
        is taken if its tables would exceed 1 MB.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers.positional import IntegerRotaryEmbedding
    >>> rope = IntegerRotaryEmbedding(dim=64, effective_dim=48, base=10_000, table_size=1024)
    >>> rope(pt.arange(5)[None]).type.shape
    (1, 5, 32, 2)
    """

    def __init__(self, dim: int, effective_dim: int, base: float, table_size: int):
        self.name = "IntegerRotaryEmbedding"
        self.dim = check_rotary_dim(dim)
        self.effective_dim = check_rotary_dim(effective_dim)
        if effective_dim > dim:
            raise ValueError(
                f"effective_dim={effective_dim} is larger than dim={dim}, so some frequencies "
                "would have no channels. Pass at most dim."
            )
        if table_size < 2:
            raise ValueError(
                f"table_size={table_size} can't be the base of digits. Pass at least 2."
            )
        self.base, _ = resolve_scaling(base, "none", 1.0)
        self.table_size = table_size
        self.theta = self.make_theta()

    def __call__(self, x: TensorLike) -> TensorVariable:
        op = IntegerRotaryTable(
            dim=self.dim,
            effective_dim=self.effective_dim,
            base=self.base,
            table_size=self.table_size,
        )
        return op(_check_positions(x), name=f"{self.name}_output")

    def make_theta(self) -> np.ndarray:
        """Return the frequencies in radians a position, shape (dim // 2,), float32."""
        return integer_rotary_theta(self.dim, self.effective_dim, self.base)


def integer_rotary_theta(dim: int, effective_dim: int, base: float) -> np.ndarray:
    """Return the frequencies of :class:`IntegerRotaryEmbedding`."""
    frequencies, _ = scaled_frequencies(
        rotary_dim=effective_dim, base=base, scaling=(("rope_type", "default"),)
    )
    theta = np.zeros(dim // 2, "float32")
    theta[: effective_dim // 2] = [float(f) for f in frequencies]
    return theta


class RotaryTable(UnaryLayerOp):
    """The op of :func:`rotary_table`: one input, the positions."""

    __props__ = ("rotary_dim", "base", "scaling", "dtype")

    rotary_dim: int
    base: float
    scaling: ScalingProp
    dtype: str

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        (position_ids,) = inputs
        positions = _widen(position_ids)
        numbers = dict(self.scaling)
        if numbers["rope_type"] == "dynamic":
            original = numbers["original_max_position_embeddings"]
            frequencies, attention_factor = self._frequencies(length=1)
            parts = _dynamic_digits(
                positions,
                frequencies=frequencies,
                original_length=int(original),
                growth=Decimal(numbers["factor"]) / Decimal(original),
                dtype=self.dtype,
            )
        elif numbers["rope_type"] == "longrope":
            original = int(numbers["original_max_position_embeddings"])
            frequencies, attention_factor = self._frequencies(length=original)
            parts = _digits(
                positions,
                [frequencies, self._frequencies(length=original + 1)[0]],
                self.dtype,
                choose_second=pt.ge(_largest(positions), _constant(original, positions.type.dtype)),
            )
        else:
            frequencies, attention_factor = self._frequencies(length=1)
            parts = _digits(positions, [frequencies], self.dtype)
        return [_join_angles(parts, attention_factor, self.dtype)]

    def _frequencies(self, length: int) -> Frequencies:
        return scaled_frequencies(
            rotary_dim=self.rotary_dim, base=self.base, scaling=self.scaling, length=length
        )


class IntegerRotaryTable(UnaryLayerOp):
    """The op of :class:`IntegerRotaryEmbedding`: one input, the positions."""

    __props__ = ("dim", "effective_dim", "base", "table_size")

    dim: int
    effective_dim: int
    base: float
    table_size: int

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        (position_ids,) = inputs
        theta = integer_rotary_theta(self.dim, self.effective_dim, self.base)
        digits = _digits(
            _widen(position_ids),
            [[Decimal(float(f)) for f in theta]],
            "float32",
            digit_base=self.table_size,
        )
        return [_join_angles(digits, Decimal(1), "float32")]


class SymbolicRotaryTable(BinaryLayerOp):
    """The op of a table of unknown width: inputs positions and 0, 1, ..., rotary_dim // 2 - 1."""

    __props__ = ("base", "scaling", "dtype")

    base: float
    scaling: ScalingProp
    dtype: str

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        position_ids, pair_ids = inputs
        numbers = dict(self.scaling)
        pairs = pair_ids.astype(self.dtype)
        exponents = pairs / pair_ids.shape[0].astype(self.dtype)
        frequencies = pt.exp(-exponents * _constant(np.log(self.base), self.dtype))
        if numbers["rope_type"] == "linear":
            frequencies /= _constant(numbers["factor"], self.dtype)
        elif numbers["rope_type"] == "ntk":
            # A lone pair has exponent 0, whatever it is divided by.
            last = pt.maximum(pair_ids.shape[0] - 1, 1).astype(self.dtype)
            frequencies *= pt.exp(-pairs / last * _constant(np.log(numbers["factor"]), self.dtype))
        angles = position_ids[..., None].astype(self.dtype) * frequencies
        return [pt.stack([pt.cos(angles), pt.sin(angles)], axis=-1)]


class ApplyRotary(BinaryLayerOp):
    """The op of :func:`apply_rotary`: inputs x and table; ``inverse`` rotates the other way."""

    __props__ = ("pairing", "inverse")

    pairing: str
    inverse: bool

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        x, table = inputs
        dtype = np.result_type(x.type.dtype, table.type.dtype, "float32").name
        head_axes = x.type.ndim - (table.type.ndim - 1)
        sequence_axis = table.type.ndim - 3
        table = pt.expand_dims(table, tuple(range(sequence_axis, sequence_axis + head_axes)))
        cos = table[..., 0].astype(dtype)
        sin = table[..., 1].astype(dtype)
        if self.inverse:
            sin = -sin
        n_pairs = table.type.shape[-2]
        if n_pairs is None:
            rotated = _rotate_by_index(x.astype(dtype), cos, sin, self.pairing).astype(x.type.dtype)
        elif self.pairing == "half":
            first = x[..., :n_pairs].astype(dtype)
            second = x[..., n_pairs : 2 * n_pairs].astype(dtype)
            parts = [
                (first * cos - second * sin).astype(x.type.dtype),
                (second * cos + first * sin).astype(x.type.dtype),
                x[..., 2 * n_pairs :],
            ]
            rotated = pt.concatenate(parts[: 2 if 2 * n_pairs == x.type.shape[-1] else 3], axis=-1)
        else:
            even, odd = x[..., 0 : 2 * n_pairs : 2], x[..., 1 : 2 * n_pairs : 2]
            first, second = even.astype(dtype), odd.astype(dtype)
            rotated = even.set((first * cos - second * sin).astype(x.type.dtype))
            rotated = rotated[..., 1 : 2 * n_pairs : 2].set(
                (second * cos + first * sin).astype(x.type.dtype)
            )
        return [specify_shape(rotated, x.type.shape)]

    @property
    def has_aligned_table(self) -> bool:
        """Whether no axis that the table has is broadcast against x."""
        x, table = self.input_types
        leading = [*zip(x.shape, table.shape[:-3], strict=False), (x.shape[-2], table.shape[-3])]
        return all(of_table != 1 or of_x == 1 for of_x, of_table in leading)

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        return [shapes[0]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True], [False]]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        cotangents: Sequence[Variable],
    ) -> list[Variable]:
        inverse = ApplyRotary(pairing=self.pairing, inverse=not self.inverse)
        return [inverse(cotangents[0], inputs[1]), disconnected_type()]


def _rotate_by_index(
    x: TensorVariable, cos: TensorVariable, sin: TensorVariable, pairing: str
) -> TensorVariable:
    """Rotate channels of unknown number, which JAX can gather but not slice."""
    channel = _channels(x)
    n_pairs = cos.shape[-1]
    if pairing == "half":
        pair = channel % n_pairs
        partner = (channel + n_pairs) % (2 * n_pairs)
        is_first = channel < n_pairs
    else:
        pair = (channel // 2) % n_pairs
        partner = channel + 1 - 2 * (channel % 2)
        is_first = pt.eq(channel % 2, 0)
    rotates = channel < 2 * n_pairs
    partner = pt.switch(rotates, partner, channel)
    signed_sin = pt.switch(is_first, -sin[..., pair], sin[..., pair])
    return pt.switch(rotates, x * cos[..., pair] + x[..., partner] * signed_sin, x)


def _channels(x: TensorVariable) -> TensorVariable:
    """Return 0, 1, ... along the last axis of ``x``, counted in values: JAX has no other length."""
    row = x[(0,) * (x.type.ndim - 1)]
    return pt.cumsum((pt.isnan(row) | ~pt.isnan(row)).astype("int32")) - 1


def _symbolic_table(
    position_ids: TensorVariable,
    pair_ids: TensorVariable,
    base: float,
    scaling: ScalingProp,
    dtype: str,
) -> TensorVariable:
    kind = dict(scaling)["rope_type"]
    if kind not in ("default", "linear", "ntk"):
        raise ValueError(
            f"Scaling kind {kind!r} makes its frequencies before the graph runs and needs a known "
            "width. Pass rotary_dim as an int, or an x whose last dimension is static."
        )
    op = SymbolicRotaryTable(base=base, scaling=scaling, dtype=dtype)
    return op(position_ids, pair_ids, name="rotary_table")


# An index into the rows of an array of angles in radians, and that array.
type Part = tuple[TensorVariable, np.ndarray]


def _join_angles(parts: Iterable[Part], attention_factor: Decimal, dtype: str) -> TensorVariable:
    """Return (cos, sin) of a sum of angles, each chosen from an array by an index."""
    amplitude = float(attention_factor)
    cos: Any = None
    sin: Any = None
    for index, angles in parts:
        part_cos = _constant(amplitude * np.cos(angles), dtype)[index]
        part_sin = _constant(amplitude * np.sin(angles), dtype)[index]
        if cos is None:
            cos, sin, amplitude = part_cos, part_sin, 1.0
        else:
            cos, sin = (
                cos * part_cos - sin * part_sin,
                sin * part_cos + cos * part_sin,
            )
    return pt.stack([cos, sin], axis=-1)


def _digits(
    positions: TensorVariable,
    frequency_sets: Sequence[Sequence[Decimal]],
    dtype: str,
    *,
    digit_base: int | None = None,
    choose_second: TensorVariable | None = None,
) -> Iterable[Part]:
    r"""Split positions into digits and yield each with its angles under every frequency.

    The digits are those of :math:`p = \sum_k d_k B^k` by floor division, the last one signed. Of
    two frequency sets ``choose_second`` takes the second.
    """
    n_pairs = len(frequency_sets[0])
    bytes_a_row = len(frequency_sets) * n_pairs * np.dtype(dtype).itemsize
    max_rows = (MAX_CONSTANT_BYTES - 1) // bytes_a_row
    n_digits = 1
    while True:
        even_base = int(np.ceil(2 ** ((POSITION_BITS + 1) / n_digits)))
        B = even_base if digit_base is None else min(digit_base, max_rows)
        top = 2**POSITION_BITS // B ** (n_digits - 1)
        # Besides -top - 1 ... top, the last digit has a row of NaN on either side.
        if max(B if n_digits > 1 else 0, 2 * top + 4) <= max_rows:
            break
        n_digits += 1

    integer = positions.type.dtype
    remaining = positions
    for k in range(n_digits):
        if k < n_digits - 1:
            digits = np.arange(B)
            quotient = remaining // _constant(B, integer)
            index = remaining - quotient * _constant(B, integer)
            remaining = quotient
        else:
            digits = np.arange(-top - 2, top + 2)
            index = remaining + _constant(top + 2, integer)
            if integer == "int64":
                index = pt.clip(index, _constant(0, integer), _constant(2 * top + 3, integer))
        angles = []
        for frequencies in frequency_sets:
            # Turns, as fractions of 64 bits: products with a digit wrap around as angles do.
            with localcontext(prec=DIGITS):
                turns = [int(f * B**k / TWO_PI % 1 * 2**64) for f in frequencies]
            wrapped = digits.astype("uint64")[:, None] * np.array(turns, "uint64")
            angles.append(wrapped.view("int64") * (2 * np.pi / 2.0**64))
            if k == n_digits - 1:
                angles[-1][[0, -1]] = np.nan
        if choose_second is not None:
            index = pt.switch(choose_second, index + _constant(len(digits), integer), index)
        yield index, np.concatenate(angles)


LIMB_BITS = 12
LIMB = 2**LIMB_BITS

# A number as digits of base LIMB after the point, in int32: products of two sum without overflow.
type Limbs = list[Any]


def _dynamic_digits(
    positions: TensorVariable,
    *,
    frequencies: Sequence[Decimal],
    original_length: int,
    growth: Decimal,
    dtype: str,
) -> Iterable[Part]:
    r"""Yield the digits of the angles, in turns, under dynamic scaling.

    With u the length beyond the original one and a growth g, frequency i is
    :math:`\theta_i (1 + g u)^{-a_i}`, where :math:`a_i = 2i/(d-2)`. It is needed to 60 bits, beyond
    any float of the graph, so the graph counts in integers: a table holds the frequency at a grid
    of u, each octave of which has equal cells, and the binomial series covers the rest of a cell.
    """
    n_limbs, n_phase_limbs = (6, 3) if dtype == "float32" else (8, 4)
    n_pairs = len(frequencies)
    cell_bits = 5
    while (32 - cell_bits) * 2**cell_bits * n_pairs * n_limbs * 2 >= MAX_CONSTANT_BYTES:
        cell_bits -= 1
    max_shift = POSITION_BITS - 1 - cell_bits
    n_terms = -(-LIMB_BITS * n_limbs // cell_bits)

    slopes, at_starts, series = [], [], []
    with localcontext(prec=DIGITS):
        exponents = [Decimal(i) / max(n_pairs - 1, 1) for i in range(n_pairs)]
        for row in range((POSITION_BITS + 1 - cell_bits) * 2**cell_bits):
            shift = max(0, row // 2**cell_bits - 1)
            scale = 1 + growth * ((row - shift * 2**cell_bits) << shift)
            # Times the quotient of the steps of a cell and the LIMB**2 that they are counted in.
            slope = -growth * 2**shift / scale * LIMB**2 / 2**max_shift
            slopes.append(slope if shift else Decimal(0))
            ratio, power = scale ** -exponents[min(1, n_pairs - 1)], Decimal(1)
            for theta in frequencies:
                at_starts.append(theta / TWO_PI * power)
                power *= ratio
        terms = [Decimal(1)] * n_pairs
        for k in range(n_terms):
            series.append(_limbs(terms, n_limbs))
            terms = [t * (a + k) / (k + 1) for a, t in zip(exponents, terms, strict=True)]

    integer = positions.type.dtype
    beyond = pt.clip(
        _largest(positions) + _constant(1 - original_length, integer),
        _constant(0, integer),
        _constant(2**POSITION_BITS - 1, integer),
    ).astype("int32")
    octaves = _constant(2 ** np.arange(cell_bits + 1, POSITION_BITS), "int32")
    octave = pt.sum(pt.ge(beyond, octaves), dtype="int32", acc_dtype="int32")
    widths = 2 ** np.arange(max_shift + 1)
    width = _constant(widths, "int32")[octave]
    quotient = beyond // width
    steps = (beyond - quotient * width) * _constant(widths[::-1], "int32")[octave]
    cell = octave * _constant(2**cell_bits, "int32") + quotient

    def table_at_cell(values: Sequence[Decimal], width: int) -> Limbs:
        limbs = _limbs(values, n_limbs).reshape((n_limbs, -1, width))
        at_cell = _constant(limbs, "int16")[:, cell].astype("int32")
        return [pt.broadcast_to(at_cell[k], (n_pairs,)) for k in range(n_limbs)]

    zero = pt.zeros((n_pairs,), dtype="int32")
    step_limbs = [zero + steps // LIMB, zero + steps % LIMB, *[zero] * (n_limbs - 2)]
    numbers: Limbs = [pt.tensor(dtype="int32", shape=(n_pairs,)) for _ in range(3 * n_limbs)]
    # One op, which a backend compiles once for all the terms.
    op = OpFromGraph(
        numbers,
        _multiply_add(numbers[:n_limbs], numbers[n_limbs : 2 * n_limbs], numbers[2 * n_limbs :]),
    )

    def multiply_add(a: Limbs, b: Limbs, c: Limbs) -> Limbs:
        return cast(Limbs, op(*a, *b, *c, return_list=True))

    no_limbs = [zero] * n_limbs
    minus_x = multiply_add(step_limbs, table_at_cell(slopes, 1), no_limbs)
    shrinkage = no_limbs
    for term in series[::-1]:
        shrinkage = multiply_add(minus_x, shrinkage, [_constant(limb, "int32") for limb in term])
    frequency = multiply_add(table_at_cell(at_starts, n_pairs), shrinkage, no_limbs)

    low = positions.astype("int32")
    middle = low // LIMB
    high = middle // LIMB
    columns = [
        sum(
            digit[..., None] * frequency[column + place]
            for place, digit in enumerate([low - middle * LIMB, middle - high * LIMB, high])
            if column + place < n_limbs
        )
        for column in range(n_phase_limbs + 1)
    ]
    in_range = pt.eq(low, positions)[..., None]
    for place, limb in enumerate(_carry(columns)[:n_phase_limbs]):
        digit = limb % LIMB if place == 0 else limb
        angles = np.append(np.arange(LIMB) * (2 * np.pi / LIMB ** (place + 1)), np.nan)
        yield pt.switch(in_range, digit, LIMB), angles


def _limbs(values: Sequence[Decimal], n_limbs: int) -> np.ndarray:
    """Return numbers of magnitude at most 1 as signed limbs, along the first axis."""
    with localcontext(prec=DIGITS):
        integers = np.array([int(v * LIMB**n_limbs) for v in values], object)
    limbs = [abs(integers) // LIMB ** (n_limbs - 1 - k) for k in range(n_limbs)]
    limbs[1:] = [limb % LIMB for limb in limbs[1:]]
    return (np.stack(limbs) * np.sign(integers)).astype("int32")


def _multiply_add(a: Limbs, b: Limbs, c: Limbs) -> Limbs:
    """Return a * b + c, all of as many limbs, for a and b of magnitude at most 1."""
    columns: list[Any] = [*c, 0]
    for i, a_limb in enumerate(a):
        for j, b_limb in enumerate(b[: len(c) - i]):
            columns[i + j + 1] = columns[i + j + 1] + a_limb * b_limb
    return _carry(columns)[:-1]


def _carry(columns: Sequence[Any]) -> list[Any]:
    """Return columns as limbs, all but the first of which are digits."""
    limbs: list[Any] = []
    carry: Any = 0
    for column in columns[:0:-1]:
        total = column + carry
        carry = total // LIMB
        limbs.append(total - carry * LIMB)
    return [columns[0] + carry, *limbs[::-1]]


def _largest(positions: TensorVariable) -> TensorVariable:
    """Return the largest position, at least 0, which there is also where there are none."""
    zero = pt.zeros((1,), dtype=positions.type.dtype)
    return pt.max(pt.concatenate([positions.flatten(), zero]))


def _constant(value: Any, dtype: str) -> TensorVariable:
    return pt.constant(np.asarray(value, dtype=dtype))


def _widen(position_ids: TensorVariable) -> TensorVariable:
    """Return positions in an integer type that holds their digits, and their maximum plus one."""
    bits = np.dtype(position_ids.type.dtype).itemsize * 8
    is_signed = position_ids.type.dtype.startswith("int")
    return position_ids.astype("int32" if bits < 32 or (bits == 32 and is_signed) else "int64")


def _check_positions(position_ids: TensorLike) -> TensorVariable:
    position_ids = as_tensor(position_ids)
    if not position_ids.type.dtype.startswith(("int", "uint")):
        raise TypeError(
            f"position_ids has dtype {position_ids.type.dtype}; a float32 counts exactly only up "
            "to 16777216 and its angles are off long before. Pass integers, as from "
            "position_ids.astype('int64')."
        )
    if position_ids.type.ndim == 0:
        raise ValueError(
            "position_ids is a scalar, so the table would have no sequence axis. Pass shape (seq,) "
            "or (batch, seq), as from position_ids[None]."
        )
    if position_ids.type.dtype == "uint64":
        # As int64 the largest would be small negative positions; JAX holds 32 bits of either.
        bounded: Any = pt.minimum(position_ids, _constant(3 * 2**30, "uint64"))
        return bounded
    return position_ids


def check_pairing(pairing: str) -> None:
    if pairing not in ("half", "adjacent"):
        raise ValueError(
            f"Unknown pairing {pairing!r}, so the channels to rotate together are undefined. "
            "Choose 'half' (i with i + rotary_dim // 2) or 'adjacent' (2i with 2i + 1)."
        )


def _check_table(x: TensorVariable, table: TensorVariable) -> None:
    if not x.type.dtype.startswith("float"):
        raise TypeError(
            f"x has dtype {x.type.dtype}, and a rotation of integers would be truncated. Cast it, "
            "as with x.astype('float32')."
        )
    if not table.type.dtype.startswith("float"):
        raise TypeError(
            f"table has dtype {table.type.dtype}, in which cosines and sines cannot be held. "
            "Pass a table as rotary_table makes it, not positions."
        )
    if table.type.ndim < 3 or table.type.shape[-1] not in (None, 2):
        raise ValueError(
            f"table has shape {table.type.shape}, but its last axis must hold a cosine and a sine. "
            "Pass a table of shape (..., seq, rotary_dim // 2, 2), as rotary_table makes it."
        )
    if table.type.ndim - 1 > x.type.ndim:
        raise ValueError(
            f"table has shape {table.type.shape}, positions of {table.type.ndim - 2} dimensions, "
            f"and x has shape {x.type.shape}, so the result would have more dimensions than x. "
            f"Pass positions of at most {x.type.ndim - 1} dimensions."
        )
    n_pairs, head_dim = table.type.shape[-2], x.type.shape[-1]
    if n_pairs is not None and head_dim is not None and 2 * n_pairs > head_dim:
        raise ValueError(
            f"table rotates {2 * n_pairs} channels, but x has {head_dim}, so the last pairs would "
            f"have none. Make the table with rotary_dim of at most {head_dim}."
        )
    leading = (*table.type.shape[:-3], *(1,) * (x.type.ndim - table.type.ndim + 1))
    for of_table, of_x in zip((*leading, table.type.shape[-3]), x.type.shape[:-1], strict=True):
        if of_table not in (None, 1, of_x) and of_x is not None:
            raise ValueError(
                f"table has shape {table.type.shape} and x has shape {x.type.shape}, so a "
                f"dimension of {of_table} would meet one of {of_x}. Pass one position for each "
                "step of x's sequence, axis -2."
            )
