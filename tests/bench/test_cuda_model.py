"""The model of the distribution of the lookup's tiles: its results for small batches are known by
hand, and those for the design are within the bounds that the design was made for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tools.cuda_model import (
    FIGURES,
    RESULT,
    TILE,
    batches,
    clusters,
    designs,
    one_wave,
    pieces,
    simulate,
    tiles_of,
)

SMALL = replace(FIGURES, multiprocessors=2)
OLD, NEW, _ = designs(100)
RAGGED = ("256 ragged up to 128k", "256 ragged up to 128k, text-like")


def test_every_token_is_read_once() -> None:
    lengths = [1, TILE, TILE + 1, 10 * TILE + 7, 0]
    for blocks in (
        pieces(lengths, 16 * TILE, SMALL),
        one_wave(lengths, 16 * TILE, 4, SMALL),
        clusters(lengths, 16 * TILE),
    ):
        assert sum(tokens for block in blocks for _, tokens, _ in block) == sum(lengths)


def test_shares_are_equal_whatever_the_lengths() -> None:
    blocks = one_wave([100 * TILE, *[5] * 12], 100 * TILE, 4, SMALL)
    tiles = [sum(count for count, _, _ in block) for block in blocks]
    assert len(blocks) == 8
    assert sum(tiles) == 100 + 12
    # Of 125 places, a tile each and one for each request, 16 are a share.
    assert tiles == [15, *[16] * 5, 5 + 5, 7]


def test_a_long_row_among_many_is_one_blocks_where_rows_are_cut_by_capacity() -> None:
    blocks = pieces([100 * TILE, *[5] * 99], 100 * TILE, SMALL)
    assert max(sum(count for count, _, _ in block) for block in blocks) == 100


def test_time_grows_with_the_tokens_and_the_waves() -> None:
    one = [[(1, TILE, True)]]
    short, waves = simulate(one, OLD, f=SMALL)
    assert waves == pytest.approx(1 / 10)
    longer, _ = simulate([[(9, 9 * TILE, True)]], OLD, f=SMALL)
    full, _ = simulate(one * 10, OLD, f=SMALL)
    twice, waves = simulate(one * 11, OLD, f=SMALL)
    assert waves == pytest.approx(1.1)
    assert short < longer
    assert full < twice == pytest.approx(2 * short, rel=0.1)
    assert simulate([[(9, 9 * TILE, True)]], OLD, 0.5, SMALL)[0] > longer
    alone, _ = simulate([[(1, TILE, False)]], OLD, f=SMALL)
    assert alone < short


def test_no_time_is_shorter_than_memory_takes() -> None:
    tokens = 10_000 * TILE
    blocks = one_wave([tokens], tokens, NEW.blocks_each)
    assert simulate(blocks, NEW)[0] > tokens / FIGURES.tokens_per_us


def test_what_is_recorded() -> None:
    record = json.loads(RESULT.read_text())
    results = record["results"]
    assert results.keys() == batches().keys()
    assert "model" in record["what"]
    for name, found in results.items():
        assert found["one wave"]["waves"] <= 1, name
        assert found["one wave over bound"] <= 1.3, name
        assert found["tokens"] == sum(batches()[name][0])
    for name in RAGGED:
        assert results[name]["one wave"]["us"] < results[name]["pieces"]["us"]
        assert results[name]["one wave"]["us"] < results[name]["clusters"]["us"]
    scanned = record["ngram_index_step_"]["one_row_scanned"]
    assert scanned["128k"]["second_launch_us"] < scanned["128k"]["by_its_own_block_us"]
    assert tiles_of(0) == 1
