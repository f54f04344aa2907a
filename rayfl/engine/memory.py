"""Memory allocation of processes (glibc)."""

import ctypes
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Options of glibc's `mallopt`."""

LARGEST, KEPT = 1 << 26, 1 << 28


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MB of freed memory.

    Every round allocates tensors as large as the model. The system delivers new pages zeroed, which takes four times as
    long as copying into memory that the process has. Tensors over 64 MB are still returned to the system: the process
    would keep several times what it needs.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, LARGEST)
        libc.mallopt(TRIM_THRESHOLD, KEPT)


def give_back_freed_memory() -> None:
    """Return this process's freed memory to the system."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
