"""How the suite measures an error."""

import numpy as np

# Largest relative error of a layer against its float64 oracle.
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}


def relative_error(actual, expected):
    """Return max|actual - expected| / max|expected|; NaN anywhere gives NaN."""
    actual, expected = np.asarray(actual, "float64"), np.asarray(expected, "float64")
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not expected.size:
        return 0.0
    return np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-300)


def assert_close(actual, expected, tolerance=None):
    """Assert a relative error of at most ``tolerance``, by default that of ``actual``'s dtype."""
    tolerance = TOLERANCE[str(np.asarray(actual).dtype)] if tolerance is None else tolerance
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.3g} is above {tolerance:.3g}"
