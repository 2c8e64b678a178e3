"""The examples of docstrings run and give what they say."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import pytensor_ml

MODULES = [
    module.name
    for module in pkgutil.walk_packages(pytensor_ml.__path__, "pytensor_ml.")
    if ".dispatch." not in module.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, backend):
    module = importlib.import_module(name)
    if backend != "numba" and 'backend_mode("numba")' in inspect.getsource(module):
        pytest.skip("its examples are compiled for Numba")
    results = doctest.testmod(module)
    assert not results.failed


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = finder.find(importlib.import_module("pytensor_ml.layers.attention"))
    assert sum(bool(test.examples) for test in tests) >= 5
