"""Tests sampling in the example runner, and the verification of greedy drafts."""

from __future__ import annotations

import random

import pytest
import torch
from ngram_npu.async_state import verify_greedy

pytest.importorskip("transformers")

from examples.runner import Sampling
from examples.runner.sampling import make_gumbel_noise


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_sampled_tokens_follow_softmax(temperature: float) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0]).log()
    count = 20_000
    requests, positions = torch.zeros(count).long(), torch.arange(count)
    rows = logits.expand(count, -1)
    scores = Sampling(temperature, seed=3).compute_scores(rows, requests, positions)
    frequencies = scores.argmax(-1).bincount(minlength=6) / count
    assert frequencies[5] == 0
    # The limit is more than three standard deviations.
    assert (frequencies - (logits / temperature).softmax(-1)).abs().max() < 0.012


def test_top_k_and_top_p_equal_transformers() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)).double()
    for top_k, top_p in ((1, 1.0), (5, 1.0), (0, 0.3), (12, 0.6), (90, 0.999)):
        expected = logits / 0.7
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        ids = torch.arange(20)
        scores = Sampling(0.7, top_k=top_k, top_p=top_p).compute_scores(logits, ids, ids)
        assert scores.equal(expected + make_gumbel_noise(0, ids, ids, 50))


def test_invalid_sampling_options_raise() -> None:
    with pytest.raises(ValueError, match="temperature: expected at least 0 and finite, got -1"):
        Sampling(temperature=-1)
    for options in ({"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(ValueError, match="top_k, top_p: expected"):
            Sampling(**options)  # type: ignore[arg-type]


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
