"""Initializers, and drawing parameters from them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.configdefaults import config

type RandomState = int | Sequence[int] | np.random.SeedSequence | np.random.Generator | None

_birth_initializer: ContextVar["Initializer | None"] = ContextVar("birth_initializer", default=None)


class Initializer(ABC):
    """A law that parameters are drawn from, described entirely by ``__props__``."""

    __props__: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        """Draw an array of ``shape`` and ``dtype``."""

    def initial_value(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw the value that a new parameter holds, of dtype floatX."""
        drawn_by = _birth_initializer.get() or self
        return drawn_by.sample(shape, config.floatX, np.random.default_rng())

    def __call__(self, param: SharedVariable, rng: RandomState = None) -> SharedVariable:
        """Redraw ``param`` in place and return it."""
        param.set_value(self._sample_like(param, np.random.default_rng(rng)), borrow=True)
        return param

    def _sample_like(self, param: SharedVariable, rng: np.random.Generator) -> np.ndarray:
        return self.sample(param.get_value(borrow=True).shape, param.type.dtype, rng)


@contextmanager
def initial_values_from(initializer: Initializer) -> Iterator[None]:
    """Let parameters made inside the block hold a draw of ``initializer`` at first.

    Each still declares its own law. With :class:`EmptyInitializer` a model whose weights all come
    from a file is built without drawing any.
    """
    token = _birth_initializer.set(initializer)
    try:
        yield
    finally:
        _birth_initializer.reset(token)


class ZeroInitializer(Initializer):
    """All zeros."""

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(shape, dtype)


class OneInitializer(Initializer):
    """All ones."""

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        return np.ones(shape, dtype)


class EmptyInitializer(Initializer):
    """Memory as it is found, for a parameter that is filled from a file."""

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        return np.empty(shape, dtype)


class NormalInitializer(Initializer):
    """A normal law of the given mean and standard deviation."""

    __props__ = ("mean", "std")

    def __init__(self, mean: float = 0.0, std: float = 0.01):
        self.mean = mean
        self.std = std

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(self.mean, self.std, shape).astype(dtype)


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of inputs and of outputs of a weight stored as ``(n_in, n_out)``."""
    if len(shape) < 2:
        raise ValueError(
            f"A Xavier law needs a weight of at least two dimensions, got shape {shape}: "
            "a vector has no fan. Use NormalInitializer, ZeroInitializer or OneInitializer."
        )
    receptive = int(np.prod(shape[2:], dtype=int))
    return shape[0] * receptive, shape[1] * receptive


class XavierUniformInitializer(Initializer):
    """A uniform law of variance 2 / (fan_in + fan_out) [1]_.

    References
    ----------
    .. [1] Glorot and Bengio (2010). Understanding the difficulty of training deep feedforward
       neural networks.
    """

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        bound = np.sqrt(6.0 / sum(fans(shape)))
        return rng.uniform(-bound, bound, shape).astype(dtype)


class XavierNormalInitializer(Initializer):
    """A normal law of variance 2 / (fan_in + fan_out); see :class:`XavierUniformInitializer`."""

    def sample(self, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(0.0, np.sqrt(2.0 / sum(fans(shape))), shape).astype(dtype)


def initialize_params(
    params: Sequence[SharedVariable],
    rng: RandomState = None,
    initializers: Mapping[SharedVariable, Initializer] | None = None,
) -> list[np.ndarray]:
    """Draw a value for each parameter, without storing it.

    Parameters
    ----------
    params : sequence of SharedVariable
        Parameters to draw for; one seed reproduces the whole sequence.
    rng : int or Generator, optional
        Seed or source of the draws.
    initializers : mapping from parameter to Initializer, optional
        Laws that take precedence over the parameters' own.

    Returns
    -------
    list of ndarray
        Values with the shapes and dtypes of ``params``.

    Raises
    ------
    ValueError
        If a parameter has no law.
    """
    generator = np.random.default_rng(rng)
    values = []
    for param in params:
        law = (initializers or {}).get(param, getattr(param, "initializer", None))
        if law is None:
            raise ValueError(
                f"Parameter {param.name} declares no initializer, so it cannot be redrawn. "
                "Name one for it in `initializers`."
            )
        values.append(law._sample_like(param, generator))
    return values
