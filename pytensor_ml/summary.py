"""Tables of the parameters that a layer or a network has."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pytensor_ml.params import NonTrainableParameter, TrainableParameter

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Summary", "summarize"]

type Parameter = TrainableParameter | NonTrainableParameter

COLUMNS = ("parameter", "shape", "dtype", "bytes", "")
# What a layer that is printed shows at most; `summarize` shows all.
MOST_ROWS = 100
# Two are read as quickly as a line about two.
FEWEST_FOLDED = 3


class Summarized:
    """What shows its parameters as a table where it is printed, and in notebooks."""

    def _part(self) -> "Part":
        return layer_part(self)

    def _shown(self) -> "Summary":
        # It may be half built, or of a user's class; debuggers print those too.
        try:
            return Summary(self._part(), most_rows=MOST_ROWS)
        except Exception as error:
            title = (
                f"{type(self).__name__}, whose parameters no table lists: {type(error).__name__}"
            )
            return Summary(Part(title=title))

    def summary(self) -> "Summary":
        """List all parameters; see :func:`~pytensor_ml.summary.summarize`."""
        return summarize(self)

    def __repr__(self) -> str:
        return str(self._shown())

    def _repr_html_(self) -> str:
        return self._shown()._repr_html_()

    def __rich__(self) -> "Table":
        return self._shown().__rich__()


@dataclass(frozen=True)
class Part:
    """A parameter, or what has some.

    Parameters
    ----------
    label : str
        How its owner reaches it, as in ``.attention`` or ``[0]``.
    title : str
        What it is called: a parameter's name, a layer's class and name.
    kind : str
        A layer's class.
    shape : tuple of int, optional
        A parameter's shape.
    dtype : str
        Its dtype.
    note : str
        What else there is to say of it.
    n_numbers, n_bytes : int
        What it takes, with its parts.
    parts : tuple of Part
        What it is made of.
    """

    label: str = ""
    title: str = ""
    kind: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    note: str = ""
    n_numbers: int = 0
    n_bytes: int = 0
    parts: tuple["Part", ...] = ()

    @property
    def form(self) -> tuple[Any, ...]:
        """What is equal for parts that differ only in their names."""
        inner = tuple((part.label, part.form) for part in self.parts)
        return self.kind, self.shape, self.dtype, self.note, inner


def whole(parts: Iterable[Part], *, label: str = "", title: str = "", kind: str = "") -> Part:
    """Return what is made of ``parts``, of which those that say nothing are left out."""
    kept = tuple(part for part in parts if part.parts or part.shape is not None or part.note)
    return Part(
        label=label,
        title=title,
        kind=kind,
        n_numbers=sum(part.n_numbers for part in kept),
        n_bytes=sum(part.n_bytes for part in kept),
        parts=kept,
    )


def parameter_part(parameter: Parameter, label: str, seen: set[int]) -> Part:
    """Return a parameter, which counts nothing if ``seen`` has its id; add its id otherwise."""
    shape, dtype = parameter.type.shape, parameter.type.dtype
    if None in shape:
        shape = parameter.get_value(borrow=True, return_internal_type=True).shape
    is_tied = id(parameter) in seen
    seen.add(id(parameter))
    is_trained = isinstance(parameter, TrainableParameter)
    notes = [note for note, holds in (("tied", is_tied), ("not trained", not is_trained)) if holds]
    n_numbers = 0 if is_tied else prod(shape)
    return Part(
        label=label,
        title="" if parameter.name is None else str(parameter.name),
        shape=tuple(shape),
        dtype=dtype,
        note=", ".join(notes),
        n_numbers=n_numbers,
        n_bytes=n_numbers * np.dtype(dtype).itemsize,
    )


def layer_part(layer: Summarized, label: str = "", seen: set[int] | None = None) -> Part:
    """Return a layer with what its attributes hold, in sequences and mappings too.

    Parameters
    ----------
    layer : Layer, BinaryLayer or VariadicLayer
        The layer, whole or not.
    label : str
        How its owner reaches it.
    seen : set of int, optional
        Ids of what was met before: layers of it are left out, its parameters count nothing.

    Returns
    -------
    Part
    """
    seen = set() if seen is None else seen
    seen.add(id(layer))
    attributes = vars(layer)
    kind, name = type(layer).__name__, attributes.get("name")
    parts = list(_held_parts(((f".{key}", value) for key, value in attributes.items()), seen))
    # Layers that were not told a width learn it from their first input.
    waits = attributes.get("n_in", 0) is None and attributes.get("affine", True)
    if waits and all(part.shape is None for part in parts):
        note = "made at the first call"
        parts.append(Part(title=name if isinstance(name, str) else kind, note=note))
    title = f"{kind}({name!r})" if isinstance(name, str) else f"{kind}()"
    return whole(parts, label=label, title=title, kind=kind)


def _held_parts(labeled: Iterable[tuple[str, Any]], seen: set[int]) -> Iterator[Part]:
    for label, value in labeled:
        if isinstance(value, TrainableParameter | NonTrainableParameter):
            yield parameter_part(value, label, seen)
        elif id(value) in seen:
            continue
        elif isinstance(value, Summarized):
            yield layer_part(value, label, seen)
        elif isinstance(value, list | tuple | dict):
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield whole(_held_parts(((f"[{key!r}]", v) for key, v in items), seen), label=label)


class Summary:
    """A table of parameters, for terminals, for rich, and for notebooks.

    Parameters
    ----------
    part : Part
        What the table is of.
    most_rows : int, optional
        How many lines to show. Default is all.
    """

    def __init__(self, part: Part, most_rows: int | None = None):
        self.title = printable(part.title)
        self.n_numbers, self.n_bytes = part.n_numbers, part.n_bytes
        self._rows = list(_rows(part.parts))
        if most_rows is not None and len(self._rows) > most_rows:
            left_out = f"... and {len(self._rows) - most_rows} lines more"
            self._rows[most_rows:] = [Row(0, (left_out, "", "", "", ""))]
        if self._rows:
            total = ("total", f"{self.n_numbers:,} numbers", "", f"{self.n_bytes:,}", "")
            self._rows.append(Row(0, total))

    def __repr__(self) -> str:
        if not self._rows:
            return self.title
        lines = [COLUMNS, *(("  " * depth + cells[0], *cells[1:]) for depth, cells in self._rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        alignments = ("<", "<", "<", ">", "<")
        texts = [
            "  ".join(f"{c:{a}{w}}" for c, a, w in zip(line, alignments, widths, strict=True))
            for line in lines
        ]
        return "\n".join([self.title, *(text.rstrip() for text in texts)])

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Sequence[str], depth: int = 0) -> str:
            styles = [f"text-align: left; padding-left: {0.5 + 1.5 * depth}em"]
            styles += [f"text-align: {side}" for side in ("left", "left", "right", "left")]
            return "".join(
                f'<{tag} style="{style}">{escape(cell)}</{tag}>'
                for cell, style in zip(cells, styles, strict=True)
            )

        head = f"<caption>{escape(self.title)}</caption>"
        if self._rows:
            head += f"<thead><tr>{row('th', COLUMNS)}</tr></thead>"
        body = "".join(f"<tr>{row('td', cells, depth)}</tr>" for depth, cells in self._rows)
        return f"<table>{head}<tbody>{body}</tbody></table>"

    def __rich__(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        # Texts, since a name in brackets would be read as markup.
        table = Table(title=Text(self.title), title_justify="left", show_header=bool(self._rows))
        for column in COLUMNS:
            table.add_column(column, justify="right" if column == "bytes" else "left")
        for depth, (name, *cells) in self._rows:
            table.add_row(Text("  " * depth + name), *map(Text, cells))
        return table


def summarize(what: Summarized) -> Summary:
    """List all parameters of a layer or a model, equal layers of a sequence being folded.

    Parameters
    ----------
    what : Layer, BinaryLayer, VariadicLayer or Model
        What to list. Printing it shows the same table, of :data:`MOST_ROWS` lines at most.

    Returns
    -------
    Summary

    Examples
    --------
    >>> import pytensor
    >>> from pytensor_ml.layers import Linear, Sequential
    >>> from pytensor_ml.summary import summarize
    >>> with pytensor.config.change_flags(floatX="float32"):
    ...     layers = [Linear(f"fc_{i}", n_in=64, n_out=64) for i in range(12)]
    ...     network = Sequential(*layers, Linear("out", n_in=64, n_out=10, bias=False))
    >>> summarize(network)
    Sequential()
    parameter                  shape           dtype      bytes
    layers[0:12]: 12 x Linear                           199,680
      fc_0_W                   (64, 64)        float32   16,384
      fc_0_b                   (64,)           float32      256
    out_W                      (64, 10)        float32    2,560
    total                      50,560 numbers           202,240
    """
    return Summary(what._part())


class Row(NamedTuple):
    """A line of a table, its cells as texts."""

    depth: int
    cells: tuple[str, str, str, str, str]


def _rows(parts: Sequence[Part], path: str = "", depth: int = 0) -> Iterator[Row]:
    """Yield the lines about ``parts``, of which equal layers have lines together."""
    alike: dict[Any, list[Part]] = {}
    for i, part in enumerate(parts):
        # Attributes of a layer have names that say what each is for.
        may_fold = part.kind and not part.label.startswith(".")
        alike.setdefault(part.form if may_fold else i, []).append(part)
    for group in alike.values():
        if len(group) >= FEWEST_FOLDED:
            labels = [part.label for part in group]
            what = f"{path}{folded(labels, group[0].kind)}".removeprefix(".")
            size = f"{sum(part.n_bytes for part in group):,}"
            yield Row(depth, (printable(what), "", "", size, ""))
            yield from _rows(group[0].parts, "", depth + 1)
            continue
        for part in group:
            own = f"{path}{part.label}"
            if not part.kind and not part.parts:
                title = printable(part.title or own.removeprefix("."))
                shape = "" if part.shape is None else str(part.shape)
                size = f"{part.n_bytes:,}" if part.n_bytes else ""
                yield Row(depth, (title, shape, part.dtype, size, part.note))
            yield from _rows(part.parts, own, depth)


def folded(labels: Sequence[str], kind: str) -> str:
    """Return what stands for layers of one kind, their indices as a slice."""
    if not all(re.fullmatch(r"\[\d+\]", label) for label in labels):
        ends = " ... ".join(filter(None, (labels[0], labels[-1])))
    else:
        indices = [int(label[1:-1]) for label in labels]
        start, stop, step = indices[0], indices[-1] + 1, indices[1] - indices[0]
        if indices == list(range(start, stop, step)):
            ends = f"[{start}:{stop}]" if step == 1 else f"[{start}:{stop}:{step}]"
        else:
            shown = [*map(str, indices[:8]), *["..."] * (len(indices) > 8)]
            ends = f"[{', '.join(shown)}]"
    return ": ".join(filter(None, (ends, f"{len(labels)} x {kind}")))


def printable(text: str) -> str:
    """Return ``text`` as one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
