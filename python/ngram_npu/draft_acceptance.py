"""Estimates how many tokens a step generates, for each draft length.

With drafts from a request's own text, the estimate does not depend on which drafts the engine
verified: the sampler drafts again at the positions of the text that requests have generated, and
counts the steps that each draft length would have needed for this text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu.config import NgramConfig

DECAY_STEPS = 3000.0
"""Number of decode steps of single requests after which the weight of an observation is 1/e."""
MIN_OBSERVED_STEPS = 8.0
"""Sum of the weights of observed decode steps below which the tokens per step count as unknown."""
RELATIVE_DEVIATION = 1.2
"""Standard deviation of the tokens per step, relative to the mean, as in recorded text."""
PRIOR_GAIN = 50.0
"""Number of tokens, beyond one per step, that verified steps must have generated before they
outweigh the sampler's estimate."""
MAX_NEW_TOKENS = 256
"""If a request has more new tokens since the last sample, these are skipped."""


class Acceptance:
    """Estimates the tokens per step for each draft length, with exponentially decaying weights.

    Args:
        lengths: The draft lengths.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._tokens = dict.fromkeys(lengths, 0.0)
        self._steps = dict.fromkeys(lengths, 0.0)
        self._longest_length = max(lengths)
        self._gained_tokens = self._expected_gain = 0.0

    def observe(self, length: int, tokens: float, steps: float) -> None:
        """Adds `steps` decode steps of single requests with drafts of `length` tokens, which
        generated `tokens` tokens. Values that cannot occur are ignored."""
        if length not in self._steps or not 0 < steps <= tokens <= steps * (1 + length):
            return
        decay = math.exp(-steps / DECAY_STEPS)
        self._tokens[length] = self._tokens[length] * decay + tokens
        self._steps[length] = self._steps[length] * decay + steps
        if length == self._longest_length:
            self._gained_tokens *= decay
            self._expected_gain *= decay

    def observe_verified(self, length: int, tokens: float, steps: float) -> None:
        """Adds `steps` decode steps of single requests in which the engine verified `length` draft
        tokens, and which generated `tokens` tokens.

        The estimates of all lengths are scaled by the ratio of the tokens that such steps gained to
        the tokens that the estimates predicted. Verified steps are those of all requests, so the
        estimates follow a change of traffic at once. The ratios between the lengths remain those of
        :meth:`observe`.
        """
        expected = self._estimate(length)
        if length == 0 or expected is None or not 0 < steps <= tokens <= steps * (1 + length):
            return
        decay = math.exp(-steps / DECAY_STEPS)
        self._gained_tokens = self._gained_tokens * decay + tokens - steps
        self._expected_gain = self._expected_gain * decay + steps * (expected - 1)

    def estimate_tokens_per_step(self, length: int) -> float | None:
        """Returns the estimate for a draft length; None if too little was observed."""
        if length == 0:
            return 1.0
        estimate = self._estimate(length)
        if estimate is None:
            return None
        scale = (self._gained_tokens + PRIOR_GAIN) / (self._expected_gain + PRIOR_GAIN)
        return min(1 + scale * (estimate - 1), 1.0 + length)

    def _estimate(self, length: int) -> float | None:
        if self._steps.get(length, 0.0) < MIN_OBSERVED_STEPS:
            return None
        return self._tokens[length] / self._steps[length]

    def estimate_relative_error(self, length: int) -> float:
        """Returns the approximate relative standard error of :meth:`tokens_per_step`."""
        if length == 0 or self._steps[length] == 0:
            return 0.0
        return RELATIVE_DEVIATION / math.sqrt(self._steps[length])


class Request(Protocol):
    """The attributes of vLLM's ``Request`` that the sampler reads."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    def is_finished(self) -> bool: ...


@dataclass
class _Sample:
    """A request that is being sampled.

    Attributes:
        length: Number of the request's tokens in the sampler's row.
        first_position: First position that `num_accepted` still contains.
        num_accepted: For each position from `first_position` on, the number of leading draft
            tokens at this position that equal the text.
        positions: By draft length, the position of the next step.
    """

    request: Request
    length: int
    first_position: int
    num_accepted: list[int]
    positions: dict[int, int]


class AcceptanceSampler:
    """Observes the text of some running requests.

    Args:
        config: The settings of the lookup. Drafts from a store are not supported.
        lengths: The draft lengths; the longest is at most `config.k`.
        capacity: The largest length of a request.
        acceptance: Receives the observations.
        num_slots: Number of requests that are sampled at the same time.
        seed: Seed of the random choice of requests.
    """

    def __init__(
        self,
        config: NgramConfig,
        lengths: Sequence[int],
        capacity: int,
        acceptance: Acceptance,
        *,
        num_slots: int = 4,
        seed: int = 0,
    ) -> None:
        self._lengths = tuple(length for length in lengths if length)
        self._max_length = max(self._lengths)
        self._acceptance = acceptance
        self._random = random.Random(seed)
        self._token_ids = np.zeros((num_slots, capacity), np.int32)
        self._samples: list[_Sample | None] = [None] * num_slots
        self._next_slot = 0
        self._lookup_arguments = {**config.lookup_arguments, "k": self._max_length, "fill": True}

    def sample(self, running: Sequence[Request]) -> None:
        """Observes the new text of one sampled request, and replaces the request by a random
        one."""
        slot = self._next_slot % min(len(self._samples), max(len(running), 1))
        self._next_slot = slot + 1
        sample = self._samples[slot]
        if sample is not None:
            is_finished = sample.request.is_finished()
            self._observe_sample(slot, sample, is_finished)
            if is_finished:
                self._samples[slot] = None
        if not running:
            return
        request = running[self._random.randrange(len(running))]
        if self._samples[slot] is None or request is not sample.request:  # type: ignore[union-attr]
            self._begin_sample(slot, request)

    def _begin_sample(self, slot: int, request: Request) -> None:
        self._samples[slot] = None
        length = len(request.all_token_ids)
        if not 0 < length < self._token_ids.shape[1] or request.is_finished():
            return
        self._token_ids[slot, :length] = request.all_token_ids[:length]
        positions = dict.fromkeys(self._lengths, length)
        self._samples[slot] = _Sample(request, length, length, [], positions)

    def _observe_sample(self, slot: int, sample: _Sample, is_finished: bool) -> None:
        end = min(len(sample.request.all_token_ids), self._token_ids.shape[1])
        if end < sample.length or end - sample.length > MAX_NEW_TOKENS:
            # The text was truncated, or has too many new tokens for one call.
            self._samples[slot] = None
            return
        row = self._token_ids[slot]
        row[sample.length : end] = sample.request.all_token_ids[sample.length : end]
        # A draft can be compared when the text of its length is known, or the text has ended.
        known_end = end if is_finished else end - self._max_length
        for position in range(sample.first_position + len(sample.num_accepted), known_end):
            sample.num_accepted.append(self._count_accepted(slot, position, row[position:end]))
        sample.length = end
        for length, start in sample.positions.items():
            position, steps = start, 0
            while position < known_end:
                num_accepted = min(sample.num_accepted[position - sample.first_position], length)
                position = min(position + 1 + num_accepted, end)
                steps += 1
            sample.positions[length] = position
            self._acceptance.observe(length, position - start, steps)
        del sample.num_accepted[: min(sample.positions.values()) - sample.first_position]
        sample.first_position = min(sample.positions.values())

    def _count_accepted(self, slot: int, position: int, text: npt.NDArray[np.int32]) -> int:
        """Returns the number of leading draft tokens at a position that equal the text."""
        drafts = _C.ngram_propose(
            self._token_ids,
            np.full(len(self._token_ids), position, np.int32),
            row_indices=np.array([slot], np.int32),
            **self._lookup_arguments,
        )[0][0]
        num_compared = min(len(text), self._max_length)
        is_wrong = drafts[:num_compared] != text[:num_compared]
        return int(is_wrong.argmax()) if is_wrong.any() else num_compared
