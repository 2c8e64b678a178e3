"""What the machine can do: the limits that layers are held against."""

import timeit

import numba
import numpy as np

from benchmarks.contestants import Task

PACKAGES = ("numpy", "numba")


def copy(inputs):
    x, n_threads = inputs["x"], numba.get_num_threads()
    y = np.empty_like(x)
    if n_threads == 1:
        return Task(lambda: np.copyto(y, x) or [])
    flat_x, flat_y = x.reshape(-1), y.reshape(-1)
    return Task(lambda: copy_parts(flat_x, flat_y, n_threads) or [])


def read(inputs, n_values):
    """Read about as many float32 values as a model has, in the faster of two ways."""
    width, n_threads = 4096, numba.get_num_threads()
    matrix, vector = np.ones((n_values // width, width), "float32"), np.ones(width, "float32")
    flat = matrix.reshape(-1)
    ways = [lambda: [matrix @ vector], lambda: [add_parts(flat, n_threads)]]
    return Task(min(ways, key=best_seconds))


def best_seconds(run):
    run()
    return min(timeit.repeat(run, number=1, repeat=5))


@numba.njit(parallel=True)
def copy_parts(x, y, n_parts):
    for i in numba.prange(n_parts):
        part = slice(i * x.size // n_parts, (i + 1) * x.size // n_parts)
        y[part] = x[part]


@numba.njit(parallel=True)
def add_parts(x, n_parts):
    totals = np.zeros(n_parts, np.float32)
    for i in numba.prange(n_parts):
        totals[i] = add(x[i * x.size // n_parts : (i + 1) * x.size // n_parts])
    return totals


# Within the parallel loop this one would not be vectorized.
@numba.njit(fastmath=True)
def add(x):
    total = np.float32(0)
    for value in x:
        total += value
    return total
