"""Scaled dot-product attention and the layers around it."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.gradient import disconnected_grad, grad
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.variable import TensorVariable

import pytensor_ml.dispatch  # noqa: F401  (its rewrites put in the kernels)
from pytensor_ml.base import (
    Layer,
    LayerOp,
    VariadicLayer,
    VariadicLayerOp,
    resolve_layer_name,
)
from pytensor_ml.layers.linear import Linear
from pytensor_ml.layers.norm import ZeroCenteredRMSNorm
from pytensor_ml.layers.positional import apply_rotary, check_pairing
from pytensor_ml.state import Initializer


class KVCache(NamedTuple):
    """What attention reads of the tokens before, in slots of a fixed capacity.

    Attributes
    ----------
    keys, values : tensor of shape (batch, n_kv_head, capacity, head_dim)
        Slots from ``length`` on are not yet written.
    length : integer scalar
        Number of slots that are written. Token i of the next call takes slot ``length + i``.
    start : integer tensor of shape (batch,)
        First slot of each row that holds a real token; those before it are padding.
    """

    keys: TensorVariable
    values: TensorVariable
    length: TensorVariable
    start: TensorVariable


class AttentionLayer(VariadicLayerOp):
    """The op of :func:`scaled_dot_product_attention`: inputs q, k, v and, if there is one, mask."""

    __props__ = ("is_causal", "scale", "window", "softcap")

    is_causal: bool
    scale: float
    window: int | None
    softcap: float | None

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        q, k, v, *mask = inputs
        return [attend(q, k, v, *mask, **self._props_dict())]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(*shapes[0][:-1], shapes[2][-1])]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        output_grads: Sequence[Variable],
    ) -> list[Variable]:
        q, k, v, *mask = inputs
        op = AttentionPullback(**self._props_dict())
        gradients = op(q, k, v, output_grads[0], *mask)
        if mask and len(gradients) == 3:
            gradients = [*gradients, pt.zeros_like(mask[0], dtype=config.floatX)]
        return gradients


class AttentionPullback(LayerOp):
    """The gradients of :class:`AttentionLayer` by q, k, v and a floating mask.

    Its inputs are q, k, v, the gradient of the output and, if there is one, the mask.
    """

    __props__ = ("is_causal", "scale", "window", "softcap")

    is_causal: bool
    scale: float
    window: int | None
    softcap: float | None

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        q, k, v, g, *mask = inputs
        y = attend(q, k, v, *mask, **self._props_dict())
        wrt = [x for x in (q, k, v, *mask) if x.type.dtype != "bool"]
        gradients: Any = grad(None, wrt, known_grads={y: g})
        return gradients

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        q, k, v, _, *mask = shapes
        return [q, k, v, *mask][: len(node.outputs)]


def scaled_dot_product_attention(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    *,
    mask: TensorLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> TensorVariable:
    r"""Average values with weights from the products of queries and keys [1]_.

    .. math:: \mathrm{softmax}(s \, q k^\top + m) \, v

    Query heads share key and value heads in contiguous groups [2]_: with 4 and 2 heads, queries
    read keys 0, 0, 1, 1. A query that may see no key gives 0, with zero gradient. A key that no
    query of its batch row may see has no influence, whatever it holds.

    Parameters
    ----------
    q : tensor of shape (..., n_head, n_queries, head_dim)
        Queries.
    k, v : tensors of shape (..., n_kv_head, n_keys, head_dim)
        Keys and values; n_head is a multiple of n_kv_head, and both are static.
    mask : tensor broadcastable to (..., n_head, n_queries, n_keys), optional
        Boolean: true where a query may see a key. Floating: added to the scores, where -inf, and
        NaN too, means that the query may not see the key.
    is_causal : bool
        Whether a query sees no later key. The last query stands at the last key.
    scale : float, optional
        The factor s. Default is 1 / sqrt(head_dim).
    window : int, optional
        How many keys a query sees at the most, going back from its own.
    softcap : float, optional
        Bound c: scores become c tanh(scores / c) before the mask.

    Returns
    -------
    tensor of shape (..., n_head, n_queries, head_dim)
        In the dtype of q.

    Raises
    ------
    TypeError
        If a mask is neither boolean nor floating.
    ValueError
        If head counts are not static or do not divide, batches or widths differ, a mask does not
        broadcast to the scores, a window is not causal, or a number is out of its range.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import scaled_dot_product_attention
    >>> q = pt.tensor("q", shape=(None, 8, 5, 64))
    >>> k, v = (pt.tensor(name, shape=(None, 2, 5, 64)) for name in "kv")
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).type.shape
    (None, 8, 5, 64)

    References
    ----------
    .. [1] Vaswani et al. (2017). Attention Is All You Need. arXiv:1706.03762.
    .. [2] Ainslie et al. (2023). GQA. arXiv:2305.13245.
    """
    q, k, v = _with_equal_batches(as_tensor(q), as_tensor(k), as_tensor(v))
    _check_window(window, is_causal)
    op = AttentionLayer(
        is_causal=is_causal,
        scale=_resolve_scale(scale, q.type.shape[-1]),
        window=window,
        softcap=resolve_softcap(softcap),
    )
    masks = [] if mask is None else [pt.atleast_Nd(_checked_mask(mask, q, k), n=q.type.ndim)]
    if q.type.ndim > 3:
        return op(q, k, v, *masks, name="attention_output")
    # Kernels are for four axes.
    y = op(*(x[None] for x in (q, k, v, *masks)))[0]
    y.name = "attention_output"
    return y


class CachedAttentionLayer(VariadicLayerOp):
    """The op of :func:`cached_attention`: q, the new k and v, then the fields of the cache."""

    __props__ = ("scale", "window", "softcap")

    scale: float
    window: int | None
    softcap: float | None

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        q, k, v, cached_keys, cached_values, length, start = inputs
        keys = pt.concatenate([cached_keys[:, :, :length], k], axis=2)
        values = pt.concatenate([cached_values[:, :, :length], v], axis=2)
        slot = pt.arange(keys.shape[2])
        query_slot = slot[length:, None]
        visible = (slot <= query_slot) & (slot >= start[:, None, None])
        if self.window is not None:
            visible = visible & (query_slot - slot < self.window)
        scores = attention_scores(q, keys, scale=self.scale, softcap=self.softcap)
        weights = masked_softmax(scores, visible[:, None, None])
        y = merge_groups(weights @ _as_wide(values)[..., None, :, :]).astype(q.type.dtype)
        return [pt.specify_shape(y, (*q.type.shape[:-1], v.type.shape[-1]))]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(*shapes[0][:-1], shapes[2][-1])]


def cached_attention(
    q: TensorVariable,
    k: TensorVariable,
    v: TensorVariable,
    cache: KVCache,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> TensorVariable:
    """Attend causally from new tokens to those in a cache and to one another.

    The cache is only read: what it holds from ``cache.length`` on does not matter, and the caller
    writes k and v into it.

    Parameters
    ----------
    q : tensor of shape (batch, n_head, n_new, head_dim)
        Queries of the new tokens.
    k, v : tensors of shape (batch, n_kv_head, n_new, head_dim)
        Their keys and values.
    cache : KVCache
        The tokens before.
    scale, window, softcap
        As for :func:`scaled_dot_product_attention`.

    Returns
    -------
    tensor of shape (batch, n_head, n_new, head_dim)
        In the dtype of q; 0 for a token that is padding.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import KVCache, cached_attention
    >>> q = pt.tensor("q", shape=(1, 8, 1, 64))
    >>> k, v = (pt.tensor(name, shape=(1, 2, 1, 64)) for name in "kv")
    >>> keys, values = (pt.tensor(name, shape=(1, 2, 512, 64)) for name in ("keys", "values"))
    >>> cache = KVCache(keys, values, length=pt.lscalar(), start=pt.zeros((1,), dtype="int64"))
    >>> cached_attention(q, k, v, cache).type.shape
    (1, 8, 1, 64)
    """
    q, k, v = _with_equal_batches(q, k, v)
    _check_window(window, is_causal=True)
    op = CachedAttentionLayer(
        scale=_resolve_scale(scale, q.type.shape[-1]),
        window=window,
        softcap=resolve_softcap(softcap),
    )
    return op(q, k, v, *cache, name="attention_output")


class GroupedQueryAttention(VariadicLayer):
    """What :class:`MultiheadAttention` and :class:`GatedAttention` share, parameters as there."""

    def __init__(
        self,
        name: str | None = None,
        *,
        n_embd: int,
        n_head: int,
        n_kv_head: int | None = None,
        kv_dim: int | None = None,
        fused_qkv: bool = False,
        bias: bool = True,
        is_causal: bool = False,
        out_proj_initializer: Initializer | None = None,
        head_dim: int | None = None,
        out_bias: bool | None = None,
        pairing: str = "half",
        q_norm: Layer | None = None,
        k_norm: Layer | None = None,
        qk_norm_order: Literal["before_rotary", "after_rotary"] = "before_rotary",
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ):
        self.name = resolve_layer_name(name, type(self).__name__)
        check_pairing(pairing)
        if qk_norm_order not in ("before_rotary", "after_rotary"):
            raise ValueError(
                f"{self.name} got qk_norm_order={qk_norm_order!r}, which says neither that norms "
                "come before nor after the rotation. Pass 'before_rotary' or 'after_rotary'."
            )
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        _check_groups(n_head, n_kv_head)
        _check_window(window, is_causal)
        if head_dim is None and n_embd % n_head:
            raise ValueError(
                f"{self.name} cannot split n_embd={n_embd} into n_head={n_head} heads of equal "
                "width. Change one of them, or pass head_dim."
            )
        if fused_qkv and kv_dim is not None:
            raise ValueError(
                f"{self.name} got kv_dim={kv_dim} with fused_qkv=True, but one weight reads one "
                "input. Pass fused_qkv=False."
            )
        self.n_embd = n_embd
        self.n_head = n_head
        self.n_kv_head = n_kv_head
        self.head_dim = n_embd // n_head if head_dim is None else head_dim
        self.is_causal = is_causal
        self.pairing = pairing
        self.fused_qkv = fused_qkv
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.qk_norm_order = qk_norm_order
        n_q, n_kv = n_head * self.head_dim, n_kv_head * self.head_dim
        if fused_qkv:
            self.qkv_proj = Linear(
                f"{self.name}_qkv_proj", n_in=n_embd, n_out=n_q + 2 * n_kv, bias=bias
            )
        else:
            kv_in = n_embd if kv_dim is None else kv_dim
            self.q_proj = Linear(f"{self.name}_q_proj", n_in=n_embd, n_out=n_q, bias=bias)
            self.k_proj = Linear(f"{self.name}_k_proj", n_in=kv_in, n_out=n_kv, bias=bias)
            self.v_proj = Linear(f"{self.name}_v_proj", n_in=kv_in, n_out=n_kv, bias=bias)
        self.out_proj = Linear(
            f"{self.name}_out_proj",
            n_in=n_q,
            n_out=n_embd,
            bias=bias if out_bias is None else out_bias,
            weight_initializer=out_proj_initializer,
        )
        self.scale = _resolve_scale(scale, self.head_dim)
        self.window = window
        self.softcap = resolve_softcap(softcap)

    def attend(
        self,
        x: TensorVariable,
        kv: TensorLike | None,
        *,
        mask: TensorLike | None,
        rope: TensorLike | None,
        cache: KVCache | None,
    ) -> tuple[TensorVariable, TensorVariable, TensorVariable]:
        """Return each head's average of values, and the keys and values of ``x``."""
        if mask is not None and cache is not None:
            raise ValueError(
                f"{self.name} got a mask beside a cache, but attention to a cache is causal and "
                "hides what lies before cache.start, so the mask would be ignored. Leave it out."
            )
        if kv is not None and cache is not None:
            raise ValueError(
                f"{self.name} got kv beside a cache, but attention to a cache is causal among the "
                "tokens of x, whose keys and values follow those in the cache. Leave kv out."
            )
        if rope is not None and (ndim := as_tensor(rope).type.ndim - 2) >= x.type.ndim:
            raise ValueError(
                f"{self.name} got a rotary table of positions with {ndim} axes for an input of "
                f"{x.type.ndim}, so they would be matched to heads. Pass positions of at most "
                f"{x.type.ndim - 1} axes."
            )
        q, k, v = self._project(x, kv)
        q = self._normalized_and_rotated(q, self.q_norm, rope)
        k = self._normalized_and_rotated(k, self.k_norm, rope)
        if cache is None:
            heads = scaled_dot_product_attention(
                q,
                k,
                v,
                mask=mask,
                is_causal=self.is_causal,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
            )
        else:
            heads = cached_attention(
                q, k, v, cache, scale=self.scale, window=self.window, softcap=self.softcap
            )
        return heads, k, v

    def _normalized_and_rotated(
        self, x: TensorVariable, norm: Layer | None, rope: TensorLike | None
    ) -> TensorVariable:
        """Normalize queries or keys and rotate them, in the order of ``qk_norm_order``."""
        if norm is not None and self.qk_norm_order == "before_rotary":
            x = norm(x)
        if rope is not None:
            x = apply_rotary(x, rope, pairing=self.pairing)
        if norm is not None and self.qk_norm_order == "after_rotary":
            x = norm(x)
        return x

    def _project(
        self, x: TensorVariable, kv: TensorLike | None
    ) -> tuple[TensorVariable, TensorVariable, TensorVariable]:
        n_q, n_kv = self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        if self.fused_qkv:
            if kv is not None:
                raise ValueError(
                    f"{self.name} has one weight for queries, keys and values, so it cannot make "
                    "keys and values from another input. Build it with fused_qkv=False."
                )
            qkv = self.qkv_proj(x)
            q, k, v = qkv[..., :n_q], qkv[..., n_q : n_q + n_kv], qkv[..., n_q + n_kv :]
        else:
            source = x if kv is None else as_tensor(kv)
            q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        return (
            _split_heads(q, self.n_head),
            _split_heads(k, self.n_kv_head),
            _split_heads(v, self.n_kv_head),
        )

    def _project_out(self, heads: TensorVariable) -> TensorVariable:
        y = self.out_proj(_join_heads(heads))
        y.name = f"{self.name}_output"
        return y


class MultiheadAttention(GroupedQueryAttention):
    r"""Multi-head attention with grouped queries and, if a table is given, rotary positions.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    n_embd : int
        Width of the input and of the output.
    n_head : int
        Number of query heads.
    n_kv_head : int, optional
        Number of key and value heads. Default is ``n_head``.
    kv_dim : int, optional
        Width of what keys and values are made from, where that is not the input.
    fused_qkv : bool
        Whether queries, keys and values come from one weight.
    bias : bool
        Whether the projections have biases.
    is_causal : bool
        Whether a token sees no later one.
    out_proj_initializer : Initializer, optional
        Law of the output weight.
    head_dim : int, optional
        Width of a head. Default is ``n_embd // n_head``.
    out_bias : bool, optional
        Whether the output projection has a bias. Default is ``bias``.
    pairing : "half" or "adjacent"
        How channels pair under rotation (:func:`~pytensor_ml.layers.positional.apply_rotary`).
    q_norm, k_norm : Layer, optional
        Norms of queries and of keys, each head by itself: build them with ``n_in=head_dim`` [1]_.
    qk_norm_order : "before_rotary" or "after_rotary"
        Whether they come before the rotation or after it.
    scale, window, softcap
        As for :func:`scaled_dot_product_attention`.

    Raises
    ------
    ValueError
        If the head counts do not divide, or an option has no such value.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import MultiheadAttention, rotary_table
    >>> attention = MultiheadAttention("attention", n_embd=64, n_head=4, n_kv_head=2)
    >>> x = pt.tensor("x", shape=(None, 5, 64))
    >>> attention(x, rope=rotary_table(pt.arange(5), rotary_dim=16)).type.shape
    (None, 5, 64)

    References
    ----------
    .. [1] Henry et al. (2020). Query-Key Normalization for Transformers. arXiv:2010.04245.
    """

    def __call__(
        self,
        x: TensorLike,
        kv: TensorLike | None = None,
        mask: TensorLike | None = None,
        *,
        rope: TensorLike | None = None,
        cache: KVCache | None = None,
    ) -> TensorVariable | tuple[TensorVariable, TensorVariable, TensorVariable]:
        """Attend.

        Parameters
        ----------
        x : tensor of shape (..., tokens, n_embd)
            What queries, and without ``kv`` keys and values too, are made from.
        kv : tensor of shape (..., keys, kv_dim), optional
            What keys and values are made from.
        mask : tensor broadcastable to (..., n_head, tokens, keys), optional
            As for :func:`scaled_dot_product_attention`.
        rope : tensor of shape (..., tokens, rotary_dim // 2, 2), optional
            Rotary table that turns queries and keys.
        cache : KVCache, optional
            The tokens before; attention is then causal, and ``cache.start`` takes the place of
            ``mask``.

        Returns
        -------
        y : tensor of shape (..., tokens, n_embd)
        keys, values : tensors of shape (batch, n_kv_head, tokens, head_dim)
            Only with ``cache``: what the caller writes into it.
        """
        heads, k, v = self.attend(as_tensor(x), kv, mask=mask, rope=rope, cache=cache)
        y = self._project_out(heads)
        return y if cache is None else (y, k, v)


class CausalSelfAttention(MultiheadAttention):
    """:class:`MultiheadAttention` in which a token sees itself and the ones before.

    Its parameters are those of the same name there.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import CausalSelfAttention
    >>> CausalSelfAttention(n_embd=64, n_head=4)(pt.tensor("x", shape=(None, 5, 64))).type.shape
    (None, 5, 64)
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        n_embd: int,
        n_head: int,
        n_kv_head: int | None = None,
        bias: bool = True,
        out_proj_initializer: Initializer | None = None,
    ):
        super().__init__(
            name,
            n_embd=n_embd,
            n_head=n_head,
            n_kv_head=n_kv_head,
            bias=bias,
            is_causal=True,
            out_proj_initializer=out_proj_initializer,
        )


class GatedAttention(GroupedQueryAttention):
    r"""Grouped-query attention whose heads are gated by its input [1]_, as in Praxis [2]_.

    .. math:: y = W_o \, [\sigma(g_h(x)) \, \mathrm{head}_h(x)]_h + b_o

    Queries and keys are rotated, then normalized a head at a time by a
    :class:`~pytensor_ml.layers.norm.ZeroCenteredRMSNorm`; every token sees every other that
    ``mask`` lets it see.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    dim : int
        Width of the input and of the output.
    num_heads, num_kv_heads : int
        Number of query heads, and of key and value heads.
    head_dim : int
        Width of a head.
    qk_norm_eps : float
        The epsilon of the norms of queries and keys.
    gate : "head" or "channel"
        Whether there is one gate a head, or one a channel of each head.

    Raises
    ------
    ValueError
        If the head counts do not divide, or there is no such gate.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import GatedAttention, rotary_table
    >>> attention = GatedAttention(
    ...     "attention", dim=64, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm_eps=1e-6
    ... )
    >>> x = pt.tensor("x", shape=(2, 5, 64), dtype="float32")
    >>> attention(x, rotary_table(pt.arange(5), rotary_dim=16)).type.shape
    (2, 5, 64)

    References
    ----------
    .. [1] Qiu et al. (2025). Gated Attention for Large Language Models. arXiv:2505.06708.
    .. [2] NVIDIA NeMo AutoModel, ``nemo_automodel.components.models.praxis.layers``.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm_eps: float,
        gate: Literal["head", "channel"] = "head",
    ):
        name = resolve_layer_name(name, "GatedAttention")
        if gate not in ("head", "channel"):
            raise ValueError(
                f"{name} got gate={gate!r}, which says neither that heads nor that channels are "
                "gated. Pass 'head' or 'channel'."
            )
        super().__init__(
            name,
            n_embd=dim,
            n_head=num_heads,
            n_kv_head=num_kv_heads,
            head_dim=head_dim,
            bias=False,
            out_bias=True,
            is_causal=False,
            q_norm=ZeroCenteredRMSNorm(f"{name}_q_norm", n_in=head_dim, epsilon=qk_norm_eps),
            k_norm=ZeroCenteredRMSNorm(f"{name}_k_norm", n_in=head_dim, epsilon=qk_norm_eps),
            qk_norm_order="after_rotary",
        )
        self.gate_proj = Linear(
            f"{name}_gate_proj",
            n_in=dim,
            n_out=num_heads if gate == "head" else num_heads * head_dim,
            bias=False,
        )

    def __call__(
        self,
        x: TensorLike,
        rope: TensorLike | None,
        mask: TensorLike | None = None,
        *,
        cache: KVCache | None = None,
    ) -> TensorVariable | tuple[TensorVariable, TensorVariable, TensorVariable]:
        """Attend.

        Parameters
        ----------
        x : tensor of shape (..., tokens, dim)
            Its input.
        rope : tensor of shape (..., tokens, rotary_dim // 2, 2) or None
            Rotary table that turns queries and keys.
        mask, cache
            As for :class:`MultiheadAttention`; a boolean mask of shape (tokens, tokens) serves all
            rows and heads.

        Returns
        -------
        y : tensor of shape (..., tokens, dim)
        keys, values : tensors of shape (batch, num_kv_heads, tokens, head_dim)
            Only with ``cache``: what the caller writes into it.
        """
        x = as_tensor(x)
        heads, k, v = self.attend(x, None, mask=mask, rope=rope, cache=cache)
        gates = _split_heads(pt.sigmoid(self.gate_proj(x)), self.n_head)
        y = self._project_out(heads * gates)
        return y if cache is None else (y, k, v)


def attend(
    q: TensorVariable,
    k: TensorVariable,
    v: TensorVariable,
    mask: TensorVariable | None = None,
    *,
    is_causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> TensorVariable:
    """Return the graph of :func:`scaled_dot_product_attention`."""
    visible, bias = mask, None
    if mask is not None and mask.type.dtype != "bool":
        visible = mask > pt.constant(-math.inf, dtype=mask.type.dtype)
        bias = pt.where(visible, mask, pt.zeros_like(mask))
    if is_causal or window is not None:
        lag = _distance_to_last(k)[None, :] - _distance_to_last(q)[:, None]
        near = lag >= 0 if is_causal else None
        if window is not None:
            near = lag < window if near is None else near & (lag < window)
        visible = near if visible is None else visible & near
    if visible is not None and not (mask is None and window is None):
        over_queries_and_heads = (-2, -3) if visible.type.ndim > 2 else -2
        seen = pt.any(visible, axis=over_queries_and_heads)[..., None, :, None]
        k, v = pt.where(seen, k, pt.zeros_like(k)), pt.where(seen, v, pt.zeros_like(v))
    scores = attention_scores(q, k, scale=scale, softcap=softcap)
    n_head, n_kv_head = q.type.shape[-3], k.type.shape[-3]
    if bias is not None:
        scores = scores + _group_heads(bias, n_head, n_kv_head).astype(scores.type.dtype)
    if visible is not None:
        visible = _group_heads(visible, n_head, n_kv_head)
    weights = masked_softmax(scores, visible)
    return merge_groups(weights @ _as_wide(v)[..., None, :, :]).astype(q.type.dtype)


def attention_scores(
    q: TensorVariable, k: TensorVariable, *, scale: float, softcap: float | None
) -> TensorVariable:
    """Return the scaled products, of shape (..., n_kv_head, group, n_queries, n_keys)."""
    q, k = _as_wide(q), _as_wide(k)
    grouped = _group_heads(
        q * pt.constant(scale, dtype=q.type.dtype), q.type.shape[-3], k.type.shape[-3]
    )
    scores = grouped @ k.swapaxes(-1, -2)[..., None, :, :]
    return scores if softcap is None else soft_capped(scores, softcap)


def soft_capped(scores: TensorVariable, softcap: float) -> TensorVariable:
    """Return ``softcap`` times the hyperbolic tangent of ``scores / softcap``."""
    bound = pt.constant(softcap, dtype=scores.type.dtype)
    return bound * pt.tanh(scores / bound)


def masked_softmax(scores: TensorVariable, visible: TensorVariable | None) -> TensorVariable:
    """Softmax over the last axis where ``visible``; 0 elsewhere, also where a row sees nothing."""
    if visible is not None:
        scores = pt.where(visible, scores, pt.constant(-math.inf, dtype=scores.type.dtype))
    # The shift cancels, so it carries no gradient; a row that sees nothing has no maximum.
    shift = disconnected_grad(pt.max(scores, axis=-1, keepdims=True))
    if visible is not None:
        shift = pt.where(pt.isinf(shift), pt.zeros_like(shift), shift)
    weights = pt.exp(scores - shift)
    if visible is not None:
        # Without this a hidden score would get the gradient 0 * inf.
        weights = pt.where(visible, weights, pt.zeros_like(weights))
    total = pt.sum(weights, axis=-1, keepdims=True, acc_dtype=weights.type.dtype)
    if visible is not None:
        total = pt.where(pt.eq(total, 0), pt.ones_like(total), total)
    return weights / total


def merge_groups(x: TensorVariable) -> TensorVariable:
    """Undo the grouping of heads: (..., n_kv_head, group, n, d) to (..., n_head, n, d)."""
    return pt.join_dims(x, start_axis=x.type.ndim - 4, n_axes=2)


def _group_heads(x: TensorVariable, n_head: int, n_kv_head: int) -> TensorVariable:
    """Split the head axis of x, if it has one, into (n_kv_head, group)."""
    if x.type.ndim < 3:
        return x
    if x.type.shape[-3] == 1:
        return x[..., None, :, :]
    if x.type.shape[-3] != n_head:
        raise ValueError(
            f"A mask of shape {x.type.shape} has {x.type.shape[-3]} where the head axis of "
            f"attention with {n_head} heads belongs, so it cannot be matched to heads. Give that "
            f"axis the static length 1 or {n_head}."
        )
    return pt.split_dims(x, shape=(n_kv_head, n_head // n_kv_head), axis=x.type.ndim - 3)


def _distance_to_last(x: TensorVariable) -> TensorVariable:
    """Return how many tokens come after each token of ``x`` of shape (..., tokens, width)."""
    if x.type.shape[-2] is not None:
        return pt.constant(range(x.type.shape[-2] - 1, -1, -1), dtype="int32")
    # Not arange: its runtime length does not lower on every backend.
    one_a_token, one = pt.ones_like(x[..., 0], dtype="int32"), pt.constant(1, dtype="int32")
    for _ in range(x.type.ndim - 2):
        one_a_token = pt.minimum(pt.sum(one_a_token, axis=0, dtype="int32"), one)
    return pt.cumsum(one_a_token)[::-1] - one


def _as_wide(x: TensorVariable) -> TensorVariable:
    """Widen float16, whose products and sums overflow and round too early."""
    return x.astype("float32") if x.type.dtype == "float16" else x


def _resolve_scale(scale: float | None, head_dim: int | None) -> float:
    if scale is not None:
        if not math.isfinite(scale):
            raise ValueError(
                f"A scale of {scale} makes no score finite. Pass a finite number, or None for "
                "1 / sqrt(head_dim)."
            )
        return float(scale)
    if head_dim is None:
        raise ValueError(
            "The scale 1 / sqrt(head_dim) is unknown, since the last axis of the queries has no "
            "static length. Use specify_shape to state it, or pass scale."
        )
    return 1 / math.sqrt(head_dim)


def _check_groups(n_head: int, n_kv_head: int) -> None:
    if n_kv_head < 1 or n_head < 1 or n_head % n_kv_head:
        raise ValueError(
            f"{n_head} query heads cannot share {n_kv_head} key and value heads evenly. "
            "Pass a number of query heads that is a multiple."
        )


def _check_window(window: int | None, is_causal: bool) -> None:
    if window is None:
        return
    if not isinstance(window, int) or not 1 <= window < 2**31:
        raise ValueError(
            f"A window of {window!r} tokens is no number of keys that a query, its own included, "
            "can see. Pass an integer from 1 to 2**31 - 1, or None for no window."
        )
    if not is_causal:
        raise ValueError(
            f"A window of {window} tokens goes back from each query, so without is_causal a query "
            "would see every later key too. Pass is_causal=True."
        )


def resolve_softcap(softcap: float | None) -> float | None:
    """Return the bound as a float, or raise if it bounds nothing."""
    if softcap is None:
        return None
    if not 0 < softcap < math.inf:
        raise ValueError(
            f"A softcap of {softcap} bounds no score, since scores are divided by it. "
            "Pass a positive number, or None for no bound."
        )
    return float(softcap)


def _checked_mask(mask: TensorLike, q: TensorVariable, k: TensorVariable) -> TensorVariable:
    mask = as_tensor(mask)
    if mask.type.dtype != "bool" and not mask.type.dtype.startswith("float"):
        raise TypeError(
            f"The mask has dtype {mask.type.dtype}: as numbers to add, 0 and 1 would hide nothing. "
            "Pass mask.astype('bool') to select keys, or floats to add to the scores."
        )
    scores = (*q.type.shape[:-1], k.type.shape[-2])
    lengths = zip(mask.type.shape[::-1], scores[::-1], strict=False)
    if mask.type.ndim > len(scores) or any(
        None not in pair and pair[0] not in (1, pair[1]) for pair in lengths
    ):
        raise ValueError(
            f"A mask of shape {mask.type.shape} does not broadcast to the scores' shape {scores}, "
            "(..., heads, queries, keys). Give each axis the scores' length, or 1."
        )
    return mask


def _with_equal_batches(
    q: TensorVariable, k: TensorVariable, v: TensorVariable
) -> tuple[TensorVariable, ...]:
    """Check that the three go together, and let each know the batch axes of the others."""
    _check_heads(q, k, v)
    batch: list[int | None] = []
    for lengths in zip(*(x.type.shape[:-3] for x in (q, k, v)), strict=True):
        known = set(lengths) - {None}
        if len(known) > 1:
            raise ValueError(
                f"q, k and v have batch axes of {', '.join(map(str, lengths))}, so rows cannot be "
                "matched. Broadcast them to one length first."
            )
        batch += known or {None}
    return tuple(pt.specify_shape(x, (*batch, *x.type.shape[-3:])) for x in (q, k, v))


def _check_heads(q: TensorVariable, k: TensorVariable, v: TensorVariable) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.type.dtype.startswith("float"):
            raise TypeError(
                f"{name} has dtype {x.type.dtype}, in which averages would be truncated. Cast it, "
                f"as in {name}.astype('float32')."
            )
        if x.type.ndim < 3 or x.type.shape[-3] is None:
            raise ValueError(
                f"Attention needs {name} of shape (..., heads, tokens, head_dim) with a static "
                f"number of heads, got {x.type.shape}. Use specify_shape to state it."
            )
    if not q.type.ndim == k.type.ndim == v.type.ndim:
        raise ValueError(
            f"q, k and v have {q.type.ndim}, {k.type.ndim} and {v.type.ndim} axes, so batches "
            "would be matched to heads. Give all three the same axes."
        )
    _check_groups(q.type.shape[-3], k.type.shape[-3])
    if k.type.shape[-3] != v.type.shape[-3]:
        raise ValueError(
            f"k has {k.type.shape[-3]} heads and v has {v.type.shape[-3]}, so they cannot be "
            "paired. Pass as many of each."
        )
    if None not in (counts := (k.type.shape[-2], v.type.shape[-2])) and counts[0] != counts[1]:
        raise ValueError(
            f"There are {counts[0]} keys and {counts[1]} values, so they cannot be paired. "
            "Pass as many of each."
        )
    if None not in (widths := (q.type.shape[-1], k.type.shape[-1])) and widths[0] != widths[1]:
        raise ValueError(
            f"q has heads of width {widths[0]} and k of width {widths[1]}, so they have no "
            "product. Pass equal widths."
        )


def _split_heads(x: TensorVariable, n_head: int) -> TensorVariable:
    """Turn (..., tokens, n_head * head_dim) into (..., n_head, tokens, head_dim)."""
    x = pt.split_dims(x, shape=(n_head, x.type.shape[-1] // n_head), axis=x.type.ndim - 1)
    return x.swapaxes(-2, -3)


def _join_heads(x: TensorVariable) -> TensorVariable:
    """Turn (..., n_head, tokens, head_dim) into (..., tokens, n_head * head_dim)."""
    return pt.join_dims(x.swapaxes(-2, -3), start_axis=x.type.ndim - 2, n_axes=2)
