"""Partition rules: how parameters are split over the devices of a JAX mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from pytensor.compile.sharedvalue import SharedVariable

from pytensor_ml.layers.attention import GatedAttention, GroupedQueryAttention
from pytensor_ml.layers.combinators import Sequential
from pytensor_ml.layers.embedding import Embedding
from pytensor_ml.layers.feedforward import FeedForward, GatedFeedForward
from pytensor_ml.layers.linear import Linear
from pytensor_ml.layers.moe import MoE
from pytensor_ml.layers.norm import Norm
from pytensor_ml.layers.transformer import DecoderBlock, TransformerBlock, TransformerStack
from pytensor_ml.models.causal_lm import CausalLM
from pytensor_ml.params import NonTrainableParameter

type MeshAxes = str | tuple[str, ...] | None

RULES: Mapping[str, MeshAxes] = {
    "vocabulary": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "experts": "tensor",
    "expert_hidden": None,
    "conditioning": None,
    "width": None,
}


class Axis(NamedTuple):
    """What an axis of a parameter is.

    Parameters
    ----------
    role : str or None
        The rule that it follows; None is never split.
    n_parts : int
        Number of parts that must stay whole, such as heads.
    """

    role: str | None
    n_parts: int


type Axes = dict[SharedVariable, tuple[Axis, ...]]


def partition_specs(
    layers: Callable | Sequence[Callable],
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, MeshAxes] = RULES,
) -> dict[str, PartitionSpec]:
    """Return how each parameter of a model is split over the devices of a mesh.

    The axes of parameters have roles, and a rule says over which axis of the mesh a role is split:

    ================= ========================================================================
    Role              Axes
    ================= ========================================================================
    ``vocabulary``    rows of an embedding; columns of an output head
    ``heads``         columns of the projections to queries and gates; rows of the one after
    ``kv_heads``      columns of the projections to keys and values; with one head, which every
                      query reads, they are never split
    ``hidden``        columns of a feed-forward's gate and up maps; rows of its down map
    ``experts``       first axis of the weights of a mixture's experts
    ``expert_hidden`` width inside each expert
    ``conditioning``  rows of a block's modulator
    ``width``         the other axis of all these, that of the residual stream
    ================= ========================================================================

    A bias is split like the columns beside it, unless these are ``width``. Norms, scales of
    branches and biases of experts are whole on every device.

    Parameters
    ----------
    layers : layer or sequence of layers
        The model, or its parts. A :class:`~pytensor_ml.layers.linear.Linear` among them is an
        output head.
    mesh : Mesh or AbstractMesh
        The devices, or only their number along each axis.
    rules : mapping from str to str, tuple of str or None, optional
        For each role the axis of the mesh, or several, over which it is split, or None. By default
        vocabulary, heads, hidden width and experts are split over ``"tensor"``. With
        ``RULES | {"width": "data"}`` the width is split over the axis that batches are split over.

    Returns
    -------
    dict from str to PartitionSpec
        By the names that :func:`~pytensor_ml.to_jax` gives the parameters.

    Raises
    ------
    ValueError
        If a rule names an axis that the mesh has not, or one whose size does not divide what is to
        be split over it, or the mesh leaves no shardings to XLA.

    Examples
    --------
    >>> import jax
    >>> from jax.sharding import Mesh
    >>> from pytensor_ml.layers import GatedFeedForward
    >>> from pytensor_ml.sharding import partition_specs
    >>> mesh = Mesh(jax.devices()[:1], ("tensor",))
    >>> specs = partition_specs(GatedFeedForward("mlp", d_model=8, hidden_dim=16), mesh)
    >>> specs["mlp_gate_W"], specs["mlp_down_W"]
    (P(None, 'tensor'), P('tensor', None))
    """
    if explicit := [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is not AxisType.Auto
    ]:
        raise ValueError(
            f"The mesh's axes {', '.join(map(str, explicit))} leave the splitting of what is "
            "computed to the program, which does not say it, and JAX would refuse to run it. Make "
            "the mesh by jax.sharding.Mesh, or with axis_types of AxisType.Auto."
        )
    axes: Axes = {}
    for layer in layers if isinstance(layers, Sequence) else [layers]:
        axes |= parameter_axes(layer)
    return {
        str(parameter.name): PartitionSpec(
            *(_mesh_axes(parameter, axis, mesh, rules) for axis in of_parameter)
        )
        for parameter, of_parameter in axes.items()
    }


def shard_params(
    params: Mapping[str, Any], specs: Mapping[str, PartitionSpec], mesh: Mesh
) -> dict[str, jax.Array]:
    """Put each parameter on the devices of a mesh, split as its spec says.

    Parameters
    ----------
    params : mapping from str to array
        Parameters, as :func:`~pytensor_ml.to_jax` gives them.
    specs : mapping from str to PartitionSpec
        How they are split; those of other parameters are not read.
    mesh : jax.sharding.Mesh
        The devices.

    Raises
    ------
    ValueError
        If a parameter has no spec.
    """
    if missing := [name for name in params if name not in specs]:
        raise ValueError(
            f"No spec says how to split {', '.join(missing)}. Pass the layers that own them to "
            f"partition_specs, or add specs, as in specs | {{{missing[0]!r}: PartitionSpec()}}."
        )
    return jax.device_put(dict(params), {name: NamedSharding(mesh, specs[name]) for name in params})


@singledispatch
def parameter_axes(layer: Any) -> Axes:
    """Return what the axes of each parameter of a layer are, none for classes not known.

    Parameters
    ----------
    layer : layer
        The layer. Classes of your own are added by ``parameter_axes.register``.

    Returns
    -------
    dict from SharedVariable to tuple of Axis

    Examples
    --------
    >>> from pytensor_ml.layers import Linear
    >>> from pytensor_ml.sharding import Axis, parameter_axes
    >>> class Adapter:
    ...     def __init__(self, name):
    ...         self.down = Linear(f"{name}_down", n_in=64, n_out=8, bias=False)
    >>> @parameter_axes.register(Adapter)
    ... def adapter_axes(layer):
    ...     return {layer.down.W: (Axis("width", 64), Axis(None, 8))}
    """
    return {}


@parameter_axes.register(Sequential)
def _sequential(layer: Sequential) -> Axes:
    return _joined(*layer.layers)


@parameter_axes.register(CausalLM)
def _causal_lm(layer: CausalLM) -> Axes:
    return _joined(layer.embedding, layer.stack, layer.norm, layer.head)


@parameter_axes.register(TransformerStack)
def _stack(layer: TransformerStack) -> Axes:
    return _joined(*layer.blocks)


@parameter_axes.register(TransformerBlock)
def _transformer_block(layer: TransformerBlock) -> Axes:
    return parameter_axes(layer._block)


@parameter_axes.register(DecoderBlock)
def _decoder_block(layer: DecoderBlock) -> Axes:
    axes = _joined(
        layer.attention,
        layer.feed_forward,
        layer.attention_norm,
        layer.feed_forward_norm,
        layer.post_attention_norm,
        layer.post_feed_forward_norm,
    )
    if isinstance(layer.branch_scale, NonTrainableParameter):
        axes[layer.branch_scale] = ()
    if layer.modulator is not None:
        conditioning = Axis("conditioning", layer.modulator.n_in)
        axes |= _linear(layer.modulator, conditioning, Axis("width", layer.attention.n_embd))
    return axes


@parameter_axes.register(GroupedQueryAttention)
def _attention(layer: GroupedQueryAttention) -> Axes:
    width = Axis("width", layer.n_embd)
    heads = Axis("heads", layer.n_head)
    axes = _joined(layer.q_norm, layer.k_norm)
    axes |= _linear(layer.out_proj, heads, width)
    if layer.fused_qkv:
        return axes | _linear(layer.qkv_proj, width, Axis("heads", layer.qkv_proj.n_out))
    kv_heads = Axis(None if layer.n_kv_head == 1 else "kv_heads", layer.n_kv_head)
    axes |= _linear(layer.q_proj, width, heads)
    for projection in (layer.k_proj, layer.v_proj):
        axes |= _linear(projection, Axis("width", projection.n_in), kv_heads)
    if isinstance(layer, GatedAttention):
        axes |= _linear(layer.gate_proj, width, heads)
    return axes


@parameter_axes.register(FeedForward)
def _feed_forward(layer: FeedForward) -> Axes:
    width, hidden = Axis("width", layer.fc_in.n_in), Axis("hidden", layer.hidden_dim)
    return _linear(layer.fc_in, width, hidden) | _linear(layer.fc_out, hidden, width)


@parameter_axes.register(GatedFeedForward)
def _gated_feed_forward(layer: GatedFeedForward) -> Axes:
    width, hidden = Axis("width", layer.gate.n_in), Axis("hidden", layer.gate.n_out)
    return (
        _linear(layer.gate, width, hidden)
        | _linear(layer.up, width, hidden)
        | _linear(layer.down, hidden, width)
    )


@parameter_axes.register(MoE)
def _moe(layer: MoE) -> Axes:
    width, experts = Axis("width", layer.d_model), Axis("experts", layer.n_experts)
    hidden = Axis("expert_hidden", layer.hidden_dim)
    axes = _joined(layer.shared) | {
        layer.gate: (experts, width, hidden),
        layer.up: (experts, width, hidden),
        layer.down: (experts, hidden, width),
    }
    # Every device chooses among all experts.
    axes |= _linear(layer.router, width, Axis(None, layer.n_experts))
    if layer.bias is not None:
        axes[layer.bias] = ()
    return axes


@parameter_axes.register(Norm)
def _norm(layer: Norm) -> Axes:
    return {v: () for v in vars(layer).values() if isinstance(v, SharedVariable)}


@parameter_axes.register(Embedding)
def _embedding(layer: Embedding) -> Axes:
    rows = Axis("vocabulary", layer.n_embeddings)
    return {layer.W: (rows, Axis("width", layer.n_features))}


@parameter_axes.register(Linear)
def _head(layer: Linear) -> Axes:
    return _linear(layer, Axis("width", layer.n_in), Axis("vocabulary", layer.n_out))


def _joined(*layers: Any) -> Axes:
    return {v: axes for layer in layers for v, axes in parameter_axes(layer).items()}


def _linear(layer: Linear, rows: Axis, columns: Axis) -> Axes:
    axes: Axes = {layer.W: (rows, columns)}
    if layer.b is not None:
        axes[layer.b] = () if columns.role == "width" else (columns,)
    return axes


def _mesh_axes(
    parameter: SharedVariable, axis: Axis, mesh: Mesh | AbstractMesh, rules: Mapping[str, MeshAxes]
) -> MeshAxes:
    if axis.role is None:
        return None
    if axis.role not in rules:
        raise ValueError(
            f"No rule says how {axis.role} of {parameter.name} is split. Add one, as in "
            f"RULES | {{{axis.role!r}: None}}."
        )
    over = rules[axis.role]
    names = (over,) if isinstance(over, str) else over or ()
    if unknown := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(
            f"{axis.role} is to be split over {', '.join(unknown)}, but the mesh has the axes "
            f"{', '.join(map(str, mesh.axis_names))}. Give the mesh such an axis, which may have "
            f"size 1, or change the rule, as in RULES | {{{axis.role!r}: None}}."
        )
    size = math.prod(mesh.shape[name] for name in names)
    if axis.n_parts % size:
        raise ValueError(
            f"{parameter.name} has {axis.n_parts} {axis.role}, which {size} devices of the mesh's "
            f"axis {' x '.join(names)} cannot share equally. Choose a size that divides it, or "
            f"leave them whole by RULES | {{{axis.role!r}: None}}."
        )
    return over
