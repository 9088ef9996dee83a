"""Rows whose offsets exceed 32 bits: R * S may exceed 2**31."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from backends import BACKENDS, TWIN_BACKENDS, Backend
from opspecs import OPSPECS, Array
from opspecs.rows import random_rows

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
    step_tail = (sampled, None, None, True, 9, *LOOKUP, None)
    expected = step.reference(near, lengths.copy(), *step_tail)
    with backend.selected():
        got = backend.call(step.name, (far, lengths, *step_tail))
        assert expected is not None
        assert all(map(np.array_equal, got, expected))
        assert np.array_equal(far, near)
        tail = (None, None, *LOOKUP, None, True)
        drafts = propose.reference(near, lengths, *tail)
        assert drafts is not None
        assert all(map(np.array_equal, backend.call(propose.name, (far, lengths, *tail)), drafts))
