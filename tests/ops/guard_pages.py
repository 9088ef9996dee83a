"""Places the arguments of calls next to guard pages. A kernel that reads or writes one item
outside its arguments, or writes to a read-only argument, ends this process."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict
from dataclasses import replace

import numpy as np
from backends import Backend
from ops.specs import Args, Array, OpSpec

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2


class GuardedMemory:
    """Memory between two inaccessible pages. Mapping memory takes longer than most calls, so unused
    objects are kept in ``_free_memories``."""

    def __init__(self, size: int) -> None:
        self.size, self.writable = size, True
        self.memory = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + mmap.PAGESIZE
        _protect(self.begin - mmap.PAGESIZE, mmap.PAGESIZE, _PROT_NONE)
        _protect(self.begin + size, mmap.PAGESIZE, _PROT_NONE)

    def copy_array(self, array: Array, num_bytes: int, *, at_end: bool, writable: bool) -> Array:
        if not self.writable:
            _protect(self.begin, self.size, _PROT_READ | _PROT_WRITE)
        offset = mmap.PAGESIZE + (self.size - num_bytes if at_end else 0)
        copy = np.ndarray(array.shape, array.dtype, self.memory, offset, array.strides)
        copy[...] = array
        if not writable:
            _protect(self.begin, self.size, _PROT_READ)
        self.writable = writable
        return copy


_free_memories: dict[int, list[GuardedMemory]] = defaultdict(list)
"""Unused memory by size in bytes."""


def make_guarded_copy(array: Array, *, at_end: bool, writable: bool) -> Array:
    """Returns a copy with equal strides. Its last or first item is next to an inaccessible page."""
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
    size = max(1, -(-(high - low) // mmap.PAGESIZE)) * mmap.PAGESIZE
    free_memories = _free_memories[size]
    memory = free_memories.pop() if free_memories else GuardedMemory(size)
    copy = memory.copy_array(array, high - low, at_end=at_end, writable=writable)
    weakref.finalize(copy, free_memories.append, memory)
    return copy


def _protect(address: int, size: int, access: int) -> None:
    if _LIBC.mprotect(address, size, access) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def make_guarding_backend(spec: OpSpec, backend: Backend, at_end: bool) -> Backend:
    """Returns a backend that calls ``backend`` with guarded copies of the arguments."""

    def call(op: str, args: Args) -> tuple[Array, ...]:
        copies = []
        for (name, _), value in zip(spec.arguments, args, strict=True):
            if isinstance(value, np.ndarray):
                copy = make_guarded_copy(value, at_end=at_end, writable=name in spec.written)
                copies.append(copy)
            else:
                copies.append(value)
        results = backend.call(op, tuple(copies))
        for value, copy in zip(args, copies, strict=True):
            if isinstance(value, np.ndarray):
                value[...] = copy
        return results

    end = "end" if at_end else "start"
    return replace(backend, name=f"{backend.name}-guarded-{end}", call=call)
