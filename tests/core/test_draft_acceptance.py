"""Tests the estimates of tokens per step: compares them with steps that a reference counts."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from ngram_npu import NgramConfig
from ngram_npu.draft_acceptance import Acceptance, AcceptanceSampler
from ops import reference

LENGTHS = (0, 1, 3, 5)
CONFIGS = {
    "2-5": NgramConfig(min_n=2, max_n=5, overlap=False),
    "1-16": NgramConfig(),
}


@dataclass
class Request:
    all_token_ids: list[int]
    finished: bool = field(default=False)

    def is_finished(self) -> bool:
        return self.finished


class UnweightedAcceptance(Acceptance):
    """Sums the observations without weights."""

    def __init__(self) -> None:
        super().__init__(LENGTHS)
        self.tokens: Counter[int] = Counter()
        self.steps: Counter[int] = Counter()

    def observe(self, length: int, tokens: float, steps: float) -> None:
        self.tokens[length] += int(tokens)
        self.steps[length] += int(steps)


def make_text(rng: random.Random, length: int) -> list[int]:
    """Returns random tokens and copies of earlier tokens."""
    text = [rng.randrange(20) for _ in range(10)]
    while len(text) < length:
        start, size = rng.randrange(len(text)), rng.randrange(1, 12)
        text += text[start : start + size] if rng.random() < 0.6 else [rng.randrange(20)]
    return text[:length]


def count_steps(config: NgramConfig, text: list[int], start: int, length: int) -> int:
    """Returns the number of steps that generate `text[start:]` with drafts of `length` tokens."""
    arguments = {**config.lookup_arguments, "k": length, "fill": True}
    row, position, num_steps = np.array([text], np.int32), start, 0
    while position < len(text):
        drafts, _, _ = reference.ngram_propose(row, np.array([position], np.int32), **arguments)
        draft = drafts[0].tolist()
        num_accepted = 0
        while (
            num_accepted < length
            and position + num_accepted < len(text)
            and draft[num_accepted] == text[position + num_accepted]
        ):
            num_accepted += 1
        position, num_steps = position + num_accepted + 1, num_steps + 1
    return num_steps


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_sampler_counts_steps_of_each_draft_length(config: NgramConfig) -> None:
    rng = random.Random(1)
    for seed in range(5):
        acceptance = UnweightedAcceptance()
        sampler = AcceptanceSampler(config, LENGTHS, 400, acceptance, num_slots=1, seed=seed)
        text, start = make_text(rng, 300), 40
        request = Request(text[:start])
        while len(request.all_token_ids) < len(text):
            sampler.sample([request])
            end = len(request.all_token_ids)
            request.all_token_ids += text[end : end + rng.randrange(1, 20)]
        request.finished = True
        sampler.sample([])
        for length in LENGTHS[1:]:
            assert acceptance.tokens[length] == len(text) - start
            assert acceptance.steps[length] == count_steps(config, text, start, length)


def test_sampler_with_many_requests_observes_all_lengths() -> None:
    rng = random.Random(2)
    acceptance = UnweightedAcceptance()
    sampler = AcceptanceSampler(CONFIGS["2-5"], LENGTHS, 300, acceptance)
    texts = [make_text(rng, 290) for _ in range(8)]
    requests = [Request(text[:30]) for text in texts]
    for end in range(32, 290, 2):
        for request, text in zip(requests, texts, strict=True):
            request.all_token_ids = text[:end]
        sampler.sample(requests)
    for length in LENGTHS[1:]:
        assert acceptance.steps[length] > 50
        assert acceptance.steps[length] <= acceptance.tokens[length]
    assert acceptance.steps[5] < acceptance.steps[1]


def test_sampler_ignores_empty_long_and_shortened_requests() -> None:
    acceptance = UnweightedAcceptance()
    sampler = AcceptanceSampler(CONFIGS["2-5"], LENGTHS, 600, acceptance, num_slots=1)
    sampler.sample([])
    sampler.sample([Request([]), Request([1] * 600)])
    request = Request([1] * 50)
    sampler.sample([request])
    request.all_token_ids = [1] * 40
    sampler.sample([request])
    request.all_token_ids = [1] * 400  # more new tokens than one call drafts for
    sampler.sample([request])
    assert not acceptance.steps


def test_acceptance_follows_newer_observations() -> None:
    acceptance = Acceptance(LENGTHS)
    assert acceptance.estimate_tokens_per_step(0) == 1.0
    assert acceptance.estimate_tokens_per_step(3) is None
    acceptance.observe(3, 20000, 10000)
    assert acceptance.estimate_tokens_per_step(3) == 2.0
    assert acceptance.estimate_relative_error(3) == pytest.approx(0.012)
    for _ in range(100):
        acceptance.observe(3, 300, 300)
    assert acceptance.estimate_tokens_per_step(3) == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize(
    "observation",
    [(2, 5, 5), (3, 4, 5), (3, 21, 5), (3, 0, 0), (3, -4, -5), (3, math.nan, 5), (3, 5, math.nan)],
)
def test_impossible_observation_is_ignored(observation: tuple[int, float, float]) -> None:
    acceptance = Acceptance(LENGTHS)
    acceptance.observe(*observation)
    assert acceptance.estimate_relative_error(3) == 0
    assert acceptance.estimate_tokens_per_step(3) is None


def test_estimates_follow_verified_steps_and_return_to_the_samples() -> None:
    acceptance = Acceptance(LENGTHS)
    for length in (1, 3, 5):
        acceptance.observe(length, (1 + length / 2) * 1000, 1000)
    acceptance.observe_verified(3, 1.0, 0)  # an impossible observation
    acceptance.observe_verified(0, 100, 100)  # steps without drafts
    assert acceptance.estimate_tokens_per_step(5) == 3.5
    for _ in range(100):
        acceptance.observe_verified(3, 175, 100)  # half of the expected additional tokens
    assert acceptance.estimate_tokens_per_step(1) == pytest.approx(1.25, rel=0.02)
    assert acceptance.estimate_tokens_per_step(5) == pytest.approx(2.25, rel=0.02)
    assert acceptance.estimate_tokens_per_step(0) == 1.0
    for _ in range(300):
        acceptance.observe(5, 350, 100)
    assert acceptance.estimate_tokens_per_step(5) == pytest.approx(3.5, rel=0.15)


def test_scaled_estimate_does_not_exceed_draft_length() -> None:
    acceptance = Acceptance(LENGTHS)
    acceptance.observe(1, 120, 100)
    acceptance.observe(5, 300, 100)
    for _ in range(100):
        acceptance.observe_verified(1, 200, 100)
    assert acceptance.estimate_tokens_per_step(1) == pytest.approx(2.0, rel=0.05)
    assert acceptance.estimate_tokens_per_step(5) == 6.0
