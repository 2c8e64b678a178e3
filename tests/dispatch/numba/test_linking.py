import subprocess
import sys

import pytest

pytest.importorskip("numba")

SCRIPT = """
import sys
from pathlib import Path

import numba
import numpy as np
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import numba_njit
from pytensor_ml.dispatch.numba.basic import cached_as
from pytensor_ml.dispatch.numba.linking import call_by_symbol

def cached(source, name, **names):
    names |= {"np": np, "__name__": "numpy"}
    function = compile_numba_function_src(source, name, names, cache_key=f"{name}_key")
    return numba_njit(function, cache=True, final_function=True)

def make_inner(limit):
    def inner(x, y, shift=None):
        if x.shape[0] > limit:
            raise ValueError("too long")
        return x + y, x.sum()

    return cached_as(numba_njit(inner, final_function=True), "inner_key")

# Numba puts the address of a large constant into the code.
table = np.ones(200_000)
def large(i):
    return table[i]

large = cached_as(numba_njit(large, final_function=True), "large_key")
uses = cached("def uses(i): return large(i)", "uses", large=call_by_symbol(large))
if len(sys.argv) == 1:
    assert uses(3) == 1
    print("cached", bool(list(Path(uses._cache.cache_path).glob("string.uses-*"))))
    sys.exit()
inner = make_inner(3)
middle = cached("def middle(*args): return inner(*args)", "middle", inner=call_by_symbol(inner))
linked = cached("def linked(*args): return middle(*args)", "linked", middle=call_by_symbol(middle))
name, *lost = sys.argv[1:]
if lost == ["overwritten"]:
    import subprocess
    first = cached("def first(x, y): return middle(x, y)", "first", middle=middle)
    first(np.ones(2), np.ones(2))
    for file in Path(middle._cache.cache_path).glob("string.middle-*"):
        file.unlink()
    subprocess.run([sys.executable, *sys.orig_argv[1:3], "direct"], check=True)
    for file in Path(middle._cache.cache_path).glob("string.direct-*"):
        file.unlink()
elif lost:
    inner(np.ones(2), np.ones(2))
    for name_of_file in ("inner", "middle", "linked"):
        for file in list(Path(lost[0]).rglob(f"string.{name_of_file}-*")):
            file.unlink()
if name == "direct":
    linked = call_by_symbol(middle)
outer = cached(f'''
def {name}(x, y):
    a, b = linked(x, y)
    c, _ = linked(a[::2], y[::2])
    return a, b, c
''', name, linked=linked)

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


@pytest.fixture
def run(tmp_path):
    """Run the script with an outer function of some name, and a cache of its own."""

    def run(*arguments):
        environment = {"PYTENSOR_FLAGS": f"base_compiledir={tmp_path}", "PATH": ""}
        command = [sys.executable, "-c", SCRIPT, *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return run


def test_called_code_is_not_copied_and_comes_with_its_caller_from_the_cache(run, tmp_path):
    assert run("outer") == ["too long", "hits 0 misses 1", "copied []"]
    # Link what the first run left in the cache.
    for name in ("other", "direct"):
        assert run(name)[:2] == ["too long", "hits 0 misses 1"]
    for entry in ("inner", "middle", "linked"):
        for file in list(tmp_path.rglob(f"string.{entry}-*")):
            file.unlink()
    for name in ("outer", "other", "direct"):
        assert run(name) == ["too long", "hits 1 misses 0"]


def test_a_caller_does_not_bring_what_another_process_has_put_in_the_cache_since(run, tmp_path):
    run("outer")
    run("direct", "overwritten")
    assert run("direct")[:2] == ["too long", "hits 0 misses 1"]
    assert run("direct")[:2] == ["too long", "hits 1 misses 0"]


def test_a_caller_of_what_holds_an_address_is_not_cached(run):
    assert run() == ["cached False"]


def test_a_caller_of_what_the_cache_lost_is_compiled_again(run, tmp_path):
    run("outer")
    run("other", str(tmp_path))
    assert run("other")[:2] == ["too long", "hits 0 misses 1"]
    assert run("other")[:2] == ["too long", "hits 1 misses 0"]
