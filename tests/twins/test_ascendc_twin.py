"""Tests the lookup of the AscendC kernels where cores and tiles meet, and that their store does not
depend on the number of cores. The parity suite runs the kernels' samples on 1 to 48 cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from backends import TWIN_BACKENDS
from ops.parity import check_parity
from ops.specs import OPSPECS, Sample
from ops.specs.inputs import make_match_rows
from ops.specs.store import new_store
from store_steps import append_text, assert_equal, check_ranks, generate_steps, propose_drafts

TWIN = next(b for b in TWIN_BACKENDS if b.name == "ascendc_twin")
MIN_SPAN, HALO, MAX_TILE, STEP = 1024, 64, 8448, 128
"""Tokens, by csrc/ascendc/launch_args.h and plans.h."""
RANK_STEPS = int(os.environ.get("NGRAM_NPU_RANK_STEPS", "3000"))
"""Number of steps of the slow test with two ranks; `make prove` runs more steps."""


@contextmanager
def run_on_cores(num_cores: int) -> Iterator[None]:
    """Runs the operators on the twin of an NPU with this number of cores."""
    assert TWIN.twin is not None
    with TWIN.select(), TWIN.twin.use_cores(num_cores):
        yield


@pytest.mark.parametrize("num_cores", [1, 2, 7, 40, 48])
def test_store_on_any_number_of_cores_equals_store_of_cpu(num_cores: int) -> None:
    store, expected = new_store(8, 4096, 6), new_store(8, 4096, 6)
    for step, rows in zip(range(100), generate_steps(num_cores), strict=False):
        append_text(expected, rows)
        with run_on_cores(num_cores):
            append_text(store, rows)
            drafts = propose_drafts(store, rows)
        assert_equal(propose_drafts(expected, rows), drafts, f"step {step}")
    assert_equal(expected, store, "after the last step")


@pytest.mark.parametrize("num_steps", [100, pytest.param(RANK_STEPS, marks=pytest.mark.slow)])
def test_ranks_with_different_numbers_of_cores_have_equal_stores(num_steps: int) -> None:
    check_ranks(lambda rank, _: run_on_cores((7, 48)[rank]), num_steps)


def find_piece_starts(length: int, cores: int) -> list[int]:
    """Returns where the pieces of a single row begin, without the first piece, by the rules of
    csrc/ascendc/lookup.h. A piece is the part of the row that a core reads with one tile."""

    def round_up(size: int) -> int:
        return -(-size // STEP) * STEP

    num_ends = length - 1
    span = max(MIN_SPAN, round_up(-(-(num_ends + HALO) // cores)))
    max_tile = (MAX_TILE - HALO) // STEP * STEP
    starts = []
    for begin in range(-HALO, num_ends, span):
        size = min(span, num_ends - begin)
        tile = round_up(-(-size // -(-size // max_tile)))
        starts += list(range(begin, begin + size, tile))
    return starts[1:]


@pytest.mark.parametrize("n", [*range(1, 9), 33, 64])
@pytest.mark.parametrize(("cores", "length"), [(1, 8257), (1, 8258), (1, 16_300), (3, 27_000)])
def test_twin_finds_matches_at_piece_starts(cores: int, length: int, n: int) -> None:
    starts = find_piece_starts(length, cores)
    ends = [start + offset for start in starts for offset in (-1, 0, 1)]
    match_ends = [end for end in ends if end + 2 * n + 40 < length]
    assert match_ends or length == 8257  # one tile reads the row
    rows = make_match_rows(match_ends[:6], n, length)
    spec = OPSPECS["ngram_propose"]
    with run_on_cores(cores):
        for i, row in enumerate(rows):
            lookup = (1, n, 4, i % 2, False, 2**40, 2**31 - 1, n % 2 == 0)
            args = (row[None], np.array([length], np.int32), None, None, *lookup)
            check_parity(spec, TWIN, Sample(f"{cores}-{length}-{n}-{i}", args))
