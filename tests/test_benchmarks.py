"""A row of the benchmarks runs from its inputs to the table, and refuses what is wrong."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


def test_a_row_is_checked_timed_and_printed(backend, tmp_path, capsys):
    from benchmarks.__main__ import main

    table = tmp_path / "table.md"
    options = ["--row", "norm-small", "--rounds", "2", "--threads", "1"]
    assert main([*options, "--backends", backend, "--markdown", str(table)]) == 0
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("norm-small")]
    assert line.split()[1] == backend
    assert "empty function" in line
    assert f"| RMSNorm, 1 x 576 | {backend} | " in table.read_text()


def test_a_wrong_result_is_refused_before_anything_is_timed(backend, tmp_path, monkeypatch):
    if backend != "mlx":
        pytest.skip("results of all backends are checked by the same lines")
    from benchmarks import race as racing
    from benchmarks.rows import norm_row

    row = norm_row(3, 8)

    def error_of_half_an_output(inputs, settings, outputs):
        return row.error(inputs, settings, [outputs[0] / 2])

    wrong = replace(row, error=error_of_half_an_output, contestants=row.contestants[:1])

    def refuse(worker, n):
        raise AssertionError("timed")

    monkeypatch.setattr(racing.Worker, "seconds", refuse)
    setting = racing.Setting(threads=1, pythons={"here": sys.executable}, folder=tmp_path)
    with pytest.raises(racing.WrongResult, match=f"the result of ours on {backend} is wrong"):
        racing.race(wrong, [backend], setting)
