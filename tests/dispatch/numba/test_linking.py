import subprocess
import sys

import pytest

pytest.importorskip("numba")

SCRIPT = """
import numba
import numpy as np
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import numba_njit
from pytensor_ml.dispatch.numba.linking import call_by_symbol

def cached(source, name, **names):
    names |= {"np": np, "__name__": "numpy"}
    function = compile_numba_function_src(source, name, names, cache_key=f"{name}_key")
    return numba_njit(function, cache=True, final_function=True)

inner = cached('''
def inner(x, y):
    if x.shape[0] > 3:
        raise ValueError("too long")
    return x + y, x.sum()
''', "inner")
middle = cached("def middle(*args): return inner(*args)", "middle", inner=call_by_symbol(inner))
outer = cached('''
def outer(x, y):
    a, b = middle(x, y)
    c, _ = middle(a[::2], y[::2])
    return a, b, c
''', "outer", middle=call_by_symbol(middle))

a, b, c = outer(np.arange(3.0), np.ones(3))
np.testing.assert_array_equal(a, [1, 2, 3])
assert b == 3
np.testing.assert_array_equal(c, [2, 4])
try:
    outer(np.ones(4), np.ones(4))
except ValueError as error:
    print(error)
hits, misses = outer.stats.cache_hits, outer.stats.cache_misses
print("hits", sum(hits.values()), "misses", sum(misses.values()))
if inner.signatures:
    def copies(function):
        [library] = [result.library for result in function.overloads.values()]
        return [f.name for f in library._final_module.functions if not f.is_declaration]
    print("copied", [n for n in copies(outer) if "inner" in n or "middle" in n])
"""


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


def test_called_code_is_not_copied_and_comes_with_its_caller_from_the_cache(tmp_path):
    def run():
        environment = {"PYTENSOR_FLAGS": f"base_compiledir={tmp_path}", "PATH": ""}
        command = [sys.executable, "-c", SCRIPT]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    assert run() == ["too long", "hits 0 misses 1", "copied []"]
    for entry in ("inner", "middle"):
        for file in list(tmp_path.rglob(f"string.{entry}-*")):
            file.unlink()
    assert run() == ["too long", "hits 1 misses 0"]
