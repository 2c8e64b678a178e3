import numba
import numpy as np
import pytest

from pytensor_ml.dispatch.numba.threads import LEAST_BYTES, N_THREADS, count_threads, in_threads


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


@numba.njit
def count(first, stop, counts, step):
    for i in range(first, stop):
        if step < 0 and i == 3:
            raise ValueError
        counts[i] += step


counting = in_threads(count)


@numba.njit
def run(counts, n_threads, step):
    counting(len(counts), n_threads, counts, step)


@pytest.mark.parametrize("n_threads", [1, 2, 7, 64])
@pytest.mark.parametrize("n_items", [0, 1, 5, 1000])
def test_threads_do_every_item_once(n_items, n_threads):
    counts = np.zeros(n_items)
    run(counts, n_threads, 2)
    np.testing.assert_array_equal(counts, np.full(n_items, 2))


def test_what_a_thread_raises_is_not_lost():
    with pytest.raises(MemoryError, match="no memory"):
        run(np.zeros(4), 2, -1)
    counts = np.zeros(4)
    run(counts, 2, 1)
    assert counts.sum() == 4


def test_threads_are_for_what_is_large():
    @numba.njit
    def counted(n_items, n_bytes):
        return count_threads(n_items, n_bytes)

    assert counted(1000, LEAST_BYTES - 1) == 1
    assert counted(1, 100 * LEAST_BYTES) == 1
    assert counted(1000, 100 * LEAST_BYTES) == min(N_THREADS, 64)
