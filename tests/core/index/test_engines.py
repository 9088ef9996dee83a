"""NgramProposer's engines: which one is used, and that drafts do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramProposer
from ngram_npu.config import INDEX_POLICY

ROWS = 5


def _batch(capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 4, (ROWS, capacity), dtype=np.int32)
    lengths = np.array([40, 0, capacity - 100, 500, 7], np.int32)
    return tokens, lengths, rng.integers(-1, 4, (20, ROWS, 4), dtype=np.int32)


@pytest.mark.parametrize(
    ("engine", "max_n", "capacity", "uses_index"),
    [
        ("auto", 5, INDEX_POLICY.short_row, False),
        ("auto", 5, INDEX_POLICY.short_row + 1, True),
        ("auto", 9, INDEX_POLICY.short_row + 1, True),
        ("auto", 10, INDEX_POLICY.short_row + 1, False),
        ("scan", 5, INDEX_POLICY.short_row + 1, False),
        ("index", 5, 700, True),
    ],
)
def test_which_engine(engine: str, max_n: int, capacity: int, uses_index: bool) -> None:
    proposer = NgramProposer(NgramConfig(min_n=2, max_n=max_n), engine)  # type: ignore[arg-type]
    tokens, lengths, sampled = _batch(capacity)
    proposer.step(tokens, lengths, sampled[0])
    assert (proposer.index is not None) == uses_index


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"engine: expected 'index', 'scan' or 'auto', got 'tree'"):
        NgramProposer(NgramConfig(), "tree")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_n - min_n <= 7.* for 'index', got 1 to 9"):
        NgramProposer(NgramConfig(min_n=1, max_n=9), "index")


@pytest.mark.parametrize("match_policy", ["earliest", "latest"])
@pytest.mark.parametrize("appended", [False, True])
def test_engines_and_kinds_draft_alike(match_policy: str, appended: bool) -> None:
    config = NgramConfig(min_n=1, max_n=4, k=4, match_policy=match_policy, overlap=True)  # type: ignore[arg-type]
    tokens, lengths, sampled = _batch(900)
    # A row is taken by each step that has it: rows in another order, one of them missing.
    order = np.array([3, 0, 4, 2], np.int64)
    slots = np.array([6, 2, 0, 5], np.int32)
    results = []
    for engine in ("scan", "index"):
        for kind in (np.asarray, torch.from_numpy):
            proposer = NgramProposer(config, engine, num_slots=7)  # type: ignore[arg-type]
            rows, live = kind(tokens.copy()), kind(lengths.copy())
            if appended:
                proposer.append(rows, live, row_indices=kind(order), slot_indices=kind(slots))
            made = []
            for number, new in enumerate(sampled):
                step = proposer.step(
                    rows,
                    live,
                    kind(new[order]),
                    discard=kind(np.array([number % 5 == 0, False, False, False])),
                    row_indices=kind(order),
                    slot_indices=kind(slots),
                )
                made.append([np.asarray(part) for part in step])
            made.append([np.asarray(rows), np.asarray(live)])
            results.append(made)
            if proposer.index is not None:
                stats = proposer.index.statistics
                assert stats.num_slots == 7
                assert stats.rows_indexed > 40
                assert stats.rows_scanned_full == stats.rows_scanned_catching_up == 0
                proposer.index.check_integrity()
    for other in results[1:]:
        for parts, expected in zip(other, results[0], strict=True):
            for part, truth in zip(parts, expected, strict=True):
                np.testing.assert_array_equal(part, truth)


@pytest.mark.parametrize("engine", ["index", "scan"])
def test_reset_forgets(engine: str) -> None:
    proposer = NgramProposer(NgramConfig(min_n=2, max_n=4), engine)  # type: ignore[arg-type]
    proposer.reset(np.array([0], np.int32))  # nothing to forget yet
    tokens, lengths, _ = _batch(900)
    proposer.append(tokens, lengths)
    proposer.reset(np.arange(ROWS, dtype=np.int32))
    if proposer.index is not None:
        assert proposer.index.statistics.pages_in_use == 0


def test_the_arena_may_be_smaller_than_the_rows() -> None:
    config = NgramConfig(min_n=2, max_n=4, k=3)
    tokens, lengths, sampled = _batch(3000)
    tokens[:] = np.random.default_rng(1).integers(0, 99, tokens.shape)
    lengths[:] = 2900
    small = NgramProposer(config, "index", token_capacity=3000)
    scan = NgramProposer(config, "scan")
    other_tokens, other_lengths = tokens.copy(), lengths.copy()
    for new in sampled:
        found = small.step(tokens, lengths, new)
        truth = scan.step(other_tokens, other_lengths, new)
        np.testing.assert_array_equal(found.draft_token_ids, truth.draft_token_ids)
    assert small.index is not None
    assert small.index.statistics.rows_scanned_full > 0
    assert small.index.statistics.rows_indexed > 0
