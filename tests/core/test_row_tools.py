"""Tests of ``_C.count_items``, ``_C.list_drafts`` and ``_C.join_spans``; see also
tests/async_state/test_upload.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ngram_npu import _C


@pytest.mark.parametrize("batch", [0, 1, 9])
def test_list_drafts_with_strided_drafts_returns_first_tokens(batch: int) -> None:
    rng = np.random.default_rng(batch)
    drafts = rng.integers(-(2**31), 2**31, (batch, 12), np.int32)[:, 2:7]
    counts = rng.integers(0, 6, batch, np.int32)
    lists = _C.list_drafts(drafts, counts)
    assert lists == [draft[:count].tolist() for draft, count in zip(drafts, counts, strict=True)]


def test_count_items_returns_the_length_of_each_list() -> None:
    assert _C.count_items([]).tolist() == []
    counts = _C.count_items([[1, 2], [], [3]])
    assert counts.dtype == np.int32
    assert counts.tolist() == [2, 0, 1]


def test_join_spans_concatenates_spans() -> None:
    begins, counts = np.array([3, 5, 1]), np.array([2, 0, 1], np.int32)
    assert _C.join_spans(np.arange(5, dtype=np.int32), begins, counts).tolist() == [3, 4, 1]


@pytest.mark.parametrize("lists", [[[1], 2], ([1],)])
def test_count_items_of_other_values_raises(lists: Any) -> None:
    with pytest.raises(TypeError):
        _C.count_items(lists)


@pytest.mark.parametrize("count", [-1, 6])
def test_list_drafts_with_count_out_of_range_raises(count: int) -> None:
    counts = np.array([5, count], np.int32)
    with pytest.raises(
        ValueError, match=f"list_drafts: num_draft_tokens: expected 0 to 5, got {count}"
    ):
        _C.list_drafts(np.zeros((2, 5), np.int32), counts)
