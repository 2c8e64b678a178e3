"""What the README and the pages of docs show is run, and their links lead somewhere.

Blocks of one page share a namespace, in order. What a ``python`` block prints must stand after it,
in a ``text`` block or, after "prints", indented. Shell blocks are not run, but scripts, options and
extras that they name must exist.
"""

import ast
import contextlib
import doctest
import importlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytensor
import pytest

import pytensor_ml
from pytensor_ml.models.loading import gguf, registry
from pytensor_ml.serialize import allowed

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
TEXTS = [*PAGES, *(path for path in [ROOT / "CONTRIBUTING.md"] if path.exists())]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
REGISTRIES = (registry._builders, gguf._families, allowed.OPS, allowed.INITIALIZERS)


class Block(NamedTuple):
    """A code block: its language ("" if indented), its text, and the lines above the text."""

    language: str
    text: str
    line: int


def blocks_of(path: Path) -> list[Block]:
    """Return the code blocks of a page; directives of the site are none."""
    pattern = re.compile(
        r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<fenced>.*?)^(?P=fence)$"
        r"|(?<=\n\n)(?P<indented> {4}[^\n]*\n(?:\n* {4}[^\n]*\n)*)",
        re.MULTILINE | re.DOTALL,
    )
    text = path.read_text()
    blocks = []
    for found in pattern.finditer(text):
        if found["fence"] is None:
            kind, code = "", re.sub("^ {4}", "", found["indented"], flags=re.MULTILINE)
        else:
            kind, code = found["language"].strip(), found["fenced"]
        if not kind.startswith("{"):
            start = found.start("indented" if found["fence"] is None else "fenced")
            blocks.append(Block(kind, code, text[:start].count("\n")))
    return blocks


def with_outputs(path: Path) -> Iterator[tuple[Block, str]]:
    """Yield each block that is no output, with the output that is shown after it."""
    lines = path.read_text().splitlines()
    blocks = blocks_of(path)
    while blocks:
        block, *blocks = blocks
        output = ""
        if blocks and block.language != "pycon":
            between = lines[block.line + block.text.count("\n") : blocks[0].line]
            lead = " ".join(line for line in between if line and not line.startswith("```"))
            if (blocks[0].language, lead) in (("text", ""), ("", "prints")):
                output = blocks[0].text
                del blocks[0]
        yield block, output


@pytest.fixture
def _registries_as_before():
    """Take back what a page registers."""
    before = [dict(table) for table in REGISTRIES]
    yield
    for table, entries in zip(REGISTRIES, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.mark.usefixtures("_registries_as_before")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_blocks_run_and_print_what_is_shown(path, backend, monkeypatch, tmp_path):
    if backend != "mlx":
        pytest.skip("pages name their backends, or compile for any; MLX compiles them quickest")
    monkeypatch.chdir(tmp_path)
    # Numba finds a kernel in its cache again by the module that it is defined in.
    page = ModuleType(f"page_{path.stem}")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    namespace = vars(page)
    with pytensor.config.change_flags(floatX="float32"):
        for block, shown in with_outputs(path):
            if block.language == "python":
                # So that a traceback points into the page.
                code = compile("\n" * block.line + block.text, path, "exec")
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(code, namespace)
                assert printed.getvalue() == shown, f"line {block.line} of {path.name}"
            elif block.language == "pycon":
                session = doctest.DocTestParser().get_doctest(
                    block.text, namespace, path.name, str(path), block.line
                )
                session.globs = namespace
                assert not doctest.DocTestRunner().run(session, clear_globs=False).failed


def options_in(source: Path) -> set[str]:
    """Return the options that a script declares."""
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
    return {
        argument.value
        for call in calls
        if getattr(call.func, "attr", None) in ("add_argument", "addoption")
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def script_of(words: list[str]) -> tuple[int, Path] | None:
    """Return where the words of a command name a script of this repository, and the script."""
    for i, word in enumerate(words):
        if word.endswith(".py") and words[0] != "sphinx-build" and "pytest" not in words[:i]:
            return i, ROOT / word
        if word == "pytest":
            return i, ROOT / "tests" / "conftest.py"
        if words[i - 1] == "-m" and word.split(".")[0] == "benchmarks":
            path = ROOT.joinpath(*word.split("."))
            return i, path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return None


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_commands_name_what_exists(path):
    for block, _ in with_outputs(path):
        if block.language in ("python", "pycon"):
            continue
        assert block.language in ("", "console"), f"{block.language!r} of {path.name} is not tested"
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for command in (part for line in lines for part in line.split("&&")):
            words = shlex.split(command, comments=True)
            asked = [name for before, name in pairwise(words) if before == "--extra"]
            asked += [
                name
                for names in re.findall(r"\.\[([\w,]+)\]", command)
                for name in names.split(",")
            ]
            assert set(asked) <= set(EXTRAS), command
            if (script := script_of(words)) is not None:
                position, source = script
                given = {w.split("=")[0] for w in words[position:] if w.startswith("--")}
                assert given <= options_in(source), command


def slugs(text: str) -> set[str]:
    """Return the anchors that headings get."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        name, _, place = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = path.parent / name if name else path
        assert target.exists(), f"{path.name} links to {link}"
        if place:
            assert place in slugs(target.read_text()), f"{path.name} links to {link}"


@pytest.mark.compiles_nothing
def test_every_page_is_in_a_table_of_contents():
    tables = [re.findall(r"^```{toctree}.*?^```", page.read_text(), re.M | re.S) for page in PAGES]
    listed = {line for table in tables for text in table for line in text.splitlines()}
    assert {page.stem for page in PAGES[1:]} - {"index"} <= listed


@pytest.mark.compiles_nothing
def test_names_to_move_to_exist_and_those_that_are_missing_do_not():
    folders = ("models", "models.loading", "optim", "pytensorf", "serialize", "layers")
    files = ("activations", "base", "generation", "loss", "model", "params", "state")
    modules = [importlib.import_module(f"pytensor_ml.{name}") for name in (*folders, *files)]
    modules.append(pytensor_ml)

    def exists(name):
        return name == "pytensor" or any(hasattr(module, name) for module in modules)

    text = (ROOT / "docs" / "moving.md").read_text()
    n_names = 0
    for table in re.finditer(r"(?:^\|.*\|\n)+", text, re.M):
        header, _, *rows = [row.strip("| ").split(" | ")[-1] for row in table[0].splitlines()]
        is_missing = table.start() > text.index("What is only in 0.3.0") and header == "names"
        pattern = r"`(?:\w+=)?(\w+)[\w.]*\(" if header == "here" else r"`(\w+)`"
        for row in rows:
            names = re.findall(pattern, row if header == "here" else row.split(";")[0])
            assert all(exists(name) is not is_missing for name in names), row
            n_names += len(names)
    assert n_names > 100
