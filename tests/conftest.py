"""The suite runs on one backend: ``--backend c|numba|jax|mlx``, ``--floatX float32|float64``.

Whoever runs it on several saves time by ``-m "not compiles_nothing"`` on all but one.
"""

import gc
import os
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--backend", choices=["c", "numba", "jax", "mlx"], default="numba")
    parser.addoption("--floatX", choices=["float32", "float64"], default="float32")


def pytest_configure(config):
    """Set floatX before PyTensor is imported: its JAX backend reads it at import."""
    flags = [os.environ.get("PYTENSOR_FLAGS", ""), f"floatX={config.getoption('floatX')}"]
    os.environ["PYTENSOR_FLAGS"] = ",".join(filter(None, flags))

    import pytensor

    from pytensor_ml.pytensorf import backend_mode

    backend = config.getoption("backend")
    pytensor.config.mode = backend_mode(backend)


def pytest_collection_modifyitems(items):
    folders = [Path(__file__).parent / name for name in ("serialize", "models/loading")]
    for item in items:
        if any(map(item.path.is_relative_to, folders)):
            item.add_marker("compiles_nothing")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Hold a test and its fixtures to what its marker says."""
    if item.get_closest_marker("compiles_nothing") is None:
        return (yield)

    import pytensor
    from pytensor.compile.mode import Mode
    from pytensor.link.basic import PerformLinker

    class Refusing(PerformLinker):
        def accept(self, *args, **kwargs):
            raise AssertionError("A test that is marked as one that compiles nothing compiles.")

    with pytensor.config.change_flags(mode=Mode(linker=Refusing())):
        return (yield)


def pytest_report_header(config):
    return f"backend: {config.getoption('backend')}, floatX: {config.getoption('floatX')}"


@pytest.fixture(scope="session")
def backend(request):
    return request.config.getoption("backend")


@pytest.fixture(scope="session")
def floatX(request):
    return request.config.getoption("floatX")


@pytest.fixture(scope="module", autouse=True)
def _what_lives_on_is_no_garbage():
    """Let the collector run seldom, and spare it what earlier modules left for good."""
    gc.set_threshold(20_000)
    gc.collect()
    gc.freeze()
