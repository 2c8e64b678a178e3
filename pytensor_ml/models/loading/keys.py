"""Which tensor of a checkpoint fills which parameter, and filling them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable

type Transform = Callable[[np.ndarray], np.ndarray]


class Checkpoint(ABC):
    """Tensors in files, each read only when asked for; shapes and dtypes are known before."""

    name: str

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What the model is, under the keys that transformers' configs use."""

    @abstractmethod
    def keys(self) -> set[str]:
        """Names of all tensors."""

    @abstractmethod
    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the tensor that ``read`` gives."""

    @abstractmethod
    def dtype(self, key: str) -> np.dtype:
        """Dtype of the tensor that ``read`` gives."""

    @abstractmethod
    def read(self, key: str) -> np.ndarray:
        """Read one tensor; bfloat16 and quantized ones come as float32."""


class KeyMap:
    """A map between the tensors of a checkpoint and the parameters of a model.

    Examples
    --------
    >>> import numpy as np
    >>> from pytensor_ml.models.loading import KeyMap
    >>> from pytensor_ml.params import trainable
    >>> keys, scale = KeyMap(), trainable(np.ones(2, "float32"), name="scale")
    >>> with keys.scope("model", "norm"):
    ...     keys.bind(scale, "weight")
    >>> tensors = {"model.norm.weight": np.array([2.0, 3.0], "float32")}
    >>> keys.load(tensors.__getitem__, tensors)
    []
    >>> scale.get_value()
    array([2., 3.], dtype=float32)
    """

    def __init__(self) -> None:
        self._scope: tuple[str, ...] = ()
        self._bound: dict[str, _Binding] = {}
        self._tied: dict[str, _Binding] = {}
        self._key_of: dict[SharedVariable, str] = {}

    @contextmanager
    def scope(self, *parts: str) -> Iterator[None]:
        """Put ``parts``, joined by dots, before every key that is bound inside the block."""
        outer = self._scope
        self._scope = (*outer, *parts)
        try:
            yield
        finally:
            self._scope = outer

    def bind(
        self, parameter: SharedVariable, *parts: str, transform: Transform | None = None
    ) -> None:
        """Let the tensor called ``parts``, joined by dots within the scope, fill ``parameter``.

        Parameters
        ----------
        parameter : SharedVariable
            Parameter to fill.
        *parts : str
            Name of the tensor.
        transform : callable, optional
            Makes the parameter's value from the tensor's. Its result's shape and dtype must follow
            from those of its argument: they are found by calling it with zeros.

        Raises
        ------
        ValueError
            If the key or the parameter is bound already.
        """
        key = self._new_key(parts, parameter)
        if parameter in self._key_of:
            raise ValueError(
                f"{parameter.name} is bound to {self._key_of[parameter]!r} already; bound to "
                f"{key!r} too, one of the two tensors would be lost. If both hold the same "
                "matrix, use `tie` for the second."
            )
        self._bound[key] = _Binding(parameter, transform)
        self._key_of[parameter] = key

    def tie(
        self, parameter: SharedVariable, *parts: str, transform: Transform | None = None
    ) -> None:
        """Let the tensor called ``parts`` be absent, or else equal to what fills ``parameter``.

        For a matrix that a model uses twice and a file may store twice, such as an embedding that
        is also the output head. Arguments as for :meth:`bind`.
        """
        self._tied[self._new_key(parts, parameter)] = _Binding(parameter, transform)

    def key_for(self, parameter: SharedVariable) -> str:
        """Return the key bound to ``parameter``."""
        if parameter not in self._key_of:
            raise KeyError(f"{parameter.name} is bound to no key; bind it first.")
        return self._key_of[parameter]

    def parameter_for(self, key: str) -> SharedVariable:
        """Return the parameter bound to ``key``."""
        if key not in self._bound:
            raise KeyError(f"{key!r} is bound to no parameter; bind it first.")
        return self._bound[key].parameter

    def keys(self) -> set[str]:
        """Return the keys a checkpoint must hold; tied ones are not among them."""
        return set(self._bound)

    def __len__(self) -> int:
        return len(self._bound)

    def tensors(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the tensors of a checkpoint that would fill the parameters with ``values``.

        Parameters
        ----------
        values : mapping from str to array
            Values by the parameters' names.

        Raises
        ------
        ValueError
            If a value is missing or has another shape than its parameter, or the parameter is made
            from its tensor by something else than a transposition, which is all that is undone.
        """
        made = {}
        for key, (parameter, transform) in self._bound.items():
            name, shape = str(parameter.name), parameter.get_value(borrow=True).shape
            value = values.get(name)
            if value is None or value.shape != shape:
                found = "nothing" if value is None else f"a value of shape {value.shape}"
                raise ValueError(
                    f"{key!r} is made from {name}, of shape {shape}, for which there is {found}. "
                    "Pass the parameters of the model that the keys were bound for."
                )
            if transform not in (None, np.transpose):
                raise ValueError(
                    f"{name} is made from {key!r} by {transform}, which cannot be undone. Bind it "
                    "with no transform or with np.transpose."
                )
            made[key] = value if transform is None else value.T
        return made

    def load(
        self,
        read: Checkpoint | Callable[[str], np.ndarray],
        available: Iterable[str] | None = None,
        *,
        allow_narrowing: bool = False,
    ) -> list[str]:
        """Fill every bound parameter, or raise before any value is changed.

        Parameters
        ----------
        read : Checkpoint or callable
            Where tensors come from. A callable from key to array is called again for each check and
            to fill, so that one tensor at a time is in memory.
        available : iterable of str, optional
            Keys that ``read`` knows; needed with a callable.
        allow_narrowing : bool
            Whether a value may be rounded to a parameter's dtype, such as float32 to float16. One
            beyond the dtype's range is an error all the same.

        Returns
        -------
        list of str
            Sorted keys of the checkpoint that nothing is bound or tied to.

        Raises
        ------
        ValueError
            If keys are missing, shapes differ, a dtype would be narrowed, or a tied tensor differs
            from its table. All faults are listed.
        """
        checkpoint = _as_checkpoint(read, available)
        missing, surplus = self._compare_keys(checkpoint)
        faults = []
        if missing:
            faults.append(
                f"missing, so that these parameters would keep values of no meaning: "
                f"{_listing(missing)}. In the file and bound to nothing: {_listing(surplus)}. Load "
                "the file this model was made for, or use `load_partial`; a family with tensors of "
                "other names needs a builder of its own (`register_builder`)"
            )
        self._fill(checkpoint, self.keys() - set(missing), faults, allow_narrowing)
        return surplus

    def load_partial(
        self,
        read: Checkpoint | Callable[[str], np.ndarray],
        available: Iterable[str] | None = None,
        *,
        allow_narrowing: bool = False,
    ) -> tuple[list[str], list[str]]:
        """Fill the bound parameters that the checkpoint has a tensor for.

        Arguments and errors are those of :meth:`load`, missing keys aside.

        Returns
        -------
        missing : list of str
            Sorted keys whose parameters kept their values.
        surplus : list of str
            Sorted keys of the checkpoint that nothing is bound or tied to.
        """
        checkpoint = _as_checkpoint(read, available)
        missing, surplus = self._compare_keys(checkpoint)
        self._fill(checkpoint, self.keys() - set(missing), [], allow_narrowing)
        return missing, surplus

    def _new_key(self, parts: tuple[str, ...], parameter: SharedVariable) -> str:
        key = ".".join((*self._scope, *parts))
        taken = self._bound.get(key) or self._tied.get(key)
        if taken is not None:
            raise ValueError(
                f"{key!r} fills {taken.parameter.name} already, so it cannot fill {parameter.name} "
                "too. Give each its own key."
            )
        return key

    def _compare_keys(self, checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
        present = checkpoint.keys()
        return sorted(self.keys() - present), sorted(present - self.keys() - self._tied.keys())

    def _fill(
        self, checkpoint: Checkpoint, keys: set[str], faults: list[str], allow_narrowing: bool
    ) -> None:
        present = checkpoint.keys()
        filling = {key: binding for key, binding in self._bound.items() if key in keys}
        tied = {key: tie for key, tie in self._tied.items() if key in present}
        for key, binding in (filling | tied).items():
            faults += binding.faults(checkpoint, key, allow_narrowing)
        # Values are compared only where shapes are known to agree.
        for key, tie in tied.items() if not faults else ():
            table = self._key_of.get(tie.parameter)
            if table in filling and not np.array_equal(
                tie.value(checkpoint, key),
                filling[table].value(checkpoint, table),
                equal_nan=True,
            ):
                faults.append(
                    f"{key} differs from {table}, although the model uses one matrix for both: one "
                    "of the two would be lost. Build the model with a head of its own "
                    "(tie_word_embeddings false in the config)"
                )
        if faults:
            raise ValueError(
                f"{checkpoint.name} does not fit the model; nothing was loaded:\n"
                + "\n".join(f"- {fault}." for fault in faults)
            )
        for key, binding in filling.items():
            binding.fill(checkpoint, key)


class _Binding(NamedTuple):
    parameter: SharedVariable
    transform: Transform | None

    def faults(self, checkpoint: Checkpoint, key: str, allow_narrowing: bool) -> list[str]:
        shape, dtype = checkpoint.shape(key), checkpoint.dtype(key)
        needed = self.parameter.get_value(borrow=True).shape
        # A tensor of this shape and dtype that takes no memory.
        probe = np.broadcast_to(np.zeros((), dtype), shape)
        if self.transform is not None:
            try:
                probe = self.transform(probe)
            except (ValueError, IndexError) as error:
                return [
                    f"{key} has shape {shape}, which cannot be made into the shape {needed} of "
                    f"{self.parameter.name}: {error}"
                ]
        if probe.shape != needed:
            after = "" if probe.shape == shape else f", {probe.shape} once transformed"
            return [
                f"{key} has shape {shape}{after}, but {self.parameter.name} has shape {needed}; "
                "the config and the tensors belong to different models"
            ]
        held = np.dtype(self.parameter.type.dtype)
        if np.can_cast(probe.dtype, held):
            return []
        if not allow_narrowing:
            return [
                f"{key} is {probe.dtype}, but {self.parameter.name} is {held}, which cannot hold "
                "all of its values; pass allow_narrowing=True to round them"
            ]
        value = self.value(checkpoint, key)
        with np.errstate(all="ignore"):
            rounded = value.astype(held)
        kept = np.isfinite(rounded) | ~np.isfinite(value) if held.kind in "fc" else rounded == value
        if not kept.all():
            return [
                f"{key} is {probe.dtype} and holds {value[~kept].flat[0]}, which {held}, the "
                f"dtype of {self.parameter.name}, cannot hold even rounded"
            ]
        return []

    def value(self, checkpoint: Checkpoint, key: str) -> np.ndarray:
        array = checkpoint.read(key)
        return array if self.transform is None else self.transform(array)

    def fill(self, checkpoint: Checkpoint, key: str) -> None:
        # A copy: the array may be a view of a file, which must not be written to.
        value = np.array(self.value(checkpoint, key), self.parameter.type.dtype, order="C")
        self.parameter.set_value(value, borrow=True)


class _Arrays(Checkpoint):
    """What a function gives for each key, which only reading tells the shape and dtype of."""

    name = "The checkpoint"

    def __init__(self, read: Callable[[str], np.ndarray], keys: Iterable[str]) -> None:
        self._read = read
        self._keys = set(keys)

    @property
    def config(self) -> dict[str, Any]:
        return {}

    def keys(self) -> set[str]:
        return self._keys

    def shape(self, key: str) -> tuple[int, ...]:
        return self.read(key).shape

    def dtype(self, key: str) -> np.dtype:
        return self.read(key).dtype

    def read(self, key: str) -> np.ndarray:
        return np.asarray(self._read(key))


def _as_checkpoint(
    read: Checkpoint | Callable[[str], np.ndarray], available: Iterable[str] | None
) -> Checkpoint:
    if isinstance(read, Checkpoint):
        return read
    if available is None:
        raise TypeError(
            "load got a function and no `available`, so missing keys could not be told; pass the "
            "keys that the function knows."
        )
    return _Arrays(read, available)


def _listing(keys: list[str]) -> str:
    return ", ".join(keys) or "none"
