"""The package as it is imported and released."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pytensor_ml

pytestmark = pytest.mark.compiles_nothing

ROOT = Path(__file__).parents[1]
OPTIONAL = ["gguf", "jax", "llvmlite", "matplotlib", "mlx", "numba", "rich", "tokenizers", "torch"]


def test_importing_the_package_imports_no_backend():
    code = "import json, sys, pytensor_ml; print(json.dumps([*sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    imported = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert "pytensor_ml" in imported
    assert not imported & set(OPTIONAL)


def test_the_version_is_the_same_everywhere():
    version = pytensor_ml.__version__
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    [cited] = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == version
