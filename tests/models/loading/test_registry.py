import numpy as np
import pytest
from safetensors.numpy import save_file

from pytensor_ml.models.loading import (
    SafetensorsCheckpoint,
    architecture_name,
    build_from_config,
    build_model,
    open_checkpoint,
    register_builder,
    registry,
)
from pytensor_ml.params import trainable


@pytest.fixture(autouse=True)
def scaled_model(monkeypatch):
    monkeypatch.setattr(registry, "_builders", {})

    @register_builder("ScaledForCausalLM")
    def build(config, keys):
        scale = trainable(np.ones(config["size"], "float32"), name="scale")
        keys.bind(scale, "scale")
        return lambda token_ids: token_ids * scale

    @register_builder("Pair")
    def build_pair(config, keys):
        return ["inputs"], "outputs"

    return build


def test_architecture_name():
    assert architecture_name({"architectures": ["A", "B"], "model_type": "c"}) == "A"
    assert architecture_name({"architectures": [], "model_type": "c"}) == "c"
    assert architecture_name({"_class_name": "D"}) == "D"
    assert architecture_name({}) is None


def test_the_builder_gets_the_config_and_its_keys_come_back():
    model, keys = build_model({"architectures": ["ScaledForCausalLM"], "size": 3})
    assert keys.parameter_for("scale").get_value().shape == (3,)
    assert callable(model)


def test_build_from_config_gives_a_graph_of_token_ids():
    [token_ids], outputs, keys = build_from_config({"model_type": "ScaledForCausalLM", "size": 3})
    assert (token_ids.type.dtype, token_ids.type.shape) == ("int64", (None, None))
    assert token_ids in outputs.owner.inputs
    assert len(keys) == 1
    assert build_from_config({"architectures": ["Pair"]})[:2] == (["inputs"], "outputs")


def test_an_unknown_architecture_is_named_beside_the_supported():
    with pytest.raises(ValueError, match=r"MambaForCausalLM.*Pair, ScaledForCausalLM"):
        build_from_config({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ValueError, match=r"names no architecture.*Pair, ScaledForCausalLM"):
        build_from_config({})


def test_open_checkpoint_knows_the_kinds(tmp_path):
    save_file({"w": np.ones(2, "float32")}, tmp_path / "model.safetensors")
    (tmp_path / "model.bin").write_bytes(b"PK-a-zip-file")
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        assert isinstance(open_checkpoint(path), SafetensorsCheckpoint)
    with pytest.raises(ValueError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "model.bin")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")
