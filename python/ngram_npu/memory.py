"""Memory of an index or a store: zeroed words from the system."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

WORD_BYTES = 4
_HUGE_PAGE_BYTES = 2 << 20


def zeroed_words(words: int, *, prefault: bool = False) -> Int32Array:
    """Allocates zeroed words, in huge pages if the system has them: lookups access memory at
    random, and with small pages each access also misses the TLB. The system commits memory when it
    is first used, and zeroes a whole huge page then; ``prefault``: now."""
    # Private, because a shared mapping gets no huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, words * WORD_BYTES + _HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)  # keeps the mapping alive
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES
    array = whole[start : start + words * WORD_BYTES].view(np.int32)
    if prefault:
        array[:: mmap.PAGESIZE // WORD_BYTES] = 0
    return array
