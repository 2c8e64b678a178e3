"""A decoder-only language model, whatever its family."""

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.tensor import TensorLike, as_tensor
from pytensor.tensor.variable import TensorVariable

from pytensor_ml.base import Layer, VariadicLayer, resolve_layer_name
from pytensor_ml.layers.attention import KVCache, resolve_softcap, soft_capped
from pytensor_ml.layers.embedding import Embedding
from pytensor_ml.layers.linear import Linear
from pytensor_ml.layers.transformer import TransformerStack


class CausalLM(VariadicLayer):
    r"""Token ids to the logits of the token after each.

    .. math:: \mathrm{head}(\mathrm{norm}(\mathrm{stack}(s \, \mathrm{embedding}(ids))))

    Parameters
    ----------
    name : str, optional
        Name of the model.
    embedding : Embedding
        Table of the vocabulary.
    stack : TransformerStack
        Blocks with causal attention.
    norm : Layer
        Acts on the last block's output.
    head : Linear, optional
        Output head. Default is the embedding's table, transposed.
    max_positions : int
        Largest number of tokens that the model was made for.
    embedding_scale : float
        The factor s, rounded to the dtype of the embedding.
    logit_softcap : float, optional
        Bound c: logits become c tanh(logits / c).

    Raises
    ------
    ValueError
        If the bound is not positive and finite.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pytensor_ml.layers import Embedding, RMSNorm, TransformerBlock, TransformerStack
    >>> from pytensor_ml.models import CausalLM
    >>> blocks = [TransformerBlock(d_model=64, n_head=4, is_causal=True)]
    >>> model = CausalLM(
    ...     embedding=Embedding(n_embeddings=100, n_features=64),
    ...     stack=TransformerStack("stack", blocks, rotary=None),
    ...     norm=RMSNorm(n_in=64),
    ...     max_positions=512,
    ... )
    >>> model(pt.tensor("ids", shape=(None, 5), dtype="int64")).type.shape
    (None, 5, 100)
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        embedding: Embedding,
        stack: TransformerStack,
        norm: Layer,
        head: Linear | None = None,
        max_positions: int,
        embedding_scale: float = 1.0,
        logit_softcap: float | None = None,
    ):
        self.name = resolve_layer_name(name, "CausalLM")
        self.embedding = embedding
        self.stack = stack
        self.norm = norm
        self.head = head
        self.max_positions = max_positions
        self.embedding_scale = embedding_scale
        self.logit_softcap = resolve_softcap(logit_softcap)

    def __call__(self, ids: TensorLike, valid: TensorLike | None = None) -> TensorVariable:
        """Score the next token at every position.

        Parameters
        ----------
        ids : integer tensor of shape (batch, tokens)
            Token ids.
        valid : boolean tensor of shape (batch, tokens), optional
            False where a token is padding: it is not seen, and positions do not count it.

        Returns
        -------
        tensor of shape (batch, tokens, vocabulary)
            Logits; those at padding mean nothing.
        """
        ids = as_tensor(ids)
        valid = None if valid is None else as_tensor(valid)
        if valid is not None and valid.type.dtype != "bool":
            raise TypeError(
                f"valid has dtype {valid.type.dtype}, which would be added to scores "
                "instead of hiding tokens. Pass valid.astype('bool')."
            )
        positions = _positions(pt.ones_like(ids, dtype="bool") if valid is None else valid)
        mask = None if valid is None else valid[:, None, None, :]
        hidden, _ = self.stack(self._embed(ids), positions, mask)
        return self._logits(hidden)

    def extend(
        self, ids: TensorLike, caches: Sequence[KVCache]
    ) -> tuple[TensorVariable, list[tuple[TensorVariable, TensorVariable]]]:
        """Score the token after new ones that follow those in the caches.

        Parameters
        ----------
        ids : integer tensor of shape (batch, tokens)
            New token ids.
        caches : sequence of KVCache
            One a block, all of the same length and start.

        Returns
        -------
        logits : tensor of shape (batch, vocabulary)
            Logits at the last of the new tokens.
        new : list of (keys, values)
            For each block what the caller writes into its cache.
        """
        ids = as_tensor(ids)
        _, _, length, start = caches[0]
        positions = _positions(pt.ones_like(ids, dtype="bool")) + length - start[:, None]
        hidden, new = self.stack.extend(self._embed(ids), positions, caches)
        return self._logits(hidden[:, -1]), new

    def _embed(self, ids: TensorVariable) -> TensorVariable:
        hidden = self.embedding(ids)
        if self.embedding_scale == 1:
            return hidden
        return hidden * pt.constant(self.embedding_scale, dtype=hidden.type.dtype)

    def _logits(self, hidden: TensorVariable) -> TensorVariable:
        score = self.embedding.head if self.head is None else self.head
        logits = score(self.norm(hidden))
        if self.logit_softcap is not None:
            logits = soft_capped(logits, self.logit_softcap)
        logits.name = "logits"
        return logits


def _positions(valid: TensorVariable) -> TensorVariable:
    """Return the position of each token that is ``valid`` among those of its row."""
    # Sums of floats, exact to 2**24: PyTensor gives those of a constant of int32 in int64, which it
    # then cannot use.
    return pt.cumsum(valid.astype("float32"), axis=-1).astype("int32") - 1
