import ctypes
import os
import signal
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest

from dispatch import thread_checks
from pytensor_ml.dispatch import threads
from pytensor_ml.dispatch.numba.threads import (
    LEAST_BYTES,
    PARTS_OF_A_THREAD,
    count_parts,
    count_threads,
    in_threads,
)


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


@numba.njit(nogil=True)
def run(counts, n_parts, step):
    counting(len(counts), n_parts, counts, step)


@numba.njit
def count_rows(first, stop, counts):
    for row in range(first, stop):
        counting(counts.shape[1], 5, counts[row], 1)


counting_rows = in_threads(count_rows)


@numba.njit
def run_rows(counts):
    counting_rows(len(counts), len(counts), counts)


@numba.njit
def meet(first, stop, seen, blas_threads):
    """Wait for the other part, for 10 million turns."""
    blas_threads[first] = threads.get_blas_threads()
    seen[first] = 1
    turn = 0
    while seen[1 - first] == 0 and turn < 10_000_000:
        threads.sched_yield()
        turn += 1
    seen[first] = 2 if turn < 10_000_000 else 3


meeting = in_threads(meet)


@numba.njit
def run_meeting(seen, blas_threads):
    meeting(2, 2, seen, blas_threads)
    return count_threads()


needs_threads = pytest.mark.skipif(
    ctypes.CFUNCTYPE(ctypes.c_ssize_t)(threads.COUNT_THREADS)() < 2,
    reason="SciPy's OpenBLAS has one thread, or SciPy another BLAS",
)


def assert_that_parts_meet():
    seen, blas_threads = np.zeros(2), np.zeros(2)
    n_threads = run_meeting(seen, blas_threads)
    np.testing.assert_array_equal(seen, [2, 2])
    # OpenBLAS's own threads rest meanwhile, and no longer.
    np.testing.assert_array_equal(blas_threads, [1, 1])
    assert n_threads > 1


@pytest.mark.parametrize("n_parts", [1, 2, 7, 64])
@pytest.mark.parametrize("n_items", [0, 1, 5, 1000])
def test_every_item_is_done_once(n_items, n_parts):
    counts = np.zeros(n_items)
    run(counts, n_parts, 2)
    np.testing.assert_array_equal(counts, np.full(n_items, 2))


def test_what_a_part_raises_is_not_lost():
    for n_parts in (1, 2):
        with pytest.raises(MemoryError, match="no memory"):
            run(np.zeros(4), n_parts, -1)
    counts = np.zeros(4)
    run(counts, 2, 1)
    assert counts.sum() == 4


@needs_threads
def test_parts_run_at_once():
    for _ in range(100):
        assert_that_parts_meet()


@needs_threads
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_starts_its_own_threads():
    assert_that_parts_meet()
    child = os.fork()
    if not child:
        status = 1
        signal.alarm(60)
        try:
            # Its threads must find no parts of the other's job.
            assert threads.STATE[threads.TICKET] % threads.NEXT_JOB == threads.NO_PART
            assert_that_parts_meet()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert_that_parts_meet()


@numba.njit
def set_blas_threads(n_threads):
    threads.set_blas_threads(n_threads)


@needs_threads
def test_there_are_as_many_as_openblas_has_at_the_time():
    before = run_meeting(np.ones(2), np.zeros(2))
    try:
        for n_threads in (1, 3, 2):
            set_blas_threads(n_threads)
            counts = np.zeros(1000)
            run(counts, 8, 1)
            assert (counts == 1).all()
            assert run_meeting(np.ones(2), np.zeros(2)) == n_threads
    finally:
        set_blas_threads(before)


def test_a_part_may_have_parts():
    counts = np.zeros((6, 1000))
    run_rows(counts)
    assert (counts == 1).all()


def test_two_threads_of_python_may_run_kernels_at_once():
    counts = [np.zeros(1000), np.zeros(1000)]

    def count_often(own):
        for _ in range(2000):
            run(own, 8, 1)

    pair = [threading.Thread(target=count_often, args=[own]) for own in counts]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    for own in counts:
        np.testing.assert_array_equal(own, np.full(1000, 2000))


def test_parts_are_for_what_is_large():
    @numba.njit
    def counted(n_items, n_bytes):
        return count_parts(n_items, n_bytes), count_threads()

    most, n_threads = counted(1000, 100_000 * LEAST_BYTES)
    assert most == (n_threads * PARTS_OF_A_THREAD if n_threads > 1 else 1)
    assert counted(1000, 2 * LEAST_BYTES - 1)[0] == 1
    assert counted(1, 100 * LEAST_BYTES)[0] == 1


WITHOUT_OPENBLAS = """
import ctypes, types, numba, scipy.linalg
ctypes.CDLL = lambda path: types.SimpleNamespace()
import numpy as np
import pytensor, pytensor.tensor as pt
from pytensor_ml.dispatch import threads
assert not threads.HAS_THREADS
from pytensor_ml.layers import Linear
x = pt.matrix("x", dtype="float64")
linear = Linear("fc", n_in=300, n_out=400)
linear.W.set_value(np.ones((300, 400), linear.W.type.dtype))
y = pytensor.function([x], linear(x), mode="NUMBA")(np.ones((200, 300)))
np.testing.assert_allclose(y, np.full((200, 400), 300.0))
"""


def test_another_blas_is_left_its_own_threads():
    subprocess.run([sys.executable, "-c", WITHOUT_OPENBLAS], check=True)


def test_products():
    thread_checks.check_products()


COPIES = """
import numba
import numpy as np
from pytensor_ml.dispatch.numba.products import multiply, multiply_vector

@numba.njit
def products(a, b, first, c, y):
    multiply(a, b, c)
    multiply_vector(first, b, y)

a, b = np.random.default_rng(0).normal(size=(2, 8, 8))[:, ::-2, ::-2]
c, y, first = np.empty((4, 4)), np.empty(4), a[0].copy()
products(a, b, first, c, y)
np.testing.assert_allclose(c, a @ b, atol=1e-12)
np.testing.assert_allclose(y, a[0] @ b, atol=1e-12)
"""


def test_copies_of_what_is_scattered_last():
    # So that the GNU C library overwrites what is freed.
    tunables = "glibc.malloc.tcache_count=0:glibc.malloc.perturb=165"
    environment = os.environ | {"GLIBC_TUNABLES": tunables}
    subprocess.run([sys.executable, "-c", COPIES], check=True, env=environment)


def test_norms():
    thread_checks.check_norms()


def test_attention():
    thread_checks.check_attention()


def test_rotations():
    thread_checks.check_rotations()


def test_gated_activations():
    thread_checks.check_gated_activations()
