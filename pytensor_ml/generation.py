"""Text generation: the cache of keys and values, the decode loop, sampling."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import Mode, get_mode
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.compile.sharedvalue import shared
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.link.jax import JAXLinker
from pytensor.link.mlx import MLXLinker
from pytensor.tensor.rewriting.basic import register_specialize

from pytensor_ml.base import VariadicLayerOp
from pytensor_ml.layers.attention import KVCache
from pytensor_ml.layers.half import dtype_of
from pytensor_ml.models.causal_lm import CausalLM
from pytensor_ml.pytensorf import (
    collect_shared_variables,
    function,
    rewrite_for_prediction,
)


class CacheWrite(VariadicLayerOp):
    """Write new keys or values into a cache: inputs cache, new and the slot of the first."""

    __props__ = ()

    def build_inner_graph(self, *inputs: Any) -> list[Variable]:
        cache, new, slot = inputs
        return [pt.set_subtensor(cache[:, :, slot : slot + new.shape[2]], new)]


def inline_cache_write(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    """Put the inner graph in place of the op, inside of which the cache would be copied."""
    return inline_ofg_node(node)


# PyTensor leaves out what is tagged "inplace" for JAX and MLX, which keep the op.
register_specialize(
    node_rewriter([CacheWrite])(inline_cache_write), "inplace", name="inline_cache_write"
)


class Decoder:
    """A model compiled to take tokens and give the logits of the next one.

    Keys and values of the tokens so far are kept in shared variables that the compiled function
    updates in place. A prompt is taken in one call; calls that follow take one token each, or any
    other number. JAX and MLX compute on arrays of their own, so there the model's parameters are
    copied whenever a prompt begins; on C and Numba they are read as they are.

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
    TypeError
        If the model has not what a CausalLM has.
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
        needed = ("name", "max_positions", "embedding", "stack", "extend")
        if lacking := [name for name in needed if not hasattr(model, name)]:
            raise TypeError(
                f"{type(model).__name__} has no {', '.join(lacking)}, by which a decoder knows its "
                "caches and what to call. Put its parts into a CausalLM, or give it what one has."
            )
        self.capacity = model.max_positions if capacity is None else capacity
        if not 1 <= self.capacity <= model.max_positions:
            raise ValueError(
                f"A capacity of {self.capacity} tokens was asked for, but {model.name} takes 1 to "
                f"{model.max_positions}: beyond that its positions were never trained. "
                "Pass a capacity in that range."
            )
        if batch_size < 1:
            raise ValueError(
                f"A decoder of {batch_size} rows decodes nothing. Pass a batch_size of at least 1."
            )
        self.batch_size = batch_size
        self.length = 0
        self._n_begun = 0
        self._n_ids = model.embedding.n_embeddings
        self._start = np.zeros(batch_size, "int64")

        ids = pt.tensor("ids", shape=(batch_size, None), dtype="int64")
        length = pt.scalar("length", dtype="int64")
        start = pt.tensor("start", shape=(batch_size,), dtype="int64")
        caches = []
        for block in model.stack.blocks:
            attention = block.attention
            shape = (batch_size, attention.n_kv_head, self.capacity, attention.head_dim)
            zeros = np.zeros(shape, dtype_of(model.embedding.W))
            keys = shared(zeros, name=f"{block.name}_keys", shape=shape)
            values = shared(zeros.copy(), name=f"{block.name}_values", shape=shape)
            caches.append(KVCache(keys, values, length, start))
        logits, new = model.extend(ids, caches)
        written = [
            CacheWrite()(old, fresh, length)
            for cache, pair in zip(caches, new, strict=True)
            for old, fresh in zip(cache[:2], pair, strict=True)
        ]
        outputs = rewrite_for_prediction([logits, *written])
        slots = [variable for cache in caches for variable in cache[:2]]
        updates: dict[Any, Variable] = dict(zip(slots, outputs[1:], strict=True))
        compiled_for = _giving_buffers_away(get_mode(mode))
        self._to_device = _device_put(compiled_for)
        parameters = [v for v in collect_shared_variables(outputs) if v not in updates]
        self._parameters = [] if self._to_device is None else parameters
        self._on_device: list[Any] = []
        stand_ins = {v: v.type() for v in self._parameters}
        self._step = function(
            [ids, length, start, *stand_ins.values()],
            outputs[0],
            updates=updates,
            givens=stand_ins,
            mode=compiled_for,
        )
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
        self._check_rows(prompts)
        if not all(len(prompt) for prompt in prompts):
            raise ValueError(
                "A prompt is empty, so there is no token to continue from. "
                "Begin with at least one token, such as the model's beginning-of-text token."
            )
        if any(np.asarray(prompt).dtype.kind not in "iu" for prompt in prompts):
            raise TypeError("A prompt holds something else than integer ids. Tokenize it first.")
        longest = max(len(prompt) for prompt in prompts)
        padded = np.zeros((self.batch_size, longest), "int64")
        for row, prompt in zip(padded, prompts, strict=True):
            row[longest - len(prompt) :] = prompt
        self._check_room(longest, after=0)
        self.length = 0
        self._n_begun += 1
        self._start = np.array([longest - len(prompt) for prompt in prompts], "int64")
        self._on_device = []
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
        ids = np.asarray(ids)
        if ids.ndim != 2 or ids.shape[0] != self.batch_size or ids.dtype.kind not in "iu":
            raise ValueError(
                f"Got {ids.dtype} ids of shape {ids.shape}, of which a decoder of "
                f"{self.batch_size} rows cannot make steps. Pass integers of shape "
                f"({self.batch_size}, tokens)."
            )
        if ids.size == 0:
            raise ValueError("Got no tokens, so there is no next one to score. Pass at least one.")
        if ids.min() < 0 or ids.max() >= self._n_ids:
            raise ValueError(
                f"Ids run from {ids.min()} to {ids.max()}, but the vocabulary is 0 to "
                f"{self._n_ids - 1}: others would read rows of something else. Use the tokenizer "
                "that belongs to the model."
            )
        self._check_room(ids.shape[1], after=self.length)
        if self._to_device is not None and not self._on_device:
            self._on_device = [self._to_device(v.get_value(borrow=True)) for v in self._parameters]
        length = np.array(self.length, "int64")
        logits = np.asarray(self._step(ids.astype("int64"), length, self._start, *self._on_device))
        self.length += ids.shape[1]
        return logits

    def _check_rows(self, prompts: Sequence[Sequence[int]]) -> None:
        if isinstance(prompts, str) or not all(
            isinstance(prompt, Sequence | np.ndarray) for prompt in prompts
        ):
            raise TypeError(
                "Prompts are sequences of ids, one a row. Pass [ids] for one row, with ids as "
                "Tokenizer.encode makes them of a text."
            )
        if len(prompts) != self.batch_size:
            raise ValueError(
                f"Got {len(prompts)} prompts for a decoder of {self.batch_size} rows. "
                "Pass one prompt a row, or build the decoder with another batch_size."
            )

    def _check_room(self, n_tokens: int, after: int) -> None:
        if after + n_tokens > self.capacity:
            raise ValueError(
                f"{n_tokens} tokens after {after} do not fit into a context of {self.capacity} "
                "tokens. Shorten the prompt, or build the decoder with more capacity if the model "
                "was made for it."
            )


def _device_put(mode: Mode) -> Callable[[np.ndarray], Any] | None:
    """Return what copies an array to where a backend computes; None if it computes on NumPy's."""
    if isinstance(mode.linker, JAXLinker):
        import jax

        return jax.device_put
    if isinstance(mode.linker, MLXLinker):
        import mlx.core as mx

        return mx.array
    return None


def _giving_buffers_away(mode: Mode) -> Mode:
    """Return ``mode`` with a linker that lets JAX write what is updated into its old buffer."""
    if type(mode.linker) is not JAXLinker:
        return mode
    from pytensor_ml.dispatch.jax.linker import DonatingJAXLinker

    linker = DonatingJAXLinker(allow_gc=mode.linker.allow_gc)
    return Mode(linker=linker, optimizer=mode.provided_optimizer)


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
        If a prompt and the new tokens do not fit into the decoder's capacity, or a number is out of
        its range.
    RuntimeError
        If the decoder begins other prompts before this generation has ended.
    """
    check_sampling(temperature, top_k, top_p)
    rng = np.random.default_rng(seed)
    ending = np.array(list(eos_ids), "int64")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1.")
    decoder._check_rows(prompts)
    longest = max(len(prompt) for prompt in prompts)
    # The last token is given, not taken.
    if longest + max_new_tokens - 1 > decoder.capacity:
        raise ValueError(
            f"A prompt of {longest} tokens and {max_new_tokens} new ones do not fit into a context "
            f"of {decoder.capacity} tokens. Shorten the prompt or ask for fewer."
        )

    def tokens() -> Iterator[np.ndarray]:
        ended = np.zeros(decoder.batch_size, bool)
        token = np.zeros(decoder.batch_size, "int64")
        logits = decoder.begin(prompts)
        n_begun = decoder._n_begun
        for i in range(max_new_tokens):
            drawn = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, rng=rng)
            token = np.where(ended, token, drawn)
            ended |= np.isin(token, ending)
            yield token
            if ended.all() or i == max_new_tokens - 1:
                return
            if decoder._n_begun != n_begun:
                raise RuntimeError(
                    "The decoder has begun other prompts since this generation began, so its "
                    "cache no longer holds these tokens. Finish one generation before the next, "
                    "or build a decoder for each."
                )
            logits = decoder.extend(token[:, None])

    return tokens()


def sample(
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
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
        Only draw among the k largest, at least 1.
    top_p : float
        In (0, 1]. Only draw among the fewest tokens whose probabilities sum to at least p [1]_.
    rng : Generator
        Source of the draws.

    Returns
    -------
    integer array of shape (batch,)

    Examples
    --------
    >>> import numpy as np
    >>> from pytensor_ml.generation import sample
    >>> logits = np.array([[0.0, 2.0, 1.0]])
    >>> rng = np.random.default_rng(0)
    >>> sample(logits, temperature=0.0, rng=rng).tolist()
    [1]

    References
    ----------
    .. [1] Holtzman et al. (2020). The Curious Case of Neural Text Degeneration. arXiv:1904.09751.
    """
    check_sampling(temperature, top_k, top_p)
    if not np.isfinite(logits).all():
        raise ValueError(
            "The logits are not finite, so no token is likeliest: the model overflowed, or its "
            "weights hold NaN. Check the checkpoint, and the dtype it was loaded in."
        )
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


def check_sampling(temperature: float, top_k: int | None, top_p: float) -> None:
    """Raise if a number for :func:`sample` is out of its range."""
    if not 0 <= temperature < np.inf:
        raise ValueError(
            f"A temperature of {temperature} does not order tokens as the model does. "
            "Pass 0 for the likeliest token, or a positive number."
        )
    if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
        raise ValueError(
            f"top_k={top_k} is no number of tokens to draw among. Pass an integer of at least 1, "
            "or None for all."
        )
    if not 0 < top_p <= 1:
        raise ValueError(
            f"top_p={top_p} is not in (0, 1], so it keeps no set of tokens. Pass 1 for all."
        )
