import json
import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save_file

from pytensor_ml.models.loading import SafetensorsCheckpoint

INDEX = "model.safetensors.index.json"


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, first, last, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_bfloat16_is_widened_exactly(tmp_path):
    words = np.array([0x3F80, 0x41FD, 0xFF80, 0x0001], "<u2")
    write_raw(tmp_path / "b.safetensors", {"w": entry([2, 2], 0, 8, "BF16")}, words.tobytes())
    checkpoint = SafetensorsCheckpoint(tmp_path / "b.safetensors")
    values = checkpoint.read("w")
    assert values.dtype == checkpoint.dtype("w") == "float32"
    np.testing.assert_array_equal(values, [[1.0, 31.625], [-np.inf, np.float32(2.0**-133)]])


@pytest.mark.parametrize(
    "dtype",
    ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"],
)
def test_every_dtype_of_the_library_comes_back(tmp_path, dtype):
    arrays = {
        "matrix": np.array([[0, 1, 2], [3, 40, 100]], dtype),
        "scalar": np.array(1, dtype),
        "empty": np.zeros((0, 3), dtype),
    }
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.keys() == arrays.keys()
    for key, array in arrays.items():
        values = checkpoint.read(key)
        assert values.dtype == checkpoint.dtype(key) == array.dtype
        assert values.shape == checkpoint.shape(key) == array.shape
        np.testing.assert_array_equal(values, array)


def test_config_is_read_from_beside_the_weights(tmp_path):
    save_file({"w": np.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        SafetensorsCheckpoint(tmp_path).config  # noqa: B018
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for path in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        assert SafetensorsCheckpoint(path).config == {"model_type": "llama"}
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json"):
        SafetensorsCheckpoint(tmp_path).config  # noqa: B018


@pytest.mark.parametrize(("dtype", "size"), [("F32", 4), ("BOOL", 1)])
def test_only_what_is_read_takes_memory(tmp_path, dtype, size):
    header = {
        "big": entry([(1 << 26) // size], 0, 1 << 26, dtype),
        "small": entry([2], 1 << 26, (1 << 26) + 8),
    }
    path = write_raw(tmp_path / "model.safetensors", header)
    os.truncate(path, path.stat().st_size + (1 << 26) + 8)
    tracemalloc.start()
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.shape("big") == ((1 << 26) // size,)
    assert checkpoint.read("small").shape == (2,)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


BROKEN = {
    "text": (b"these are no weights at all", "not a safetensors file"),
    "empty": (b"", "not a safetensors file"),
    "header beyond the file": (struct.pack("<Q", 1000) + b"{}", "cut short"),
    "header of two gigabytes": (struct.pack("<Q", 1 << 31) + b"{}", "cut short"),
    "header that is no JSON": ((b"{'w': 1}",), "valid JSON"),
    "header that is no UTF-8": ((b'{"\xff": 1}',), "valid JSON"),
    "header that is a list": ((b"[1, 2]",), "list"),
    "header nested 100,000 deep": ((b"[" * 100_000,), "valid JSON"),
    "key twice": ((b'{"w": 1, "w": 2}',), "w appears twice"),
    "entry without shape": (({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, 8), "w"),
    "entry that is a number": (({"w": 3}, 8), "w"),
    "three offsets": (({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, 8), "w"),
    "unknown dtype": (({"w": entry([2], 0, 8, "F33")}, 8), "w as 'F33'"),
    "dtype that is a list": (({"w": entry([2], 0, 8, ["F32"])}, 8), "w as"),
    "negative offset": (({"w": entry([2], -8, 0)}, 8), r"w.*\[-8, 0\]"),
    "negative shape": (({"w": entry([-1, -2], 0, 8)}, 8), r"w.*\[-1, -2\]"),
    "shape of fractions": (({"w": entry([2.0], 0, 8)}, 8), r"w.*\[2\.0\]"),
    "shape that is a number": (({"w": entry(2, 0, 8)}, 8), "w.*2"),
    "shape of truths": (({"w": entry([True], 0, 4)}, 4), r"w.*\[True\]"),
    "shape larger than its bytes": (({"w": entry([10**9], 0, 8)}, 8), r"w.*4000000000"),
    "shape of no array": (({"w": entry([2**70, 0], 0, 0)}, 0), "w.*no array can have"),
    "shape of numpy's limits": (({"w": entry([2**40, 2**40, 0], 0, 0)}, 0), "w.*no array can"),
    "71 axes": (({"w": entry([1] * 71, 0, 4)}, 4), "w.*no array can have"),
    "100,000 axes": (({"w": entry([1] * 100_000, 0, 4)}, 4), "w.*no array can have"),
    "truths that are neither": (({"w": entry([2], 0, 2, "BOOL")}, b"\1\2"), "w.*truth values"),
    "name of half a letter": (({"\ud800": entry([1], 0, 4)}, 4), r"no tensor.*ud800"),
    "name of 5,000 letters": (({"w" * 5000: entry([1], 0, 4)}, 4), "no tensor.*www"),
    "header of another Unicode": (('{"w": 1}'.encode("utf-16"),), "valid JSON"),
    "header of 20 megabytes": ((b"{" + b" " * 20_000_000 + b"}",), "20000002 bytes"),
    "header of a million values": ((b'{"w": [' + b"0," * 10**6 + b"0]}",), "1000003 values"),
    "truths that are neither, after a while": (
        ({"w": entry([2**21], 0, 2**21, "BOOL")}, bytes(2**21 - 1) + b"\2"),
        "w.*truth values",
    ),
    "tensor cut short": (({"v": entry([1], 0, 4), "w": entry([2], 4, 12)}, 10), "cut short.*w"),
    "overlap": (({"v": entry([2], 0, 8), "w": entry([1], 4, 8)}, 8), "w.*overlaps"),
    "hole": (({"v": entry([1], 0, 4), "w": entry([1], 8, 12)}, 12), "w.*hole"),
    "bytes left over": (({"w": entry([1], 0, 4)}, 12), "end at byte 4"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, kind):
    content, told = BROKEN[kind]
    path = tmp_path / "broken.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        header, *data = content
        write_raw(path, header, bytes(*data))
    with pytest.raises(ValueError, match=rf"(?s)broken\.safetensors.*{told}") as caught:
        SafetensorsCheckpoint(path)
    assert len(str(caught.value)) < 2000


class Trap:
    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_renamed_pickle_is_not_run(tmp_path, protocol):
    trap = Trap()
    trap.path = str(tmp_path / "was-run")
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(trap, protocol))
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file.*Pickles"):
        SafetensorsCheckpoint(tmp_path)
    assert not (tmp_path / "was-run").exists()


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither.*none"):
        SafetensorsCheckpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"null is no ordinary file"):
        SafetensorsCheckpoint(os.devnull)
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors does not exist"):
        SafetensorsCheckpoint(tmp_path / "nothing.safetensors")
    save_file({"w": np.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match=r"index.*model-00001-of-00002\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


class TestShards:
    shards = ("model-1.safetensors", "model-2.safetensors")

    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "folder"
        folder.mkdir()
        first, second = self.shards
        save_file({"a": np.ones(2), "b": np.full(3, 2.0)}, folder / first)
        save_file({"c": np.full((2, 2), 3.0)}, folder / second)
        self.write_index(folder, a=first, b=first, c=second)
        return folder

    def write_index(self, folder, **weight_map):
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def test_are_read_as_one(self, folder):
        checkpoint = SafetensorsCheckpoint(folder)
        assert checkpoint.keys() == {"a", "b", "c"}
        for key, value in {"a": [1, 1], "b": [2, 2, 2], "c": [[3, 3], [3, 3]]}.items():
            np.testing.assert_array_equal(checkpoint.read(key), value)

    def test_that_are_absent_are_all_named(self, folder):
        for shard in self.shards:
            (folder / shard).unlink()
        with pytest.raises(FileNotFoundError, match=rf"{INDEX}.*{', '.join(self.shards)}"):
            SafetensorsCheckpoint(folder)

    def test_that_are_absent_in_great_number_are_counted(self, folder):
        self.write_index(folder, **{f"k{i}": f"s{i}.safetensors" for i in range(50_000)})
        with pytest.raises(FileNotFoundError, match="and 49980 others"):
            SafetensorsCheckpoint(folder)

    def test_are_not_read_beside_one_file_of_all(self, folder):
        save_file({"a": np.zeros(2)}, folder / "model.safetensors")
        assert SafetensorsCheckpoint(folder).keys() == {"a"}

    def test_that_hold_less_or_more_than_the_index_says(self, folder):
        first, second = self.shards
        self.write_index(folder, a=first, b=first, c=second, d=second)
        with pytest.raises(ValueError, match=f"{INDEX}.*{second} does not hold d"):
            SafetensorsCheckpoint(folder)
        self.write_index(folder, a=first, c=second)
        with pytest.raises(ValueError, match=f"{INDEX}.*{first} holds.* b"):
            SafetensorsCheckpoint(folder)

    @pytest.mark.parametrize("content", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
    def test_index_without_a_map(self, folder, content):
        (folder / INDEX).write_text(content)
        with pytest.raises(ValueError, match=f"{INDEX} has no `weight_map`"):
            SafetensorsCheckpoint(folder)

    @pytest.mark.parametrize("way", ["up", "absolute", "link", "linked folder"])
    def test_outside_the_folder_are_refused(self, folder, way):
        outside = folder.parent / "outside"
        outside.mkdir()
        save_file({"a": np.ones(2)}, outside / "secret.safetensors")
        name = {
            "up": "../outside/secret.safetensors",
            "absolute": str(outside / "secret.safetensors"),
            "link": "link.safetensors",
            "linked folder": "link/secret.safetensors",
        }[way]
        (folder / "link.safetensors").symlink_to(outside / "secret.safetensors")
        (folder / "link").symlink_to(outside)
        self.write_index(folder, a=name)
        with pytest.raises(ValueError, match=rf"{INDEX}.*{name}.*outside"):
            SafetensorsCheckpoint(folder)

    @pytest.mark.parametrize("name", ["l" * 5000, "\ud800", "l\0"])
    def test_of_a_name_that_no_file_has(self, folder, name):
        self.write_index(folder, a=name)
        with pytest.raises(ValueError, match=f"{INDEX} names the file .*no file can") as caught:
            SafetensorsCheckpoint(folder)
        assert len(str(caught.value)) < 2000

    def test_of_a_hub_cache_are_read_through_its_links(self, folder):
        cache = folder.parent / "models--some--model"
        (cache / "snapshots").mkdir(parents=True)
        (cache / "blobs").mkdir()
        snapshot = folder.rename(cache / "snapshots" / "0123abcd")
        for i, shard in enumerate(self.shards):
            (snapshot / shard).rename(cache / "blobs" / f"blob{i}")
            (snapshot / shard).symlink_to(f"../../blobs/blob{i}")
        assert SafetensorsCheckpoint(snapshot).keys() == {"a", "b", "c"}
        (snapshot / self.shards[0]).unlink()
        (snapshot / self.shards[0]).symlink_to("../../other")
        with pytest.raises(ValueError, match="outside"):
            SafetensorsCheckpoint(snapshot)
