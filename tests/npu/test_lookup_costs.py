"""Tests how often the AscendC lookup reads a tile, with the instruction counts of the host twin."""

from __future__ import annotations

import pytest

from tools.npu.lookup_costs import count_costs, make_rows, use_twin

BATCH, CONTEXT = 96, 8192
TOKENS_PER_REPEAT = 64


@pytest.mark.parametrize("n", [(1, 16), (2, 5)])
@pytest.mark.parametrize(
    ("kind", "max_reads", "max_instructions_per_row"),
    # A core needs 14 for constants; a row 3, and 7 per further comparison of its tile.
    [("no hit", 1.15, 10), ("periodic", 1.15, 10), ("no match", 2.3, 17), ("zipf", 2.3, 17)],
)
def test_lookup_reads_a_tile_again_only_if_tokens_match(
    kind: str, max_reads: float, max_instructions_per_row: int, n: tuple[int, int]
) -> None:
    rows = make_rows(kind, BATCH, CONTEXT)
    with use_twin() as twin:
        counts = count_costs(twin, rows, *n)
    assert counts["vector_repeats"] <= max_reads * rows.size / TOKENS_PER_REPEAT
    assert counts["vector_instructions"] <= max_instructions_per_row * BATCH
