"""The table and the chart."""

import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.race import Entry, Outcome
from benchmarks.rows import BACKENDS

COLUMNS = ("published", "peer", "torch", "limit")
HEADER = (
    "row",
    "backend",
    "ours",
    "spread",
    "published",
    "flax, mx.fast, slices",
    "torch, transformers",
    "limit",
)
WIDTHS = (24, 7, 8, 6, 16, 42, 26, 37)


def table_lines(outcome: Outcome) -> list[list[str]]:
    """Return the cells of each line of a row."""
    lines = []
    for backend, ours in ours_by_backend(outcome):
        times = outcome.seconds[ours]
        low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
        spread = f"{100 * (high - low) / middle:.0f} %" if len(times) > 1 else ""
        cells = [outcome.row.title, backend, quantity(middle, outcome), spread]
        for column in COLUMNS:
            others = [
                against(ours, other, outcome)
                for other in outcome.seconds
                if other.contestant.column == column and meets(other, backend)
            ]
            others += [
                "-"
                for other in outcome.absent
                if other.contestant.column == column and meets(other, backend)
            ]
            cells.append("; ".join(others))
        lines.append(cells)
    return lines


def ours_by_backend(outcome: Outcome) -> list[tuple[str, Entry]]:
    found = {e.backend: e for e in outcome.seconds if e.contestant.column == "ours"}
    return [(backend, found[backend]) for backend in BACKENDS if backend in found]


def meets(other: Entry, backend: str) -> bool:
    return backend in other.contestant.backends and other.backend in (None, backend)


def against(ours: Entry, other: Entry, outcome: Outcome) -> str:
    mine, theirs = (float(np.median(outcome.seconds[entry])) for entry in (ours, other))
    name = "" if other.contestant.column == "published" else f"{other.contestant.name} "
    cell = f"{name}{quantity(theirs, outcome)}, {three_digits(mine / theirs)}x"
    if other.contestant.task == "nothing":
        cell += f", {1e6 * (mine - theirs):+.1f} µs"
    return cell


def quantity(seconds: float, outcome: Outcome) -> str:
    if outcome.row.unit == "tokens/s":
        return f"{1 / seconds:.1f}/s"
    unit, size = ("s", 1) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    return f"{three_digits(seconds / size)} {unit}"


def three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def plain(cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def markdown(outcomes: Sequence[Outcome], about: Sequence[str]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *(x for o in outcomes for x in table_lines(o))]
    table = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([*table, "", *(f"* {line}" for line in about)])


def write_markdown(path: Path, text: str) -> None:
    """Put the table between the file's two marks, or into a new file."""
    start, end = "<!-- table -->", "<!-- end of table -->"
    whole = path.read_text(encoding="utf-8") if path.exists() else f"{start}\n{end}\n"
    before, found, rest = whole.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(
            f"{path} has no {start} followed by {end}, so there is no telling where the table "
            "belongs, and what else the file says would be lost. Add the two lines, or name a new "
            "file."
        )
    path.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def draw_chart(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw how many times longer than ours each contestant takes."""
    from matplotlib.figure import Figure

    lines = [(o, backend, ours) for o in outcomes for backend, ours in ours_by_backend(o)]
    colors = {"published": "C1", "peer": "C2", "torch": "C3", "limit": "0.4"}
    names = dict(zip(COLUMNS, ("published pytensor-ml", *HEADER[5:]), strict=True))
    figure = Figure(figsize=(8, 0.9 + 0.22 * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    for column in COLUMNS:
        points = [
            (np.median(o.seconds[other]) / np.median(o.seconds[ours]), y)
            for y, (o, backend, ours) in enumerate(lines)
            for other in o.seconds
            if other.contestant.column == column and meets(other, backend)
        ]
        if points:
            marker = "|" if column == "limit" else "o"
            axes.scatter(*zip(*points, strict=True), c=colors[column], marker=marker, s=40)
            axes.scatter([], [], c=colors[column], marker=marker, label=names[column])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("time / our time: right of the line ours is faster")
    axes.set_yticks(range(len(lines)), [f"{o.row.title}  {backend}" for o, backend, _ in lines])
    axes.tick_params(axis="y", labelsize=6)
    axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=4, fontsize=7)
    figure.savefig(path, dpi=150)


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*: (.*)", cpuinfo.read_text())):
        model = found[1]
    return f"{model}, {os.cpu_count()} processors, {platform.system()}, Python " + (
        platform.python_version()
    )
