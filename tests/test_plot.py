import re
from functools import partial
from xml.etree import ElementTree

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.typed_list import TypedListType

from pytensor_ml.activations import SiLU
from pytensor_ml.layers import (
    Dropout,
    GatedFeedForward,
    Input,
    Linear,
    Sequential,
    TransformerBlock,
    TransformerStack,
    call_as_block,
)
from pytensor_ml.params import trainable
from pytensor_ml.plot import network_nodes, plot_network

pytestmark = pytest.mark.compiles_nothing

SVG = "{http://www.w3.org/2000/svg}"


def boxes_of(picture):
    """The first line of each box, from the top."""
    texts = ElementTree.fromstring(picture.svg).iter(f"{SVG}text")
    return [t.text for t in texts if t.get("font-size") == "13"]


def arrows_of(picture):
    """The boxes that each arrow joins."""
    root = ElementTree.fromstring(picture.svg)
    tops = [int(r.get("y")) for r in root.iter(f"{SVG}rect") if r.get("rx")]
    height = int(next(r for r in root.iter(f"{SVG}rect") if r.get("rx")).get("height"))
    arrows = set()
    for path in root.iter(f"{SVG}path"):
        if path.get("marker-end"):
            start = int(path.get("d").split()[1].split("V")[0].split("H")[0])
            stop = int(path.get("d").split("V")[1].split("H")[0])
            arrows.add(
                tuple(
                    next(i for i, top in enumerate(tops) if top <= y <= top + height)
                    for y in (start, stop)
                )
            )
    return arrows


def test_layers_and_named_steps_are_drawn_with_their_shapes():
    network = Sequential(
        Linear("fc", n_in=4, n_out=3), SiLU(), lambda h: h * 2, Linear("out", n_in=3, n_out=2)
    )
    picture = plot_network(network(Input("x", shape=(None, 4), dtype="float32")))
    assert boxes_of(picture) == ["x", "fc: Linear", "SiLU", "out: Linear"]
    assert arrows_of(picture) == {(0, 1), (1, 2), (2, 3)}
    assert picture.svg.count(">(None, 2) float") == 1


def test_branches_are_drawn_past_what_is_between():
    y = GatedFeedForward("ff", d_model=4, hidden_dim=3)(Input("x", shape=(None, 4)))
    nodes = network_nodes(y)
    [x] = [i for i, node in enumerate(nodes) if not node.reads]
    arrows = arrows_of(plot_network(y))
    assert {(x, 1), (x, 2)} <= arrows
    assert all(start < stop for start, stop in arrows)
    expected = {(nodes.index(read), i) for i, node in enumerate(nodes) for read in node.reads}
    assert arrows == expected
    passing = re.findall(r"M\d+ \d+H(\d+)V", plot_network(y).svg)
    assert len(passing) == sum(stop > start + 1 for start, stop in expected)
    # Those that overlap have lanes of their own.
    assert len(set(passing)) > 1


def test_generators_and_other_shared_state_are_left_out():
    y = Dropout("drop", p=0.5)(Input("x", shape=(None, 4)))
    scaled = y * pytensor.shared(np.ones(4, "float32"), name="plain")
    assert boxes_of(plot_network(scaled))[:2] == ["x", "drop: Dropout"]
    assert "plain" not in plot_network(scaled).svg


def stacked(n_blocks, tap_blocks=()):
    blocks = [TransformerBlock(f"block_{i}", d_model=4, n_head=2) for i in range(n_blocks)]
    x = Input("x", shape=(None, 5, 4))
    mask = pt.tensor("mask", shape=(5, 5), dtype="bool")
    stack = TransformerStack("stack", blocks, rotary=None)
    return stack(x, pt.arange(5), mask, tap_blocks=tap_blocks)


def test_equal_blocks_are_one_box():
    y, _ = stacked(30)
    picture = plot_network(y)
    assert sorted(boxes_of(picture)[:2]) == ["mask", "x"]
    assert boxes_of(picture)[2:] == ["block_0 ... block_29: 30 x TransformerBlock"]
    assert arrows_of(picture) == {(0, 2), (1, 2)}


def test_two_blocks_are_two_boxes():
    y, _ = stacked(2)
    blocks = ["block_0: TransformerBlock", "block_1: TransformerBlock"]
    assert boxes_of(plot_network(y))[2:] == blocks


def test_branches_of_equal_blocks_are_no_run():
    x = Input("x", shape=(None, 4))
    block = partial(call_as_block, lambda h: h * 2, name="Block")
    first = block(x)
    assert boxes_of(plot_network([block(first), block(first)])) == ["x", *["Block"] * 3]


def test_what_reads_a_block_inside_of_a_run_is_below():
    y, [tap] = stacked(4, tap_blocks=[1])
    tap = tap.sum(acc_dtype=tap.dtype)
    tap.name = "sum"
    picture = plot_network([tap, y])
    assert "block_0 ... block_3: 4 x TransformerBlock" in boxes_of(picture)
    assert all(start < stop for start, stop in arrows_of(picture))


def test_a_block_that_reads_what_comes_later_ends_a_run():
    x = Input("x", shape=(None, 4))
    other = Linear("other", n_in=4, n_out=4)

    def block(h, z):
        return call_as_block(lambda h, z: h * 2 + z, h, z, name="Block")

    h = x
    for _ in range(3):
        h = block(h, x)
    for _ in range(3):
        h = block(h, other(h))
    picture = plot_network(h)
    assert boxes_of(picture)[1] == "3 x Block"
    assert all(start < stop for start, stop in arrows_of(picture))
    drawn = boxes_of(picture)
    assert drawn.count("other: Linear") == 3


def test_parameters_belong_to_the_step_that_reads_them():
    W, V = (trainable(np.zeros((4, 4), "float32"), name) for name in "WV")
    x = Input("x", shape=(None, 4), dtype="float32")
    h = pt.tanh(x @ W.T)
    h.name = "hidden"
    nodes = network_nodes(h @ (V * 2) + h @ W)
    assert [[p.name for p in node.parameters] for node in nodes] == [[], ["W"], ["V", "W"]]


def test_names_are_escaped():
    name = "<b>&\n'\""
    y = Linear(name, n_in=4, n_out=3)(Input(name, shape=(None, 4)))
    assert boxes_of(plot_network(y)) == ["<b>&\\n'\"", "<b>&\\n'\": Linear"]


def test_what_is_no_tensor_is_drawn_with_its_type():
    values = TypedListType(pt.fvector)("values")
    picture = plot_network(values[0] * 2)
    assert ">TypedList &lt;Vector(float32" in picture.svg
    assert boxes_of(picture)[0] == "values"


def test_a_picture_is_saved_as_notebooks_show_it(tmp_path):
    picture = plot_network(Linear("größe", n_in=4, n_out=3)(Input("x", shape=(None, 4))))
    picture.save(tmp_path / "network.svg")
    assert (tmp_path / "network.svg").read_text(encoding="utf-8") == picture._repr_svg_()
