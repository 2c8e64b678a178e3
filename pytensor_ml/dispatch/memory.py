"""What becomes of memory that compiled code frees.

glibc, left to itself, gives the memory of large arrays back to the system as soon as they are
freed, and a network frees as much as it computes: most of its pages were new in each call, which
took a seventh of the time. The first kernel of C or Numba lets the process keep such memory.
"""

import ctypes
import os
from typing import Any

# The memory of arrays below this size, the most that glibc allows on all systems, is kept: as much
# as lies below something in use, and this much above.
LARGEST_KEPT = 2**25
MOST_KEPT_AT_END = 2**28

# Parameters of mallopt, as in <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let the process keep freed memory, unless its user has told glibc what to do."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(library, "gnu_get_libc_version") and not any(name in os.environ for name in names):
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(M_TRIM_THRESHOLD, MOST_KEPT_AT_END)
