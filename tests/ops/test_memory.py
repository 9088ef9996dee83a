"""No operator touches memory outside its arguments, and offsets of rows may exceed 32 bits."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal

import numpy as np
import pytest
from backends import BACKENDS, TWIN_BACKENDS, Backend, call_numpy
from ops.cases import cases_of
from ops.guard_pages import guarded, guarding
from ops.parity import check_case
from ops.specs import OPSPECS, Array, OpSpec
from ops.specs.rows import random_rows

# The twins have bounds checks of their own.
GUARDED = [b for b in BACKENDS if b.call is call_numpy]


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        pytest.param(spec, backend, id=f"{spec.name}-{backend.name}")
        for spec in OPSPECS.values()
        for backend in GUARDED
        if backend.serves(spec)
    ],
)
def test_every_sample_stays_inside(spec: OpSpec, backend: Backend) -> None:
    for at_end in (False, True):
        for case in cases_of(spec.name):
            print(case.sample.label)  # the last one that pytest -s shows is the one that ended it
            check_case(spec, guarding(spec, backend, at_end), case)


@pytest.mark.parametrize("fault", ["read", "write"])
def test_the_guards_bite(fault: str) -> None:
    array = guarded(np.arange(3, dtype=np.int32), at_end=True, writable=fault == "read")
    address = array.__array_interface__["data"][0]
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        if fault == "read":
            ctypes.c_int32.from_address(address + 12).value  # noqa: B018
        else:
            ctypes.c_int32.from_address(address).value = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


ROWS, CAPACITY, STRIDE = 3, 150, 2**30 + 7
NO_RESERVE = 0x4000  # MAP_NORESERVE: only what is touched needs memory
LOOKUP = (2, 5, 4, 0, True, 2**62)


@pytest.fixture(scope="module")
def far() -> Array:
    size = 4 * (STRIDE * (ROWS - 1) + CAPACITY)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.int32)
    return np.lib.stride_tricks.as_strided(memory, (ROWS, CAPACITY), (4 * STRIDE, 4))


@pytest.mark.parametrize("backend", [*BACKENDS, *TWIN_BACKENDS], ids=lambda b: b.name)
def test_far_rows(backend: Backend, far: Array) -> None:
    near = random_rows(np.random.default_rng(9), ROWS, CAPACITY, 3)
    lengths = np.full(ROWS, CAPACITY - 3, np.int32)
    sampled = np.array([[1, 2], [0, -1], [2, 0]], np.int32)
    far[...] = near
    step, propose = OPSPECS["ngram_step_"], OPSPECS["ngram_propose"]
    step_tail = (sampled, None, None, True, 9, *LOOKUP, None, 40, False, None, None)
    expected = step.reference(near, lengths.copy(), *step_tail)
    with backend.selected():
        got = backend.call(step.name, (far, lengths, *step_tail))
        assert expected is not None
        assert all(map(np.array_equal, got, expected))
        assert np.array_equal(far, near)
        tail = (None, None, *LOOKUP, None, 40, True)
        drafts = propose.reference(near, lengths, *tail)
        assert drafts is not None
        assert all(map(np.array_equal, backend.call(propose.name, (far, lengths, *tail)), drafts))
