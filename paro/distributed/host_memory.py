"""Host memory of CPU ranks: what a step frees stays with the process for the next one."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
# Larger tensors go back to the system when they are freed; before 2.35 glibc takes no other number.
_LARGEST_KEPT = (1 << 30, 32 << 20)
_MOST_KEPT = (1 << 31) - 1  # bytes that are free at the end of the heap; the largest int


def keep_freed_memory() -> bool:
    """Makes glibc's malloc keep what is freed; False where there is another malloc.

    By default it gives large tensors back to the system, which hands out the memory of the next
    ones page by page, each by a page fault and filled with zeros.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if not any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_KEPT):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT))
