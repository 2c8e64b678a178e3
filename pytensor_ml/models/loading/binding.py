"""Binding the parameters of a layer to the names that torch gives them."""

from typing import Protocol

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable

from pytensor_ml.layers.linear import Linear
from pytensor_ml.layers.norm import ZeroCenteredRMSNorm
from pytensor_ml.models.loading.keys import KeyMap, Transform


class ScaledNorm(Protocol):
    """A norm with a scale, None where it has none."""

    @property
    def scale(self) -> SharedVariable | None: ...


class ScaledAndShiftedNorm(ScaledNorm, Protocol):
    """A norm with a scale and a location, None where it has none."""

    @property
    def loc(self) -> SharedVariable | None: ...


def bind_linear(
    keys: KeyMap, linear: Linear | None, *parts: str, transform: Transform | None = None
) -> None:
    """Bind the weight of a linear layer to ``weight``, and its bias to ``bias`` if it has one.

    Parameters
    ----------
    keys : KeyMap
        Map to add to.
    linear : Linear, optional
        Layer to fill; None adds nothing.
    *parts : str
        Name of the layer in the checkpoint.
    transform : callable, optional
        Makes the weight (n_in, n_out) from the tensor. By default the tensor is transposed, as
        torch stores (n_out, n_in).
    """
    if linear is None:
        return
    keys.bind(
        linear.W, *parts, "weight", transform=np.transpose if transform is None else transform
    )
    if linear.b is not None:
        keys.bind(linear.b, *parts, "bias")


def bind_norm(
    keys: KeyMap,
    norm: ScaledNorm | ZeroCenteredRMSNorm | None,
    *parts: str,
    transform: Transform | None = None,
) -> None:
    """Bind the scale of a norm such as RMSNorm, or a zero-centered one's weight, to ``weight``.

    Parameters
    ----------
    keys : KeyMap
        Map to add to.
    norm : layer, optional
        Layer to fill; None, or a norm without a scale, adds nothing.
    *parts : str
        Name of the norm in the checkpoint.
    transform : callable, optional
        Makes the parameter from the tensor, such as 1 + w or w - 1 between the two conventions.
    """
    if norm is None:
        return
    parameter = norm.weight if isinstance(norm, ZeroCenteredRMSNorm) else norm.scale
    if parameter is not None:
        keys.bind(parameter, *parts, "weight", transform=transform)


def bind_layer_norm(keys: KeyMap, norm: ScaledAndShiftedNorm | None, *parts: str) -> None:
    """Bind the scale of a LayerNorm to ``weight`` and its location to ``bias``.

    Parameters
    ----------
    keys : KeyMap
        Map to add to.
    norm : layer, optional
        Layer to fill; None adds nothing.
    *parts : str
        Name of the norm in the checkpoint.
    """
    if norm is None:
        return
    if norm.scale is not None:
        keys.bind(norm.scale, *parts, "weight")
    if norm.loc is not None:
        keys.bind(norm.loc, *parts, "bias")
