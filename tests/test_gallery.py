"""Every script of docs/examples runs, says what it shows, and draws its picture."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


class Claim(NamedTuple):
    """What a script prints, and what holds of the numbers, in the pattern's groups."""

    pattern: str
    holds: Callable[..., bool]
    arguments: tuple[str, ...] = ()


ON_MLX = ("--backend", "mlx")
CLAIMS = {
    "custom_layer": Claim(
        r"mlx: definition and kernel differ by (\S+); .* takes (\d+) times as long",
        lambda difference, ratio: float(difference) < 1e-5 and int(ratio) >= 10,
        ("--backends", "mlx"),
    ),
    "decoder": Claim(
        r"([\d.]+)% of the symbols of new sequences repeated",
        lambda right: float(right) > 95,
        ON_MLX,
    ),
    "generate": Claim(
        r"The capital of France is (\w+)[\s\S]* (\d+) new tokens",
        lambda word, n: word == "Paris" and int(n) == 4,
        ON_MLX,
    ),
    "load_checkpoint": Claim(
        r"at most (\S+) from those of transformers\n.*, (\d) of 8 as when read at once",
        lambda difference, same: float(difference) < 1e-4 and int(same) == 8,
        ON_MLX,
    ),
    "moe_balance": Claim(
        r"without .* (\d+)% of the tokens at first, (\d+)% after .*\nwith the .* (\d+)% after",
        lambda first, without, with_: (
            abs(int(first) - 60) < 6 and int(without) > 45 and int(with_) < 35
        ),
        ON_MLX,
    ),
    "praxis_trunk": Claim(
        r"block 1: tokens of each expert \[(.*)\]",
        # 48 tokens pass through two experts each.
        lambda loads: sum(map(int, loads.split(", "))) == 96,
        ON_MLX,
    ),
    "pymc_network": Claim(
        r"R-hat of .* at most (\S+)\nthe noise is (\S+),.*\n(\d+)% of the points",
        lambda rhat, noise, inside: (
            float(rhat) < 1.5 and 0.15 < float(noise) < 0.4 and int(inside) > 75
        ),
        ("--backend", "jax"),
    ),
    "rotary_error": Claim(
        r"float32: .* off by (\S+) .*\nrotary_table: .* off by (\S+) .* vary by (\S+) of",
        lambda single, table, scores: (
            float(single) > 0.1 and float(table) < 4e-7 and float(scores) < 1e-6
        ),
        ON_MLX,
    ),
    "rotary_frequencies": Claim(
        r"default: .* turns (\S+) times[\s\S]*linear: .* turns (\S+) times",
        lambda default, linear: abs(float(default) / 8 - float(linear)) < 0.01,
    ),
    "save_and_open": Claim(
        r"saved on mlx, opened on jax: logits differ by (\S+) of",
        lambda difference: float(difference) < 1e-5,
        (*ON_MLX, "--open-on", "jax"),
    ),
    "shard": Claim(
        r"of logits, .*: (\S+)\n.*of parameters after a step, .*: (\S+)\n[\s\S]*"
        r"device 7: .*, (\S+)% of",
        lambda logits, parameters, share: (
            max(float(logits), float(parameters)) < 1e-5 and float(share) < 13
        ),
    ),
}
# These have a test of their own.
TESTED_ELSEWHERE = {"train_bytes": "test_train_bytes.py"}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in TESTED_ELSEWHERE])
def test_script_shows_what_it_claims(name, backend, tmp_path):
    assert name in CLAIMS, f"Say in CLAIMS what {name}.py prints and what holds of it."
    if backend != "mlx":
        pytest.skip("scripts say themselves what they compile for, so that one run is enough")
    claim = CLAIMS[name]
    command = [sys.executable, EXAMPLES / f"{name}.py", "--quick", "--folder", tmp_path]
    # floatX is what a script sets, or PyTensor's default, and not that of the suite.
    flags = os.environ["PYTENSOR_FLAGS"].split(",")
    kept = ",".join(flag for flag in flags if not flag.startswith("floatX="))
    result = subprocess.run(
        [*command, *claim.arguments],
        env={**os.environ, "PYTENSOR_FLAGS": kept},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    found = re.search(claim.pattern, result.stdout)
    assert found is not None, result.stdout
    assert claim.holds(*found.groups()), found[0]
    assert (tmp_path / f"{name}.png").stat().st_size > 1000


@pytest.mark.compiles_nothing
def test_every_entry_of_the_tables_is_a_script():
    assert set(CLAIMS) | set(TESTED_ELSEWHERE) == set(SCRIPTS)
    assert all((Path(__file__).parent / test).exists() for test in TESTED_ELSEWHERE.values())


@pytest.mark.compiles_nothing
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_has_a_docstring_for_the_gallery_and_a_picture(name):
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    title, blank, *text = docstring.splitlines()
    assert title.endswith(".")
    assert blank == ""
    assert text
    picture = EXAMPLES.parent / "images" / f"{name}.png"
    assert 1_000 < picture.stat().st_size < 120_000


@pytest.mark.compiles_nothing
def test_the_decoder_of_40_lines_has_no_more():
    tree = ast.parse((EXAMPLES / "decoder.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert sum(node.end_lineno - node.lineno + 1 for node in classes) <= 40
