"""``_C.list_drafts``. tests/async_state/test_upload.py tests the functions that pack rows."""

from __future__ import annotations

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


@pytest.mark.parametrize("count", [-1, 6])
def test_list_drafts_with_count_out_of_range_raises(count: int) -> None:
    counts = np.array([5, count], np.int32)
    with pytest.raises(
        ValueError, match=f"list_drafts: num_draft_tokens: expected 0 to 5, got {count}"
    ):
        _C.list_drafts(np.zeros((2, 5), np.int32), counts)
