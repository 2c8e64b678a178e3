"""A file can make loading fail, and nothing else."""

import copy
import gc
import json
import os
import struct
import sys
import time
import tracemalloc
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pytensor_ml.activations import GELU
from pytensor_ml.layers import Dropout, Input, MoE, RMSNorm, call_as_block
from pytensor_ml.params import trainable
from pytensor_ml.pretrained import from_pretrained, load_network, save_pretrained
from pytensor_ml.serialize import deserialize_graph
from pytensor_ml.state import ZeroInitializer

_watched: list[str] | None = None


def _watch(event, args):
    if _watched is None:
        return
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    others = ("import", "compile", "exec", "os.", "subprocess.", "shutil.", "socket.", "ctypes.")
    harmless = ("os.listdir", "os.scandir")
    if writes or (event.startswith(others) and event not in harmless):
        _watched.append(f"{event} {args}")


sys.addaudithook(_watch)


@contextmanager
def within_a_second():
    # A collection takes longer by itself among the objects that all tests before left.
    gc.disable()
    start = time.thread_time()
    try:
        yield
    finally:
        duration = time.thread_time() - start
        gc.enable()
    assert duration < 1


def assert_refused(load, match):
    """Assert a clear error, in a second of this thread, within 100 MB, and no other effect."""
    global _watched
    _watched = []
    try:
        with within_a_second(), pytest.raises(ValueError, match=match) as caught:
            load()
    finally:
        effects, _watched = _watched, None
    assert not effects
    assert len(str(caught.value)) < 2000
    # Apart, because it makes all slow.
    tracemalloc.start()
    with pytest.raises(ValueError, match=match):
        load()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6


def small_network():
    """Return a network of format version 4 that has each kind of entry."""
    x = Input("x", shape=(None, 6), dtype="float32")
    w = trainable(np.ones((6, 4), "float32"), "w", initializer=ZeroInitializer(), layer_name="fc")
    y = GELU()(x @ w) + pt.constant(np.arange(4, dtype="float32"))
    y = Dropout("d", p=0.2)(RMSNorm("n", n_in=4)(y))
    return [x], [y, pt.max(y, axis=1), y[:, 1:3]]


def block_network():
    """Return one of version 5: two equal blocks that write a state back."""
    x = Input("x", shape=(None, 6), dtype="float32")
    y = x
    for i in range(2):
        moe = MoE(
            f"moe_{i}",
            d_model=6,
            hidden_dim=4,
            n_experts=3,
            top_k=2,
            selection_bias=True,
            bias_update_factor=0.1,
        )
        y = call_as_block(moe, y, name="block")
    return [x], [y]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of each format version."""
    made = {}
    for version, (inputs, outputs) in {4: small_network(), 5: block_network()}.items():
        made[version] = tmp_path_factory.mktemp(f"version_{version}")
        save_pretrained(outputs, made[version], inputs=inputs)
        # What is imported late by a load that succeeds is no effect of one that fails.
        load_network(made[version] / "config.json")
    return made


@pytest.fixture(scope="module")
def configs(folders):
    return {version: json.loads((f / "config.json").read_text()) for version, f in folders.items()}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


def entries(config, key):
    """Return all objects within a config that have a key, in the order of the file."""
    found = []

    def walk(value):
        if isinstance(value, dict):
            if key in value:
                found.append(value)
            value = list(value.values())
        if isinstance(value, list):
            for part in value:
                walk(part)

    walk(config)
    return found


NAMES = [
    "os.system",
    "posix.system",
    "builtins.eval",
    "builtins.exec",
    "subprocess.Popen",
    "numpy.load",
    "pytensor_ml.base.importlib",
    "pytensor_ml.base.importlib.import_module",
    "pytensor_ml.base.LayerOp",
    "pytensor_ml.layers.linear.Sequence",
    "pytensor_ml.layers.linear.Linear",
    "pytensor_ml.pretrained.os.system",
    "pytensor_ml.checkpoint.save_state",
    "pytensor.compile.ops.FromFunctionOp",
    "pytensor.compile.builders.SymbolicOp",
    "pytensor.link.jax.ops.JAXOp",
    "pytensor.printing.Print",
    "pytensor.raise_op.CheckAndRaise",
    "pytensor.scalar.basic.Composite",
    "antigravity.geohash",
    "this",
    "..",
    "",
    "pytensor_ml.layers.linear.LinearLayer\x00",
    "PYTENSOR_ML.LAYERS.LINEAR.LINEARLAYER",
]


@pytest.mark.parametrize("name", NAMES)
def test_only_the_names_in_the_tables_are_known(configs, tmp_path, name):
    path = tmp_path / "config.json"
    for family in ("leaf", "careduce", "scalar"):
        config = copy.deepcopy(configs[4])
        next(e for e in entries(config, "family") if e["family"] == family)["type"] = name
        path.write_text(json.dumps(config))
        assert_refused(partial(load_network, path), r"config\.json.*nothing was imported")
    for key, version in (("class", 4), ("inner", 5)):
        config = copy.deepcopy(configs[version])
        entries(config, key)[0]["class" if key == "class" else "type"] = name
        path.write_text(json.dumps(config))
        assert_refused(partial(load_network, path), r"config\.json.*nothing was imported")


@pytest.mark.parametrize("version", [4, 5])
def test_every_name_in_a_config_is_looked_up(configs, tmp_path, version):
    path = tmp_path / "config.json"
    for key in ("type", "class"):
        for i, entry in enumerate(entries(configs[version], key)):
            if isinstance(entry[key], dict):  # the type of a constant
                continue
            config = copy.deepcopy(configs[version])
            entries(config, key)[i][key] = "os.system"
            path.write_text(json.dumps(config))
            with pytest.raises(ValueError, match=r"'os\.system', which files may not name"):
                load_network(path)


def leaf(config, name):
    return next(e for e in entries(config, "type") if str(e["type"]).endswith(name))


def set_in(place, key, value):
    place[key] = value


ATTACKS = {
    "unexpected prop": (
        4,
        lambda c: leaf(c, "RMSNormLayer")["props"].update(inplace=True),
        "unexpected entries inplace",
    ),
    "input types as a prop": (
        4,
        lambda c: leaf(c, "RMSNormLayer")["props"].update(input_types=[1]),
        "unexpected entries input_types",
    ),
    "missing prop": (4, lambda c: leaf(c, "RMSNormLayer")["props"].pop("n_in"), "lacks n_in"),
    "props that are a list": (
        4,
        lambda c: set_in(leaf(c, "RMSNormLayer"), "props", ["n_in"]),
        "props is list",
    ),
    "callable prop": (
        4,
        lambda c: leaf(c, "RMSNormLayer")["props"].update(epsilon={"__callable__": "os.system"}),
        "where a number belongs",
    ),
    "prop of text": (
        4,
        lambda c: leaf(c, "RMSNormLayer")["props"].update(epsilon="__import__('os')"),
        "holds the text",
    ),
    "prop that is NaN": (
        4,
        lambda c: leaf(c, "RMSNormLayer")["props"].update(epsilon={"__float__": "nan"}),
        "NaN",
    ),
    "cycle": (
        4,
        lambda c: c["nodes"][2].update(inputs=[{"node": 2, "out": 0}] * 2),
        "does not come before",
    ),
    "cycle of two": (
        4,
        lambda c: c["nodes"][1].update(inputs=[{"node": 2, "out": 0}]),
        "does not come before",
    ),
    "missing node": (
        4,
        lambda c: c["nodes"][-1]["inputs"].__setitem__(0, {"node": 99, "out": 0}),
        "node 99",
    ),
    "missing output": (
        4,
        lambda c: c["nodes"][-1]["inputs"].__setitem__(0, {"node": 0, "out": 5}),
        "output 5",
    ),
    "missing input": (4, lambda c: c["outputs"].__setitem__(0, {"input": -1}), "input -1"),
    "reference to nothing": (4, lambda c: c["outputs"].__setitem__(0, {}), "no entry 'node'"),
    "reference of two kinds": (
        4,
        lambda c: c["outputs"].__setitem__(0, {"input": 0, "node": 0}),
        "unexpected entries node",
    ),
    "an op of its own graph": (5, lambda c: inner(c)["nodes"][0].__setitem__(0, 99), "op 99"),
    "variable to come": (5, lambda c: c["nodes"][0][1].__setitem__(0, 999), "variable 999"),
    "constant that is not": (5, lambda c: c["nodes"][0][1].__setitem__(0, -999), "constant 998"),
    "run of 10⁹ variables": (5, lambda c: c["nodes"][0].__setitem__(1, [[0, 10**9]]), "over"),
    "runs that add up": (5, lambda c: c["nodes"][0].__setitem__(1, [[0, 60_000]] * 20), "over"),
    "type that is not": (5, lambda c: c["inputs"].__setitem__(0, 10**9), "type 1000000000"),
    "update of nothing": (
        5,
        lambda c: block_op(c)["props"].update(update_map={"__tuple__": [{"__tuple__": [99, 0]}]}),
        "output 99",
    ),
    "update of another type": (
        5,
        lambda c: block_op(c)["props"].update(update_map={"__tuple__": [{"__tuple__": [0, 3]}]}),
        "updates a state",
    ),
    "update of one state, twice": (
        5,
        lambda c: block_op(c)["props"]["update_map"]["__tuple__"].extend(
            block_op(c)["props"]["update_map"]["__tuple__"]
        ),
        "has an output or an input twice",
    ),
    "block of many inputs": (
        5,
        lambda c: inner(c).update(inputs=[0] * 5000, nodes=[], outputs=[0]),
        "takes 5000 inputs",
    ),
    "update map of text": (5, lambda c: block_op(c)["props"].update(update_map="ab"), "pairs"),
    "parameter of 10⁹": (
        4,
        lambda c: c["inputs"][1].update(shape=[10**9, 4]),
        "MOST_DRAWN_BYTES",
    ),
    "parameter of 10⁹ by 10⁹": (
        4,
        lambda c: c["inputs"][1].update(shape=[10**9, 10**9]),
        "MOST_DRAWN_BYTES",
    ),
    "value of another shape than its type": (
        4,
        lambda c: c["input_meta"][1].update(shape=[10**9, 4]),
        "does not allow",
    ),
    "negative shape": (4, lambda c: c["inputs"][1].update(shape=[-1, 4]), "whole numbers"),
    "shape of fractions": (4, lambda c: c["inputs"][1].update(shape=[6.0, 4]), "whole numbers"),
    "a million axes": (4, lambda c: c["inputs"][1].update(shape=[1] * 10**5), "100000 axes"),
    "unknown dtype": (4, lambda c: c["inputs"][1].update(dtype="object"), "dtype 'object'"),
    "dtype of records": (4, lambda c: c["inputs"][1].update(dtype="f4,O"), "dtype 'f4,O'"),
    "unknown kind of type": (4, lambda c: c["inputs"][1].update(kind="pickle"), "kind 'pickle'"),
    "constant of 10⁹": (
        4,
        lambda c: constant(c)["type"].update(shape=[10**9]),
        "the shape",
    ),
    "constant of open shape": (4, lambda c: constant(c)["type"].update(shape=[None]), "open shape"),
    "constant of another shape": (4, lambda c: constant(c).update(value=[[1], [2]]), "the shape"),
    "constant of text": (4, lambda c: constant(c).update(value=["a"] * 4), "'a'"),
    "integer that is NaN": (
        4,
        lambda c: constant(c).update(
            type={"kind": "tensor", "dtype": "int8", "shape": []}, value={"__float__": "nan"}
        ),
        "int8 cannot hold",
    ),
    "integer too large": (
        4,
        lambda c: constant(c).update(
            type={"kind": "tensor", "dtype": "int8", "shape": [1]}, value=[300]
        ),
        "int8 cannot hold",
    ),
    "float too large": (4, lambda c: constant(c).update(value=[1e39] * 4), "float32 cannot hold"),
    "number of 400 digits": (4, lambda c: constant(c).update(value=[10**400] * 4), "larger than"),
    "float of a name": (
        4,
        lambda c: constant(c).update(value=[{"__float__": "os"}] * 4),
        "not nan",
    ),
    "bytes of another length": (
        4,
        lambda c: constant(c).update(value={"base64": "AAAA"}),
        "holds 3 bytes",
    ),
    "bytes that are none": (4, lambda c: constant(c).update(value={"base64": "é"}), "base64"),
    "constant that is a generator": (
        4,
        lambda c: constant(c).update(type={"kind": "random_generator"}),
        "which has none",
    ),
    "output of another dtype": (
        4,
        lambda c: node(c, "RMSNormLayer")["outputs"][0].update(dtype="float64"),
        "claims outputs",
    ),
    "output of another rank": (
        4,
        lambda c: node(c, "RMSNormLayer")["outputs"][0].update(shape=[None]),
        "claims outputs",
    ),
    "output of a length that is not known": (
        4,
        lambda c: node(c, "RMSNormLayer")["outputs"][0].update(shape=[7, 4]),
        "claims outputs",
    ),
    "output too many": (
        4,
        lambda c: c["nodes"][-1]["outputs"].append(c["inputs"][0]),
        "claims outputs",
    ),
    "inputs that would be converted": (
        4,
        lambda c: elemwise(c, "Pow")["inputs"].__setitem__(
            1, {"const": {"type": {"kind": "tensor", "dtype": "int8", "shape": []}, "value": 3}}
        ),
        "once they are converted",
    ),
    "unknown family": (4, lambda c: c["nodes"][0]["op"].update(family="pickle"), "family"),
    "unknown kind of input": (4, lambda c: c["input_meta"][0].update(kind="code"), "kind 'code'"),
    "input with code": (4, lambda c: c["input_meta"][0].update(code="1"), "entries code"),
    "data that is a generator": (4, lambda c: c["inputs"].__setitem__(1, c["inputs"][0]), "."),
    "fewer inputs than described": (4, lambda c: c["input_meta"].pop(), "input_meta has"),
    "fewer outputs than described": (4, lambda c: c.update(n_outputs=7), "n_outputs"),
    "no outputs entry": (4, lambda c: c.pop("outputs"), "no entry 'outputs'"),
    "nodes that are a number": (4, lambda c: c.update(nodes=3), "nodes is 3"),
    "version to come": (4, lambda c: c.update(format_version=6), "version 6"),
    "version that is true": (4, lambda c: c.update(format_version=True), "version True"),
    "version of another form": (4, lambda c: c.update(format_version=5), "form of that version"),
    "another format": (4, lambda c: c.update(format="torch"), "from_pretrained"),
    "unknown generator": (4, lambda c: rng(c).update(bit_generator="os"), "no known generator"),
    "generator with more": (4, lambda c: rng(c).update(code=1), "just the entries"),
    "generator of a large number": (4, lambda c: rng(c)["state"].update(inc=2**200), "whole"),
    "generator that reads beyond its buffer": (
        4,
        lambda c: rng(c).update(mersenne(pos=10**6)),
        r"pos is no whole number from 0 to 624",
    ),
    "generator of few words": (4, lambda c: rng(c).update(mersenne(words=3)), "624 numbers"),
    "initializer prop": (
        4,
        lambda c: entries(c, "class")[0].update(props={"std": 1.0}),
        "unexpected entries std",
    ),
}


def inner(config):
    return entries(config, "inner")[-1]["inner"]


def block_op(config):
    return next(e for e in entries(config, "inner") if e["props"])


def constant(config):
    return next(e["const"] for e in entries(config, "const") if e["const"]["type"]["shape"] == [4])


def node(config, name):
    return next(n for n in config["nodes"] if str(n["op"].get("type")).endswith(name))


def elemwise(config, name):
    return next(n for n in config["nodes"] if n["op"].get("scalar_op", {}).get("type") == name)


def rng(config):
    return entries(config, "rng_state")[0]["rng_state"]


def mersenne(words=624, pos=0):
    key = {"__array__": [1] * words, "dtype": "uint32"}
    state = {"bit_generator": "MT19937", "state": {"key": key, "pos": pos}}
    return {**state, "has_uint32": None, "uinteger": None}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_config_that_lies_is_refused(configs, tmp_path, name):
    version, attack, match = ATTACKS[name]
    config = copy.deepcopy(configs[version])
    attack(config)
    if "MT19937" in json.dumps(config):
        for key in ("has_uint32", "uinteger"):
            del rng(config)[key]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert_refused(lambda: load_network(path, restore_rng=True), match)


def tensor_type(shape, dtype="float32"):
    return {"kind": "tensor", "dtype": dtype, "shape": shape}


def graph_of(op, inputs, output):
    """Return the description of one op, its inputs being constants where they have a value."""
    references = [
        {"input": i} if isinstance(x, dict) else {"const": {"type": x[0], "value": x[1]}}
        for i, x in enumerate(inputs)
    ]
    node = {"op": op, "inputs": references, "outputs": [output]}
    inputs = [x if isinstance(x, dict) else x[0] for x in inputs]
    return {"inputs": inputs, "nodes": [node], "outputs": [{"node": 0, "out": 0}]}


def op_of(name, **props):
    return {"family": "leaf", "type": name, "props": props}


def router(top_k=2):
    return op_of(
        "pytensor_ml.layers.moe.RouterLayer",
        top_k=top_k,
        score="softmax",
        selection_bias=False,
        n_groups=1,
        top_k_groups=1,
        renormalize=True,
        routed_scaling_factor=1.0,
        bias_update_factor=0.0,
    )


DEFAULT_ROPE = {"__tuple__": [{"__tuple__": ["rope_type", "default"]}]}
HUGE = {
    "rotary table": (
        op_of(
            "pytensor_ml.layers.positional.RotaryTable",
            rotary_dim=10**9,
            base=1e4,
            scaling=DEFAULT_ROPE,
            dtype="float32",
        ),
        [tensor_type([5], "int64")],
    ),
    "digits of a rotary table": (
        op_of(
            "pytensor_ml.layers.positional.IntegerRotaryTable",
            dim=8,
            effective_dim=8,
            base=10_000,
            table_size=10**9,
        ),
        [tensor_type([5], "int64")],
    ),
    "rounds of a router": (router(top_k=10**9), [tensor_type([5, 8])]),
    "experts of a router": (router(), [tensor_type([5, 10**9])]),
    "queries": (
        op_of(
            "pytensor_ml.layers.attention.AttentionLayer",
            is_causal=True,
            scale=None,
            window=None,
            softcap=None,
        ),
        [tensor_type([1, 2, 10**9, 4])] * 3,
    ),
    "parts of a split": (
        op_of("pytensor.tensor.basic.Split", len_splits=10**9, axis=0),
        [tensor_type([5]), tensor_type([2], "int64")],
    ),
    "few parts of a split": (
        op_of("pytensor.tensor.basic.Split", len_splits=4000, axis=0),
        [tensor_type([5]), tensor_type([2], "int64")],
    ),
    "axes of a reshape": (
        op_of("pytensor.tensor.shape.Reshape", ndim=10**9),
        [tensor_type([5]), tensor_type([10**9], "int64")],
    ),
    "axes of a transpose": (
        op_of("pytensor.tensor.elemwise.DimShuffle", input_ndim=10**9, new_order=[]),
        [tensor_type([5])],
    ),
}


@pytest.mark.parametrize(
    ("prop", "text", "match"),
    [
        ("name", 'f(a=__import__("os").system("true"),b="""): return 0#', "holds the text"),
        ("name", "bytes", "of the name 'bytes'"),
        ("signature", "(),(),()->()", "of the signature"),
        ("dtype", 'float64"#', "holds the text"),
    ],
)
def test_a_random_op_is_the_one_that_its_class_says(prop, text, match):
    """PyTensor pastes its name into the source of what it compiles on Numba."""
    scalar = {"kind": "tensor", "dtype": "float64", "shape": []}
    props = {"name": "normal", "signature": "(),()->()", "dtype": "float64", "inplace": False}
    graph = {
        "types": [
            {"kind": "random_generator"},
            scalar,
            {"kind": "tensor", "dtype": "int64", "shape": [0]},
            {"kind": "none"},
        ],
        "constants": [[2, []], [3, None]],
        "ops": [
            {"family": "leaf", "type": "pytensor.tensor.random.basic.NormalRV", "props": props}
        ],
        "inputs": [0, 1, 1],
        "nodes": [[0, [0, -2, 1, 2], [0, 1]]],
        "outputs": [4],
    }
    assert deserialize_graph(graph)[1][0].owner.op.name == "normal"
    props[prop] = text
    assert_refused(lambda: deserialize_graph(graph), match)


@pytest.mark.parametrize("name", HUGE)
def test_no_number_in_a_file_makes_a_graph_huge(name):
    graph = graph_of(*HUGE[name], tensor_type([5]))
    assert_refused(lambda: deserialize_graph(graph), "at most|but has 1 outputs|is allowed")


def graph_of_nodes(types, ops, inputs, nodes):
    return {
        "types": types,
        "constants": [],
        "ops": ops,
        "inputs": inputs,
        "nodes": nodes,
        "outputs": [10**6],
    }


def test_no_number_of_equal_parts_takes_long():
    add = {"family": "elemwise", "scalar_op": {"family": "scalar", "type": "Add"}}
    many = graph_of_nodes([tensor_type([3])], [add], [0] * 1000, [[0, [[0, 1000]] * 1000, [0]]])
    assert_refused(lambda: deserialize_graph(many), "over 131072 inputs and outputs")
    types = [tensor_type([5, 300]), tensor_type([None, None], "int32")]
    types += [tensor_type([None, None]), tensor_type([None], "int32")]
    routers = [router(top_k=i + 1) for i in range(64)]
    nodes = [[i, [0], [1, 2, 3]] for i in range(64)]
    selecting = graph_of_nodes(types, routers, [0], nodes)
    assert_refused(
        lambda: deserialize_graph(selecting), "the best 104 experts.*at most 96 are loaded"
    )


@pytest.mark.parametrize("text", ['0);system("id");(', "a" * 300, "{x}"])
def test_no_prop_of_an_op_here_is_a_text_that_could_be_code(text):
    op = router()
    op["props"]["bias_update_factor"] = text
    graph = graph_of(op, [tensor_type([5, 8])], tensor_type([5]))
    assert_refused(lambda: deserialize_graph(graph), "holds the text")


def test_no_value_of_a_file_is_computed_while_its_graph_is_built():
    # As the length of an array: the sum of 10⁹ ones, which PyTensor would compute to know a shape.
    scalar = tensor_type([], "int64")
    nodes = [
        {
            "op": op_of("pytensor.tensor.basic.Alloc"),
            "inputs": [{"const": {"type": scalar, "value": n}} for n in (1, 10**9)],
            "outputs": [tensor_type([10**9], "int64")],
        },
        {
            "op": {"family": "careduce", "type": "pytensor.tensor.math.Sum", "axis": None},
            "inputs": [{"node": 0, "out": 0}],
            "outputs": [scalar],
        },
        {
            "op": op_of("pytensor.tensor.basic.Alloc"),
            "inputs": [{"const": {"type": scalar, "value": 1}}, {"node": 1, "out": 0}],
            "outputs": [tensor_type([10**9], "int64")],
        },
    ]
    graph = {"inputs": [], "nodes": nodes, "outputs": [{"node": 2, "out": 0}]}
    assert_refused(lambda: deserialize_graph(graph), "claims outputs")
    nodes[2]["outputs"] = [tensor_type([None], "int64")]
    with within_a_second():
        _, [y] = deserialize_graph(graph)
    assert y.owner.inputs[1].owner.inputs[0].type.shape == (10**9,)


def test_graphs_within_graphs_do_not_multiply():
    # Each op has the one before it twice: 2⁶⁰ nodes if they were spelled out.
    ops = [{"family": "elemwise", "scalar_op": {"family": "scalar", "type": "Neg"}}]
    for i in range(60):
        ops.append(
            {
                "family": "inner_graph",
                "type": "pytensor_ml.base.BlockOp",
                "inline": False,
                "name": None,
                "props": {},
                "inner": {
                    "inputs": [0],
                    "nodes": [[i, [0], [0]], [i, [1], [0]]],
                    "outputs": [2],
                },
            }
        )
    graph = {"types": [tensor_type([3])], "constants": [], "ops": ops, "inputs": [0]}
    with within_a_second():
        deserialize_graph({**graph, "nodes": [[60, [0], [0]]], "outputs": [1]})


@pytest.mark.parametrize("depth", [60, 10_000])
def test_graphs_nested_deep_are_refused(depth):
    graph = {"inputs": [], "nodes": [], "outputs": []}
    for _ in range(depth):
        op = {
            "family": "inner_graph",
            "type": "pytensor.compile.builders.OpFromGraph",
            "inline": False,
            "name": None,
            "props": {},
            "inner": graph,
        }
        node = {"op": op, "inputs": [], "outputs": []}
        graph = {"inputs": [], "nodes": [node], "outputs": []}
    assert_refused(lambda: deserialize_graph(graph), "deep")


def test_props_nested_deep_are_refused():
    value = 1
    for _ in range(10_000):
        value = {"__tuple__": [value]}
    graph = graph_of(op_of("pytensor.tensor.special.Softmax", axis=value), [], tensor_type([]))
    assert_refused(lambda: deserialize_graph(graph), "deep")


TEXTS = {
    "nested 10,000 deep": (b'{"nodes":' + b"[" * 10_000, "valid JSON"),
    "objects 10,000 deep": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "valid JSON"),
    "objects, a million": (b'{"ops":[' + b"{}," * 10**6 + b"{}]}", "2000004 values"),
    "text of 20 megabytes": (b'{"format":"' + b"a" * 20_000_000 + b'"}', "20000013 bytes"),
    "key twice, the last of many": (
        b"{" + b",".join(b'"%d":0' % i for i in range(10**5)) + b',"99999":0}',
        "99999 appears twice",
    ),
    "another Unicode": ('{"format": "pytensor_ml.graph"}'.encode("utf-16"), "valid JSON"),
    "key twice": (b'{"format": "pytensor_ml.graph", "format": "torch"}', "format appears twice"),
    "bare NaN": (b'{"format": NaN}', "does not describe a network"),
    "number of 10,000 digits": (b'{"format": ' + b"9" * 10_000 + b"}", "valid JSON"),
    "cut short": (b'{"format": "pytensor_ml.gr', "valid JSON"),
    "pickle": (b"cos\nsystem\n(S'true'\ntR.", "valid JSON"),
    "list": (b"[]", "list"),
    "no UTF-8": (b'{"\xff": 1}', "valid JSON"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_config_that_is_no_json_is_refused(tmp_path, name):
    text, match = TEXTS[name]
    path = tmp_path / "config.json"
    path.write_bytes(text)
    assert_refused(lambda: load_network(path), rf"(?s)config\.json.*{match}")


def test_bare_nan_within_a_config_is_refused(configs, tmp_path):
    config = copy.deepcopy(configs[4])
    constant(config)["value"][0] = float("nan")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert_refused(lambda: load_network(path), "nan, where a number belongs")


@pytest.mark.parametrize("load", [from_pretrained, lambda f: load_network(f / "config.json")])
def test_a_config_of_200_megabytes_is_not_read(tmp_path, load):
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 200_000_000)
    assert_refused(lambda: load(tmp_path), r"config\.json has 200000000 bytes")


def test_weights_of_two_gigabytes_in_a_hundred_bytes_are_refused(folders, tmp_path):
    folder = copy_of(folders[4], tmp_path)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**29], "data_offsets": [0, 2**31]}})
    data = struct.pack("<Q", len(header)) + header.encode()
    (folder / "model.safetensors").write_bytes(data)
    assert_refused(lambda: from_pretrained(folder), r"model\.safetensors is cut short: w takes")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**31) + header.encode())
    assert_refused(lambda: from_pretrained(folder), r"announce a header of 2147483648")


def test_parameters_larger_than_their_weights_take_no_memory(folders, configs, tmp_path):
    folder = copy_of(folders[4], tmp_path)
    config = copy.deepcopy(configs[4])
    i = next(i for i, m in enumerate(config["input_meta"]) if m["name"] == "n_scale")
    config["inputs"][i]["shape"] = [10**9]
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(lambda: from_pretrained(folder), r"10{9}|1000000000")


def test_weights_outside_of_the_folder_are_not_read(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"secret": np.ones(2)}, tmp_path / "secret.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    index = {"weight_map": {"secret": "link.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(lambda: from_pretrained(folder), r"index.*link\.safetensors.*outside")


def test_the_mark_of_the_weights_is_no_path(folders, configs, tmp_path):
    folder = copy_of(folders[4], tmp_path)
    secret = tmp_path / "secret.safetensors"
    save_file({"secret": np.ones(2)}, secret)
    mark = f"../{'x' * 8}/../secret"
    (folder / "config.json").write_text(json.dumps({**configs[4], "weights": mark}))
    # It is then as if there were none: the weights are those of their usual name.
    from_pretrained(folder)


def copy_of(folder, into):
    made = into / "copy"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    return made


JUNK = st.sampled_from(
    [None, True, -1, 0, 1, 3, 10**9, 2**70, 0.5, 1e308, "", "x", "os.system", [], {}, [0, 1], [[]]]
)


@st.composite
def mutations(draw):
    """Return a function that changes a JSON value at one place."""
    path = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=9))
    action = draw(st.sampled_from(["set", "delete", "double", "swap"]))
    junk = draw(JUNK)

    def mutate(value):
        for step in path[:-1]:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            deeper = [k for k in keys if isinstance(value[k], dict | list) and value[k]]
            if not deeper:
                break
            value = value[deeper[step % len(deeper)]]
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, other = keys[path[-1] % len(keys)], keys[path[0] % len(keys)]
        if action == "set":
            value[key] = copy.deepcopy(junk)
        elif action == "delete":
            del value[key]
        elif action == "swap":
            value[key], value[other] = value[other], value[key]
        elif isinstance(value, list):
            value.append(copy.deepcopy(value[key]))
        else:
            value[f"{key}_"] = copy.deepcopy(value[key])

    return mutate


def load_or_refuse(load):
    with suppress(ValueError):
        load()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(version=st.sampled_from([4, 5]), changes=st.lists(mutations(), min_size=1, max_size=3))
def test_a_config_changed_anywhere_loads_or_is_refused(configs, folders, scratch, version, changes):
    config = copy.deepcopy(configs[version])
    for change in changes:
        change(config)
    folder = scratch
    (folder / "config.json").write_text(json.dumps(config))
    weights = (folders[version] / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights)
    load_or_refuse(lambda: load_network(folder / "config.json", restore_rng=True))
    load_or_refuse(lambda: from_pretrained(folder, "pytensor"))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    length=st.none() | st.integers(0, 10**6),
)
def test_weights_changed_anywhere_load_or_are_refused(folders, scratch, changes, length):
    folder = scratch
    config = (folders[5] / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config)
    data = bytearray((folders[5] / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for place, byte in changes:
        data[place % header] = byte
    data = data if length is None else data[: length % len(data)]
    (folder / "model.safetensors").write_bytes(data)
    load_or_refuse(lambda: from_pretrained(folder))
