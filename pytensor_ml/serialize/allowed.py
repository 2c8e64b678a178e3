"""What a file may name: the tables in which loading looks names up.

A name that is in no table is an error. Nothing is imported, nor searched for in a module, because
a file names it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytensor.gradient
import pytensor.scalar as ps
import pytensor.tensor.linalg as linalg
import pytensor.tensor.math as math
import pytensor.tensor.random.basic as random
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import DeepCopyOp, ViewOp
from pytensor.conditional.op import IfElse
from pytensor.graph.basic import Variable
from pytensor.graph.op import Op
from pytensor.scalar.basic import ScalarOp
from pytensor.tensor import basic, extra_ops, special, subtensor
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.signal.conv import Convolve1d, Convolve2d
from pytensor.tensor.sort import ArgSortOp, SortOp

from pytensor_ml import generation, loss, state
from pytensor_ml.base import BlockOp, BlockPullback, BlockWithResiduals
from pytensor_ml.layers import (
    attention,
    dropout,
    embedding,
    feedforward,
    half,
    linear,
    moe,
    norm,
    positional,
    transformer,
)
from pytensor_ml.state import Initializer


def qualified_name(kind: type) -> str:
    """Return the name by which a file refers to a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _by_name[T: type](*kinds: T) -> dict[str, T]:
    return {qualified_name(kind): kind for kind in kinds}


# Ops that their ``__props__`` rebuild.
OPS: dict[str, type[Op]] = _by_name(
    # This package's.
    attention.AttentionLayer,
    attention.AttentionPullback,
    attention.CachedAttentionLayer,
    dropout.DropoutLayer,
    embedding.EmbeddingLayer,
    half.Widen,
    feedforward.GatedActivationLayer,
    feedforward.GatedActivationPullback,
    generation.CacheWrite,
    linear.LinearLayer,
    linear.LinearPullback,
    loss.CrossEntropyLayer,
    loss.CrossEntropyPullback,
    loss.ProbabilityCrossEntropyLayer,
    moe.BalanceLossLayer,
    moe.BalanceLossPullback,
    moe.ConvertLayer,
    moe.ExpertsLayer,
    moe.ExpertsPullback,
    moe.RouterLayer,
    moe.RouterPullback,
    norm.LayerNormLayer,
    norm.LayerNormPullback,
    norm.PreciseSum,
    norm.RMSNormLayer,
    norm.RMSNormPullback,
    norm.ZeroCenteredRMSNormLayer,
    positional.ApplyRotary,
    positional.IntegerRotaryTable,
    positional.RotaryTable,
    positional.SymbolicRotaryTable,
    transformer.ModulationLayer,
    # PyTensor's.
    basic.ARange,
    basic.Alloc,
    basic.AllocDiag,
    basic.AllocEmpty,
    basic.Choose,
    basic.ExtractDiag,
    basic.Eye,
    basic.Join,
    basic.MakeVector,
    basic.Nonzero,
    basic.PermuteRowElements,
    basic.ScalarFromTensor,
    basic.Split,
    basic.TensorFromScalar,
    extra_ops.CpuContiguous,
    extra_ops.CumOp,
    extra_ops.FillDiagonal,
    extra_ops.FillDiagonalOffset,
    extra_ops.RavelMultiIndex,
    extra_ops.Repeat,
    extra_ops.SearchsortedOp,
    extra_ops.Unique,
    extra_ops.UnravelIndex,
    linalg.BlockDiagonal,
    linalg.Cholesky,
    linalg.CholeskySolve,
    linalg.Det,
    linalg.Eig,
    linalg.Eigh,
    linalg.Eigvalsh,
    linalg.Expm,
    linalg.LU,
    linalg.LUFactor,
    linalg.Lstsq,
    linalg.MatrixInverse,
    linalg.MatrixPinv,
    linalg.QR,
    linalg.SLogDet,
    linalg.SVD,
    linalg.Solve,
    linalg.SolveTriangular,
    math.Argmax,
    math.Dot,
    pytensor.gradient.DisconnectedGrad,
    pytensor.gradient.ZeroGrad,
    random.BernoulliRV,
    random.BetaBinomialRV,
    random.BetaRV,
    random.BinomialRV,
    random.CategoricalRV,
    random.CauchyRV,
    random.ChoiceWithoutReplacement,
    random.DirichletRV,
    random.ExponentialRV,
    random.GammaRV,
    random.GenGammaRV,
    random.GeometricRV,
    random.GumbelRV,
    random.HalfCauchyRV,
    random.HalfNormalRV,
    random.HyperGeometricRV,
    random.IntegersRV,
    random.InvGammaRV,
    random.LaplaceRV,
    random.LogNormalRV,
    random.LogisticRV,
    random.MultinomialRV,
    random.MvNormalRV,
    random.NegBinomialRV,
    random.NormalRV,
    random.ParetoRV,
    random.PermutationRV,
    random.PoissonRV,
    random.StudentTRV,
    random.TriangularRV,
    random.TruncExponentialRV,
    random.UniformRV,
    random.VonMisesRV,
    random.WaldRV,
    random.WeibullRV,
    JoinDims,
    SplitDims,
    Reshape,
    Shape,
    Shape_i,
    SpecifyShape,
    Convolve1d,
    Convolve2d,
    ArgSortOp,
    SortOp,
    special.LogAddExp,
    special.LogSoftmax,
    special.LogSumExp,
    special.Softmax,
    special.XLog1PY,
    special.XLogY,
    subtensor.AdvancedIncSubtensor,
    subtensor.AdvancedSubtensor,
    subtensor.IncSubtensor,
    subtensor.Subtensor,
    DeepCopyOp,
    DimShuffle,
    IfElse,
    ViewOp,
)

REDUCTIONS: dict[str, Any] = _by_name(math.All, math.Any, math.Max, math.Min, math.Prod, math.Sum)

# Ops that a graph in the file defines.
GRAPH_OPS: dict[str, type[OpFromGraph]] = _by_name(
    BlockOp, BlockPullback, BlockWithResiduals, OpFromGraph
)

SCALAR_OPS: dict[str, ScalarOp] = {
    type(op).__name__: op
    for op in (
        ps.abs,
        ps.add,
        ps.and_,
        ps.arccos,
        ps.arccosh,
        ps.arcsin,
        ps.arcsinh,
        ps.arctan,
        ps.arctan2,
        ps.arctanh,
        ps.betainc,
        ps.betaincinv,
        ps.ceil,
        ps.clip,
        ps.complex,
        ps.conj,
        ps.cos,
        ps.cosh,
        ps.eq,
        ps.erf,
        ps.erfc,
        ps.erfcinv,
        ps.erfcx,
        ps.erfinv,
        ps.exp,
        ps.exp2,
        ps.expm1,
        ps.floor,
        ps.gamma,
        ps.gammainc,
        ps.gammaincc,
        ps.gammainccinv,
        ps.gammaincinv,
        ps.gammaln,
        ps.ge,
        ps.gt,
        ps.hyp2f1,
        ps.i0,
        ps.i1,
        ps.identity,
        ps.imag,
        ps.int_div,
        ps.invert,
        ps.isinf,
        ps.isnan,
        ps.ive,
        ps.j0,
        ps.j1,
        ps.jv,
        ps.kve,
        ps.le,
        ps.log,
        ps.log10,
        ps.log1mexp,
        ps.log1p,
        ps.log2,
        ps.lt,
        ps.maximum,
        ps.minimum,
        ps.mod,
        ps.mul,
        ps.ndtri_exp,
        ps.neg,
        ps.neq,
        ps.or_,
        ps.owens_t,
        ps.polygamma,
        ps.pow,
        ps.psi,
        ps.real,
        ps.reciprocal,
        ps.round_half_away_from_zero,
        ps.round_half_to_even,
        ps.second,
        ps.sigmoid,
        ps.sign,
        ps.sin,
        ps.sinh,
        ps.softplus,
        ps.sqr,
        ps.sqrt,
        ps.sub,
        ps.switch,
        ps.tan,
        ps.tanh,
        ps.tri_gamma,
        ps.true_div,
        ps.trunc,
        ps.xor,
    )
}

INITIALIZERS: dict[str, type[Initializer]] = _by_name(
    state.EmptyInitializer,
    state.NormalInitializer,
    state.OneInitializer,
    state.XavierNormalInitializer,
    state.XavierUniformInitializer,
    state.ZeroInitializer,
    transformer.IdentityModulationInitializer,
)

# Props that the published package's op of this name has not, with what leaves the op the same.
DEFAULT_PROPS: dict[Any, Mapping[str, Any]] = {
    attention.AttentionLayer: {"window": None, "softcap": None},
}


# An op's props may make its graph large, so a whole number in a file is at most this one ...
LARGEST_PROP = 4096
# ... but for these props, by which no graph grows.
UNBOUNDED_PROPS = {
    *("base", "ignore_index", "n_embeddings", "n_features", "n_in", "n_out", "offset", "scaling"),
    "window",
}
# A graph of 96 rounds of a maximum takes half a second to build, be they of one op or of several.
SMALLER_PROPS = {"top_k": 64, "top_k_groups": 64}
MOST_ROUNDS = 96

# These make constants as long as an axis of their inputs, which a file may claim to be of any
# length.
GROWING_OPS = (
    attention.AttentionLayer,
    attention.AttentionPullback,
    attention.CachedAttentionLayer,
    moe.BalanceLossLayer,
    moe.BalanceLossPullback,
    moe.ExpertsLayer,
    moe.ExpertsPullback,
    moe.RouterLayer,
    moe.RouterPullback,
)
LONGEST_AXIS = 2**20
# Of an op with a graph of its own, whose making takes time by the square of it.
MOST_INNER_INPUTS = 2000
# Inputs and outputs of all nodes; a short file could refer to all variables at each node.
MOST_REFERENCES = 2**17


def as_published(op: Op, inputs: Sequence[Variable]) -> Op:
    """Return the op that the published package means where this package has other props for it."""
    if isinstance(op, attention.AttentionLayer) and op.scale is None:
        # Here the default is written out.
        props = {**op._props_dict(), "scale": inputs[0].type.shape[-1] ** -0.5}
        return attention.AttentionLayer(**props)
    return op


def register_op[T: type[Op]](op_class: T, *, name: str | None = None) -> T:
    """Let files name an op class, so that networks with such an op can be saved and loaded.

    Parameters
    ----------
    op_class : type
        A subclass of :class:`~pytensor.graph.op.Op` that its ``__props__``, passed by keyword,
        rebuild. Their values are made of numbers, strings, None, tuples and slices.
    name : str, optional
        The name that files use. Default is the class's module and name; give it when that has
        changed since files were written.

    Returns
    -------
    type
        ``op_class``, so that this can be used as a decorator.

    Raises
    ------
    TypeError
        If it is no op class, or declares no props.
    ValueError
        If the name belongs to another class.

    Examples
    --------
    >>> from pytensor_ml.base import UnaryLayerOp
    >>> from pytensor_ml.serialize import register_op
    >>> @register_op
    ... class DoubleLayer(UnaryLayerOp):
    ...     __props__ = ()
    ...
    ...     def build_inner_graph(self, *inputs):
    ...         return [inputs[0] * 2]
    """
    _check_registrable(op_class, Op)
    _register(OPS, op_class, name)
    return op_class


def register_initializer[T: type[Initializer]](initializer: T, *, name: str | None = None) -> T:
    """Let files name an initializer class; arguments and errors as for :func:`register_op`.

    Examples
    --------
    >>> import numpy as np
    >>> from pytensor_ml.serialize import register_initializer
    >>> from pytensor_ml.state import Initializer
    >>> @register_initializer
    ... class TwoInitializer(Initializer):
    ...     def sample(self, shape, dtype, rng):
    ...         return np.full(shape, 2, dtype)
    """
    _check_registrable(initializer, Initializer)
    _register(INITIALIZERS, initializer, name)
    return initializer


def _check_registrable(kind: type, base: type) -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(
            f"{kind!r} is no subclass of {base.__name__}, so loading could not use it as one. "
            "Register the class, not an instance or a function."
        )
    if getattr(kind, "__props__", None) is None:
        raise TypeError(
            f"{kind.__qualname__} has no __props__, so a file could not say how to rebuild it. "
            "Declare them, as an empty tuple if it has none."
        )


def _register(table: dict[str, Any], kind: type, name: str | None) -> None:
    name = qualified_name(kind) if name is None else name
    if table.setdefault(name, kind) is not kind:
        raise ValueError(
            f"Files call {qualified_name(table[name])} by the name {name!r} already, so those "
            "would open as another op. Register under a name of its own."
        )
