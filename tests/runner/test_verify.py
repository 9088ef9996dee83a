from __future__ import annotations

import random

import pytest
import torch
from ngram_npu.async_state import verify_greedy

VOCAB = 5


def _by_hand(says: list[int], drafts: list[list[int]], k: int) -> list[list[int]]:
    rows, at = [], 0
    for own in drafts:
        gained = []
        for place in range(len(own) + 1):
            gained.append(says[at + place])
            if place < len(own) and own[place] != says[at + place]:
                break
        at += len(own) + 1
        rows.append(gained + [-1] * (k + 1 - len(gained)))
    return rows


def _arguments(drafts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.tensor([token for own in drafts for token in own], dtype=torch.int32)
    counts = torch.tensor([len(own) for own in drafts], dtype=torch.int32)
    return flat, counts.cumsum(0, dtype=torch.int32)


def test_against_a_loop() -> None:
    rng = random.Random(0)
    accepted = 0
    for _ in range(300):
        k = rng.randint(0, 5)
        drafts = [
            [rng.randrange(VOCAB) for _ in range(rng.randint(0, k))]
            for _ in range(rng.randint(1, 6))
        ]
        rows = sum(map(len, drafts)) + len(drafts)
        says = [rng.randrange(VOCAB) for _ in range(rows)]
        for at, own in enumerate(drafts):  # accept more drafts than chance would
            first = sum(map(len, drafts[:at])) + at
            if rng.random() < 0.5:
                own[:] = says[first : first + len(own)]
        logits = torch.nn.functional.one_hot(torch.tensor(says), VOCAB).double()
        sampled = verify_greedy(logits, *_arguments(drafts), k)
        assert sampled.dtype == torch.int32
        assert sampled.tolist() == _by_hand(says, drafts, k)
        accepted += int((sampled >= 0).sum()) - len(drafts)
    assert accepted > 100


def test_a_draft_after_a_rejected_one_is_not_accepted() -> None:
    logits = torch.eye(VOCAB)[[1, 2, 3, 4]]
    flat, cumulative = _arguments([[1, 0, 3]])
    assert verify_greedy(logits, flat, cumulative, 3).tolist() == [[1, 2, -1, -1]]


@pytest.mark.parametrize("rows", [3, 5])
def test_logits_for_another_number_of_rows_are_refused(rows: int) -> None:
    flat, cumulative = _arguments([[1, 0], [2]])
    with pytest.raises(ValueError, match=r"logits: expected 5 rows.*got shape"):
        verify_greedy(torch.zeros(rows + (rows == 5), VOCAB), flat, cumulative, 2)


def test_a_negative_k_is_refused() -> None:
    with pytest.raises(ValueError, match="k: expected at least 0, got -1"):
        verify_greedy(torch.zeros(1, VOCAB), *_arguments([[]]), -1)
