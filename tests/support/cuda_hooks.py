"""The CUDA kernels on the twin that watches every access to memory, told what the tensors are."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
from backends import Backend, call_torch
from opspecs import Args, Array, OpSpec, owner
from twins import Twin

HOOKS = Twin("cuda_hooks", "cuda", "cuda")


def watched(spec: OpSpec, path: Path) -> Backend:
    """The library's kernels as a backend for that operator. Only what the arguments are made of may
    be read, and only what the schema marks written; what lies between a slice's rows is neither."""
    library = ctypes.CDLL(str(path))
    tell = library.ngram_npu_cuda_twin_tensor
    tell.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 4]

    def call(op: str, args: Args) -> tuple[Array, ...]:
        for (name, _), value in zip(spec.arguments, args, strict=True):
            if isinstance(value, np.ndarray):
                tell(*_extent(value), name in spec.written)
        try:
            return call_torch(op, args)
        finally:
            library.ngram_npu_cuda_twin_forget_tensors()

    return Backend(HOOKS.name, call, twin=replace(HOOKS, folder=path.parent))


def _extent(array: Array) -> tuple[int, ...]:
    """Owner, its bytes, first item, rows, bytes of a row, bytes from row to row. What lies right
    before and behind the owner's memory is the allocator's, and so never another tensor's."""
    beside = 8
    base = owner(array)
    rows, width = (1, array.shape[0]) if array.ndim == 1 else array.shape
    begin = base.__array_interface__["data"][0]
    first = array.__array_interface__["data"][0]
    stride = array.strides[0] if array.ndim > 1 else 0
    return begin - beside, base.nbytes + 2 * beside, first, rows, width * array.itemsize, stride
