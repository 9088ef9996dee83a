"""Tests the verification of greedy drafts."""

from __future__ import annotations

import random

import pytest
import torch
from ngram_npu.async_state import verify_greedy

VOCAB = 5


def _flatten_drafts(drafts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
    counts = torch.tensor([len(draft) for draft in drafts], dtype=torch.int32)
    return flat, counts.cumsum(0, dtype=torch.int32)


def test_verify_greedy_equals_loop_over_tokens() -> None:
    rng = random.Random(0)
    num_accepted = 0
    for _ in range(300):
        k = rng.randint(0, 5)
        drafts, targets, expected = [], [], []
        for _ in range(rng.randint(1, 6)):
            draft = [rng.randrange(VOCAB) for _ in range(rng.randint(0, k))]
            row_targets = [rng.randrange(VOCAB) for _ in range(len(draft) + 1)]
            if rng.random() < 0.5:  # all drafts are accepted
                draft = row_targets[:-1]
            count = 0
            while count < len(draft) and draft[count] == row_targets[count]:
                count += 1
            drafts.append(draft)
            targets += row_targets
            expected.append(row_targets[: count + 1] + [-1] * (k - count))
            num_accepted += count
        logits = torch.nn.functional.one_hot(torch.tensor(targets), VOCAB).double()
        sampled_ids = verify_greedy(logits, *_flatten_drafts(drafts), k)
        assert sampled_ids.dtype == torch.int32
        assert sampled_ids.tolist() == expected
    assert num_accepted > 100


def test_verify_greedy_with_invalid_arguments_raises() -> None:
    flat, cumulative = _flatten_drafts([[1, 0], [2]])
    for rows in (3, 6):
        with pytest.raises(ValueError, match=r"logits: expected 5 rows.*got shape"):
            verify_greedy(torch.zeros(rows, VOCAB), flat, cumulative, 2)
    with pytest.raises(ValueError, match="k: expected at least 0, got -1"):
        verify_greedy(torch.zeros(1, VOCAB), *_flatten_drafts([[]]), -1)
