"""What importing the package costs."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.compiles_nothing

OPTIONAL = ["gguf", "jax", "llvmlite", "matplotlib", "mlx", "numba", "rich", "tokenizers", "torch"]


def test_importing_the_package_imports_no_backend():
    code = "import json, sys, pytensor_ml; print(json.dumps([*sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    imported = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert "pytensor_ml" in imported
    assert not imported & set(OPTIONAL)
