"""Partition rules, and decoders split by them: run once, with JAX."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pytensor_ml.layers import (
    DecoderBlock,
    Embedding,
    GatedAttention,
    GatedFeedForward,
    Input,
    IntegerRotaryEmbedding,
    Linear,
    MultiheadAttention,
    RMSNorm,
    Sequential,
    TransformerBlock,
    TransformerStack,
    build_moe_config,
    praxis_stack,
)
from pytensor_ml.models import CausalLM
from pytensor_ml.pytensorf import collect_shared_variables

SPLIT = Path(__file__).with_name("on_eight_devices.py")


@pytest.fixture(scope="module", autouse=True)
def _with_jax_only(backend):
    if backend != "jax":
        pytest.skip("uses JAX whatever the backend")


@pytest.fixture(scope="module")
def sharding():
    import pytensor_ml.sharding

    return pytensor_ml.sharding


@pytest.fixture(scope="module")
def split():
    flags = f"{os.environ.get('PYTENSOR_FLAGS', '')},floatX=float32"
    environment = os.environ | {"PYTENSOR_FLAGS": flags}
    result = subprocess.run(
        [sys.executable, SPLIT], stdout=subprocess.PIPE, env=environment, check=True, timeout=300
    )
    return json.loads(result.stdout)


def mesh_of(data=2, tensor=4, kind="Auto"):
    """A mesh of shapes alone, of devices that need not be there."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh((data, tensor), ("data", "tensor"), axis_types=(AxisType[kind],) * 2)


@pytest.mark.parametrize("case", ["tensor", "both"])
def test_split_models_give_what_one_device_gives(split, case):
    errors = split[case]["errors"]
    assert len(errors) > 12
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(("case", "n_devices"), [("tensor", 4), ("both", 8)])
def test_devices_share_the_parameters_equally(split, case, n_devices):
    assert split[case]["n_devices"] == n_devices
    # Norms and biases, which are whole everywhere, are few.
    assert split[case]["most_bytes"] < 1.06 * split[case]["bytes"] / n_devices


def test_a_block_joins_devices_twice_and_gathers_no_weight(split):
    n_embeddings, n_blocks = 1, 2
    assert split["tensor"]["collectives"] == {"all-reduce": n_embeddings + 2 * n_blocks}


def test_roles_of_a_decoder(sharding):
    block = DecoderBlock(
        "b",
        attention=MultiheadAttention("attn", n_embd=16, n_head=8, n_kv_head=4),
        feed_forward=GatedFeedForward("mlp", d_model=16, hidden_dim=32),
        attention_norm=RMSNorm("norm1", n_in=16),
        feed_forward_norm=RMSNorm("norm2", n_in=16),
        branch_scale=0.5,
        modulation_dim=8,
    )
    model = CausalLM(
        embedding=Embedding("tokens", n_embeddings=12, n_features=16),
        stack=TransformerStack("stack", [block], rotary=None),
        norm=RMSNorm("norm", n_in=16),
        head=Linear("head", n_in=16, n_out=12),
        max_positions=8,
    )
    rules = sharding.RULES | {"width": "data", "conditioning": "tensor"}
    specs = sharding.partition_specs(model, mesh_of(), rules)
    columns, rows = ("data", "tensor"), ("tensor", "data")
    assert {name: tuple(spec) for name, spec in specs.items()} == {
        "tokens_W": rows,
        "attn_q_proj_W": columns,
        "attn_q_proj_b": ("tensor",),
        "attn_k_proj_W": columns,
        "attn_k_proj_b": ("tensor",),
        "attn_v_proj_W": columns,
        "attn_v_proj_b": ("tensor",),
        "attn_out_proj_W": rows,
        "attn_out_proj_b": (),
        "mlp_gate_W": columns,
        "mlp_up_W": columns,
        "mlp_down_W": rows,
        "norm1_scale": (),
        "norm2_scale": (),
        "b_branch_scale": (),
        "b_modulator_W": rows,
        "b_modulator_b": (),
        "norm_scale": (),
        "head_W": columns,
        "head_b": ("tensor",),
    }


def test_roles_of_a_praxis_trunk(sharding):
    trunk = praxis_stack(
        "t",
        depth=2,
        dense_blocks=(0,),
        dim=16,
        num_heads=4,
        num_kv_heads=1,
        head_dim=4,
        qk_norm_eps=1e-6,
        norm_eps=1e-6,
        dense_hidden=32,
        rotary=IntegerRotaryEmbedding(dim=4, effective_dim=4, base=100, table_size=64),
        moe=build_moe_config(
            dim=16,
            expert_hidden=8,
            num_routed_experts=4,
            top_k_routed=2,
            routed_scaling_factor=1.0,
            gate_bias_update_factor=0.1,
        ),
    )
    y, _ = trunk(Input("x", (None, None, 16), "float32"), Input("positions", (None,), "int64"))
    specs = sharding.partition_specs([trunk], mesh_of())
    assert specs.keys() == {v.name for v in collect_shared_variables(y)}
    moe, attention = "t_blocks_1_moe_", "t_blocks_1_attention_"
    expected = {
        f"{moe}gate_W": ("tensor", None, None),
        f"{moe}up_W": ("tensor", None, None),
        f"{moe}down_W": ("tensor", None, None),
        f"{moe}router_W": (None, None),
        f"{moe}selection_bias": (),
        f"{moe}shared_up_W": (None, "tensor"),
        f"{moe}shared_down_W": ("tensor", None),
        f"{attention}gate_proj_W": (None, "tensor"),
        # The one head of keys is read by the queries of every device.
        f"{attention}k_proj_W": (None, None),
        f"{attention}q_norm_weight": (),
        "t_blocks_1_s": (),
    }
    assert {name: tuple(specs[name]) for name in expected} == expected
    hidden = sharding.RULES | {"experts": None, "expert_hidden": "tensor"}
    specs = sharding.partition_specs(trunk, mesh_of(), hidden)
    assert tuple(specs[f"{moe}gate_W"]) == (None, None, "tensor")
    assert tuple(specs[f"{moe}down_W"]) == (None, "tensor", None)


@pytest.mark.parametrize("fused_qkv", [True, False])
def test_every_parameter_of_a_transformer_block_has_a_role(sharding, fused_qkv):
    block = TransformerBlock("b", d_model=16, n_head=4, fused_qkv=fused_qkv)
    parameters = collect_shared_variables(block(Input("x", (None, None, 16), "float32")))
    specs = sharding.partition_specs(block, mesh_of())
    assert specs.keys() == {v.name for v in parameters}
    n_split = sum(any(spec) for spec in specs.values())
    assert n_split == (6 if fused_qkv else 10)


def test_axes_that_do_not_divide_are_errors(sharding):
    attention = MultiheadAttention("attn", n_embd=24, n_head=6, n_kv_head=2, bias=False)
    with pytest.raises(ValueError, match=r"attn_out_proj_W has 6 heads, which 4 devices of"):
        sharding.partition_specs(attention, mesh_of())
    # 8 columns would divide, but not into whole heads.
    with pytest.raises(ValueError, match=r"attn_k_proj_W has 2 kv_heads, which 3 devices of"):
        sharding.partition_specs(attention, mesh_of(tensor=3))
    mlp = GatedFeedForward("mlp", d_model=9, hidden_dim=24)
    both = sharding.RULES | {"hidden": ("data", "tensor")}
    sharding.partition_specs(mlp, mesh_of(), both)
    with pytest.raises(ValueError, match=r"24 hidden, which 16 devices of .*data x tensor cannot"):
        sharding.partition_specs(mlp, mesh_of(data=4), both)
    with pytest.raises(ValueError, match=r"mlp_gate_W has 9 width, which 2"):
        sharding.partition_specs(mlp, mesh_of(), sharding.RULES | {"width": "data"})


def test_layers_in_sequence_are_found(sharding):
    layers = [GatedFeedForward(name, d_model=8, hidden_dim=16) for name in ("one", "two")]
    specs = sharding.partition_specs(Sequential(*layers), mesh_of())
    assert specs == sharding.partition_specs(layers, mesh_of())
    assert len(specs) == 6


def test_meshes_that_do_not_serve_are_errors(sharding):
    mlp = GatedFeedForward("mlp", d_model=8, hidden_dim=24)
    with pytest.raises(ValueError, match=r"split over model, but the mesh has the axes data, tens"):
        sharding.partition_specs(mlp, mesh_of(), sharding.RULES | {"hidden": "model"})
    with pytest.raises(ValueError, match=r"axes data, tensor leave the splitting"):
        sharding.partition_specs(mlp, mesh_of(kind="Explicit"))
    with pytest.raises(ValueError, match="No rule says how hidden of mlp_gate_W"):
        sharding.partition_specs(mlp, mesh_of(), {"width": None})


def test_layers_of_the_user_take_part_once_registered(sharding):
    from jax.sharding import PartitionSpec

    class Adapter:
        def __init__(self):
            self.down = Linear("down", n_in=8, n_out=4, bias=False)

    attention = GatedAttention(
        "attn", dim=8, num_heads=4, num_kv_heads=4, head_dim=2, qk_norm_eps=1e-6
    )
    norms = {where: RMSNorm(where, n_in=8) for where in ("attention_norm", "feed_forward_norm")}
    block = DecoderBlock("b", attention=attention, feed_forward=Adapter(), **norms)
    assert "down_W" not in sharding.partition_specs(block, mesh_of())

    @sharding.parameter_axes.register(Adapter)
    def adapter_axes(layer):
        return {layer.down.W: (sharding.Axis(None, 8), sharding.Axis("hidden", 4))}

    specs = sharding.partition_specs(block, mesh_of())
    assert specs["down_W"] == PartitionSpec(None, "tensor")


def test_parameters_without_a_spec_are_named(sharding):
    import jax
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(jax.devices()[:1], ("tensor",))
    params = {"w": np.ones(3), "v": np.ones((2, 2))}
    with pytest.raises(ValueError, match=r"how to split v\..*specs \| \{'v': PartitionSpec\(\)\}"):
        sharding.shard_params(params, {"w": PartitionSpec("tensor")}, mesh)
    put = sharding.shard_params({"w": np.ones(3)}, {"w": PartitionSpec("tensor")}, mesh)
    assert put["w"].sharding.spec == PartitionSpec("tensor")
