"""Models that take half the memory."""

from typing import Any

import numpy as np

from pytensor_ml.layers.embedding import Embedding
from pytensor_ml.layers.linear import Linear
from pytensor_ml.params import NonTrainableParameter, non_trainable
from pytensor_ml.summary import Summarized


def halve_weights(model: Any) -> None:
    """Hold the matrices of a model's linear layers and embeddings in float16.

    They are widened to float32 as they are read, and everything is computed in float32. On C and
    Numba this takes half the bytes of memory for each token of up to four rows, and more time for
    many tokens at once. Weights are rounded, by 5e-4 of themselves or 3e-8, whichever is more. They
    are words of dtype uint16, as Numba has no float16, and are not trained. To be called when the
    model has its values, and before a graph is built; a model is saved before, not after.

    Parameters
    ----------
    model : Layer, BinaryLayer or VariadicLayer
        What holds the layers, in attributes, sequences or mappings.

    Raises
    ------
    ValueError
        If a weight is not finite or beyond float16's range, or the model has no matrices to halve.
        Nothing is changed then.

    Examples
    --------
    >>> from pytensor_ml.layers import Linear
    >>> from pytensor_ml.models import halve_weights
    >>> fc = Linear("fc", n_in=64, n_out=8)
    >>> halve_weights(fc)
    >>> fc.W.type.dtype
    'uint16'
    """
    layers = list(dict.fromkeys(_matrix_layers(model, set())))
    halved: dict[Any, NonTrainableParameter] = {}
    for layer in layers:
        if layer.W not in halved:
            halved[layer.W] = _halved(layer)
    if not halved:
        raise ValueError(
            f"{type(model).__name__} has no linear layer or embedding of float32, so there is "
            "nothing to halve."
        )
    for layer in layers:
        layer.W = halved[layer.W]


def _matrix_layers(held: Any, seen: set[int]) -> Any:
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, Linear | Embedding) and held.W.type.dtype == "float32":
        yield held
    held = vars(held) if isinstance(held, Summarized) else held
    if isinstance(held, list | tuple | dict):
        for part in held.values() if isinstance(held, dict) else held:
            yield from _matrix_layers(part, seen)


def _halved(layer: Linear | Embedding) -> NonTrainableParameter:
    value = np.asarray(layer.W.get_value(borrow=True))
    with np.errstate(over="ignore"):
        rounded = value.astype("float16")
    if not np.isfinite(rounded).all():
        worst = value[~np.isfinite(rounded)][0]
        raise ValueError(
            f"{layer.W.name} holds {worst}, which is no number of float16, of which the largest is "
            "65504. Nothing was halved; keep this model in float32."
        )
    # So that what a product sums over is contiguous, in a tied head as well.
    words = np.asarray(rounded, order="F" if isinstance(layer, Linear) else "C")
    return non_trainable(words.view("uint16"), layer.W.name, layer_name=layer.name)
