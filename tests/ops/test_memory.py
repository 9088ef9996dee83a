"""Tests that an access to a guard page ends the process, that offsets of rows may exceed 32 bits,
and that no result depends on the contents of a workspace.

test_parity.py tests that no operator accesses memory outside its arguments, and that the size that
``workspace_size`` returns is sufficient: its samples have workspaces of this size."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from backends import BACKENDS, DEVICE_BACKENDS, TWIN_BACKENDS, Backend
from ngram_npu.ops import workspace_size
from ops.guard_pages import make_guarded_copy
from ops.parity import add_workspace, check_cases, make_case
from ops.specs import OPSPECS, Args, Array, OpSpec, clone_args, find_base
from ops.specs.inputs import draw_rows


@pytest.mark.parametrize("fault", ["read", "write"])
def test_access_to_guard_page_ends_process(fault: str) -> None:
    array = make_guarded_copy(np.arange(3, dtype=np.int32), at_end=True, writable=fault == "read")
    address = array.__array_interface__["data"][0]
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        if fault == "read":
            ctypes.c_int32.from_address(address + 12).value  # noqa: B018
        else:
            ctypes.c_int32.from_address(address).value = 1
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV


ROWS, CAPACITY, STRIDE = 3, 150, 2**30 + 7
NO_RESERVE = 0x4000  # MAP_NORESERVE: only touched pages use memory
LOOKUP = (2, 5, 4, 0, True, 2**62)  # min_n, max_n, k, match_policy, overlap, max_len


@pytest.fixture(scope="module")
def distant_rows() -> Array:
    """Rows whose distance is larger than 2^32 bytes."""
    size = 4 * (STRIDE * (ROWS - 1) + CAPACITY)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.int32)
    return np.lib.stride_tricks.as_strided(memory, (ROWS, CAPACITY), (4 * STRIDE, 4))


@pytest.mark.parametrize("backend", [*BACKENDS, *TWIN_BACKENDS], ids=lambda b: b.name)
def test_row_offsets_may_exceed_32_bits(backend: Backend, distant_rows: Array) -> None:
    rows = draw_rows(np.random.default_rng(9), ROWS, CAPACITY, 3)
    lengths = np.full(ROWS, CAPACITY - 3, np.int32)
    sampled = np.array([[1, 2], [0, -1], [2, 0]], np.int32)
    distant_rows[...] = rows
    step, propose = OPSPECS["ngram_step_"], OPSPECS["ngram_propose"]
    step_tail = (sampled, None, None, True, 9, *LOOKUP, False, None)
    propose_tail = (None, None, *LOOKUP, 2, True)
    expected = step.reference(rows, lengths.copy(), *step_tail)
    with backend.select():
        got = backend.call(step.name, (distant_rows, lengths, *step_tail))
        assert expected is not None
        assert all(map(np.array_equal, got, expected))
        assert np.array_equal(distant_rows, rows)
        expected = propose.reference(rows, lengths, *propose_tail)
        got = backend.call(propose.name, (distant_rows, lengths, *propose_tail))
        assert expected is not None
        assert all(map(np.array_equal, got, expected))


# Workspaces, on devices and their twins.

STEP = OPSPECS["ngram_step_"]
# The launches on an NPU allocate their own workspace and ignore the caller's.
WORKSPACE_BACKENDS = [
    b
    for b in [*TWIN_BACKENDS, *DEVICE_BACKENDS]
    if "cuda" in (b.device, b.twin.device if b.twin else "")
]
each_workspace_backend = pytest.mark.parametrize(
    "backend", WORKSPACE_BACKENDS, ids=lambda b: b.name
)


def _make_step_that_needs_workspace() -> Args:
    """Returns the arguments of a step in which several blocks share a row."""
    args = next(s.args for s in STEP.samples if s.label.startswith("few-long"))
    return add_workspace(STEP, args)


def _copy_misaligned(workspace: Array) -> Array:
    return np.concatenate([workspace, workspace])[1 : 1 + len(workspace)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:-1], r"expected size >= \d+ \(for this batch\), got size \d+"),
        (lambda w: w[:0], r"got size 0"),
        (_copy_misaligned, r"expected 16-byte alignment, got address % 16 == 4"),
    ],
)
@each_workspace_backend
def test_unusable_workspace_is_rejected_before_anything_is_written(
    backend: Backend, change: Callable[[Array], Array], message: str
) -> None:
    args = STEP.replace(_make_step_that_needs_workspace(), workspace=change)
    before = clone_args(args)
    error = r"^ngram_step_: workspace: .*" + message
    with backend.select(), pytest.raises(ValueError, match=error):
        backend.call(STEP.name, args)
    for after, original in zip(args, before, strict=True):
        if isinstance(after, np.ndarray):
            assert np.array_equal(find_base(after), find_base(original))


@pytest.mark.parametrize(
    "spec",
    [spec for spec in OPSPECS.values() if "workspace" in spec.tensor_names],
    ids=lambda spec: spec.name,
)
@each_workspace_backend
def test_result_does_not_depend_on_contents_of_workspace(backend: Backend, spec: OpSpec) -> None:
    """An earlier call that failed, or another operator, may have left anything. In each sample,
    several blocks work on a request or on the batch."""
    labels = ("few-long", "workspace-large", "held back")
    samples = [sample for sample in spec.samples if sample.label.startswith(labels)]
    assert samples
    rng = np.random.default_rng(3)
    cases = []
    for sample in samples:
        args = add_workspace(spec, sample.args)
        size = len(spec.get(args, "workspace"))
        expected = make_case(spec, replace(sample, args=args))
        for workspace in (
            np.zeros(size, np.int32),
            np.ones(size, np.int32),
            np.full(size, -1, np.int32),
            rng.integers(-(2**31), 2**31, size, dtype=np.int32),
        ):
            new_args = clone_args(spec.replace(args, workspace=workspace))
            cases.append(replace(expected, sample=replace(sample, args=new_args)))
    check_cases(spec, backend, cases)


def test_workspace_size_grows_with_batch() -> None:
    for op, spec in OPSPECS.items():
        if "workspace" in spec.tensor_names:
            sizes = [workspace_size(op, batch) for batch in (0, 1, 2, 1000)]
            assert sizes == sorted(sizes)
            assert sizes[1] > 0


@pytest.mark.parametrize(
    ("op", "batch", "message"),
    [
        ("prepare_inputs", 3, "workspace_size: op: expected an operator with .*'prepare_inputs'"),
        ("ngram_step_", -1, "workspace_size: batch: expected >= 0, got -1"),
    ],
)
def test_workspace_size_with_invalid_arguments_raises(op: str, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workspace_size(op, batch)
