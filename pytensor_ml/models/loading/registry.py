"""Which function builds the model that a config describes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytensor.graph.basic import Variable
from pytensor.tensor import tensor

from pytensor_ml.models.loading.gguf import GGUFCheckpoint
from pytensor_ml.models.loading.keys import Checkpoint, KeyMap
from pytensor_ml.models.loading.safetensors import SafetensorsCheckpoint

type Builder = Callable[[dict[str, Any], KeyMap], Any]

_builders: dict[str, Builder] = {}


def register_builder[B: Builder](architecture: str) -> Callable[[B], B]:
    """Make the decorated function the builder of an architecture.

    Parameters
    ----------
    architecture : str
        Name as configs give it in ``architectures``, such as LlamaForCausalLM, or in
        ``model_type``.

    Returns
    -------
    callable
        Decorator of a function that takes a config and a :class:`KeyMap`, binds each parameter in
        the map, and returns the model: either a layer to call with token ids, or a pair
        (inputs, outputs) of graph variables.
    """

    def register(builder: B) -> B:
        _builders[architecture] = builder
        return builder

    return register


def architecture_name(config: dict[str, Any]) -> str | None:
    """Return the architecture that ``config`` names, or None if it names none."""
    architectures = config.get("architectures") or [config.get("_class_name")]
    kind = config.get("model_type")
    if not isinstance(architectures, list) or not all(
        name is None or isinstance(name, str) for name in (*architectures, kind)
    ):
        raise ValueError(
            "The config has something else than a list of names in `architectures`, or than a name "
            "in `model_type`, so what the model is stays unknown. Take the config.json that "
            "belongs to the weights."
        )
    name: str | None = architectures[0] or kind
    return name


def build_model(config: dict[str, Any]) -> tuple[Any, KeyMap]:
    """Build the model that ``config`` describes.

    Parameters
    ----------
    config : dict
        Config as transformers writes it.

    Returns
    -------
    model : Layer or tuple
        What the architecture's builder returned.
    keys : KeyMap
        Map from a checkpoint's tensors to the model's parameters.

    Raises
    ------
    ValueError
        If the config names no architecture, or one that has no builder.
    """
    name = architecture_name(config)
    if name not in _builders:
        problem = (
            "The config is of a network that save_pretrained wrote, whose folder from_pretrained "
            "loads, and names no architecture"
            if "format_version" in config
            else "The config names no architecture (neither `architectures` nor `model_type`)"
            if name is None
            else f"The architecture {name:.100} has no builder"
        )
        raise ValueError(
            f"{problem}, so its weights have no layers to go into. Supported are: "
            f"{', '.join(sorted(_builders)) or 'none'}. Others can be added with register_builder."
        )
    keys = KeyMap()
    return _builders[name](config, keys), keys


def build_from_config(
    config: dict[str, Any],
) -> tuple[list[Variable], Variable | list[Variable], KeyMap]:
    """Build the graph of the model that ``config`` describes.

    Arguments and errors are those of :func:`build_model`.

    Returns
    -------
    inputs : list of Variable
        Inputs of the graph: token ids (batch, seq) where the builder returns a layer.
    outputs : Variable or list of Variable
        Outputs of the graph.
    keys : KeyMap
        Map from a checkpoint's tensors to the graph's parameters.
    """
    model, keys = build_model(config)
    if isinstance(model, tuple):
        inputs, outputs = model
        return inputs, outputs, keys
    token_ids = tensor("token_ids", dtype="int64", shape=(None, None))
    return [token_ids], model(token_ids), keys


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, a safetensors file, or a folder with ``config.json`` and safetensors.

    Parameters
    ----------
    path : str or Path
        File or folder.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is of none of these formats.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"{path} does not exist, so there is no model to load. Pass a GGUF file, or a folder "
            "with config.json and safetensors."
        )
    if Path(path).is_file() and Path(path).suffix != ".safetensors":
        return GGUFCheckpoint(path)
    return SafetensorsCheckpoint(path)
