"""The training example stops when asked to, resumes, and finishes."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "train_bytes.py"


def test_training_stops_when_interrupted_and_resumes(backend, tmp_path):
    if backend != "mlx":
        pytest.skip(f"{backend} takes long to compile a step, a sample and a score, twice")
    command = [sys.executable, SCRIPT, "--quick", "--backend", backend, "--folder", tmp_path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--steps", "100000"], **pipes) as first:
        for line in first.stderr:
            if line.startswith("step 10:"):
                first.send_signal(signal.SIGINT)
                break
        output, _ = first.communicate(timeout=120)
    assert first.returncode == 0
    n_steps = int(re.search(r"stopped; .* holds step (\d+)", output)[1])

    command += ["--resume", "--steps", str(n_steps + 20)]
    second = subprocess.run(command, **pipes, check=True, timeout=120)
    assert re.search(
        r"[\d.]+ bits per byte of held-out files, gzip -9 of them [\d.]+", second.stdout
    )
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert [step for step, _ in curves["train"]] == list(range(n_steps + 20))
    assert curves["train"][-1][1] < curves["train"][0][1] < 10
    assert (tmp_path / "train_bytes.png").stat().st_size > 1000


@pytest.mark.compiles_nothing
def test_resuming_without_a_checkpoint_says_so(tmp_path):
    command = [sys.executable, SCRIPT, "--quick", "--resume", "--folder", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "to resume from. Train without --resume first" in result.stderr
