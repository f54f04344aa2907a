"""How processes get memory, and give it back."""

import ctypes
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Options of glibc's `mallopt`."""

LARGEST, KEPT = 1 << 26, 1 << 28


def keep_freed_memory() -> None:
    """Lets this process keep up to 256 MB that it has freed, instead of giving it back at once.

    Every round asks for tensors as large as the model again. From the system they come page by page and zeroed,
    which takes four times as long as copying into memory that is there. Tensors over 64 MB still come from the system
    and go back: of those a process would keep several times what it needs.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, LARGEST)
        libc.mallopt(TRIM_THRESHOLD, KEPT)


def give_back_freed_memory() -> None:
    """Returns to the system what this process has freed and still holds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
