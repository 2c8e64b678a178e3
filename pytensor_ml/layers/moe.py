"""Mixtures of experts: feed-forwards of which each token passes through a few."""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.variable import TensorVariable

import pytensor_ml.dispatch  # noqa: F401  (its rewrites put in the kernels)
from pytensor_ml.base import (
    LayerOp,
    UnaryLayerOp,
    VariadicLayer,
    VariadicLayerOp,
    resolve_layer_name,
)
from pytensor_ml.layers.feedforward import GatedFeedForward
from pytensor_ml.layers.half import floats_of
from pytensor_ml.layers.linear import Linear, LinearLayer, check_width
from pytensor_ml.layers.norm import PreciseSum
from pytensor_ml.params import NonTrainableParameter, non_trainable, trainable_parameter
from pytensor_ml.state import NormalInitializer

type Score = Literal["sigmoid", "softmax"]

SCORES = ("sigmoid", "softmax")


class MoE(VariadicLayer):
    r"""SwiGLU feed-forwards of which a router picks a few for each token.

    .. math::
        y = \sum_{i \in \mathrm{top}_k(s + b)} w_i \, E_i(x) + S(x), \qquad
        s = \mathrm{score}(x W_\mathrm{router})

    :math:`E_i` and the shared experts S are gated feed-forwards. The weights :math:`w_i` are the
    scores of the experts chosen, divided by their sum if ``renormalize``, times
    ``routed_scaling_factor``. No token is dropped, and equal scores go to the lowest index.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    d_model : int
        Width of the input and of the output.
    hidden_dim : int
        Width inside an expert.
    n_experts : int
        Number of experts to choose from.
    top_k : int
        Number of experts a token passes through.
    n_shared_experts : int
        Number of experts that every token passes through besides: S is one feed-forward of width
        ``n_shared_experts * hidden_dim``.
    score : "sigmoid" or "softmax"
        What makes scores of the router's logits; the softmax is over all experts.
    selection_bias : bool
        Whether there is a bias :math:`b` on the scores that chooses [1]_. It does not weigh, and
        has no gradient.
    n_groups, top_k_groups : int
        Experts form ``n_groups`` contiguous groups, and only those in the ``top_k_groups`` groups
        with the largest sums of their two best scores can be chosen [1]_.
    renormalize : bool
        Whether the weights of a token sum to one before they are scaled.
    routed_scaling_factor : float
        What the weights are multiplied by.
    bias_update_factor : float
        The step :math:`u` by which a function compiled with :func:`pytensor_ml.pytensorf.function`
        moves the bias in each call [2]_, :math:`b \leftarrow b + u \, \mathrm{sign}(\bar n - n)`
        with the load :math:`n`. Prediction leaves it alone.
    aux_loss_coeff : float
        What ``balance_loss`` is multiplied by.

    Attributes
    ----------
    router : Linear
        Bias-free map to the logits.
    gate, up : parameters of shape (n_experts, d_model, hidden_dim)
        Weights of the experts' inner maps.
    down : parameter of shape (n_experts, hidden_dim, d_model)
        Weights of their outer maps.
    shared : GatedFeedForward or None
        The shared experts.
    bias : parameter of shape (n_experts,), or None
        The selection bias.
    load : int32 tensor of shape (n_experts,)
        How many valid tokens of the last call chose each expert. Like ``balance_loss``, it belongs
        to the graph of that call: what :func:`~pytensor_ml.layers.combinators.call_as_block` calls
        has to return it.
    balance_loss : scalar tensor
        Of the last call, ``aux_loss_coeff`` times :math:`N \sum_i f_i P_i` [3]_ over N experts:
        the fraction :math:`f_i` of the choices of valid tokens, and the mean :math:`P_i` of the
        scores after they are divided by their sum over the experts. It is
        ``aux_loss_coeff`` where both are uniform.

    Raises
    ------
    ValueError
        If there is no such score, or the counts of experts and groups do not fit together.

    Examples
    --------
    >>> from pytensor_ml.layers import Input, MoE
    >>> moe = MoE("moe", d_model=64, hidden_dim=32, n_experts=8, top_k=2)
    >>> moe(Input("x", shape=(None, 10, 64))).type.shape
    (None, 10, 64)
    >>> moe.load.type.shape
    (8,)

    References
    ----------
    .. [1] DeepSeek-AI (2024). DeepSeek-V3 Technical Report. arXiv:2412.19437.
    .. [2] Wang et al. (2024). Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts.
       arXiv:2408.15664.
    .. [3] Fedus, Zoph and Shazeer (2021). Switch Transformers. arXiv:2101.03961.
    """

    load: TensorVariable
    balance_loss: TensorVariable

    def __init__(
        self,
        name: str | None = None,
        *,
        d_model: int,
        hidden_dim: int,
        n_experts: int,
        top_k: int,
        n_shared_experts: int = 0,
        score: Score = "sigmoid",
        selection_bias: bool = False,
        n_groups: int = 1,
        top_k_groups: int = 1,
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        bias_update_factor: float = 0.0,
        aux_loss_coeff: float = 0.0,
    ):
        self.name = resolve_layer_name(name, "MoE")
        if score not in SCORES:
            raise ValueError(
                f"{self.name} got the score {score!r}, by which nothing can be ranked. Pass one of "
                f"{', '.join(SCORES)}."
            )
        _check_counts(self.name, n_experts, top_k, n_groups, top_k_groups)
        if bias_update_factor and not selection_bias:
            raise ValueError(
                f"{self.name} got bias_update_factor={bias_update_factor} without a selection "
                "bias, so there is nothing to update. Pass selection_bias=True."
            )
        self.d_model = d_model
        self.hidden_dim = hidden_dim
        self.n_experts = n_experts
        self.top_k = top_k
        self.score = score
        self.n_groups = n_groups
        self.top_k_groups = top_k_groups
        self.renormalize = renormalize
        self.routed_scaling_factor = routed_scaling_factor
        self.bias_update_factor = bias_update_factor
        self.aux_loss_coeff = aux_loss_coeff
        self.router = Linear(f"{self.name}_router", n_in=d_model, n_out=n_experts, bias=False)
        # Xavier's law for each expert.
        law = NormalInitializer(std=math.sqrt(2 / (d_model + hidden_dim)))
        self.gate, self.up, self.down = (
            trainable_parameter(
                f"{self.name}_{part}_W", shape=shape, initializer=law, layer_name=self.name
            )
            for part, shape in (
                ("gate", (n_experts, d_model, hidden_dim)),
                ("up", (n_experts, d_model, hidden_dim)),
                ("down", (n_experts, hidden_dim, d_model)),
            )
        )
        self.shared = (
            GatedFeedForward(
                f"{self.name}_shared", d_model=d_model, hidden_dim=n_shared_experts * hidden_dim
            )
            if n_shared_experts
            else None
        )
        self.bias: NonTrainableParameter | None = (
            non_trainable(
                np.zeros(n_experts, config.floatX),
                name=f"{self.name}_selection_bias",
                layer_name=self.name,
            )
            if selection_bias
            else None
        )

    def __call__(self, x: TensorLike, valid: TensorLike | None = None) -> TensorVariable:
        """Pass each token through its experts.

        Parameters
        ----------
        x : tensor of shape (..., tokens, d_model)
            The tokens.
        valid : boolean tensor of shape (..., tokens), optional
            Which of them count for the load, the balance loss and the update of the bias. Default
            is all.

        Returns
        -------
        tensor of shape (..., tokens, d_model)
            In the dtype of x.

        Raises
        ------
        TypeError
            If x holds no floats, or ``valid`` no booleans.
        ValueError
            If x is not as wide as the layer, or ``valid`` does not have the shape of the tokens.
        """
        x = as_tensor(x)
        check_width(x, self.d_model, self.name)
        if x.type.ndim < 2:
            raise ValueError(
                f"{self.name} got an input of shape {x.type.shape}, which has no axis of tokens. "
                "Pass (..., tokens, width), as in x[None]."
            )
        if valid is not None:
            valid = _checked_valid(as_tensor(valid), x, self.name)
        # In float16 scores would tie that are not equal, and sums over experts round too early.
        dtype = "float64" if x.type.dtype == "float64" else "float32"
        wide = convert(x, dtype)
        project = LinearLayer(n_in=self.d_model, n_out=self.n_experts, bias=False)
        logits = project(wide, convert(floats_of(self.router.W), dtype), name=f"{self.name}_logits")
        choose = RouterLayer(
            top_k=self.top_k,
            score=self.score,
            selection_bias=self.bias is not None,
            n_groups=self.n_groups,
            top_k_groups=self.top_k_groups,
            renormalize=self.renormalize,
            routed_scaling_factor=float(self.routed_scaling_factor),
            bias_update_factor=float(self.bias_update_factor),
        )
        options = [v for v in (self.bias, valid) if v is not None]
        ids, weights, self.load, *_ = choose(logits, *options)
        self.load.name = f"{self.name}_load"
        loss = BalanceLossLayer(score=self.score, coefficient=float(self.aux_loss_coeff))
        counted = [] if valid is None else [valid]
        self.balance_loss = loss(logits, self.load, *counted, name=f"{self.name}_balance_loss")
        experts = [convert(parameter, dtype) for parameter in (self.gate, self.up, self.down)]
        y = ExpertsLayer()(wide, ids, weights, *experts)
        if self.shared is not None:
            y = y + self.shared(wide)
        y = convert(y, x.type.dtype)
        y.name = f"{self.name}_output"
        return y


def build_moe_config(
    dim: int,
    expert_hidden: int,
    num_routed_experts: int,
    top_k_routed: int,
    routed_scaling_factor: float,
    gate_bias_update_factor: float,
    aux_loss_coeff: float = 0.0,
) -> dict[str, Any]:
    """Return the arguments of :class:`MoE` for the mixtures of the Praxis trunk.

    A sigmoid router with a selection bias, weights that sum to one before they are scaled, and one
    shared expert.

    Parameters
    ----------
    dim : int
        Width of the input and of the output.
    expert_hidden : int
        Width inside an expert, the shared one included.
    num_routed_experts : int
        Number of experts to choose from.
    top_k_routed : int
        Number of experts a token passes through besides the shared one.
    routed_scaling_factor : float
        What the weights are multiplied by.
    gate_bias_update_factor : float
        The step of the selection bias.
    aux_loss_coeff : float
        What the balance loss is multiplied by.

    Examples
    --------
    >>> from pytensor_ml.layers import MoE, build_moe_config
    >>> settings = build_moe_config(64, 32, 8, 2, 2.5, 1e-3)
    >>> MoE("moe", **settings).top_k
    2
    """
    return {
        "d_model": dim,
        "hidden_dim": expert_hidden,
        "n_experts": num_routed_experts,
        "top_k": top_k_routed,
        "n_shared_experts": 1,
        "score": "sigmoid",
        "selection_bias": True,
        "renormalize": True,
        "routed_scaling_factor": routed_scaling_factor,
        "bias_update_factor": gate_bias_update_factor,
        "aux_loss_coeff": aux_loss_coeff,
    }


class ConvertLayer(UnaryLayerOp):
    """The op of :func:`convert`; PyTensor's own cast leaves the gradient in the new dtype."""

    __props__ = ("dtype",)

    dtype: str

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        return [inputs[0].astype(self.dtype)]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[0]]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        given: Any = inputs[0]
        return [convert(output_grads[0], given.type.dtype)]


def convert(x: Any, dtype: str) -> TensorVariable:
    """Return ``x`` in another floating dtype."""
    return x if x.type.dtype == dtype else ConvertLayer(dtype=dtype)(x)


class RouterLayer(LayerOp):
    """The op that chooses experts.

    Its inputs are the logits, of shape (..., tokens, n_experts), the bias if ``selection_bias``,
    and which tokens are valid if that is given. Its outputs are the ids and the weights of the
    experts chosen, of shape (..., tokens, top_k), the load of each expert, and the next bias if
    ``bias_update_factor`` is not 0.
    """

    __props__ = (
        "top_k",
        "score",
        "selection_bias",
        "n_groups",
        "top_k_groups",
        "renormalize",
        "routed_scaling_factor",
        "bias_update_factor",
    )

    top_k: int
    score: Score
    selection_bias: bool
    n_groups: int
    top_k_groups: int
    renormalize: bool
    routed_scaling_factor: float
    bias_update_factor: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        logits, bias, valid = self.split_inputs(inputs)
        scores = expert_scores(logits, self.score)
        preferences = scores if bias is None else scores + bias.astype(scores.type.dtype)
        # A token of NaN gets experts like any other.
        preferences = pt.where(pt.isnan(preferences), _minus_infinity(preferences), preferences)
        preferences = limit_groups(preferences, self.n_groups, self.top_k_groups)
        ids = top_k(preferences, self.top_k)
        weights = route_weights(
            scores,
            ids,
            renormalize=self.renormalize,
            factor=self.routed_scaling_factor,
        )
        load = expert_load(ids, valid, logits.type.shape[-1])
        if bias is None or not self.bias_update_factor:
            return [ids, weights, load]
        return [ids, weights, load, updated_bias(bias, load, self.bias_update_factor)]

    def split_inputs(
        self, inputs: Sequence[Any]
    ) -> tuple[TensorVariable, TensorVariable | None, TensorVariable | None]:
        """Return the logits, the bias or None, and the valid tokens or None."""
        logits, *options = inputs
        bias = options.pop(0) if self.selection_bias else None
        return logits, bias, options[0] if options else None

    def update_map(self) -> dict[int, int]:
        return {3: 1} if self.bias_update_factor else {}

    def for_prediction(self, inputs: list[Variable]) -> list[Variable] | None:
        if not self.bias_update_factor:
            return None
        op: Any = RouterLayer(**{**self._props_dict(), "bias_update_factor": 0.0})
        return [*op(*inputs), inputs[1]]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        chosen = (*shapes[0][:-1], pt.constant(self.top_k, dtype="int64"))
        an_expert = (shapes[0][-1],)
        return [chosen, chosen, an_expert, an_expert][: len(node.outputs)]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [
            [of_logits and output == 1 for output in range(len(node.outputs))]
            for of_logits in (True, *(False for _ in node.inputs[1:]))
        ]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        op = RouterPullback(
            score=self.score,
            renormalize=self.renormalize,
            routed_scaling_factor=self.routed_scaling_factor,
        )
        gradient = op(inputs[0], outputs[0], output_grads[1])
        return [gradient, *(disconnected_type() for _ in inputs[1:])]


class RouterPullback(VariadicLayerOp):
    """The gradient of the weights of :class:`RouterLayer` by the logits.

    Its inputs are the logits, the ids of the experts chosen, and the gradient of the weights.
    """

    __props__ = ("score", "renormalize", "routed_scaling_factor")

    score: Score
    renormalize: bool
    routed_scaling_factor: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        logits, ids, g = inputs
        dtype = logits.type.dtype
        scores = expert_scores(logits, self.score)
        g = g * pt.constant(self.routed_scaling_factor, dtype=dtype)
        if self.renormalize:
            chosen = select(scores, ids)
            total = nonzero_sum(chosen)
            g = (g - pt.sum(chosen / total * g, axis=-1, keepdims=True, acc_dtype=dtype)) / total
        is_chosen = pt.eq(ids[..., None], np.arange(logits.type.shape[-1], dtype="int32"))
        dscores = pt.sum(pt.where(is_chosen, g[..., None], _zero(g)), axis=-2, acc_dtype=dtype)
        if self.score == "softmax":
            mean = pt.sum(dscores * scores, axis=-1, keepdims=True, acc_dtype=dtype)
            return [scores * (dscores - mean)]
        return [dscores * scores * (pt.constant(1, dtype=dtype) - scores)]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[0]]


class BalanceLossLayer(VariadicLayerOp):
    """The op of the balance loss: inputs logits, load and, if given, which tokens are valid."""

    __props__ = ("score", "coefficient")

    score: Score
    coefficient: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        logits, load, *valid = inputs
        shares, fractions = self.shares_and_scaled_fractions(logits, load, *valid)
        over_tokens = tuple(range(logits.type.ndim - 1))
        sums = PreciseSum(axes=over_tokens)(shares)
        return [pt.sum(fractions * sums, acc_dtype=logits.type.dtype)]

    def shares_and_scaled_fractions(
        self, logits: TensorVariable, load: TensorVariable, valid: TensorVariable | None = None
    ) -> tuple[TensorVariable, TensorVariable]:
        """Return each token's scores divided by their sum, and the loss's derivative by them."""
        dtype = logits.type.dtype
        # Sigmoids divided by their sum are the softmax of their logarithms.
        shares = softmax(logits if self.score == "softmax" else -pt.softplus(-logits))
        counted = pt.ones_like(logits[..., :1], dtype="bool") if valid is None else valid[..., None]
        shares = pt.where(counted, shares, _zero(shares))
        n_tokens = pt.sum(counted, dtype="int32", acc_dtype="int32")
        n_choices = pt.sum(load, dtype="int32", acc_dtype="int32")
        fractions = load.astype(dtype) / pt.maximum(n_choices, np.int32(1)).astype(dtype)
        factor = pt.constant(self.coefficient * logits.type.shape[-1], dtype=dtype)
        return shares, fractions * (factor / pt.maximum(n_tokens, np.int32(1)).astype(dtype))

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [()]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        # Choices, which make the load, are not differentiable.
        return [[of_logits] for of_logits in (True, *(False for _ in node.inputs[1:]))]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        op = BalanceLossPullback(score=self.score, coefficient=self.coefficient)
        gradient = op(inputs[0], inputs[1], output_grads[0], *inputs[2:])
        return [gradient, *(disconnected_type() for _ in inputs[1:])]


class BalanceLossPullback(VariadicLayerOp):
    """The gradient of :class:`BalanceLossLayer` by the logits.

    Its inputs are the logits, the load, the gradient of the loss and, if given, which tokens are
    valid.
    """

    __props__ = ("score", "coefficient")

    score: Score
    coefficient: float

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        logits, load, g, *valid = inputs
        dtype = logits.type.dtype
        layer = BalanceLossLayer(score=self.score, coefficient=self.coefficient)
        shares, slopes = layer.shares_and_scaled_fractions(logits, load, *valid)
        mean = pt.sum(shares * slopes, axis=-1, keepdims=True, acc_dtype=dtype)
        gradient = g * shares * (slopes - mean)
        if self.score == "sigmoid":
            gradient = gradient * pt.sigmoid(-logits)
        return [gradient]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [shapes[0]]


class ExpertsLayer(VariadicLayerOp):
    """The op that passes tokens through their experts.

    Its inputs are the tokens, of shape (..., tokens, d_model), the ids and the weights of their
    experts, of shape (..., tokens, top_k), and the gate, up and down weights of all experts. All
    but the ids have one dtype.
    """

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        return [run_experts(*inputs)]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(*shapes[0][:-1], shapes[5][-1])]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[is_float] for is_float in (True, False, True, True, True, True)]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        op: Any = ExpertsPullback()
        dx, *others = op(*inputs, output_grads[0])
        return [dx, disconnected_type(), *others]


class ExpertsPullback(LayerOp):
    """The gradients of :class:`ExpertsLayer` by all its inputs but the ids.

    Its inputs are those of the layer and the gradient of the output.
    """

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        return pull_back_experts(*inputs)

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        x, _, weights, gate, up, down, _ = shapes
        return [x, weights, gate, up, down]


def top_k(scores: TensorVariable, k: int) -> TensorVariable:
    """Return the int32 indices of the ``k`` largest entries of the last axis, the largest first.

    Equal ones come in the order of their indices, on every backend; none of PyTensor's sorts
    promises that. The last axis is static, and has no NaN.
    """
    n = scores.type.shape[-1]
    index = pt.constant(np.arange(n, dtype="int32"))
    is_left: TensorVariable = pt.ones_like(scores, dtype="bool")
    ids: list[TensorVariable] = []
    for _ in range(k):
        rest = pt.where(is_left, scores, _minus_infinity(scores))
        is_largest = pt.eq(rest, pt.max(rest, axis=-1, keepdims=True)) & is_left
        ids.append(pt.min(pt.where(is_largest, index, np.int32(n)), axis=-1))
        is_left = is_left & pt.neq(index, ids[-1][..., None])
    return pt.stack(ids, axis=-1)


def select(scores: TensorVariable, ids: TensorVariable) -> TensorVariable:
    """Return the entries of the last axis of ``scores`` that stand at ``ids``."""
    # A sum with one term: what is not selected must not reach it, not even as a NaN times 0.
    is_chosen = pt.eq(ids[..., None], np.arange(scores.type.shape[-1], dtype="int32"))
    candidates = pt.where(is_chosen, scores[..., None, :], _zero(scores))
    return pt.sum(candidates, axis=-1, acc_dtype=scores.type.dtype)


def limit_groups(scores: TensorVariable, n_groups: int, top_k_groups: int) -> TensorVariable:
    """Put -inf in the place of scores outside of the ``top_k_groups`` best groups."""
    if top_k_groups == n_groups:
        return scores
    n_experts = scores.type.shape[-1]
    size = n_experts // n_groups
    grouped = pt.split_dims(scores, shape=(n_groups, size), axis=scores.type.ndim - 1)
    best_two = select(grouped, top_k(grouped, min(2, size)))
    group_scores = pt.sum(best_two, axis=-1, acc_dtype=scores.type.dtype)
    group_ids = top_k(group_scores, top_k_groups)
    group_of_expert = np.arange(n_experts, dtype="int32") // np.int32(size)
    is_kept = pt.any(pt.eq(group_ids[..., None], group_of_expert), axis=-2)
    return pt.where(is_kept, scores, _minus_infinity(scores))


def route_weights(
    scores: TensorVariable, ids: TensorVariable, *, renormalize: bool, factor: float
) -> TensorVariable:
    """Return the weights of the experts at ``ids``."""
    weights = select(scores, ids)
    if renormalize:
        weights = weights / nonzero_sum(weights)
    return weights * pt.constant(factor, dtype=weights.type.dtype)


def nonzero_sum(scores: TensorVariable) -> TensorVariable:
    """Return the sums of the last axis, with 1 in the place of 0."""
    total = pt.sum(scores, axis=-1, keepdims=True, acc_dtype=scores.type.dtype)
    # Sigmoids of very negative logits are all 0.
    return pt.where(pt.eq(total, 0), pt.constant(1, dtype=total.type.dtype), total)


def expert_scores(logits: TensorVariable, score: Score) -> TensorVariable:
    """Return the scores that the router's logits mean."""
    if score == "softmax":
        return softmax(logits)
    return cast(TensorVariable, pt.sigmoid(logits))


def softmax(x: TensorVariable) -> TensorVariable:
    """Return the softmax of the last axis, which PyTensor's own sums in float64."""
    exponentials = pt.exp(x - pt.max(x, axis=-1, keepdims=True))
    return exponentials / pt.sum(exponentials, axis=-1, keepdims=True, acc_dtype=x.type.dtype)


def expert_load(
    ids: TensorVariable, valid: TensorVariable | None, n_experts: int
) -> TensorVariable:
    """Return how many valid tokens chose each expert."""
    is_chosen = pt.eq(ids[..., None], np.arange(n_experts, dtype="int32"))
    if valid is not None:
        is_chosen = is_chosen & valid[..., None, None]
    over_tokens = tuple(range(is_chosen.type.ndim - 1))
    return pt.sum(is_chosen, axis=over_tokens, dtype="int32", acc_dtype="int32")


def updated_bias(bias: TensorVariable, load: TensorVariable, step: float) -> TensorVariable:
    """Return the bias moved by ``step``: up where an expert's load is below the mean."""
    n_experts = load.type.shape[0]
    total = pt.sum(load, dtype="int32", acc_dtype="int32").astype("float32")
    # Not the mean: its rounding would move an expert that has just the mean load.
    lack = total - load.astype("float32") * np.float32(n_experts)
    return bias + pt.constant(step, dtype=bias.type.dtype) * pt.sign(lack).astype(bias.type.dtype)


def run_experts(
    x: TensorVariable,
    ids: TensorVariable,
    weights: TensorVariable,
    gate: TensorVariable,
    up: TensorVariable,
    down: TensorVariable,
) -> TensorVariable:
    """Return the graph of :class:`ExpertsLayer`, in which every expert sees every token."""
    dtype = weights.type.dtype
    copies = x[..., None, :, :]
    inner = copies @ gate
    outputs = (inner * pt.sigmoid(inner) * (copies @ up)) @ down
    is_chosen = chosen_slots(ids, gate)
    factor = slot_sum(is_chosen, weights)
    # An expert that is not chosen must not reach the sum, not even as a NaN times 0.
    terms = pt.where(pt.any(is_chosen, axis=-1, keepdims=True), factor * outputs, _zero(outputs))
    return pt.sum(terms, axis=-3, acc_dtype=dtype)


def pull_back_experts(
    x: TensorVariable,
    ids: TensorVariable,
    weights: TensorVariable,
    gate: TensorVariable,
    up: TensorVariable,
    down: TensorVariable,
    g: TensorVariable,
) -> list[Variable]:
    """Return the graph of :class:`ExpertsPullback`, in which every expert sees every token."""
    dtype = weights.type.dtype
    copies, g = x[..., None, :, :], g[..., None, :, :]
    inner, value = copies @ gate, copies @ up
    sigmoid = pt.sigmoid(inner)
    silu = inner * sigmoid
    hidden = silu * value
    by_output = g @ down.swapaxes(-1, -2)
    is_chosen = chosen_slots(ids, gate)
    dfactor = pt.sum(by_output * hidden, axis=-1, keepdims=True, acc_dtype=dtype)
    dweights = pt.sum(pt.where(is_chosen, dfactor, _zero(dfactor)), axis=-3, acc_dtype=dtype)
    factor = slot_sum(is_chosen, weights)
    dhidden = pt.where(
        pt.any(is_chosen, axis=-1, keepdims=True), factor * by_output, _zero(by_output)
    )
    one = pt.constant(1, dtype=dtype)
    dinner = dhidden * value * (sigmoid + silu * (one - sigmoid))
    dvalue = dhidden * silu
    dcopies = dinner @ gate.swapaxes(-1, -2) + dvalue @ up.swapaxes(-1, -2)
    over_batch = tuple(range(x.type.ndim - 2))

    def of_parameter(rows: TensorVariable, drows: TensorVariable) -> TensorVariable:
        return pt.sum(rows.swapaxes(-1, -2) @ drows, axis=over_batch, acc_dtype=dtype)

    gradients = (
        pt.sum(dcopies, axis=-3, acc_dtype=dtype),
        dweights,
        of_parameter(copies, dinner),
        of_parameter(copies, dvalue),
        of_parameter(hidden, factor * g),
    )
    return [
        pt.specify_shape(gradient, v.type.shape)
        for gradient, v in zip(gradients, (x, weights, gate, up, down), strict=True)
    ]


def chosen_slots(ids: TensorVariable, gate: TensorVariable) -> TensorVariable:
    """Return which expert stands in which slot: a mask (..., n_experts, tokens, top_k)."""
    experts = np.arange(gate.type.shape[0], dtype="int32")[:, None, None]
    return pt.eq(ids[..., None, :, :], experts)


def slot_sum(is_chosen: TensorVariable, weights: TensorVariable) -> TensorVariable:
    """Return the weight of each expert for each token, of shape (..., n_experts, tokens, 1)."""
    chosen = pt.where(is_chosen, weights[..., None, :, :], _zero(weights))
    return pt.sum(chosen, axis=-1, keepdims=True, acc_dtype=weights.type.dtype)


def _zero(x: TensorVariable) -> TensorVariable:
    return pt.constant(0, dtype=x.type.dtype)


def _minus_infinity(x: TensorVariable) -> TensorVariable:
    return pt.constant(-math.inf, dtype=x.type.dtype)


def _check_counts(name: str, n_experts: int, top_k: int, n_groups: int, top_k_groups: int) -> None:
    if not 1 <= top_k <= n_experts:
        raise ValueError(
            f"{name} got top_k={top_k}, but a token passes through at least one and at most all "
            f"of n_experts={n_experts} experts. Pass a top_k from 1 to {n_experts}."
        )
    if n_groups < 1 or n_experts % n_groups:
        raise ValueError(
            f"{name} cannot split n_experts={n_experts} into n_groups={n_groups} groups of equal "
            "size. Pass a number of groups that divides the number of experts."
        )
    if not 1 <= top_k_groups <= n_groups:
        raise ValueError(
            f"{name} got top_k_groups={top_k_groups}, but it keeps at least one and at most all of "
            f"n_groups={n_groups} groups. Pass a top_k_groups from 1 to {n_groups}."
        )
    n_left = n_experts // n_groups * top_k_groups
    if top_k > n_left:
        raise ValueError(
            f"{name} got top_k={top_k}, but only {n_left} experts are left in top_k_groups="
            f"{top_k_groups} groups of {n_experts // n_groups}, so a token would get experts that "
            "were left out. Keep more groups, or choose fewer experts."
        )


def _checked_valid(valid: TensorVariable, x: TensorVariable, name: str) -> TensorVariable:
    if valid.type.dtype != "bool":
        raise TypeError(
            f"{name} takes which tokens are valid as booleans, but got dtype {valid.type.dtype}, "
            "in which fractions of a token could count. Cast it, as in valid.astype('bool')."
        )
    tokens = x.type.shape[:-1]
    if valid.type.ndim != len(tokens) or any(
        None not in pair and pair[0] != pair[1]
        for pair in zip(valid.type.shape, tokens, strict=True)
    ):
        raise ValueError(
            f"{name} got valid of shape {valid.type.shape} for tokens of shape {tokens}, so it "
            "cannot tell which of them count. Pass one boolean a token."
        )
    return valid
