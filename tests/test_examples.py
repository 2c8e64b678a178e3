"""The examples of docstrings run and give what they say."""

import doctest
import importlib
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
    if backend != "mlx":
        pytest.skip("examples name their backends, or compile for any; MLX compiles them quickest")
    results = doctest.testmod(importlib.import_module(name))
    assert not results.failed


@pytest.mark.compiles_nothing
def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = finder.find(importlib.import_module("pytensor_ml.layers.attention"))
    assert sum(bool(test.examples) for test in tests) >= 5
