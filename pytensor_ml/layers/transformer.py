"""Blocks of a decoder, and stacks of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.activations import Activation
from pytensor_ml.base import Layer, VariadicLayer, resolve_layer_name
from pytensor_ml.layers.attention import KVCache, MultiheadAttention
from pytensor_ml.layers.combinators import call_as_block
from pytensor_ml.layers.dropout import Dropout
from pytensor_ml.layers.feedforward import FeedForward as FeedForward
from pytensor_ml.layers.norm import LayerNorm
from pytensor_ml.layers.positional import RotaryEmbedding
from pytensor_ml.pytensorf.collect import as_output_list
from pytensor_ml.state import Initializer

type BlockOutput = TensorVariable | tuple[TensorVariable, TensorVariable, TensorVariable]


class DecoderBlock(VariadicLayer):
    r"""Attention and a feed-forward, each added to its input.

    .. math::
        h &= x + \mathrm{attention}(\mathrm{norm}(x)) \\
        y &= h + \mathrm{feed\_forward}(\mathrm{norm}(h))

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    attention : MultiheadAttention
        Called with ``(x, mask=, rope=, cache=)``.
    feed_forward : Layer
        Acts on each token.
    attention_norm, feed_forward_norm : Layer
        What normalizes the inputs of the two, or their sums if ``norm_first`` is false.
    norm_first : bool
        Whether to normalize before each branch or after each sum.
    dropout : float
        Probability of dropping an element of a branch's output in training.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        attention: MultiheadAttention,
        feed_forward: Layer,
        attention_norm: Layer,
        feed_forward_norm: Layer,
        norm_first: bool = True,
        dropout: float = 0.0,
    ):
        self.name = resolve_layer_name(name, "DecoderBlock")
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = attention_norm
        self.feed_forward_norm = feed_forward_norm
        self.norm_first = norm_first
        self.attention_dropout = Dropout(f"{self.name}_attn_dropout", p=dropout)
        self.feed_forward_dropout = Dropout(f"{self.name}_ff_dropout", p=dropout)

    def __call__(
        self,
        x: TensorLike,
        rope: TensorLike | None = None,
        mask: TensorLike | None = None,
        *,
        cache: KVCache | None = None,
    ) -> BlockOutput:
        """Run the block.

        Parameters
        ----------
        x : tensor of shape (..., tokens, width)
            Its input.
        rope, mask, cache
            As for :class:`~pytensor_ml.layers.attention.MultiheadAttention`.

        Returns
        -------
        y : tensor of shape (..., tokens, width)
        keys, values : tensors of shape (batch, n_kv_head, tokens, head_dim)
            Only with ``cache``: what the caller writes into it.
        """
        x = as_tensor(x)
        new = None

        def attend(h: TensorVariable) -> TensorVariable:
            nonlocal new
            attended = self.attention(h, mask=mask, rope=rope, cache=cache)
            if isinstance(attended, tuple):
                attended, *new = attended
            return self.attention_dropout(attended)

        def feed(h: TensorVariable) -> TensorVariable:
            return self.feed_forward_dropout(self.feed_forward(h))

        x = self._add(x, attend, self.attention_norm)
        x = self._add(x, feed, self.feed_forward_norm)
        x.name = f"{self.name}_output"
        return x if new is None else (x, new[0], new[1])

    def _add(
        self, x: TensorVariable, branch: Callable[[TensorVariable], TensorVariable], norm: Layer
    ) -> TensorVariable:
        return x + branch(norm(x)) if self.norm_first else norm(x + branch(x))


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
        return self._block(x, rope=rope, mask=mask, cache=cache)


class TransformerStack(VariadicLayer):
    """Blocks one after another, each one op of the graph, sharing one rotary table.

    Blocks that differ only in their parameters are equal ops, which PyTensor compiles once.

    Parameters
    ----------
    name : str, optional
        Name of the layer.
    blocks : sequence of DecoderBlock or TransformerBlock
        The blocks, first to last.
    rotary : RotaryEmbedding, optional
        What makes the table from the positions. Without it positions have no influence.

    Raises
    ------
    ValueError
        If a block pairs channels otherwise than ``rotary``.
    """

    def __init__(
        self,
        name: str | None,
        blocks: Sequence[DecoderBlock | TransformerBlock],
        *,
        rotary: RotaryEmbedding | None,
    ):
        self.name = resolve_layer_name(name, "TransformerStack")
        self.blocks = list(blocks)
        self.rotary = rotary
        for block in self.blocks:
            if rotary is not None and block.attention.pairing != rotary.pairing:
                raise ValueError(
                    f"{self.name} has a rotary embedding of pairing {rotary.pairing!r}, but "
                    f"{block.name} rotates by {block.attention.pairing!r}. Build both with the "
                    "pairing that the weights were trained with."
                )

    def __call__(
        self,
        x: TensorLike,
        positions: TensorLike,
        mask: TensorLike | None = None,
        *,
        tap_blocks: Sequence[int] = (),
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
        tap_blocks : sequence of int
            Indices of the blocks whose outputs are returned too.

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
        rope = self._table(positions, hidden)
        outputs = []
        for block in self.blocks:
            [hidden] = _as_one_op(block, hidden, rope, mask, None)
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
        rope = self._table(positions, hidden)
        new = []
        for block, cache in zip(self.blocks, caches, strict=True):
            hidden, keys, values = _as_one_op(block, hidden, rope, None, cache)
            new.append((keys, values))
        return hidden, new

    def _table(self, positions: TensorLike, x: TensorVariable) -> TensorVariable | None:
        if self.rotary is None:
            return None
        dtype = "float64" if x.type.dtype == "float64" else "float32"
        return self.rotary.table(positions, dtype=dtype)


def _as_one_op(
    block: DecoderBlock | TransformerBlock,
    x: TensorVariable,
    rope: TensorVariable | None,
    mask: TensorVariable | None,
    cache: KVCache | None,
) -> list[Any]:
    def call(
        x: TensorVariable,
        rope: TensorVariable | None,
        mask: TensorVariable | None,
        *cache: TensorVariable,
    ) -> list[TensorVariable]:
        result = block(x, rope=rope, mask=mask, cache=KVCache(*cache) if cache else None)
        y, *new = result if isinstance(result, tuple) else (result,)
        # A block whose input had another static shape than this one's would be another op.
        if y.type.shape != x.type.shape:
            y = pt.specify_shape(y, x.type.shape)
            y.name = f"{block.name}_output"
        return [y, *new]

    return as_output_list(
        call_as_block(call, x, rope, mask, *(cache or ()), name=type(block).__name__)
    )
