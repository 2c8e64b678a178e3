"""Norms of one row in float64, and their gradients by the complex step."""

import cmath
import math

import numpy as np


def mean(values):
    values = [complex(value) for value in values]
    real, imag = math.fsum(v.real for v in values), math.fsum(v.imag for v in values)
    return complex(real, imag) / len(values)


def rms_norm(row, scale=None, *, epsilon):
    root = cmath.sqrt(mean(v * v for v in row) + epsilon)
    return [v / root * (1 if scale is None else scale[i]) for i, v in enumerate(row)]


def zero_centered_rms_norm(row, weight, *, epsilon):
    return rms_norm(row, [1 + w for w in weight], epsilon=epsilon)


def layer_norm(row, loc=None, scale=None, *, epsilon):
    for _ in range(2):  # as the mean itself is rounded
        center = mean(row)
        row = [v - center for v in row]
    normalized = rms_norm(row, scale, epsilon=epsilon)
    return normalized if loc is None else [v + b for v, b in zip(normalized, loc, strict=True)]


def forward(norm, x, *parameters, epsilon):
    """Apply ``norm`` to every row of ``x``."""
    x = np.asarray(x, "float64")
    parameters = [parameter.astype("float64").tolist() for parameter in parameters]
    rows = [
        [value.real for value in norm(row.tolist(), *parameters, epsilon=epsilon)]
        for row in x.reshape(-1, x.shape[-1])
    ]
    return np.reshape(np.array(rows, "float64"), x.shape)


def gradients(norm, x, dy, *parameters, epsilon, columns=None):
    """Return the gradients of sum(dy * norm(x)) by x and by each parameter.

    ``columns`` limits them to some entries of the last axis.
    """
    rows = np.asarray(x, "float64").reshape(-1, np.shape(x)[-1])
    dy_rows = np.asarray(dy, "float64").reshape(rows.shape)
    columns = range(rows.shape[-1]) if columns is None else columns
    # One list of a value a row, for every argument of the norm and column.
    derivatives = [[[] for _ in columns] for _ in range(1 + len(parameters))]
    for row, dy_row in zip(rows.tolist(), dy_rows.tolist(), strict=True):
        arguments = [row, *(parameter.astype("float64").tolist() for parameter in parameters)]
        for which, argument in enumerate(arguments):
            for place, column in enumerate(columns):
                moved = list(argument)
                moved[column] += 1e-30j
                shifted = [*arguments[:which], moved, *arguments[which + 1 :]]
                y = norm(*shifted, epsilon=epsilon)
                terms = [d * v.imag * 1e30 for d, v in zip(dy_row, map(complex, y), strict=True)]
                derivatives[which][place].append(math.fsum(terms))
    dx = np.array(derivatives[0]).T.reshape(*np.shape(x)[:-1], len(columns))
    return [dx, *(np.array([math.fsum(v) for v in by_column]) for by_column in derivatives[1:])]
