import sys
from dataclasses import dataclass
from io import StringIO
from xml.etree import ElementTree

import numpy as np
import pytensor.tensor as pt
import pytest

from pytensor_ml.activations import SiLU
from pytensor_ml.base import Layer, VariadicLayer
from pytensor_ml.layers import (
    DecoderBlock,
    Dropout,
    Embedding,
    GatedFeedForward,
    Input,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    TransformerBlock,
    TransformerStack,
    call_as_block,
)
from pytensor_ml.model import Model
from pytensor_ml.models import CausalLM
from pytensor_ml.params import non_trainable, trainable
from pytensor_ml.pytensorf import collect_non_trainable_params, collect_trainable_params
from pytensor_ml.summary import MOST_ROWS, summarize

pytestmark = pytest.mark.compiles_nothing


class Holder(VariadicLayer):
    """A user's layer with any attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, x):
        return x


def weight(name="W", shape=(2, 3), dtype="float32"):
    return trainable(np.zeros(shape, dtype), name)


def shown_names(layer):
    """The first words of all lines of a table but the title, the head and the total."""
    return [line.split("  ")[0] for line in map(str.strip, repr(layer).splitlines()[2:-1])]


def total_bytes(layer):
    line = repr(layer).splitlines()[-1].split()
    assert line[0] == "total"
    return int(line[-1].replace(",", ""))


def decoder(n_blocks, dropout=0.0):
    def block(name):
        return DecoderBlock(
            name,
            attention=MultiheadAttention(f"{name}_attn", n_embd=8, n_head=2, bias=False),
            feed_forward=GatedFeedForward(f"{name}_mlp", d_model=8, hidden_dim=12),
            attention_norm=RMSNorm(f"{name}_norm1", n_in=8),
            feed_forward_norm=RMSNorm(f"{name}_norm2", n_in=8),
            branch_scale=0.5,
            dropout=dropout,
        )

    stack = TransformerStack(
        "stack",
        [block(f"block_{i}") for i in range(n_blocks)],
        rotary=RotaryEmbedding(rotary_dim=4),
    )
    return CausalLM(
        "lm",
        embedding=Embedding("tokens", n_embeddings=10, n_features=8),
        stack=stack,
        norm=RMSNorm("norm", n_in=8),
        max_positions=32,
    )


def test_a_table_has_names_shapes_dtypes_bytes_and_totals():
    layer = Holder(
        name="mixed",
        W=weight("mixed_W", (64, 32), "float16"),
        counts=non_trainable(np.zeros(1000, "int64"), "mixed_counts"),
        inner=Holder(b=weight(None, (), "float64")),
    )
    assert repr(layer) == "\n".join(
        [
            "Holder('mixed')",
            "parameter     shape          dtype     bytes",
            "mixed_W       (64, 32)       float16   4,096",
            "mixed_counts  (1000,)        int64     8,000  not trained",
            "inner.b       ()             float64       8",
            "total         3,049 numbers           12,104",
        ]
    )


def test_thirty_equal_blocks_are_folded_and_all_counted():
    model = decoder(30)
    lines = repr(model).splitlines()
    assert len(lines) < 20
    [folded] = [line for line in lines if "30 x DecoderBlock" in line]
    block = 4 * 8 * 8 + 3 * 8 * 12 + 2 * 8 + 1
    itemsize = model.embedding.W.get_value().itemsize
    assert folded.split()[0] == "stack.blocks[0:30]:"
    assert folded.split()[-1] == f"{30 * block * itemsize:,}"
    assert sum("block_" in line for line in lines) == 10
    assert not any("block_1_" in line for line in lines)
    assert total_bytes(model) == (30 * block + 10 * 8 + 8) * itemsize


def test_blocks_of_several_kinds_are_folded_by_kind():
    wide, narrow = (lambda: Holder(W=weight(None, (9,)))), (lambda: Holder(W=weight(None, (2,))))
    stack = Holder(blocks=[wide() if i % 3 else narrow() for i in range(9)])
    assert shown_names(stack) == [
        "blocks[0:7:3]: 3 x Holder",
        "W",
        "blocks[1, 2, 4, 5, 7, 8]: 6 x Holder",
        "W",
    ]
    assert total_bytes(stack) == (6 * 9 + 3 * 2) * 4
    irregular = Holder(blocks=[narrow() if i in (0, 9, 12) else wide() for i in range(13)])
    assert "blocks[1, 2, 3, 4, 5, 6, 7, 8, ...]: 10 x Holder" in repr(irregular)


@pytest.mark.parametrize(
    "other",
    [
        {"W": weight(None, (2, 4))},
        {"W": weight(None, dtype="float16")},
        {"W": non_trainable(np.zeros((2, 3), "float32"))},
        {"V": weight(None)},
        {"W": weight(None), "b": weight(None)},
    ],
)
def test_blocks_that_differ_are_not_folded_together(other):
    blocks = [Holder(W=weight(None)) for _ in range(3)]
    assert shown_names(Holder(blocks=[*blocks, Holder(**other)]))[2].startswith("blocks[3].")


def test_two_blocks_and_attributes_are_not_folded():
    names = ["q_W", "k_W", "v_W"]
    parts = {name[0]: Linear(name[0], n_in=3, n_out=3, bias=False) for name in names}
    assert shown_names(Holder(**parts)) == names
    assert shown_names(Holder(blocks=[*parts.values()][:2])) == names[:2]


def test_a_tied_parameter_counts_once():
    shared = weight("table", (5, 4))
    layer = Holder(embedding=Holder(W=shared), head=Holder(W=shared))
    lines = repr(layer).splitlines()
    assert lines[2].split() == ["table", "(5,", "4)", "float32", "80"]
    assert lines[3].split() == ["table", "(5,", "4)", "float32", "tied"]
    assert total_bytes(layer) == 80


def test_a_layer_that_is_met_twice_is_listed_once():
    norm = RMSNorm("norm", n_in=3)
    assert shown_names(Holder(first=norm, again=norm, more=[norm])) == ["norm_scale"]
    assert len(shown_names(TransformerBlock("block", d_model=4, n_head=2))) == 16


def test_cycles_end():
    inner = Holder(W=weight())
    outer = Holder(inner=inner)
    inner.owner = outer
    inner.layers = loop = [inner]
    loop.append(loop)
    assert shown_names(outer) == ["W"]


def test_parameters_in_sequences_and_mappings_are_found():
    layer = Holder(
        heads={"a": weight(None), "b": Holder(W=weight(None))},
        nested=[(weight(None), [Holder(V=weight(None))])],
        network=Sequential(SiLU(), Linear("fc", n_in=2, n_out=2, bias=False), lambda x: x),
    )
    names = ["heads['a']", "heads['b'].W", "nested[0][0]", "nested[0][1][0].V", "fc_W"]
    assert shown_names(layer) == names


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (SiLU(), "SiLU()"),
        (Dropout("drop"), "Dropout('drop')"),
        (RMSNorm("norm", n_in=3, affine=False), "RMSNorm('norm')"),
        (RotaryEmbedding(), "RotaryEmbedding('RotaryEmbedding')"),
        (Sequential(SiLU(), lambda x: x), "Sequential()"),
    ],
)
def test_a_layer_without_parameters_is_one_line(layer, text):
    assert repr(layer) == text
    assert "<td" not in layer._repr_html_()


def test_a_norm_says_that_its_parameters_are_to_come():
    norm = RMSNorm("norm")
    assert repr(norm).splitlines()[2].split("  ")[0::4][0] == "norm"
    assert "made at the first call" in repr(norm)
    norm(pt.tensor("x", shape=(None, 6), dtype="float32"))
    assert shown_names(norm) == ["norm_scale"]
    assert "first call" not in repr(norm)
    assert "first call" not in repr(RMSNorm("norm", affine=False))
    assert "first call" not in repr(Holder(n_in=None, W=weight()))


def test_a_call_with_symbolic_sizes_changes_nothing():
    model = decoder(2)
    before = repr(model)
    model(pt.tensor("ids", shape=(None, None), dtype="int64"))
    assert repr(model) == before


def test_an_open_dimension_has_the_length_of_the_value():
    table = trainable(np.zeros((7, 2), "float32"), "table", shape=(None, 2))
    layer = Holder(table=table)
    assert "(7, 2)" in repr(layer)
    table.set_value(np.zeros((9, 2), "float32"))
    assert total_bytes(layer) == 72


def test_values_are_not_read(monkeypatch):
    layer = Linear("fc", n_in=3, n_out=2)
    monkeypatch.setattr(type(layer.W), "get_value", None)
    assert total_bytes(layer) == 8 * np.dtype(layer.W.type.dtype).itemsize


def test_a_layer_whose_init_failed_can_be_printed():
    made = []

    class Failing(Layer):
        def __init__(self):
            made.append(self)
            self.W = weight()
            self.name = self.missing

        def __call__(self, x):
            return x

    with pytest.raises(AttributeError):
        Failing()
    assert repr(made[0]).startswith("Failing()\n")
    assert shown_names(made[0]) == ["W"]
    assert repr(CausalLM.__new__(CausalLM)) == "CausalLM()"
    assert repr(Model.__new__(Model)).startswith("Model, whose parameters no table lists: ")


class Hostile:
    @property
    def __class__(self):
        raise OSError("<no>")


def test_printing_never_raises_and_listing_does():
    layer = Holder(name="outer", thing=Hostile())
    text = "Holder, whose parameters no table lists: OSError"
    assert repr(layer) == text
    assert text in layer._repr_html_()
    assert str(layer.__rich__().title) == text
    with pytest.raises(OSError, match="no"):
        summarize(layer)


def test_layers_nested_too_deep_can_be_printed():
    layer = Holder(W=weight())
    for _ in range(3 * sys.getrecursionlimit()):
        layer = Holder(inner=layer)
    assert repr(layer) == "Holder, whose parameters no table lists: RecursionError"


def test_layers_need_no_hash():
    @dataclass
    class Block(Layer):
        inner: Layer
        W: object

        def __call__(self, x):
            return x

        __repr__ = Layer.__repr__

    assert Block.__hash__ is None
    assert shown_names(Block(Block(SiLU(), weight("V")), weight())) == ["V", "W"]


def test_many_parameters_are_cut_and_all_counted():
    layer = Holder(weights=[weight(f"W_{i}", (2,)) for i in range(MOST_ROWS + 7)])
    lines = repr(layer).splitlines()
    assert len(lines) == MOST_ROWS + 4
    assert lines[-2] == "... and 7 lines more"
    assert total_bytes(layer) == (MOST_ROWS + 7) * 8
    assert f"W_{MOST_ROWS + 6}" in repr(summarize(layer))


def test_names_stay_on_their_line():
    layer = Holder(name="a\nb", W=weight("x\n\ty\x1b[31m"))
    lines = repr(layer).splitlines()
    assert lines[0] == "Holder('a\\nb')"
    assert lines[2].startswith(r"x\n\ty\x1b[31m  ")


def test_html_is_a_well_formed_table_of_the_same_cells():
    evil = "<script>alert('&')</script>"
    layer = Holder(name=evil, blocks=[Holder(W=weight(evil)) for _ in range(3)])
    html = layer._repr_html_()
    assert "<script" not in html
    table = ElementTree.fromstring(html)
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert table.find("caption").text == f"Holder({evil!r})"
    assert rows[0][:4] == ["parameter", "shape", "dtype", "bytes"]
    assert rows[1][0] == "blocks[0:3]: 3 x Holder"
    assert rows[2][:4] == [evil, "(2, 3)", "float32", "24"]
    assert rows[-1][3] == "72"


def test_rich_shows_a_table_in_which_names_are_no_markup():
    console = pytest.importorskip("rich.console").Console(width=120, file=StringIO())
    console.print(Holder(name="[red]x[/red]", W=weight("[bold]W[/]")))
    text = console.file.getvalue()
    assert "[bold]W[/]" in text
    assert "Holder('[red]x[/red]')" in text
    assert "│ total" in text


def test_only_rich_needs_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    layer = Linear("fc", n_in=3, n_out=2)
    assert "fc_W" in repr(layer)
    assert "fc_W" in layer._repr_html_()


def test_a_model_lists_what_its_graph_reads():
    network = decoder(12, dropout=0.1)
    y = network(pt.tensor("ids", shape=(None, None), dtype="int64"))
    model = Model(y)
    summary = model.summary()
    parameters = [*collect_trainable_params(y), *collect_non_trainable_params(y)]
    assert summary.n_bytes == sum(p.get_value(borrow=True).nbytes for p in parameters)
    assert summary.n_numbers == summarize(network).n_numbers
    lines = repr(summary).splitlines()
    assert len(lines) < 20
    assert lines[0] == "Model(logits)"
    assert any(line.startswith("block_0 ... block_11: 12 x DecoderBlock ") for line in lines)
    assert [line for line in lines if line.startswith("tokens_W")][1].endswith("tied")
    assert sum("not trained" in line for line in lines) == 1
    assert repr(model) == repr(summary)
    assert model._repr_html_() == summary._repr_html_()


def test_a_model_lists_a_block_s_parameters_in_the_order_of_use():
    y = call_as_block(Linear("fc", n_in=2, n_out=2), Input("x", shape=(None, 2)))
    assert shown_names(Model(y)) == ["fc_W", "fc_b"]


def test_a_model_lists_parameters_of_no_layer():
    W, x = weight("W"), Input("x", shape=(None, 2), dtype="float32")
    assert Model(pt.tanh(x @ W)).summary().n_bytes == 24
    assert Model(W * 2).summary().n_bytes == 24
    assert repr(Model(x * 2)).count("\n") == 0
