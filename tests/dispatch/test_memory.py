import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
import pytensor_ml.dispatch.{backend}.basic

def fill():
    arrays = [np.ones(2**16) for _ in range(64)]

fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
N_PAGES = 64 * 2**19 // os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


@pytest.mark.parametrize("told", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_kernels_let_the_process_keep_freed_memory_unless_told_otherwise(backend, told):
    if backend not in ("c", "numba") or platform.libc_ver()[0] != "glibc":
        pytest.skip("about C and Numba, and glibc")
    command = [sys.executable, "-c", FAULTS.format(backend=backend)]
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    environment = {k: v for k, v in os.environ.items() if k not in names} | told
    new_pages = int(subprocess.check_output(command, env=environment, text=True))
    assert new_pages > N_PAGES / 2 if told else new_pages < N_PAGES / 10
