"""Computes which share of an array's memory is resident."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt


def compute_resident_share(array: npt.NDArray[np.int32]) -> float:
    """Returns the share of the array's pages in memory. The array must start at a page boundary."""
    pages = -(-array.nbytes // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    assert ctypes.CDLL(None).mincore(address, size, flags) == 0
    return sum(flag & 1 for flag in flags) / pages
