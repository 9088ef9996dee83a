"""Runs the CUDA kernels on the twin that checks every memory access against the tensors' bounds."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from backends import Backend, call_torch
from ops.guard_pages import make_guarded_copy
from ops.specs import Args, Array, OpSpec, clone_args, find_base
from twins import Twin

HOOKS = Twin("cuda_hooks", "cuda", "cuda")


def make_checking_backend(spec: OpSpec, path: Path) -> Backend:
    """Returns the library's kernels as a backend for an operator. The kernels may read only the
    arguments, and write only those that the schema marks, without the gaps between slices' rows."""
    library = ctypes.CDLL(str(path))
    register = library.ngram_npu_cuda_twin_register_tensor
    register.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 4]

    def call(op: str, args: Args) -> tuple[Array, ...]:
        for (name, _), value in zip(spec.arguments, args, strict=True):
            if isinstance(value, np.ndarray):
                register(*_get_extent(value), name in spec.written)
        try:
            return call_torch(op, args)
        finally:
            library.ngram_npu_cuda_twin_clear_tensors()

    return Backend(HOOKS.name, call, twin=replace(HOOKS, folder=path.parent))


def _get_extent(array: Array) -> tuple[int, ...]:
    """Returns address and size of the base array with a margin, then address of the first item,
    number of rows, bytes per row, and row stride in bytes. The margin belongs to the allocator."""
    margin = 8
    base = find_base(array)
    rows, width = (1, array.shape[0]) if array.ndim == 1 else array.shape
    begin = base.__array_interface__["data"][0]
    first_item = array.__array_interface__["data"][0]
    stride = array.strides[0] if array.ndim > 1 else 0
    size = base.nbytes + 2 * margin
    return begin - margin, size, first_item, rows, width * array.itemsize, stride


def check_failed_launch_is_reported(spec: OpSpec, backend: Backend) -> str:
    """Makes the first launch of a call fail, or the zeroing of its workspace. Returns an error, or
    an empty text if the calls report the failure."""
    assert backend.twin is not None
    fail = ctypes.CDLL(str(backend.twin.path)).ngram_npu_cuda_twin_fail_launches
    needs_workspace = (s for s in spec.samples if s.label.startswith(("few-long", "batch-2049")))
    for sample in (next(spec.samples), *islice(needs_workspace, 1)):
        fail(ctypes.c_int64(1))
        try:
            with backend.select():
                backend.call(spec.name, clone_args(sample.args))
        except RuntimeError as error:
            if "too many resources" not in str(error):
                return f"{sample.label}: unexpected error: {error}"
            continue
        finally:
            fail(ctypes.c_int64(0))
        return f"{sample.label}: a failed launch is reported as success"
    return ""


def check_changed_lengths(spec: OpSpec, fast: Backend) -> str:
    """Runs lookups in which several blocks share a row, while another stream changes the lengths.
    The results are unspecified, but the kernels must access nothing else. Returns an error or an
    empty text. `fast` runs one block at a time, so that all of its threads read the same
    lengths."""
    if "workspace" not in spec.tensor_names:
        return ""
    assert fast.twin is not None
    swap = ctypes.CDLL(str(fast.twin.path)).ngram_npu_cuda_twin_swap_at_barriers
    for sample in spec.samples:
        if not sample.label.startswith("few-long"):
            continue
        rows = np.arange(len(spec.get(sample.args, "num_tokens")))  # all rows are read
        args = tuple(
            make_guarded_copy(value, at_end=True, writable=True)
            if isinstance(value, np.ndarray)
            else value
            for value in spec.replace(clone_args(sample.args), row_indices=rows)
        )
        lengths = spec.get(args, "num_tokens")
        new_lengths = np.full_like(lengths, 2)
        addresses = (ctypes.c_void_p(a.ctypes.data) for a in (lengths, new_lengths))
        swap(*addresses, lengths.nbytes)
        try:
            with fast.select():
                fast.call(spec.name, args)
        except RuntimeError as error:
            return f"{sample.label}: {error}"
        finally:
            swap(None, None, 0)
    return ""
