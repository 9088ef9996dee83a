"""The CUDA kernels on the twin that checks every memory access against the tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from backends import Backend, call_torch
from ops.guard_pages import guarded
from ops.specs import Args, Array, OpSpec, Sample, clone_args, owner
from twins import Twin

HOOKS = Twin("cuda_hooks", "cuda", "cuda")


def watched(spec: OpSpec, path: Path) -> Backend:
    """The library's kernels as a backend for that operator. They may read only the arguments and
    write only those that the schema marks; the gaps between a slice's rows are off limits."""
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
    """Owner, its bytes, first item, rows, bytes per row, row stride in bytes. The bytes right
    around the owner's memory are the allocator's, so they never belong to another tensor."""
    beside = 8
    base = owner(array)
    rows, width = (1, array.shape[0]) if array.ndim == 1 else array.shape
    begin = base.__array_interface__["data"][0]
    first = array.__array_interface__["data"][0]
    stride = array.strides[0] if array.ndim > 1 else 0
    return begin - beside, base.nbytes + 2 * beside, first, rows, width * array.itemsize, stride


def failed_launch_goes_unnoticed(spec: OpSpec, backend: Backend) -> str:
    """Of an operator whose launch fails: empty if the call says so."""
    assert backend.twin is not None
    fail = ctypes.CDLL(str(backend.twin.path)).ngram_npu_cuda_twin_fail_launches
    args = clone_args(next(spec.samples(np.random.default_rng(2026))).args)
    fail(ctypes.c_int64(1))
    try:
        with backend.selected():
            backend.call(spec.name, args)
    except RuntimeError as error:
        return "" if "too many resources" in str(error) else f"it says {error}"
    finally:
        fail(ctypes.c_int64(0))
    return "a failed launch is reported as success"


def changed_lengths_break(spec: OpSpec, fast: Backend) -> str:
    """Of lookups in rows shared by blocks, whose lengths another stream changes meanwhile: their
    results are open, but they touch nothing else, and the workspace is zero behind them. Empty if
    so. `fast` runs one block at a time, so that all its threads see the same lengths."""
    if "workspace" not in spec.tensor_names:
        return ""
    assert fast.twin is not None
    exchange = ctypes.CDLL(str(fast.twin.path)).ngram_npu_cuda_twin_exchange_at_barriers
    for sample in spec.samples(np.random.default_rng(2026)):
        if not sample.label.startswith("few-long"):
            continue
        rows = np.arange(len(spec.get(sample.args, "num_tokens")))  # one is read for every request
        args = tuple(
            guarded(value, at_end=True, writable=True) if isinstance(value, np.ndarray) else value
            for value in spec.replace(clone_args(sample.args), row_indices=rows)
        )
        lengths = spec.get(args, "num_tokens")
        others = np.full_like(lengths, 2)
        exchange(*(ctypes.c_void_p(a.ctypes.data) for a in (lengths, others)), lengths.nbytes)
        try:
            with fast.selected():
                fast.call(spec.name, args)
        except RuntimeError as error:
            return f"{sample.label}: {error}"
        finally:
            exchange(None, None, 0)
        if spec.get(args, "workspace").any():
            return f"{sample.label}: the workspace is not zero"
    return ""


def dirty_workspaces(spec: OpSpec) -> Iterator[Sample]:
    """Lookups in rows shared by blocks, whose workspace holds noise or a false match. The match
    lies anywhere, or next to the row's end, which a draft with overlap would read past."""
    if "workspace" not in spec.tensor_names:
        return
    rng = np.random.default_rng(5)
    for sample in spec.samples(np.random.default_rng(2026)):
        if not sample.label.startswith("few-long") or not spec.get(sample.args, "overlap"):
            continue
        for behind in range(6):
            args = clone_args(sample.args)
            memory = spec.get(args, "workspace")
            memory[:] = rng.integers(-(2**31), 2**31, len(memory))
            if behind < 5:
                requests = memory.reshape(-1, 4)[: len(spec.get(args, "num_tokens"))]
                requests[:, 1] = rng.integers(1, 9, len(requests))
                requests[:, 2:] = 0
                if behind < 4:
                    end = spec.get(args, "num_tokens") - 1 + behind
                    requests[:, 0] = end if spec.get(args, "match_policy") else ~end
            yield replace(sample, label=f"{sample.label}-dirty-{behind}", args=args, compare=False)
