"""Runs every sample of every operator with its arguments next to guard pages: a kernel that reads
or writes one item outside them, or writes to a read-only argument, kills this process.

Run by test_guard_pages.py; prints each call before it makes it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace

import numpy as np
from backends import BACKENDS, TWIN_BACKENDS, Backend, call_numpy
from opspecs import OPSPECS, Args, Array, OpSpec, Sample

from ops.parity import check_parity

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE, _PROT_READ = 0, 1


def guarded(array: Array, *, at_end: bool, writable: bool) -> Array:
    """A copy with the same strides, its last (else its first) item next to an inaccessible page."""
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
    inner = max(1, -(-(high - low) // mmap.PAGESIZE)) * mmap.PAGESIZE
    memory = mmap.mmap(-1, inner + 2 * mmap.PAGESIZE)
    begin = mmap.PAGESIZE + (inner - (high - low) if at_end else 0)
    copy = np.ndarray(array.shape, array.dtype, memory, begin, array.strides)
    copy[...] = array
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _protect(address, mmap.PAGESIZE, _PROT_NONE)
    _protect(address + mmap.PAGESIZE + inner, mmap.PAGESIZE, _PROT_NONE)
    if not writable:
        _protect(address + mmap.PAGESIZE, inner, _PROT_READ)
    return copy


def _protect(address: int, size: int, how: int) -> None:
    if _LIBC.mprotect(address, size, how) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def _guarding(spec: OpSpec, backend: Backend, at_end: bool) -> Backend:
    """The backend, called with guarded copies; what it wrote goes back to the arguments."""

    def call(op: str, args: Args) -> tuple[Array, ...]:
        copies = []
        for (name, _), value in zip(spec.arguments, args, strict=True):
            if isinstance(value, np.ndarray):
                copy = guarded(value, at_end=at_end, writable=name in spec.written)
                copies.append(copy)
            else:
                copies.append(value)
        results = backend.call(op, tuple(copies))
        for value, copy in zip(args, copies, strict=True):
            if isinstance(value, np.ndarray):
                value[...] = copy
        return results

    return replace(backend, name=f"guarded-{backend.name}", call=call)


def main(which: str) -> None:
    if which in ("read", "write"):  # the controls: these must not survive
        array = guarded(np.arange(3, dtype=np.int32), at_end=True, writable=which == "read")
        address = array.__array_interface__["data"][0]
        if which == "read":
            ctypes.c_int32.from_address(address + 12).value  # noqa: B018
        else:
            ctypes.c_int32.from_address(address).value = 1
        return
    # Includes the NPU's twin; the CUDA twin is slow and has its own bounds checks.
    twins = [b for b in TWIN_BACKENDS if b.twin is not None and b.twin.device == "npu"]
    for spec in OPSPECS.values():
        for backend in [b for b in BACKENDS if b.call is call_numpy] + twins:
            if not backend.serves(spec):
                continue
            guarding = _guarding(spec, backend, which == "end")
            for sample in spec.samples(np.random.default_rng(2026)):
                print(spec.name, backend.name, sample.label)
                check_parity(spec, guarding, Sample(sample.label, sample.args, sample.compare))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main(sys.argv[1])
