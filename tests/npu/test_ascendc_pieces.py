"""The lookup on the AscendC twin at the edges between cores and between tiles: for each row,
machine and plan a match is placed across every edge and must be found."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from backends import TWIN_BACKENDS, Backend
from ops.parity import check_parity
from ops.specs import OPSPECS, Sample
from ops.specs.inputs import matches_ending_at
from twins import ascendc_plan

TWIN = next(b for b in TWIN_BACKENDS if b.twin is not None and b.twin.device == "npu")
UB_910B = 192 * 1024
HALO, MIN_SPAN, STEP = 64, 1024, 128


def up(ends: int) -> int:
    return -(-ends // STEP) * STEP


@contextmanager
def machine(cores: int) -> Iterator[Backend]:
    assert TWIN.twin is not None
    set_cores = ctypes.CDLL(str(TWIN.twin.path)).ngram_npu_ascendc_twin_set_cores
    set_cores(ctypes.c_int64(cores))
    try:
        yield TWIN
    finally:
        set_cores(ctypes.c_int64(0))


def edges(length: int, batch: int, cores: int) -> list[int]:
    """The first ends of all pieces but the first, by the rules of csrc/ascendc/lookup.h."""
    sizes = {"batch": batch, "capacity": length, "k": 4}
    plan = ascendc_plan("ngram_propose", sizes, cores, UB_910B)
    assert plan is not None
    tiling = plan["tiling"]
    ends = length - 1
    span = max(MIN_SPAN, up(-(-(ends + HALO) // tiling["spans"])))
    most = (tiling["tile_tokens"] - HALO) // STEP * STEP
    found = []
    for begin in range(-HALO, ends, span):
        size = min(span, ends - begin)
        tile = up(-(-size // -(-size // most)))
        found += list(range(begin, begin + size, tile))
    return found[1:]


@pytest.mark.parametrize("n", [*range(1, 9), 33, 64])
@pytest.mark.parametrize(("cores", "length"), [(1, 8257), (1, 8258), (1, 16_300), (3, 27_000)])
def test_matches_across_edges(cores: int, length: int, n: int) -> None:
    inner = [e + d for e in edges(length, 1, cores) for d in (-1, 0, 1)]
    at = [end for end in inner if end + 2 * n + 40 < length]
    assert at or length == 8257  # one tile and no edge
    rows = matches_ending_at(at[:6], n, length)
    spec = OPSPECS["ngram_propose"]
    with machine(cores) as backend:
        for i, row in enumerate(rows):
            look = (1, n, 4, i % 2, False, 2**40, None, 40, n % 2 == 0)
            args = (row[None], np.array([length], np.int32), None, None, *look)
            check_parity(spec, backend, Sample(f"{cores}-{length}-{n}-{i}", args))
