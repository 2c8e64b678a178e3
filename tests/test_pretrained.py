import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from helpers import assert_close
from pytensor.graph.basic import equal_computations
from safetensors.numpy import load_file, save_file
from serialize.networks import praxis, stack

from pytensor_ml import pretrained
from pytensor_ml.base import BlockOp
from pytensor_ml.checkpoint import load_state, save_state
from pytensor_ml.layers import (
    Dropout,
    Embedding,
    Input,
    Linear,
    RMSNorm,
)
from pytensor_ml.models import load_causal_lm
from pytensor_ml.params import NonTrainableParameter, TrainableParameter, non_trainable, trainable
from pytensor_ml.pretrained import from_pretrained, load_network, save_network, save_pretrained
from pytensor_ml.pytensorf import (
    as_output_list,
    collect_data_inputs,
    collect_shared_variables,
    collect_trainable_params,
    compile_predict,
    function,
)
from pytensor_ml.serialize import register_initializer
from pytensor_ml.serialize.allowed import INITIALIZERS
from pytensor_ml.state import Initializer, NormalInitializer, ZeroInitializer

GOLDEN = Path(__file__).parent / "golden"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def values_of(outputs):
    return {v.name: v.get_value() for v in collect_shared_variables(outputs)}


FROZEN = sorted(p.name for p in [*GOLDEN.glob("format_*"), *GOLDEN.glob("published_*")])


# What a file says is the same on every backend, and this one has nothing to compile.
IN_PYTHON = {"mode": "FAST_COMPILE", "linker": "py", "cxx": ""}


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("name", FROZEN)
def test_files_of_yesterday_give_what_they_gave(name):
    inputs, outputs = from_pretrained(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected.npz")
    given = [expected[f"input{i}"] for i in range(len(inputs))]
    with pytensor.config.change_flags(**IN_PYTHON):
        results = compile_predict(outputs, inputs=inputs)(*given)
    results = results if isinstance(outputs, list) else [results]
    keys = sorted(key for key in expected.files if key.startswith("output"))
    for key, result in zip(keys, results, strict=True):
        np.testing.assert_array_equal(np.isnan(result), np.isnan(expected[key]))
        assert_close(np.nan_to_num(result), np.nan_to_num(expected[key]), tolerance=3e-6)


@pytest.mark.compiles_nothing
def test_there_is_a_frozen_file_of_each_version():
    versions = {config_of(GOLDEN / name)["format_version"] for name in FROZEN}
    assert versions == {pretrained.PUBLISHED_VERSION, pretrained.GRAPH_FORMAT_VERSION}
    # Parameters of one name, which were numbered by layers that the file does not tell.
    _, y = from_pretrained(GOLDEN / "published_mlp")
    shapes = {v.name: v.layer_name for v in collect_trainable_params(y) if "Linear" in v.name}
    assert shapes == {"Linear_W": "Linear", "Linear_b": "Linear"}


def test_a_network_gives_the_same_bits_and_gradients(tmp_path):
    x, count = Input("x", shape=(None, 6)), non_trainable(np.float32(1), "count")
    old, given = count.type(), x.type()
    counting = BlockOp([given, old], [given * old, old + 1], update_map={1: 1})
    y = RMSNorm("norm", n_in=6)(Linear("fc", n_in=6, n_out=6)(counting(x, count)[0]))
    rng = np.random.default_rng(0)
    for parameter in collect_trainable_params(y):
        parameter.set_value(rng.normal(size=parameter.type.shape).astype("float32"))
    value = rng.normal(size=(5, 6)).astype("float32")
    save_pretrained(y, tmp_path)

    def run(x, y):
        parameters = sorted(collect_trainable_params(y), key=lambda p: p.name)
        step = function([x], [y, *pt.grad(pt.sum(y**3), parameters)])
        # The second call sees the state that the first has written.
        return [*step(value), *step(value)], values_of(y)["count"]

    [new_x], new_y = from_pretrained(tmp_path)
    results, counted = run(x, y)
    new_results, new_counted = run(new_x, new_y)
    for result, new in zip(results, new_results, strict=True):
        np.testing.assert_array_equal(new, result)
    assert counted == new_counted == 3


@pytest.mark.compiles_nothing
def test_parameters_keep_what_they_are(tmp_path):
    x = Input("x", shape=(None, 6))
    fc = Linear("fc", n_in=6, n_out=4, weight_initializer=NormalInitializer(mean=1.0, std=0.25))
    steps = non_trainable(np.float32([2, 3, 4, 5]), "steps", layer_name="counter")
    plain = pytensor.shared(np.ones((4, 2), "float32"), "plain")
    bare = trainable(np.float32([1, 2]), "bare", shape=(None,))
    y = fc(x) * steps @ plain + bare
    save_pretrained(y, tmp_path)
    assert config_of(tmp_path)["format_version"] == pretrained.PUBLISHED_VERSION
    [new_x], new_y = from_pretrained(tmp_path)
    assert (new_x.name, new_x.type) == ("x", x.type)
    assert equal_computations(
        [new_y],
        [y],
        [new_x, *sorted(collect_shared_variables(new_y), key=lambda v: v.name)],
        [x, *sorted(collect_shared_variables(y), key=lambda v: v.name)],
    )
    found = {v.name: v for v in collect_shared_variables(new_y)}
    assert {n: type(v) for n, v in found.items() if n != "plain"} == {
        "fc_W": TrainableParameter,
        "fc_b": TrainableParameter,
        "steps": NonTrainableParameter,
        "bare": TrainableParameter,
    }
    assert type(found["plain"]) is type(plain)
    assert {n: v.layer_name for n, v in found.items() if n != "plain"} == {
        "fc_W": "fc",
        "fc_b": "fc",
        "steps": "counter",
        "bare": None,
    }
    law = found["fc_W"].initializer
    assert (type(law), law.mean, law.std) == (NormalInitializer, 1.0, 0.25)
    assert isinstance(found["fc_b"].initializer, ZeroInitializer)
    assert found["bare"].initializer is None
    assert found["bare"].type.shape == (None,)
    assert found["plain"].type.shape == plain.type.shape
    for name, value in values_of(y).items():
        np.testing.assert_array_equal(found[name].get_value(), value)
    # The published package does not write what length an open one has.
    config = config_of(tmp_path)
    assert [meta.pop("shape", None) for meta in config["input_meta"]].count(None) == 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(values_of(from_pretrained(tmp_path)[1])["bare"], [1, 2])


@pytest.mark.compiles_nothing
def test_tied_weights_are_one_tensor(tmp_path):
    ids = Input("ids", shape=(None, 3), dtype="int64")
    table = Embedding("tokens", n_embeddings=7, n_features=4)
    save_pretrained(table.head(RMSNorm("norm", n_in=4)(table(ids))), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == {"tokens_W", "norm_scale"}
    _, y = from_pretrained(tmp_path)
    [shared_table] = [v for v in collect_trainable_params(y) if v.name == "tokens_W"]
    assert shared_table in y.owner.inputs[1].owner.inputs
    # The gradient is that of the lookup and that of the head.
    gradient = pt.grad(y.sum(), shared_table)
    assert gradient.type.shape == (7, 4)


@pytest.mark.compiles_nothing
def test_layers_of_one_name_come_back_in_their_order(tmp_path):
    x = Input("x", shape=(None, 4))
    layers = [Linear(n_in=4, n_out=4) for _ in range(3)]
    outputs = [layers[2](x), layers[0](x) @ np.eye(4, dtype="float32") + layers[1](x)]
    for i, layer in enumerate(layers):
        layer.W.set_value(np.full((4, 4), i, "float32"))
    save_pretrained(outputs, tmp_path)
    _, new = from_pretrained(tmp_path)
    found, expected = (
        [v.get_value() for v in collect_shared_variables(ys)] for ys in (new, outputs)
    )
    np.testing.assert_array_equal(
        np.hstack([v.ravel() for v in found]), np.hstack([v.ravel() for v in expected])
    )
    state = collect_shared_variables(new)
    load_state(state, tmp_path / "model.safetensors")


@pytest.mark.compiles_nothing
def test_layers_applied_to_each_other_keep_their_own_values(tmp_path):
    """Of one name and shape, so that values of the wrong layer would fit."""
    first, second = (Linear(n_in=2, n_out=2) for _ in range(2))
    for i, linear in enumerate((first, second)):
        linear.W.set_value(np.full((2, 2), i, "float32"))
        linear.b.set_value(np.full(2, 10 + i, "float32"))
    save_pretrained(second(first(Input("x", shape=(None, 2)))), tmp_path)
    _, y = from_pretrained(tmp_path)
    x, W, b = y.owner.inputs
    assert [float(v.get_value().mean()) for v in (W, b, *x.owner.inputs[1:])] == [1, 11, 0, 10]


@pytest.mark.compiles_nothing
def test_inputs_come_in_calling_order_and_outputs_as_they_were(tmp_path):
    x, y = Input("x", shape=(3,)), Input("y", shape=(3,))
    path = tmp_path / "network.json"
    for order in ([x, y], [y, x]):
        save_network([x - y], path, inputs=order)
        inputs, output = load_network(path)
        assert [v.name for v in inputs] == [v.name for v in order]
        assert not isinstance(output, list)
    save_network([x - y, y], path)
    assert len(load_network(path)[1]) == 2
    with pytest.raises(ValueError, match=r"reads y"):
        save_network(x - y, path, inputs=[x])
    w = trainable(np.zeros(3, "float32"), "w")
    with pytest.raises(ValueError, match="given as data inputs"):
        save_network(x - w, path, inputs=[x, w])


@pytest.mark.compiles_nothing
def test_an_architecture_alone_is_drawn_anew(tmp_path):
    x = Input("x", shape=(None, 60))
    law = NormalInitializer(mean=5.0, std=0.1)
    state = non_trainable(np.ones(40, "float32"), "state")
    y = Linear("fc", n_in=60, n_out=40, weight_initializer=law)(x) + state
    save_network(y, tmp_path / "network.json")
    found = values_of(load_network(tmp_path / "network.json")[1])
    again = values_of(load_network(tmp_path / "network.json")[1])
    assert abs(found["fc_W"].mean() - 5) < 0.05
    assert found["fc_W"].dtype == "float32"
    assert (found["fc_W"] != again["fc_W"]).any()
    assert not found["state"].any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "MOST_DRAWN_BYTES", 60 * 40 * 4)
        with pytest.raises(ValueError, match=r"fc_W of shape \(60, 40\)"):
            load_network(tmp_path / "network.json")


@pytest.mark.compiles_nothing
def test_generators_go_on_only_if_asked(tmp_path):
    x = Input("x", shape=(4,))
    y = Dropout("drop", p=0.5, random_state=3)(x)
    save_pretrained(y, tmp_path)
    [rng] = collect_shared_variables(y)
    expected = rng.get_value().random(5)

    def draws(outputs):
        return collect_shared_variables(outputs)[0].get_value().random(5)

    for load, path in ((from_pretrained, tmp_path), (load_network, tmp_path / "config.json")):
        np.testing.assert_array_equal(draws(load(path, restore_rng=True)[1]), expected)
        assert (draws(load(path)[1]) != expected).all()


@pytest.mark.compiles_nothing
def test_initializers_are_those_registered(tmp_path):
    class Ramp(Initializer):
        __props__ = ("stop",)

        def __init__(self, stop):
            self.stop = stop

        def sample(self, shape, dtype, rng):
            return np.linspace(0, self.stop, int(np.prod(shape)), dtype=dtype).reshape(shape)

    y = Linear("fc", n_in=2, n_out=2, weight_initializer=Ramp(3.0))(Input("x", shape=(2,)))
    with pytest.raises(ValueError, match=r"fc_W is drawn by .*Ramp.*register_initializer"):
        save_network(y, tmp_path / "network.json")
    name = "ramp"
    try:
        assert register_initializer(Ramp, name=name) is Ramp
        save_network(y, tmp_path / "network.json")
        found = values_of(load_network(tmp_path / "network.json")[1])
        np.testing.assert_array_equal(found["fc_W"], [[0, 1], [2, 3]])
    finally:
        del INITIALIZERS[name]
    with pytest.raises(ValueError, match=r"'ramp', which files may not name"):
        load_network(tmp_path / "network.json")
    with pytest.raises(TypeError, match="no subclass of Initializer"):
        register_initializer(np.zeros)


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("make", [lambda depth: stack(depth, dropout=0.0), praxis])
def test_a_config_hardly_grows_with_depth(make, tmp_path):
    sizes = []
    for depth in (2, 30):
        inputs, outputs = make(depth)
        save_network(outputs, tmp_path / "network.json", inputs=inputs)
        config = json.loads((tmp_path / "network.json").read_text())
        # A parameter has one entry in each of these.
        parameters = [config.pop("inputs"), config.pop("input_meta")]
        assert {len(p) for p in parameters} == {len(collect_shared_variables(outputs)) + 2}
        sizes.append(len(json.dumps(config, separators=(",", ":"))))
    assert sizes[1] <= 1.5 * sizes[0]


@pytest.fixture
def folder(tmp_path):
    x = Input("x", shape=(None, 3))
    save_pretrained(Linear("fc", n_in=3, n_out=2)(x), tmp_path)
    return tmp_path


WRONG_WEIGHTS = {
    "missing": ({"fc_W": np.zeros((3, 2), "f4")}, r"Missing from the file: fc_b"),
    "left over": (
        {"fc_W": np.zeros((3, 2), "f4"), "fc_b": np.zeros(2, "f4"), "fc_c": np.zeros(2, "f4")},
        r"filling nothing: fc_c",
    ),
    "prefixed": (
        {"m.fc_W": np.zeros((3, 2), "f4"), "m.fc_b": np.zeros(2, "f4")},
        r"file: fc_W, fc_b\..*m\.fc_W, m\.fc_b",
    ),
    "of another shape": (
        {"fc_W": np.zeros((2, 3), "f4"), "fc_b": np.zeros((1, 2), "f4")},
        r"(?s)fc_b has shape \(1, 2\).*\(2,\).*fc_W has shape \(2, 3\).*\(3, 2\)",
    ),
    "wider": ({"fc_W": np.zeros((3, 2)), "fc_b": np.zeros(2, "f4")}, r"fc_W is float64"),
}


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("kind", WRONG_WEIGHTS)
def test_weights_of_another_network_are_refused(folder, kind):
    tensors, match = WRONG_WEIGHTS[kind]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=match):
        from_pretrained(folder)


@pytest.mark.compiles_nothing
def test_weights_of_another_tool_are_loaded(folder):
    tensors = {"fc_W": np.full((3, 2), 7, "float16"), "fc_b": np.zeros(2, "float32")}
    save_file(tensors, folder / "model.safetensors")
    found = values_of(from_pretrained(folder)[1])
    assert found["fc_W"].dtype == "float32"
    assert (found["fc_W"] == 7).all()


@pytest.mark.compiles_nothing
def test_files_of_two_networks_are_not_mixed(folder, tmp_path):
    other = tmp_path / "other"
    x = Input("x", shape=(None, 3))
    save_pretrained(Linear("fc", n_in=3, n_out=2)(x), other)
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"bears the mark .* Copy both files"):
        from_pretrained(folder)


@pytest.mark.compiles_nothing
def test_what_a_folder_may_be(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        moved = (folder / name).rename(tmp_path / "moved")
        with pytest.raises(FileNotFoundError, match=name):
            from_pretrained(folder)
        moved.rename(folder / name)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="'pytensor' or 'huggingface'"):
        from_pretrained(folder, "onnx")
    with pytest.raises(ValueError, match="variant is 'fp16'"):
        from_pretrained(folder, variant="fp16")
    for part in ("config.json", "model.safetensors"):
        with pytest.raises(ValueError, match=rf"{part} is one of the two files.*Pass their folder"):
            from_pretrained(folder / part)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "other.gguf").write_bytes(b"GGUF")
    (tmp_path / "beside" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other\.gguf"):
        from_pretrained(tmp_path / "beside" / "other.gguf")
    with pytest.raises(ValueError, match="whose folder from_pretrained loads"):
        load_causal_lm(folder)
    with pytest.raises(FileNotFoundError, match=r"is a folder.*Pass the config\.json"):
        load_network(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"does not describe a network of the format"):
        from_pretrained(folder, "pytensor")


@pytest.mark.compiles_nothing
def test_published_checkpoints_come_as_graphs(tmp_path):
    source = GOLDEN / "llama_gqa"
    [ids], logits = from_pretrained(source)
    assert (ids.type.dtype, ids.type.shape) == ("int64", (None, None))
    model = load_causal_lm(source)
    expected = model(ids)
    states = [sorted(collect_shared_variables(y), key=lambda v: v.name) for y in (logits, expected)]
    assert equal_computations([logits], [expected], *states)
    for v, w in zip(*states, strict=True):
        np.testing.assert_array_equal(v.get_value(), w.get_value())
    # Saved here, it is a network like any other.
    save_pretrained(logits, tmp_path)
    [new_ids], new_logits = from_pretrained(tmp_path)
    assert collect_data_inputs(new_logits) == [new_ids]
    state, new_state = (
        sorted(collect_shared_variables(ys), key=lambda v: v.name) for ys in (logits, new_logits)
    )
    assert equal_computations([new_logits], [logits], [new_ids, *new_state], [ids, *state])
    variant = tmp_path / "variant"
    variant.mkdir()
    (variant / "config.json").write_bytes((source / "config.json").read_bytes())
    weights = (source / "model.safetensors").read_bytes()
    (variant / "model.other.safetensors").write_bytes(weights)
    _, logits = from_pretrained(variant, "huggingface", variant="other")
    assert len(as_output_list(logits)) == 1


@pytest.mark.compiles_nothing
def test_a_killed_process_leaves_the_old_network_or_the_new(tmp_path):
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    script = Path(__file__).parent / "killed_while_saving.py"
    environment = {**os.environ, "PYTENSOR_FLAGS": "floatX=float32"}
    run = subprocess.run(
        [sys.executable, script, tmp_path / "model", "130"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    at_random, at_each_step = (part.split() for part in run.stdout.split("steps"))
    assert len(at_random) > 100
    assert {*at_random} == {"1", "2"}
    # Old at first, new from one step on, and never old again.
    assert at_each_step == sorted(at_each_step)
    assert {*at_each_step} == {"1", "2"}
    assert len(at_each_step) > 6


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("step", ["_read_config", "fill"])
def test_a_network_saved_while_another_loads_is_loaded(folder, monkeypatch, step):
    other = Linear("fc", n_in=3, n_out=5)(Input("x", shape=(None, 3)))
    do = getattr(pretrained, step)

    def do_and_save(*args, **kwargs):
        monkeypatch.setattr(pretrained, step, do)
        result = do(*args, **kwargs)
        save_pretrained(other, folder)
        return result

    monkeypatch.setattr(pretrained, step, do_and_save)
    _, y = from_pretrained(folder)
    assert y.type.shape == (None, 5)
    np.testing.assert_array_equal(values_of(y)["fc_W"], values_of(other)["fc_W"])


@pytest.mark.compiles_nothing
def test_a_network_of_two_files_saved_apart(tmp_path):
    y = Linear("fc", n_in=3, n_out=2)(Input("x", shape=(None, 3)))
    save_network(y, tmp_path / "config.json")
    save_state(collect_shared_variables(y), tmp_path / "model.safetensors")
    _, new = from_pretrained(tmp_path)
    np.testing.assert_array_equal(values_of(new)["fc_W"], values_of(y)["fc_W"])


@pytest.mark.compiles_nothing
def test_a_folder_and_a_file_are_not_taken_for_each_other(folder):
    y = Linear("fc", n_in=3, n_out=2)(Input("x", shape=(None, 3)))
    for save in (save_network, lambda y, path: save_state(collect_shared_variables(y), path)):
        with pytest.raises(IsADirectoryError, match=r"is a folder.*Pass the path of a file"):
            save(y, folder)
    with pytest.raises(NotADirectoryError, match=r"config\.json is a file.*Pass a folder"):
        save_pretrained(y, folder / "config.json")


@pytest.mark.compiles_nothing
def test_a_config_too_large_to_load_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "LONGEST_JSON", 1000)
    x = Input("x", shape=(2000,))
    y = x + np.random.default_rng(0).normal(size=2000).astype("float32")
    with pytest.raises(ValueError, match="non_trainable parameter"):
        save_network(y, tmp_path / "network.json")
    assert not os.listdir(tmp_path)
