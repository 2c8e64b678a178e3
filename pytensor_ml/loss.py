"""Losses: from targets and predictions to one number that training makes small."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_grad, disconnected_type
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.basic import ARange
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import LayerOp, VariadicLayerOp
from pytensor_ml.layers.moe import convert
from pytensor_ml.layers.norm import PreciseSum

type Reduction = Literal["mean", "sum"] | Callable[[TensorVariable], TensorVariable]

REDUCTIONS = ("mean", "sum")
ID_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


class Loss(ABC):
    """A callable from targets and predictions to a loss, which says what targets it takes."""

    def __call__(self, y_true: TensorLike, y_pred: TensorLike) -> TensorVariable:
        """Return the loss, a scalar, of predictions ``y_pred`` where ``y_true`` was wanted."""
        return self.loss(as_tensor(y_true), as_tensor(y_pred))

    @abstractmethod
    def loss(self, y_true: TensorVariable, y_pred: TensorVariable) -> TensorVariable: ...

    def target_dtype(self, prediction_dtype: str) -> str:
        """Return the dtype of targets for predictions of a dtype."""
        return prediction_dtype

    def target_ndim(self, prediction_ndim: int) -> int:
        """Return how many axes targets have for predictions of so many."""
        return prediction_ndim


class CrossEntropy(Loss):
    r"""The negative log-likelihood of classes.

    .. math:: -\sum_c q_c \log p_c, \qquad q_c = (1 - s) \, [c = t] + s / C

    for each target t among C classes, with label smoothing s [1]_.

    Parameters
    ----------
    reduction : "mean", "sum" or callable
        What makes one number of the losses of all targets. The mean is over targets that are not
        ignored, and 0 without any; a callable gets a tensor of all losses, with 0 for ignored ones.
    expect_logits : bool
        Whether predictions are logits, as is best: their log-probabilities are computed exactly
        where probabilities have already been rounded. Otherwise they are probabilities.
    expect_onehot_labels : bool
        Whether targets are q itself, of the shape of the predictions (one-hot, or any other
        distribution). Otherwise they are ids of classes, of the predictions' shape without its last
        axis.
    ignore_index : int, optional
        An id for targets that do not count, such as padding.
    label_smoothing : float
        The share s of a target's weight that is spread over all classes.

    Raises
    ------
    ValueError
        If there is no such reduction, the smoothing is not in [0, 1), ids are to be ignored among
        one-hot targets, or, in a call, shapes do not match or the number of classes is not static.
    TypeError
        In a call, if predictions are no floats or targets are not what is expected.

    Notes
    -----
    Shapes that are not static are compared when the compiled function runs. An id that is no class
    gives a loss of NaN on every backend, never another class's loss; what
    :func:`~pytensor_ml.optim.compile_train` compiles stops there and names the id. Predictions
    that are negative or sum to more than 1.01 give NaN too, unless logits are expected.

    Examples
    --------
    >>> from pytensor_ml.layers import Input
    >>> from pytensor_ml.loss import CrossEntropy
    >>> logits = Input("logits", shape=(None, 12, 1000))
    >>> ids = Input("ids", shape=(None, 12), dtype="int64")
    >>> CrossEntropy(expect_logits=True, ignore_index=0)(ids, logits).type.shape
    ()

    References
    ----------
    .. [1] Szegedy et al. (2015). Rethinking the Inception Architecture for Computer Vision.
       arXiv:1512.00567.
    """

    def __init__(
        self,
        reduction: Reduction = "mean",
        expect_logits: bool = False,
        expect_onehot_labels: bool = False,
        *,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ):
        if not 0 <= label_smoothing < 1:
            raise ValueError(
                f"CrossEntropy got label_smoothing={label_smoothing}, which leaves a target no "
                "weight. Pass a share of at least 0 and below 1."
            )
        if expect_onehot_labels and ignore_index is not None:
            raise ValueError(
                f"CrossEntropy got ignore_index={ignore_index}, but one-hot targets have no ids to "
                "compare with, so every row would count. Pass ids as targets, or no ignore_index."
            )
        self.reduction = _checked_reduction(reduction)
        self.expect_logits = expect_logits
        self.expect_onehot_labels = expect_onehot_labels
        self.ignore_index = ignore_index
        self.label_smoothing = float(label_smoothing)

    def loss(self, y_true: TensorVariable, y_pred: TensorVariable) -> TensorVariable:
        _check_floats("CrossEntropy", y_pred)
        y_pred = convert(y_pred, "float64" if y_pred.type.dtype == "float64" else "float32")
        if self.expect_onehot_labels:
            _check_floats("CrossEntropy with expect_onehot_labels=True", y_true, "targets")
            y_true = _matched(y_true, y_pred, "CrossEntropy").astype(y_pred.type.dtype)
            losses = dense_cross_entropy(
                y_true,
                y_pred,
                from_logits=self.expect_logits,
                label_smoothing=self.label_smoothing,
            )
            return reduced(losses, self.reduction)
        if y_true.type.dtype not in ID_DTYPES:
            raise TypeError(
                f"CrossEntropy takes ids of classes, but its targets have dtype "
                f"{y_true.type.dtype}. Cast them to int64, or pass expect_onehot_labels=True if "
                "they are distributions over the classes."
            )
        if y_pred.type.ndim == 0 or y_pred.type.shape[-1] is None:
            raise ValueError(
                f"CrossEntropy got predictions of shape {y_pred.type.shape}, of which the number "
                "of classes, the last axis, is not known, so no id could be checked. Give it with "
                "pt.specify_shape."
            )
        ids = _matched(y_true, y_pred, "CrossEntropy with ids", without_classes=True)
        settings = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        if self.expect_logits:
            losses, _ = CrossEntropyLayer(**settings)(y_pred, ids)
        else:
            losses = ProbabilityCrossEntropyLayer(**settings)(y_pred, ids)
        counted = None if self.ignore_index is None else pt.neq(ids, self.ignore_index)
        return reduced(losses, self.reduction, counted)

    def target_dtype(self, prediction_dtype: str) -> str:
        return prediction_dtype if self.expect_onehot_labels else "int64"

    def target_ndim(self, prediction_ndim: int) -> int:
        return prediction_ndim if self.expect_onehot_labels else prediction_ndim - 1


class SquaredError(Loss):
    r"""The square of the difference, :math:`(y - \hat y)^2`.

    Parameters
    ----------
    reduction : "mean", "sum" or callable
        What makes one number of all squares.

    Raises
    ------
    ValueError
        If there is no such reduction, or, in a call, shapes do not match: nothing is broadcast.
    TypeError
        In a call, if predictions or targets are no floats.

    Examples
    --------
    >>> import numpy as np
    >>> from pytensor_ml.loss import SquaredError
    >>> loss = SquaredError()(np.array([1.0, 2.0], "float32"), np.array([1.0, 4.0], "float32"))
    >>> print(loss.eval(mode="NUMBA"))
    2.0
    """

    def __init__(self, reduction: Reduction = "mean"):
        self.reduction = _checked_reduction(reduction)

    def loss(self, y_true: TensorVariable, y_pred: TensorVariable) -> TensorVariable:
        _check_floats("SquaredError", y_pred)
        _check_floats("SquaredError", y_true, "targets")
        y_pred = convert(y_pred, "float64" if y_pred.type.dtype == "float64" else "float32")
        y_true = _matched(y_true, y_pred, "SquaredError").astype(y_pred.type.dtype)
        return reduced(pt.sqr(y_pred - y_true), self.reduction)


def supervised_loss(
    prediction: TensorVariable, loss_fn: Loss
) -> tuple[TensorVariable, TensorVariable]:
    """Return the loss of a prediction and the input, called ``target``, for what was wanted."""
    ndim = loss_fn.target_ndim(prediction.type.ndim)
    target = pt.tensor(
        "target",
        shape=prediction.type.shape[:ndim],
        dtype=loss_fn.target_dtype(prediction.type.dtype),
    )
    return loss_fn(target, prediction), target


class CrossEntropyLayer(LayerOp):
    """The op of :class:`CrossEntropy` of logits and ids.

    Its inputs are the logits, of shape (..., classes), and the ids, of shape (...). Its outputs, of
    shape (...), are the losses, and the logarithms of the sums of exponentials that its gradient
    needs.
    """

    __props__ = ("ignore_index", "label_smoothing")

    ignore_index: int | None
    label_smoothing: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        logits, ids = inputs
        dtype = logits.type.dtype
        shift = row_shift(logits)
        shifted = logits - shift
        total = pt.log(PreciseSum(axes=(logits.type.ndim - 1,))(pt.exp(shifted)))
        losses = total - pt.constant(1 - self.label_smoothing, dtype=dtype) * of_class(shifted, ids)
        if self.label_smoothing:
            share = pt.constant(self.label_smoothing / logits.type.shape[-1], dtype=dtype)
            losses = losses - share * PreciseSum(axes=(logits.type.ndim - 1,))(shifted)
        return [masked(losses, ids, self.ignore_index), total + shift[..., 0]]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[1], shapes[1]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True, True], [False, False]]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        logits: Any = inputs[0]
        log_sums: Any = outputs[1]
        g, g_log_sums = output_grads[0], cast(Any, output_grads[1])
        op = CrossEntropyPullback(
            ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
        )
        gradients: list[Any] = []
        if not isinstance(g.type, DisconnectedType):
            gradients.append(op(*inputs, log_sums, g))
        # Only the gradient reads the sums, so this is part of second derivatives.
        if not isinstance(g_log_sums.type, DisconnectedType):
            gradients.append(pt.exp(logits - log_sums[..., None]) * g_log_sums[..., None])
        return [sum(gradients[1:], gradients[0]), disconnected_type()]


class CrossEntropyPullback(VariadicLayerOp):
    """The gradient of :class:`CrossEntropyLayer` by the logits.

    Its inputs are the logits, the ids, the logarithms of the sums, and the losses' gradient.
    """

    __props__ = ("ignore_index", "label_smoothing")

    ignore_index: int | None
    label_smoothing: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        logits, ids, log_sums, g = inputs
        dtype = logits.type.dtype
        wanted = pt.where(
            is_class(ids, logits.type.shape[-1]),
            pt.constant(1 - self.label_smoothing, dtype=dtype),
            pt.constant(0, dtype=dtype),
        )
        if self.label_smoothing:
            share = self.label_smoothing / logits.type.shape[-1]
            wanted = wanted + pt.constant(share, dtype=dtype)
        gradient = (pt.exp(logits - log_sums[..., None]) - wanted) * g[..., None]
        if self.ignore_index is not None:
            counts = pt.neq(ids, self.ignore_index)[..., None]
            gradient = pt.where(counts, gradient, pt.constant(0, dtype=dtype))
        return [gradient]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[0]]


class ProbabilityCrossEntropyLayer(VariadicLayerOp):
    """The op of :class:`CrossEntropy` of probabilities, of shape (..., classes), and ids."""

    __props__ = ("ignore_index", "label_smoothing")

    ignore_index: int | None
    label_smoothing: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        probabilities, ids = inputs
        dtype = probabilities.type.dtype
        if self.ignore_index is not None:
            # Before the logarithm, whose gradient at 0 times 0 is NaN.
            counts = pt.neq(ids, self.ignore_index)[..., None]
            probabilities = pt.where(counts, probabilities, pt.constant(1, dtype=dtype))
        wanted = pt.log(of_class(probabilities, ids))
        wanted = pt.where(not_probabilities(probabilities), pt.constant(np.nan, dtype), wanted)
        losses = -pt.constant(1 - self.label_smoothing, dtype=dtype) * wanted
        if self.label_smoothing:
            share = self.label_smoothing / probabilities.type.shape[-1]
            logarithms = PreciseSum(axes=(probabilities.type.ndim - 1,))(pt.log(probabilities))
            losses = losses - pt.constant(share, dtype=dtype) * logarithms
        return [masked(losses, ids, self.ignore_index)]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[1]]


def dense_cross_entropy(
    q: TensorVariable,
    predictions: TensorVariable,
    *,
    from_logits: bool,
    label_smoothing: float,
) -> TensorVariable:
    """Return the losses of logits or probabilities where the distributions ``q`` were wanted."""
    dtype = predictions.type.dtype
    one, zero = (pt.constant(value, dtype=dtype) for value in (1, 0))
    last_axis = PreciseSum(axes=(predictions.type.ndim - 1,))
    if label_smoothing:
        n_classes = predictions.shape[-1].astype(dtype)
        q = q * pt.constant(1 - label_smoothing, dtype=dtype)
        q = q + pt.constant(label_smoothing, dtype=dtype) / n_classes
    # Where q is 0, a logarithm of -inf must reach neither the loss nor the gradient.
    counts = pt.neq(q, zero)
    if not from_logits:
        losses = -last_axis(q * pt.log(pt.where(counts, predictions, one)))
        return pt.where(not_probabilities(predictions), pt.constant(np.nan, dtype), losses)
    shifted = predictions - row_shift(predictions)
    log_sums = pt.log(last_axis(pt.exp(shifted)))
    return log_sums * last_axis(q) - last_axis(q * pt.where(counts, shifted, zero))


def not_probabilities(x: TensorVariable) -> TensorVariable:
    """Return which rows of the last axis have a negative entry or sum to more than 1.

    Logits taken for probabilities could be trained on, and their loss fall without a bound.
    """
    total = pt.sum(x, axis=-1, acc_dtype=x.type.dtype)
    return pt.lt(pt.min(x, axis=-1), 0) | pt.gt(total, pt.constant(1.01, dtype=x.type.dtype))


def reduced(
    losses: TensorVariable, reduction: Reduction, counted: TensorVariable | None = None
) -> TensorVariable:
    """Make one number of losses, of which the mean is over those that are ``counted``."""
    if callable(reduction):
        return reduction(losses)
    total = PreciseSum(axes=tuple(range(losses.type.ndim)))(losses) if losses.type.ndim else losses
    if reduction == "sum":
        return total
    if counted is None:
        return total / losses.size.astype(losses.type.dtype)
    n = pt.sum(counted, dtype="int32", acc_dtype="int32").astype(losses.type.dtype)
    return total / pt.maximum(n, pt.constant(1, dtype=losses.type.dtype))


def row_shift(logits: TensorVariable) -> TensorVariable:
    """Return what keeps exponentials of the last axis in range: its maximum, or 0 for infinity."""
    largest = disconnected_grad(pt.max(logits, axis=-1, keepdims=True))
    return pt.where(pt.isinf(largest), pt.constant(0, dtype=logits.type.dtype), largest)


class ClassIds(ARange):
    """A range that never becomes a constant: Numba caches no function with one above 1e6 bytes."""

    def do_constant_folding(self, fgraph: FunctionGraph, node: Apply) -> bool:
        return False


def is_class(ids: TensorVariable, n_classes: int) -> TensorVariable:
    """Return, for each id, which class it is."""
    start, stop, step = (pt.constant(value, dtype="int64") for value in (0, n_classes, 1))
    return pt.eq(ids[..., None], ClassIds("int32")(start, stop, step))


def of_class(x: TensorVariable, ids: TensorVariable) -> TensorVariable:
    """Return the entries of the last axis of ``x`` at ``ids``, NaN where an id is no class."""
    dtype = x.type.dtype
    n_classes = x.type.shape[-1]
    assert n_classes is not None
    # A sum with one term: what is not chosen must not reach it, not even as a NaN times 0.
    candidates = pt.where(is_class(ids, n_classes), x, pt.constant(0, dtype=dtype))
    chosen = pt.sum(candidates, axis=-1, acc_dtype=dtype)
    in_range = pt.ge(ids, 0) & pt.lt(ids, n_classes)
    return pt.where(in_range, chosen, pt.constant(np.nan, dtype=dtype))


def masked(losses: TensorVariable, ids: TensorVariable, ignore_index: int | None) -> TensorVariable:
    """Put 0 in the place of the losses of targets that do not count."""
    if ignore_index is None:
        return losses
    zero = pt.constant(0, dtype=losses.type.dtype)
    return pt.where(pt.neq(ids, ignore_index), losses, zero)


def _matched(
    y_true: TensorVariable,
    y_pred: TensorVariable,
    name: str,
    without_classes: bool = False,
) -> TensorVariable:
    """Return the targets with the shape of the predictions, or raise if it is another."""
    ndim = y_pred.type.ndim - without_classes
    expected = y_pred.type.shape[:ndim]
    given = y_true.type.shape
    if len(given) != ndim or any(
        m is not None and n is not None and m != n for m, n in zip(given, expected, strict=True)
    ):
        raise ValueError(
            f"{name} got targets of shape {given} for predictions of shape {y_pred.type.shape}, "
            f"which would pair them wrongly. Pass targets of shape {expected}."
        )
    return pt.specify_shape(y_true, tuple(y_pred.shape[i] for i in range(ndim)))


def _check_floats(name: str, y: TensorVariable, what: str = "predictions") -> None:
    if not y.type.dtype.startswith("float"):
        raise TypeError(
            f"{name} takes floats, but its {what} have dtype {y.type.dtype}. Cast them, as in "
            "y.astype('float32')."
        )


def _checked_reduction(reduction: Reduction) -> Reduction:
    if not callable(reduction) and reduction not in REDUCTIONS:
        raise ValueError(
            f"There is no reduction {reduction!r}, so losses would not become one number. Pass one "
            f"of {', '.join(REDUCTIONS)}, or a function."
        )
    return reduction
