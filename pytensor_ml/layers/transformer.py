"""Blocks of a decoder, and stacks of them."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.scalar import upcast
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.activations import Activation
from pytensor_ml.base import Layer, VariadicLayer, VariadicLayerOp, resolve_layer_name, sharing_ops
from pytensor_ml.layers.attention import (
    GatedAttention,
    GroupedQueryAttention,
    KVCache,
    MultiheadAttention,
)
from pytensor_ml.layers.combinators import call_as_block
from pytensor_ml.layers.dropout import Dropout
from pytensor_ml.layers.feedforward import FeedForward as FeedForward
from pytensor_ml.layers.feedforward import GatedFeedForward
from pytensor_ml.layers.linear import Linear
from pytensor_ml.layers.moe import MoE
from pytensor_ml.layers.norm import LayerNorm, ZeroCenteredRMSNorm
from pytensor_ml.layers.positional import IntegerRotaryEmbedding, RotaryEmbedding
from pytensor_ml.params import NonTrainableParameter, non_trainable
from pytensor_ml.pytensorf.collect import as_output_list
from pytensor_ml.state import Initializer, ZeroInitializer

type TableBuilder = RotaryEmbedding | IntegerRotaryEmbedding
type ModulationDtype = Literal["mixed", "float32", "float16"]
type BlockOutput = TensorVariable | tuple[TensorVariable, TensorVariable, TensorVariable]


class DecoderBlock(VariadicLayer):
    r"""Attention and a feed-forward, each added to its input.

    .. math::
        h &= x + \mathrm{attention}(s \, \mathrm{norm}(x)) \\
        y &= h + \mathrm{feed\_forward}(s \, \mathrm{norm}(h))

    where norms may also follow the two branches [1]_, and x may be modulated first [2]_.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    attention : MultiheadAttention or GatedAttention
        Called with ``(x, mask=, rope=, cache=)``.
    feed_forward : Layer or MoE
        Acts on each token.
    attention_norm, feed_forward_norm : Layer
        What normalizes the inputs of the two, or their sums if ``norm_first`` is false.
    post_attention_norm, post_feed_forward_norm : Layer, optional
        What normalizes the outputs of the two before they are added.
    branch_scale : float or NonTrainableParameter
        The factor s. Other than 1 it is kept in a parameter that is not trained, so that blocks of
        different factors are equal ops.
    modulation_dim : int, optional
        Width of a conditioning, from which a linear ``modulator`` makes the shift and the scale
        of the block's input (:func:`modulate`). It starts as the identity.
    modulation_dtype : "mixed", "float32" or "float16"
        As for :func:`modulate`.
    norm_first : bool
        Whether to normalize before each branch or after each sum.
    dropout : float
        Probability of dropping an element of a branch's output in training.
    rotary_kind : str, optional
        Which of several rotary tables the block takes (:class:`TransformerStack`).

    Raises
    ------
    ValueError
        If the modulation has no such dtype.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import DecoderBlock, GatedFeedForward, MultiheadAttention, RMSNorm
    >>> block = DecoderBlock(
    ...     "block",
    ...     attention=MultiheadAttention(n_embd=64, n_head=4, n_kv_head=2, is_causal=True),
    ...     feed_forward=GatedFeedForward(d_model=64, hidden_dim=128),
    ...     attention_norm=RMSNorm(n_in=64),
    ...     feed_forward_norm=RMSNorm(n_in=64),
    ... )
    >>> block(pt.tensor("x", shape=(None, None, 64))).type.shape
    (None, None, 64)

    References
    ----------
    .. [1] Gemma Team (2024). Gemma 2: Improving Open Language Models at a Practical Size.
       arXiv:2408.00118.
    .. [2] Perez et al. (2018). FiLM: Visual Reasoning with a General Conditioning Layer.
       arXiv:1709.07871.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        attention: GroupedQueryAttention,
        feed_forward: Layer | MoE,
        attention_norm: Layer,
        feed_forward_norm: Layer,
        post_attention_norm: Layer | None = None,
        post_feed_forward_norm: Layer | None = None,
        branch_scale: float | NonTrainableParameter = 1.0,
        modulation_dim: int | None = None,
        modulation_dtype: ModulationDtype = "mixed",
        norm_first: bool = True,
        dropout: float = 0.0,
        rotary_kind: str | None = None,
    ):
        self.name = resolve_layer_name(name, "DecoderBlock")
        _check_modulation_dtype(modulation_dtype)
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = attention_norm
        self.feed_forward_norm = feed_forward_norm
        self.post_attention_norm = post_attention_norm
        self.post_feed_forward_norm = post_feed_forward_norm
        if not isinstance(branch_scale, NonTrainableParameter) and branch_scale != 1:
            branch_scale = non_trainable(
                np.asarray(branch_scale, config.floatX),
                f"{self.name}_branch_scale",
                layer_name=self.name,
            )
        self.branch_scale = branch_scale
        self.modulation_dtype = modulation_dtype
        self.modulator = (
            None
            if modulation_dim is None
            else Linear(
                f"{self.name}_modulator",
                n_in=modulation_dim,
                n_out=2 * attention.n_embd,
                weight_initializer=ZeroInitializer(),
                bias_initializer=IdentityModulationInitializer(),
            )
        )
        self.norm_first = norm_first
        self.attention_dropout = Dropout(f"{self.name}_attn_dropout", p=dropout)
        self.feed_forward_dropout = Dropout(f"{self.name}_ff_dropout", p=dropout)
        self.rotary_kind = rotary_kind

    def __call__(
        self,
        x: TensorLike,
        rope: TensorLike | None = None,
        mask: TensorLike | None = None,
        x_mod: TensorLike | None = None,
        *,
        valid: TensorLike | None = None,
        cache: KVCache | None = None,
    ) -> BlockOutput:
        """Run the block.

        Parameters
        ----------
        x : tensor of shape (..., tokens, width)
            Its input.
        rope, mask, cache
            As for :class:`~pytensor_ml.layers.attention.MultiheadAttention`.
        x_mod : tensor of shape (..., tokens, modulation_dim), optional
            Conditioning of each token, for a block that has a modulator.
        valid : boolean tensor of shape (..., tokens), optional
            False where a mixture of experts is not to count a token, which is padding.

        Returns
        -------
        y : tensor of shape (..., tokens, width)
        keys, values : tensors of shape (batch, n_kv_head, tokens, head_dim)
            Only with ``cache``: what the caller writes into it.

        Raises
        ------
        ValueError
            If there is a modulator and no conditioning, or the reverse.
        """
        x = as_tensor(x)
        if (x_mod is None) != (self.modulator is None):
            raise ValueError(
                f"{self.name} was {'built without' if self.modulator is None else 'built with'} "
                f"modulation_dim and called {'without' if x_mod is None else 'with'} x_mod, so "
                "the conditioning would have no influence. Give both, or neither."
            )
        if x_mod is not None and self.modulator is not None:
            both, width = self.modulator(x_mod), self.attention.n_embd
            x = modulate(x, both[..., :width], both[..., width:], dtype=self.modulation_dtype)
        new = None

        def attend(h: TensorVariable) -> TensorVariable:
            nonlocal new
            attended = self.attention(h, mask=mask, rope=rope, cache=cache)
            if isinstance(attended, tuple):
                attended, *new = attended
            return self.attention_dropout(attended)

        def feed(h: TensorVariable) -> TensorVariable:
            if isinstance(self.feed_forward, MoE):
                h = self.feed_forward(h, valid=valid)
            else:
                h = self.feed_forward(h)
            return self.feed_forward_dropout(h)

        x = self._add(x, attend, self.attention_norm, self.post_attention_norm)
        x = self._add(x, feed, self.feed_forward_norm, self.post_feed_forward_norm)
        x.name = f"{self.name}_output"
        return x if new is None else (x, new[0], new[1])

    def _add(
        self,
        x: TensorVariable,
        branch: Callable[[TensorVariable], TensorVariable],
        norm: Layer,
        post_norm: Layer | None,
    ) -> TensorVariable:
        h = norm(x) if self.norm_first else x
        if isinstance(self.branch_scale, NonTrainableParameter):
            h = h * self.branch_scale.astype(h.type.dtype)
        h = branch(h)
        widths = {x.type.shape[-1], h.type.shape[-1]} - {None}
        if len(widths) > 1:
            raise ValueError(
                f"{self.name} has an input of width {x.type.shape[-1]} and a branch of width "
                f"{h.type.shape[-1]}, so they have no sum. Build both for one width."
            )
        if post_norm is not None:
            h = post_norm(h)
        return x + h if self.norm_first else norm(x + h)


class ModulationLayer(VariadicLayerOp):
    """The op of :func:`modulate`: inputs x, shift and scale, of one rank."""

    __props__ = ("dtype",)

    dtype: str

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        x, *_ = inputs
        dtype = "float16" if self.dtype == "float16" else upcast("float32", x.type.dtype)
        wide, shift, scale = (v.astype(dtype) for v in inputs)
        return [pt.specify_shape((wide * scale + shift).astype(x.type.dtype), x.type.shape)]

    def infer_shape(self, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        return [shapes[0]]


class IdentityModulationInitializer(Initializer):
    """Shifts of 0, then as many scales of 1."""

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        return np.repeat(np.array([0, 1], dtype), shape[0] // 2)


def modulate(
    x: TensorLike, shift: TensorLike, scale: TensorLike, dtype: ModulationDtype = "mixed"
) -> TensorVariable:
    r"""Return :math:`x \odot \mathrm{scale} + \mathrm{shift}` in the dtype of x.

    Parameters
    ----------
    x : tensor of shape (..., tokens, width)
        What to modulate.
    shift, scale : tensors broadcastable to x
        What to add and to multiply by.
    dtype : "mixed", "float32" or "float16"
        What to compute in: at least float32, or float16, in which "float16" stands in for the
        bfloat16 that PyTensor has not.

    Returns
    -------
    tensor of shape (..., tokens, width)

    Raises
    ------
    TypeError
        If x holds no floats.
    ValueError
        If there is no such dtype.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import modulate
    >>> x = pt.tensor("x", shape=(None, None, 64), dtype="float16")
    >>> y = modulate(x, pt.fvector("shift"), pt.fvector("scale"))
    >>> y.type.dtype, y.type.shape
    ('float16', (None, None, 64))
    """
    _check_modulation_dtype(dtype)
    x, shift, scale = as_tensor(x), as_tensor(shift), as_tensor(scale)
    if not x.type.dtype.startswith("float"):
        raise TypeError(
            f"x has dtype {x.type.dtype}, in which what is modulated would be truncated. Cast it, "
            "as in x.astype('float32')."
        )
    shift, scale = pt.atleast_Nd(shift, n=x.type.ndim), pt.atleast_Nd(scale, n=x.type.ndim)
    return ModulationLayer(dtype=dtype)(x, shift, scale, name="modulated")


def _check_modulation_dtype(dtype: str) -> None:
    if dtype not in ("mixed", "float32", "float16"):
        raise ValueError(
            f"A modulation cannot be computed in {dtype!r}. Pass 'mixed', 'float32' or 'float16'."
        )


class TransformerBlock(VariadicLayer):
    r"""A :class:`DecoderBlock` of multi-head attention, a plain feed-forward and layer norms.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    d_model : int
        Width of the input and of the output.
    n_head, n_kv_head, fused_qkv, is_causal
        As for :class:`~pytensor_ml.layers.attention.MultiheadAttention`.
    mlp_ratio, activation
        As for :class:`~pytensor_ml.layers.feedforward.FeedForward`.
    norm_first : bool
        Whether to normalize before each branch or after each sum.
    dropout : float
        Probability of dropping an element of a branch's output in training.
    bias : bool
        Whether the projections have biases.
    epsilon : float
        The :math:`\epsilon` of both norms.
    residual_initializer : Initializer, optional
        Law of the weights that write to the sums.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import TransformerBlock
    >>> TransformerBlock(d_model=64, n_head=4)(pt.tensor("x", shape=(None, 5, 64))).type.shape
    (None, 5, 64)
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        d_model: int,
        n_head: int,
        mlp_ratio: int = 4,
        activation: Activation | None = None,
        norm_first: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
        is_causal: bool = False,
        n_kv_head: int | None = None,
        fused_qkv: bool = False,
        epsilon: float = 1e-5,
        residual_initializer: Initializer | None = None,
    ):
        self.name = resolve_layer_name(name, "TransformerBlock")
        self.attn = self.attention = MultiheadAttention(
            f"{self.name}_attn",
            n_embd=d_model,
            n_head=n_head,
            n_kv_head=n_kv_head,
            fused_qkv=fused_qkv,
            bias=bias,
            is_causal=is_causal,
            out_proj_initializer=residual_initializer,
        )
        self.ff = FeedForward(
            f"{self.name}_ff",
            d_model=d_model,
            mlp_ratio=mlp_ratio,
            activation=activation,
            bias=bias,
            fc_out_initializer=residual_initializer,
        )
        self.norm1 = LayerNorm(f"{self.name}_norm1", n_in=d_model, epsilon=epsilon)
        self.norm2 = LayerNorm(f"{self.name}_norm2", n_in=d_model, epsilon=epsilon)
        self._block = DecoderBlock(
            self.name,
            attention=self.attn,
            feed_forward=self.ff,
            attention_norm=self.norm1,
            feed_forward_norm=self.norm2,
            norm_first=norm_first,
            dropout=dropout,
        )

    def __call__(
        self,
        x: TensorLike,
        mask: TensorLike | None = None,
        *,
        rope: TensorLike | None = None,
        cache: KVCache | None = None,
    ) -> BlockOutput:
        """Run the block; see :meth:`DecoderBlock.__call__`."""
        return self._block(x, rope=rope, mask=mask, cache=cache)

    @property
    def rotary_kind(self) -> str | None:
        return self._block.rotary_kind


class TransformerStack(VariadicLayer):
    """Blocks one after another, each one op of the graph, sharing rotary tables.

    Blocks that differ only in their parameters are equal ops, which PyTensor compiles once.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    blocks : sequence of DecoderBlock or TransformerBlock
        The blocks, first to last.
    rotary : RotaryEmbedding, IntegerRotaryEmbedding, mapping from str to these, or None
        What makes the table from the positions. Of a mapping each block takes the one that its
        ``rotary_kind`` names. Without it positions have no influence.
    recompute : bool
        Whether gradients compute each block's forward pass anew from its input, so that training
        keeps one input a block instead of all that the gradient reads, for a third more work.

    Raises
    ------
    ValueError
        If a block pairs channels otherwise than its rotary embedding, or names one that is not
        there.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import TransformerBlock, TransformerStack
    >>> blocks = [TransformerBlock(f"block_{i}", d_model=64, n_head=4) for i in range(3)]
    >>> stack = TransformerStack("stack", blocks, rotary=None)
    >>> y, [tap] = stack(pt.tensor("x", shape=(None, 5, 64)), pt.arange(5), tap_blocks=[0])
    >>> y.type.shape, tap.name
    ((None, 5, 64), 'block_0_output')
    """

    def __init__(
        self,
        name: str | None,
        blocks: Sequence[DecoderBlock | TransformerBlock],
        *,
        rotary: TableBuilder | Mapping[str, TableBuilder] | None,
        recompute: bool = False,
    ):
        self.name = resolve_layer_name(name, "TransformerStack")
        self.blocks = list(blocks)
        self.recompute = recompute
        self.rotary = rotary
        for block in self.blocks:
            builder = self._rotary_of(block)
            pairing = builder.pairing if isinstance(builder, RotaryEmbedding) else "half"
            if builder is not None and block.attention.pairing != pairing:
                raise ValueError(
                    f"{self.name} has a rotary embedding of pairing {pairing!r}, but "
                    f"{block.name} rotates by {block.attention.pairing!r}. Build both with the "
                    "pairing that the weights were trained with."
                )

    def __call__(
        self,
        x: TensorLike,
        positions: TensorLike,
        mask: TensorLike | None = None,
        x_mod: TensorLike | None = None,
        tap_blocks: Sequence[int] = (),
        *,
        valid: TensorLike | None = None,
    ) -> tuple[TensorVariable, list[TensorVariable]]:
        """Run every block.

        Parameters
        ----------
        x : tensor of shape (..., tokens, width)
            Input of the first block.
        positions : integer tensor of shape (..., tokens) or (tokens,)
            Position of each token.
        mask : tensor, optional
            As for :class:`~pytensor_ml.layers.attention.MultiheadAttention`.
        x_mod : tensor of shape (..., tokens, modulation_dim), optional
            Conditioning of each token, for blocks that have a modulator.
        tap_blocks : sequence of int
            Indices of the blocks whose outputs are returned too.
        valid : boolean tensor of shape (..., tokens), optional
            False where mixtures of experts are not to count a token, which is padding. It hides
            nothing from attention; that is the mask's part.

        Returns
        -------
        y : tensor of shape (..., tokens, width)
        taps : list of tensor
            Outputs of the tapped blocks, in the order asked for.

        Raises
        ------
        ValueError
            If a tapped block does not exist.
        """
        unknown = [i for i in tap_blocks if not 0 <= i < len(self.blocks)]
        if unknown:
            raise ValueError(
                f"{self.name} has blocks 0 to {len(self.blocks) - 1}, so it cannot tap {unknown}. "
                "Name blocks that it has."
            )
        hidden = as_tensor(x)
        mask = None if mask is None else as_tensor(mask)
        x_mod = None if x_mod is None else as_tensor(x_mod)
        valid = None if valid is None else as_tensor(valid)
        ropes = self._tables(positions, hidden)
        outputs = []
        with sharing_ops():
            for block, rope in zip(self.blocks, ropes, strict=True):
                [hidden] = _as_one_op(
                    block,
                    hidden,
                    rope,
                    mask=mask,
                    x_mod=x_mod,
                    valid=valid,
                    recompute=self.recompute,
                )
                outputs.append(hidden)
        return hidden, [outputs[i] for i in tap_blocks]

    def extend(
        self, x: TensorLike, positions: TensorLike, caches: Sequence[KVCache]
    ) -> tuple[TensorVariable, list[tuple[TensorVariable, TensorVariable]]]:
        """Run every block on new tokens that follow the ones in the caches.

        Parameters
        ----------
        x : tensor of shape (batch, tokens, width)
            Input of the first block.
        positions : integer tensor of shape (batch, tokens)
            Position of each token.
        caches : sequence of KVCache
            One a block.

        Returns
        -------
        y : tensor of shape (batch, tokens, width)
        new : list of (keys, values)
            For each block what the caller writes into its cache.
        """
        hidden = as_tensor(x)
        ropes = self._tables(positions, hidden)
        new = []
        with sharing_ops():
            for block, rope, cache in zip(self.blocks, ropes, caches, strict=True):
                hidden, keys, values = _as_one_op(block, hidden, rope, cache=cache)
                new.append((keys, values))
        return hidden, new

    def _rotary_of(self, block: DecoderBlock | TransformerBlock) -> TableBuilder | None:
        if not isinstance(self.rotary, Mapping):
            return self.rotary
        kind = block.rotary_kind
        if kind is None or kind not in self.rotary:
            raise ValueError(
                f"{block.name} names the rotary kind {kind!r}, but {self.name} has "
                f"{', '.join(map(repr, self.rotary))}. Build the block with one of these."
            )
        return self.rotary[kind]

    def _tables(self, positions: TensorLike, x: TensorVariable) -> list[TensorVariable | None]:
        """Return the table of each block, those of one kind being one variable."""
        dtype = "float64" if x.type.dtype == "float64" else "float32"
        tables: dict[TableBuilder | None, TensorVariable | None] = {None: None}
        for builder in map(self._rotary_of, self.blocks):
            if builder is None or builder in tables:
                continue
            if isinstance(builder, RotaryEmbedding):
                tables[builder] = builder.table(positions, dtype=dtype)
            else:
                tables[builder] = builder(positions)
        return [tables[self._rotary_of(block)] for block in self.blocks]


def praxis_stack(
    name: str | None = None,
    *,
    depth: int,
    dense_blocks: Collection[int],
    dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qk_norm_eps: float,
    norm_eps: float,
    dense_hidden: int,
    rotary: IntegerRotaryEmbedding,
    moe: Mapping[str, Any] | None = None,
    modulation_dim: int | None = None,
    modulation_dtype: ModulationDtype = "mixed",
    dtype: str | None = None,
) -> TransformerStack:
    r"""Build the trunk of the Praxis video backbone [1]_.

    Every block is a pre-norm :class:`DecoderBlock` with zero-centered norms, a
    :class:`~pytensor_ml.layers.attention.GatedAttention` and the branch scale
    :math:`1 / \sqrt{i}`, where i counts blocks from 1.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    depth : int
        Number of blocks.
    dense_blocks : collection of int
        Indices, from 0, of the blocks with a dense feed-forward; the others have a mixture of
        experts.
    dim : int
        Width of the input and of the output.
    num_heads, num_kv_heads, head_dim, qk_norm_eps
        As for :class:`~pytensor_ml.layers.attention.GatedAttention`.
    norm_eps : float
        The epsilon of the blocks' norms.
    dense_hidden : int
        Width inside the dense feed-forwards.
    rotary : IntegerRotaryEmbedding
        What makes the one rotary table, of ``head_dim`` channels.
    moe : mapping, optional
        Settings of the mixtures, as :func:`~pytensor_ml.layers.moe.build_moe_config` gives them.
    modulation_dim, modulation_dtype
        As for :class:`DecoderBlock`.
    dtype : str, optional
        Dtype of the parameters. Default is floatX.

    Returns
    -------
    TransformerStack

    Raises
    ------
    ValueError
        If a dense block does not exist, a mixture has no settings, or the rotary table has another
        width than the heads.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import IntegerRotaryEmbedding, build_moe_config, praxis_stack
    >>> trunk = praxis_stack(
    ...     depth=3,
    ...     dense_blocks=(0, 2),
    ...     dim=64,
    ...     num_heads=4,
    ...     num_kv_heads=2,
    ...     head_dim=16,
    ...     qk_norm_eps=1e-6,
    ...     norm_eps=1e-6,
    ...     dense_hidden=256,
    ...     rotary=IntegerRotaryEmbedding(dim=16, effective_dim=12, base=10_000, table_size=1024),
    ...     moe=build_moe_config(
    ...         dim=64,
    ...         expert_hidden=32,
    ...         num_routed_experts=8,
    ...         top_k_routed=2,
    ...         routed_scaling_factor=2.5,
    ...         gate_bias_update_factor=1e-3,
    ...     ),
    ... )
    >>> y, taps = trunk(pt.tensor("x", shape=(None, 5, 64)), 2_000_000 + pt.arange(5))
    >>> y.type.shape
    (None, 5, 64)

    References
    ----------
    .. [1] NVIDIA NeMo AutoModel, ``nemo_automodel.components.models.praxis.layers``.
    """
    name = resolve_layer_name(name, "praxis_stack")
    if unknown := sorted(set(dense_blocks) - set(range(depth))):
        raise ValueError(
            f"{name} has blocks 0 to {depth - 1}, so {unknown} cannot be dense. Name blocks that "
            "it has."
        )
    if moe is None and len(set(dense_blocks)) < depth:
        raise ValueError(
            f"{name} has {depth - len(set(dense_blocks))} blocks with a mixture of experts and no "
            "settings for it. Pass moe=build_moe_config(...), or make every block dense."
        )
    if rotary.dim != head_dim:
        raise ValueError(
            f"{name} has heads of width {head_dim} and a rotary embedding of {rotary.dim} "
            f"channels. Build it with dim={head_dim}; effective_dim says how many rotate."
        )

    def block(i: int) -> DecoderBlock:
        own = f"{name}_blocks_{i}"
        return DecoderBlock(
            own,
            attention=GatedAttention(
                f"{own}_attention",
                dim=dim,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                qk_norm_eps=qk_norm_eps,
            ),
            feed_forward=(
                GatedFeedForward(f"{own}_ffn", d_model=dim, hidden_dim=dense_hidden)
                if moe is None or i in dense_blocks
                else MoE(f"{own}_moe", **moe)
            ),
            attention_norm=ZeroCenteredRMSNorm(f"{own}_ln_in", n_in=dim, epsilon=norm_eps),
            feed_forward_norm=ZeroCenteredRMSNorm(f"{own}_ln_out", n_in=dim, epsilon=norm_eps),
            # The first block's factor of 1 is a parameter too: a checkpoint holds it.
            branch_scale=non_trainable(
                np.asarray(1 / math.sqrt(i + 1), config.floatX), f"{own}_s", layer_name=own
            ),
            modulation_dim=modulation_dim,
            modulation_dtype=modulation_dtype,
        )

    with config.change_flags(floatX=config.floatX if dtype is None else dtype):
        return TransformerStack(name, [block(i) for i in range(depth)], rotary=rotary)


def _as_one_op(
    block: DecoderBlock | TransformerBlock,
    x: TensorVariable,
    rope: TensorVariable | None,
    *,
    mask: TensorVariable | None = None,
    x_mod: TensorVariable | None = None,
    valid: TensorVariable | None = None,
    cache: KVCache | None = None,
    recompute: bool = False,
) -> list[Any]:
    moe = getattr(block, "feed_forward", None)
    watched = ("load", "balance_loss") if isinstance(moe, MoE) else ()
    # An input that nothing reads would make a dense block another op.
    valid = valid if watched else None

    def call(
        x: TensorVariable,
        rope: TensorVariable | None,
        mask: TensorVariable | None,
        x_mod: TensorVariable | None,
        valid: TensorVariable | None,
        *cache: TensorVariable,
    ) -> list[TensorVariable]:
        given = {"x_mod": x_mod, "valid": valid}
        options = {name: value for name, value in given.items() if value is not None}
        new_cache = KVCache(*cache) if cache else None
        result = block(x, rope=rope, mask=mask, cache=new_cache, **options)
        y, *new = result if isinstance(result, tuple) else (result,)
        # A block whose input had another static shape than this one's would be another op.
        if y.type.shape != x.type.shape:
            y = pt.specify_shape(y, x.type.shape)
            y.name = f"{block.name}_output"
        return [y, *new, *(getattr(moe, what) for what in watched)]

    outputs = as_output_list(
        call_as_block(
            call,
            x,
            rope,
            mask,
            x_mod,
            valid,
            *(cache or ()),
            name=type(block).__name__,
            recompute=recompute,
        )
    )
    # What the call left on the layer are variables inside the op.
    for what in reversed(watched):
        setattr(moe, what, outputs.pop())
    return outputs
