import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


@pytest.fixture(autouse=True)
def _only_on_numba(backend):
    if backend != "numba":
        pytest.skip("about Numba")


def flags_of_mapping(address):
    """What Linux notes of the memory at an address of this process."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.skipif(
    sys.platform != "linux" or not HUGE_PAGES.exists(), reason="about Linux with huge pages"
)
def test_large_arrays_ask_for_huge_pages():
    from pytensor.link.numba.dispatch.basic import numba_njit

    from pytensor_ml.dispatch.numba.basic import empty

    @numba_njit(final_function=True)
    def make(n):
        return empty((n, 1024), np.float32)

    # Beyond 32 MB, glibc gives each array a mapping of its own.
    large = make(10_000)
    assert large.shape == (10_000, 1024)
    assert "hg" in flags_of_mapping(large.ctypes.data + large.nbytes // 2)


def test_a_kernel_is_told_from_what_it_was(tmp_path):
    """Numba's cache outlives a change of the code."""
    source_of = import_module("pytensor_ml.dispatch.numba.basic").source_of
    file = tmp_path / "kernels.py"
    sources = set()
    for text in (
        "def make(): return 1",
        "def make(): return 1  # and more",
        "def make(): return 2",
    ):
        for name in (str(file), "<input>"):
            file.write_text(text)
            names = {}
            exec(compile(text, name, "exec"), names)
            sources.add(source_of(names["make"]))
    assert len(sources) == 5
