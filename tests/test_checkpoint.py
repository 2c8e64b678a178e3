import json
import os
import struct

import numpy as np
import pytensor
import pytest
from safetensors.numpy import load_file, save_file

from pytensor_ml.checkpoint import load_state, save_state
from pytensor_ml.layers import Linear
from pytensor_ml.params import non_trainable, trainable

pytestmark = pytest.mark.compiles_nothing


def parameter(value, name="w", layer_name=None):
    return trainable(np.asarray(value), name, layer_name=layer_name)


def saved(path, **arrays):
    save_file(arrays, path)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


def test_values_of_every_dtype_come_back_bit_for_bit(path):
    rng = np.random.default_rng(0)
    variables = [parameter(rng.normal(0, 9, (3, 2)).astype(d), f"w_{d}") for d in DTYPES]
    variables += [
        parameter(np.float32([np.nan, -0.0, np.inf, 1e-45]), "special"),
        parameter(np.float32(3), "scalar"),
        parameter(np.zeros((0, 3), "float32"), "empty"),
        parameter(np.asfortranarray(rng.normal(size=(4, 3))), "by columns"),
        non_trainable(rng.normal(size=(6, 4)).astype("float32")[::2], "strided"),
        pytensor.shared(np.arange(3), "plain"),
    ]
    before = [v.get_value() for v in variables]
    save_state(variables, path)
    for variable in variables:
        variable.set_value(np.zeros_like(variable.get_value()))
    load_state(variables, path)
    for variable, value in zip(variables, before, strict=True):
        loaded = variable.get_value()
        assert (loaded.dtype, loaded.shape) == (variable.type.dtype, value.shape)
        assert loaded.tobytes() == np.ascontiguousarray(value, loaded.dtype).tobytes()
    # Another reader of the format reads the same.
    read = load_file(path)
    assert read.keys() == {v.name for v in variables}
    np.testing.assert_array_equal(read["strided"], before[-2])


def test_one_value_is_loaded_into_one_parameter_only(path):
    w = parameter(np.float32([1, 2]))
    save_state([w], path)
    load_state([w], path)
    w.get_value(borrow=True)[0] = 5
    assert load_file(path)["w"][0] == 1


def test_one_variable_is_saved_once_and_those_of_one_name_are_numbered(path):
    first, second = (Linear(n_in=2, n_out=3) for _ in range(2))
    loose = [parameter(np.float32([i]), "w") for i in range(2)]
    variables = [first.W, first.b, second.W, first.W, *loose, parameter(np.float32([7]), "u")]
    save_state(variables, path)
    read = load_file(path)
    assert read.keys() == {"Linear_1_W", "Linear_2_W", "Linear_b", "w_1", "w_2", "u"}
    np.testing.assert_array_equal(read["Linear_2_W"], second.W.get_value())
    np.testing.assert_array_equal(read["w_2"], [1])
    taken = parameter(np.float32([0]), "Linear_1_W")
    with pytest.raises(ValueError, match="Linear_1_W"):
        save_state([*variables, taken], path)
    with pytest.raises(ValueError, match="has no name"):
        save_state([parameter(np.float32([0]), None)], path)
    assert load_file(path).keys() == read.keys()


KINDS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]


@pytest.mark.parametrize("kind", KINDS)
def test_generators_go_on_where_they_were(path, kind):
    make = getattr(np.random, kind)
    rng = pytensor.shared(np.random.Generator(make(3)), "layer/rng")
    # With a half of a draw left over.
    rng.get_value(borrow=True).integers(0, 9, 5, dtype="int32")
    save_state([rng, parameter(np.float32([1]))], path)
    expected = rng.get_value().integers(0, 1000, 9, dtype="int32")
    other = pytensor.shared(np.random.Generator(make(4)), "layer/rng")
    load_state([other, parameter(np.float32([1]))], path)
    drawn = other.get_value().integers(0, 1000, 9, dtype="int32")
    np.testing.assert_array_equal(drawn, expected)


def test_generators_are_checked(path):
    rng = pytensor.shared(np.random.default_rng(0), "rng")
    save_state([rng], path)
    with pytest.raises(ValueError, match=r"PCG64 for rng, which draws from MT19937"):
        load_state([pytensor.shared(np.random.Generator(np.random.MT19937(0)), "rng")], path)
    with pytest.raises(ValueError, match="filling nothing: rng/rng"):
        load_state([], path)
    for text in ("{", "[]", '{"bit_generator": "PCG64"}', '{"bit_generator": ["os"]}'):
        save_file({}, path, metadata={"rng/rng": text})
        with pytest.raises(ValueError, match="rng/rng"):
            load_state([rng], path)
    header = json.dumps({"__metadata__": {"rng/rng": 3}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="__metadata__"):
        load_state([rng], path)


class Unchanged:
    """Asserts that variables keep their values."""

    def __init__(self, *variables):
        self.variables = variables

    def __enter__(self):
        self.values = [v.get_value().tobytes() for v in self.variables]

    def __exit__(self, *exception):
        assert [v.get_value().tobytes() for v in self.variables] == self.values


def test_missing_and_unexpected_keys_are_all_listed(path):
    variables = [parameter(np.float32([i, i]), name) for i, name in enumerate("abc")]
    saved(path, **{f"model.{n}": np.zeros(2, "float32") for n in "abc"})
    match = r"Missing from the file: a, b, c\..* model\.a, model\.b, model\.c\..*load_partial"
    with Unchanged(*variables), pytest.raises(ValueError, match=match):
        load_state(variables, path)
    saved(path, a=np.ones(2, "float32"), b=np.ones(2, "float32"))
    with Unchanged(*variables), pytest.raises(ValueError, match="file: c"):
        load_state(variables, path)
    load_state(variables[:2], path)
    saved(path, **{f"model.{n}": np.full(2, 7, "float32") for n in "ab"})
    load_state(variables[:2], path, {"a": "model.a", "b": "model.b"})
    assert (variables[1].get_value() == 7).all()
    with pytest.raises(ValueError, match=r"Both a and b would be filled from 'model\.a'"):
        load_state(variables[:2], path, {"a": "model.a", "b": "model.a"})


def test_shapes_are_those_of_the_parameters(path):
    a, b = parameter(np.ones(3, "float32"), "a"), parameter(np.ones((2, 3), "float32"), "b")
    saved(path, a=np.zeros((1, 3), "float32"), b=np.zeros((3, 2), "float32"))
    match = r"(?s)a has shape \(1, 3\).*\(3,\).*b has shape \(3, 2\).*\(2, 3\)"
    with Unchanged(a, b), pytest.raises(ValueError, match=match):
        load_state([a, b], path)


def test_a_dtype_is_widened_and_narrowed_only_if_asked(path):
    half = parameter(np.zeros(2, "float16"), "a")
    with Unchanged(half), pytest.raises(ValueError, match=r"a is float32.*float16"):
        load_state([half], saved(path, a=np.float32([1 / 3, np.inf])))
    load_state([half], path, allow_narrowing=True)
    np.testing.assert_array_equal(half.get_value(), np.float16([1 / 3, np.inf]))
    with Unchanged(half), pytest.raises(ValueError, match=r"a is float32 and holds 70000\.0"):
        load_state([half], saved(path, a=np.float32([1 / 3, 70000])), allow_narrowing=True)
    byte = parameter(np.zeros(2, "int8"), "a")
    load_state([byte], saved(path, a=np.int64([-128, 127])), allow_narrowing=True)
    np.testing.assert_array_equal(byte.get_value(), [-128, 127])
    for beyond in (np.int64([0, 128]), np.float32([0, 0.5])):
        with Unchanged(byte), pytest.raises(ValueError, match=r"a is \w+ and holds (128|0\.5)"):
            load_state([byte], saved(path, a=beyond), allow_narrowing=True)
    single = parameter(np.zeros(2, "float32"), "a")
    load_state([single], saved(path, a=np.float16([1 / 3, 6e-8])))
    assert single.get_value().dtype == "float32"
    np.testing.assert_array_equal(single.get_value(), np.float16([1 / 3, 6e-8]))


def test_bfloat16_is_widened_exactly(path):
    words = np.array([0x3F80, 0x41FD, 0xFF80, 0x0001], "<u2")
    entry = {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + words.tobytes())
    w = parameter(np.zeros(4, "float32"))
    load_state([w], path)
    np.testing.assert_array_equal(w.get_value(), [1, 31.625, -np.inf, np.float32(2.0**-133)])


def test_nothing_is_left_of_a_write_that_fails(path, monkeypatch):
    w = parameter(np.float32([1]))
    save_state([w], path)

    def fail(_):
        raise OSError("disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    w.set_value(np.float32([2]))
    with pytest.raises(OSError, match="disk is full"):
        save_state([w], path)
    assert os.listdir(path.parent) == [path.name]
    assert load_file(path)["w"] == 1


def test_only_dtypes_of_the_format_are_saved(path):
    with pytest.raises(ValueError, match="w holds complex64"):
        save_state([parameter(np.complex64([1j]))], path)
    assert not path.exists()


def test_a_file_is_as_private_as_others(path):
    save_state([parameter(np.float32([1]))], path)
    (path.parent / "other").touch()
    assert path.stat().st_mode == (path.parent / "other").stat().st_mode


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_no_tensor_can_have_are_refused_before_anything_is_written(tmp_path, name):
    variable = pytensor.shared(np.ones(2, "float32"), name=name)
    with pytest.raises(ValueError, match="Give it another name before saving"):
        save_state([variable], tmp_path / "state.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_link_goes_on_pointing_at_what_is_saved(tmp_path):
    variable = pytensor.shared(np.ones(2, "float32"), name="w")
    (tmp_path / "link").symlink_to(tmp_path / "state")
    save_state([variable], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    load_state([variable], tmp_path / "state")


def test_a_missing_folder_is_named(tmp_path):
    variable = pytensor.shared(np.ones(2, "float32"), name="w")
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing to write state"):
        save_state([variable], tmp_path / "missing" / "state.safetensors")
