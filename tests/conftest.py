"""The suite runs on one backend: ``--backend c|numba|jax|mlx``, ``--floatX float32|float64``."""

import os

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


def pytest_report_header(config):
    return f"backend: {config.getoption('backend')}, floatX: {config.getoption('floatX')}"


@pytest.fixture(scope="session")
def backend(request):
    return request.config.getoption("backend")


@pytest.fixture(scope="session")
def floatX(request):
    return request.config.getoption("floatX")
