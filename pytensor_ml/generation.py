"""Text generation: the cache of keys and values, the decode loop, sampling."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import shared
from pytensor.graph.basic import Variable

from pytensor_ml.base import VariadicLayerOp
from pytensor_ml.layers.attention import KVCache
from pytensor_ml.models.causal_lm import CausalLM
from pytensor_ml.pytensorf import function
from pytensor_ml.rewriting.inplace import inline_for_inplace


class CacheWrite(VariadicLayerOp):
    """Write new keys or values into a cache: inputs cache, new and the slot of the first."""

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        cache, new, slot = inputs
        return [pt.set_subtensor(cache[:, :, slot : slot + new.shape[2]], new)]


# Inside an op the cache would be copied.
inline_for_inplace(CacheWrite)


class Decoder:
    """A model compiled to take tokens and give the logits of the next one.

    Keys and values of the tokens so far are kept in shared variables that the compiled function
    updates in place. A prompt is taken in one call; calls that follow take one token each, or any
    other number.

    Parameters
    ----------
    model : CausalLM
        The model.
    batch_size : int
        Number of rows.
    capacity : int, optional
        Number of tokens there is room for. Default is ``model.max_positions``.
    mode : Mode or str, optional
        PyTensor mode; see :func:`~pytensor_ml.pytensorf.backend_mode`.

    Raises
    ------
    ValueError
        If the capacity is more than the model was made for.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        batch_size: int = 1,
        capacity: int | None = None,
        mode: Mode | str | None = None,
    ):
        self.capacity = model.max_positions if capacity is None else capacity
        if not 1 <= self.capacity <= model.max_positions:
            raise ValueError(
                f"A capacity of {self.capacity} tokens was asked for, but {model.name} takes 1 to "
                f"{model.max_positions}: beyond that its positions were never trained. "
                "Pass a capacity in that range."
            )
        self.batch_size = batch_size
        self.length = 0
        self._start = np.zeros(batch_size, "int64")

        ids = pt.tensor("ids", shape=(batch_size, None), dtype="int64")
        length = pt.scalar("length", dtype="int64")
        start = pt.tensor("start", shape=(batch_size,), dtype="int64")
        caches = []
        for block in model.stack.blocks:
            attention = block.attention
            shape = (batch_size, attention.n_kv_head, self.capacity, attention.head_dim)
            zeros = np.zeros(shape, model.embedding.W.type.dtype)
            keys = shared(zeros, name=f"{block.name}_keys", shape=shape)
            values = shared(zeros.copy(), name=f"{block.name}_values", shape=shape)
            caches.append(KVCache(keys, values, length, start))
        logits, new = model.extend(ids, caches)
        updates: dict[Any, Any] = {}
        for cache, (new_keys, new_values) in zip(caches, new, strict=True):
            updates[cache.keys] = CacheWrite()(cache.keys, new_keys, length)
            updates[cache.values] = CacheWrite()(cache.values, new_values, length)
        self._step = function([ids, length, start], logits, updates=updates, mode=mode)
        self._step.trust_input = True

    def begin(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Forget everything and take a prompt a row; shorter ones are padded on the left.

        Parameters
        ----------
        prompts : sequence of sequences of int
            Token ids, one sequence a row.

        Returns
        -------
        ndarray of shape (batch_size, vocabulary)
            Logits of each row's next token.

        Raises
        ------
        ValueError
            If a prompt is empty or longer than the capacity, or there are not ``batch_size``.
        """
        if len(prompts) != self.batch_size:
            raise ValueError(
                f"Got {len(prompts)} prompts for a decoder of {self.batch_size} rows. "
                "Pass one prompt a row, or build the decoder with another batch_size."
            )
        if not all(len(prompt) for prompt in prompts):
            raise ValueError(
                "A prompt is empty, so there is no token to continue from. "
                "Begin with at least one token, such as the model's beginning-of-text token."
            )
        longest = max(len(prompt) for prompt in prompts)
        padded = np.zeros((self.batch_size, longest), "int64")
        for row, prompt in zip(padded, prompts, strict=True):
            row[longest - len(prompt) :] = prompt
        self.length = 0
        self._start = np.array([longest - len(prompt) for prompt in prompts], "int64")
        return self.extend(padded)

    def extend(self, ids: np.ndarray) -> np.ndarray:
        """Take more tokens.

        Parameters
        ----------
        ids : integer array of shape (batch_size, tokens)
            Token ids that follow those taken so far.

        Returns
        -------
        ndarray of shape (batch_size, vocabulary)
            Logits of each row's next token.

        Raises
        ------
        ValueError
            If there is no room for them.
        """
        ids = np.asarray(ids, "int64")
        if self.length + ids.shape[1] > self.capacity:
            raise ValueError(
                f"{ids.shape[1]} tokens after {self.length} do not fit into a context of "
                f"{self.capacity} tokens. Shorten the prompt, or build the decoder with more "
                "capacity if the model was made for it."
            )
        logits = np.asarray(self._step(ids, np.array(self.length), self._start))
        self.length += ids.shape[1]
        return logits


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[np.ndarray]:
    """Continue prompts token by token.

    Parameters
    ----------
    decoder : Decoder
        The compiled model.
    prompts : sequence of sequences of int
        Token ids, one sequence a row of the decoder.
    max_new_tokens : int
        How many tokens to give at the most.
    eos_ids : collection of int
        Tokens that end a row; generation stops when every row has ended.
    temperature, top_k, top_p
        As for :func:`sample`.
    seed : int, optional
        Seed of the draws.

    Yields
    ------
    ndarray of shape (batch_size,)
        The next token of each row; a row that has ended goes on with its end token.

    Raises
    ------
    ValueError
        If a prompt and the new tokens do not fit into the decoder's capacity.
    """
    rng = np.random.default_rng(seed)
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest + max_new_tokens > decoder.capacity:
        raise ValueError(
            f"A prompt of {longest} tokens and {max_new_tokens} new ones do not fit into a context "
            f"of {decoder.capacity} tokens. Shorten the prompt or ask for fewer."
        )

    def tokens() -> Iterator[np.ndarray]:
        ended = np.zeros(decoder.batch_size, bool)
        token = np.zeros(decoder.batch_size, "int64")
        logits = decoder.begin(prompts)
        for i in range(max_new_tokens):
            drawn = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, rng=rng)
            token = np.where(ended, token, drawn)
            ended |= np.isin(token, list(eos_ids))
            yield token
            if ended.all() or i == max_new_tokens - 1:
                return
            logits = decoder.extend(token[:, None])

    return tokens()


def sample(
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw a token a row, on the host, so that every backend draws the same.

    Parameters
    ----------
    logits : array of shape (batch, vocabulary)
        Logits of the next token.
    temperature : float
        What logits are divided by; 0 takes the largest, the lowest id where several are.
    top_k : int, optional
        Only draw among the k largest.
    top_p : float
        Only draw among the fewest tokens whose probabilities sum to at least p [1]_.
    rng : Generator
        Source of the draws.

    Returns
    -------
    integer array of shape (batch,)

    References
    ----------
    .. [1] Holtzman et al. (2020). The Curious Case of Neural Text Degeneration. arXiv:1904.09751.
    """
    if temperature == 0:
        return logits.argmax(axis=-1)
    scaled = np.asarray(logits, "float64") / temperature
    order = np.argsort(-scaled, axis=-1, kind="stable")
    ranked = np.take_along_axis(scaled, order, axis=-1)
    probabilities = np.exp(ranked - ranked[:, :1])
    if top_k is not None:
        probabilities[:, top_k:] = 0
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    before = probabilities.cumsum(axis=-1) - probabilities
    probabilities[before >= top_p] = 0
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    return np.array([rng.choice(row, p=p) for row, p in zip(order, probabilities, strict=True)])
