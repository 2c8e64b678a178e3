import weakref
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from pytensor_ml.layers.linear import Linear
from pytensor_ml.models.loading import (
    Checkpoint,
    KeyMap,
    bind_layer_norm,
    bind_linear,
    bind_norm,
)
from pytensor_ml.params import trainable


def parameter(*shape, name="p", dtype="float32"):
    return trainable(np.full(shape, -7, dtype), name=name)


def untouched(*parameters):
    return all((p.get_value() == -7).all() for p in parameters)


class Recorder(Checkpoint):
    """Makes each tensor when it is read, and notes which were."""

    name = "recorded.file"

    def __init__(self, **arrays):
        self.arrays = {key.replace("_", "."): np.asarray(a) for key, a in arrays.items()}
        self.reads = []
        self.last = lambda: None

    @property
    def config(self):
        return {}

    def keys(self):
        return set(self.arrays)

    def shape(self, key):
        return self.arrays[key].shape

    def dtype(self, key):
        return self.arrays[key].dtype

    def read(self, key):
        assert self.last() is None, "the tensor before is still in memory"
        self.reads.append(key)
        array = self.arrays[key].copy()
        self.last = weakref.ref(array)
        return array


def test_scopes_nest_and_end():
    keys, inner, middle, after = KeyMap(), parameter(2), parameter(2), parameter(2)
    with keys.scope("model", "layers"):
        with suppress(RuntimeError), keys.scope("0"):
            keys.bind(inner, "mlp", "weight")
            raise RuntimeError
        keys.bind(middle, "1", "weight")
    keys.bind(after, "norm.weight")
    assert keys.keys() == {"model.layers.0.mlp.weight", "model.layers.1.weight", "norm.weight"}
    assert len(keys) == 3
    assert keys.key_for(inner) == "model.layers.0.mlp.weight"
    assert keys.parameter_for("model.layers.1.weight") is middle
    with pytest.raises(KeyError, match="other"):
        keys.key_for(parameter(1, name="other"))
    with pytest.raises(KeyError, match=r"no\.such"):
        keys.parameter_for("no.such")


def test_a_key_and_a_parameter_are_bound_once():
    keys, first, second = KeyMap(), parameter(2, name="first"), parameter(2, name="second")
    keys.bind(first, "a")
    with pytest.raises(ValueError, match=r"'a' fills first already.*second"):
        keys.bind(second, "a")
    with pytest.raises(ValueError, match=r"'a' fills first already"):
        keys.tie(second, "a")
    with pytest.raises(ValueError, match=r"first is bound to 'a' already.*'b'"):
        keys.bind(first, "b")
    keys.tie(first, "b")
    with pytest.raises(ValueError, match=r"'b' fills first already"):
        keys.bind(second, "b")
    assert keys.keys() == {"a"}


@pytest.mark.parametrize("form", ["checkpoint", "function"])
def test_load_fills_and_returns_what_is_left(form):
    keys, plain, turned = KeyMap(), parameter(3), parameter(3, 2)
    keys.bind(plain, "plain")
    keys.bind(turned, "turned", transform=np.transpose)
    arrays = {
        **dict.fromkeys("zyxwv", np.zeros(1)),
        "turned": np.arange(6, dtype="float32").reshape(2, 3),
        "plain": np.array([4, 5, 6], "float32"),
        "b": np.zeros(1),
    }
    surplus = (
        keys.load(Recorder(**arrays))
        if form == "checkpoint"
        else keys.load(arrays.__getitem__, arrays)
    )
    assert surplus == ["b", "v", "w", "x", "y", "z"]
    np.testing.assert_array_equal(plain.get_value(), [4, 5, 6])
    np.testing.assert_array_equal(turned.get_value(), [[0, 3], [1, 4], [2, 5]])
    arrays["plain"][:] = 0
    np.testing.assert_array_equal(plain.get_value(), [4, 5, 6])


def test_a_function_without_its_keys_is_refused():
    with pytest.raises(TypeError, match="available"):
        KeyMap().load({}.__getitem__)


def test_one_tensor_is_in_memory_at_a_time_and_read_once():
    keys = KeyMap()
    for name in "abc":
        keys.bind(parameter(2), name)
    checkpoint = Recorder(**{name: np.ones(2, "float32") for name in "abcd"})
    keys.load(checkpoint)
    assert sorted(checkpoint.reads) == ["a", "b", "c"]


def test_missing_keys_are_all_named_beside_what_the_file_has():
    keys, there, gone, gone_too = KeyMap(), parameter(1), parameter(1), parameter(1)
    keys.bind(there, "there")
    keys.bind(gone, "norm.weight")
    keys.bind(gone_too, "head.weight")
    checkpoint = Recorder(there=np.ones(1, "float32"), model_norm_weight=np.ones(1, "float32"))
    with pytest.raises(ValueError, match=r"(?s)recorded\.file") as error:
        keys.load(checkpoint)
    for name in ("head.weight, norm.weight", "model.norm.weight"):
        assert name in str(error.value)
    assert untouched(there, gone, gone_too)
    assert not checkpoint.reads


def test_a_partial_load_is_asked_for_and_returns_both_lists():
    keys, there, gone = KeyMap(), parameter(1), parameter(1)
    keys.bind(there, "there")
    keys.bind(gone, "gone")
    checkpoint = Recorder(there=np.ones(1, "float32"), more=np.ones(1, "float32"))
    assert keys.load_partial(checkpoint) == (["gone"], ["more"])
    assert there.get_value() == [1]
    assert untouched(gone)
    checkpoint.arrays["there"] = np.ones((1, 1), "float32")
    with pytest.raises(ValueError, match="there"):
        keys.load_partial(checkpoint)


@pytest.mark.parametrize(
    ("stored", "needed", "transform", "told"),
    [
        ((1, 3), (3,), None, ["(1, 3)", "(3,)"]),
        ((3,), (1, 3), None, ["(3,)", "(1, 3)"]),
        ((3, 2), (3, 2), np.transpose, ["(3, 2)", "(2, 3) once transformed"]),
        ((3,), (2, 2), lambda w: w.reshape(2, 2), ["(3,)", "(2, 2)"]),
    ],
)
def test_a_wrong_shape_stops_the_load_before_it_starts(stored, needed, transform, told):
    keys, good, bad = KeyMap(), parameter(2, name="good"), parameter(*needed, name="bad")
    keys.bind(good, "good")
    keys.bind(bad, "wrong.weight", transform=transform)
    checkpoint = Recorder(good=np.ones(2, "float32"), wrong_weight=np.ones(stored, "float32"))
    with pytest.raises(ValueError, match=r"wrong\.weight") as error:
        keys.load(checkpoint)
    for text in [*told, "bad"]:
        assert text in str(error.value)
    assert untouched(good, bad)
    assert not checkpoint.reads


def test_all_faults_are_told_at_once():
    keys = KeyMap()
    for name in ("a", "b", "c", "d"):
        keys.bind(parameter(2), name)
    with pytest.raises(ValueError, match=r"(?s)- missing.* a.*- b has.*- c is") as error:
        keys.load(Recorder(b=np.ones(3, "float32"), c=np.ones(2), d=np.ones(2, "float32")))
    assert "- d" not in str(error.value)


@pytest.mark.parametrize(
    ("stored", "held"),
    [("float16", "float32"), ("float16", "float16"), ("float32", "float64")],
)
def test_widening_is_exact_and_keeps_the_dtype_of_the_parameter(stored, held):
    keys, held = KeyMap(), parameter(3, dtype=held)
    keys.bind(held, "w")
    values = np.array([6.1e-05, 65504, -1 / 3], stored)
    keys.load(Recorder(w=values))
    assert held.get_value().dtype == held.type.dtype
    np.testing.assert_array_equal(held.get_value(), values)


@pytest.mark.parametrize(
    ("stored", "held"),
    [("float32", "float16"), ("float64", "float32"), ("int64", "float32")],
)
def test_narrowing_must_be_asked_for(stored, held):
    keys, held = KeyMap(), parameter(2, dtype=held)
    keys.bind(held, "w")
    checkpoint = Recorder(w=np.array([1, 3], stored))
    with pytest.raises(ValueError, match=f"w is {stored}.*{held.type.dtype}.*allow_narrowing"):
        keys.load(checkpoint)
    assert untouched(held)
    keys.load(checkpoint, allow_narrowing=True)
    assert held.get_value().dtype == held.type.dtype
    np.testing.assert_array_equal(held.get_value(), [1, 3])


class TestTiedHead:
    table = np.arange(6, dtype="float32").reshape(3, 2)

    def load(self, **head):
        keys, self.held = KeyMap(), parameter(2, 3)
        keys.bind(self.held, "embed", transform=np.transpose)
        keys.tie(self.held, "head", transform=np.transpose)
        assert keys.keys() == {"embed"}
        arrays = {"embed": self.table, **head}
        return keys.load(arrays.__getitem__, arrays)

    @pytest.mark.parametrize("head", [{}, {"head": table}, {"head": table.astype("float16")}])
    def test_absent_or_equal_loads(self, head):
        assert self.load(**head) == []
        np.testing.assert_array_equal(self.held.get_value(), self.table.T)

    def test_nan_equals_nan(self):
        self.table = np.full((3, 2), np.nan, "float32")
        assert self.load(head=self.table.copy()) == []

    @pytest.mark.parametrize("head", [np.nextafter(table, 9), table.T, table[:2]])
    def test_different_is_an_error(self, head):
        told = "head differs from embed" if head.shape == (3, 2) else "head has shape"
        with pytest.raises(ValueError, match=told):
            self.load(head=head.astype("float32"))
        assert untouched(self.held)

    def test_is_not_compared_where_it_does_not_fit(self):
        keys, held = KeyMap(), parameter(3, 2)
        keys.bind(held, "embed")
        keys.tie(held, "head", transform=lambda w: w.reshape(3, 2))
        checkpoint = Recorder(embed=self.table, head=np.ones(5, "float32"))
        with pytest.raises(ValueError, match="head has shape"):
            keys.load(checkpoint)
        assert not checkpoint.reads

    def test_the_table_itself_must_be_there(self):
        keys = KeyMap()
        held = parameter(3, 2)
        keys.bind(held, "embed")
        keys.tie(held, "head")
        with pytest.raises(ValueError, match=r"missing.*embed"):
            keys.load(Recorder(head=self.table))


class TestBinding:
    def test_linear_weights_are_transposed_and_biases_are_not(self):
        keys, linear = KeyMap(), Linear("fc", n_in=3, n_out=2)
        with keys.scope("mlp"):
            bind_linear(keys, linear, "up", "proj")
            bind_linear(keys, None, "gate")
        weight = np.arange(6, dtype=linear.W.type.dtype).reshape(2, 3)
        arrays = {
            "mlp.up.proj.weight": weight,
            "mlp.up.proj.bias": np.array([8, 9], weight.dtype),
        }
        assert keys.load(arrays.__getitem__, arrays) == []
        np.testing.assert_array_equal(linear.W.get_value(), weight.T)
        np.testing.assert_array_equal(linear.b.get_value(), [8, 9])

    def test_a_transform_makes_the_whole_weight(self):
        keys, linear = KeyMap(), Linear("fc", n_in=2, n_out=2, bias=False)
        bind_linear(keys, linear, "fc", transform=lambda weight: 2 * weight)
        arrays = {"fc.weight": np.arange(4, dtype=linear.W.type.dtype).reshape(2, 2)}
        assert keys.load(arrays.__getitem__, arrays) == []
        np.testing.assert_array_equal(linear.W.get_value(), [[0, 2], [4, 6]])

    def test_norms(self):
        keys = KeyMap()
        rms = SimpleNamespace(scale=parameter(2))
        layer = SimpleNamespace(scale=parameter(2), loc=parameter(2))
        bare = SimpleNamespace(scale=None, loc=None)
        bind_norm(keys, rms, "rms", transform=lambda w: w - 1)
        bind_layer_norm(keys, layer, "layer")
        for none in (bare, None):
            bind_norm(keys, none, "none")
            bind_layer_norm(keys, none, "none")
        arrays = {
            "rms.weight": np.array([1, 2], "float32"),
            "layer.weight": np.array([3, 4], "float32"),
            "layer.bias": np.array([5, 6], "float32"),
        }
        assert keys.load(arrays.__getitem__, arrays) == []
        np.testing.assert_array_equal(rms.scale.get_value(), [0, 1])
        np.testing.assert_array_equal(layer.scale.get_value(), [3, 4])
        np.testing.assert_array_equal(layer.loc.get_value(), [5, 6])
