"""Estimates how many tokens a step generates, for each draft length.

With drafts from a request's own text, the estimate needs no draft that an engine verified: the
sampler drafts again at the positions of text that requests have generated, and counts the steps
that each draft length would have needed for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ngram_npu.config import NgramConfig
from ngram_npu.drafting import Drafting
from ngram_npu.index import make_index

DECAY_STEPS = 3000.0
"""Decode steps of single requests after which an observation has weight 1/e."""
MIN_OBSERVED = 8.0
"""Weight of observed decode steps below which tokens per step are unknown."""
RELATIVE_DEVIATION = 1.2
"""Standard deviation of the tokens of one step, relative to their mean, as in recorded text."""
PRIOR_GAIN = 50.0
"""Tokens beyond one per step that verified steps must have gained before they outweigh the
sampler's estimate."""
MAX_NEW_TOKENS = 256
"""A request with more new tokens since the last sample is sampled from its end on again."""


class Acceptance:
    """Estimates the tokens per step for each draft length, with exponentially decaying weights.

    Args:
        lengths: The draft lengths.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._tokens = dict.fromkeys(lengths, 0.0)
        self._steps = dict.fromkeys(lengths, 0.0)
        self._longest = max(lengths)
        self._gained = self._expected = 0.0

    def observe(self, length: int, tokens: float, steps: float) -> None:
        """Adds `steps` decode steps of single requests with drafts of `length` tokens, which
        generated `tokens` tokens. Values that cannot occur are ignored."""
        if length not in self._steps or not 0 < steps <= tokens <= steps * (1 + length):
            return
        decay = math.exp(-steps / DECAY_STEPS)
        self._tokens[length] = self._tokens[length] * decay + tokens
        self._steps[length] = self._steps[length] * decay + steps
        if length == self._longest:
            self._gained *= decay
            self._expected *= decay

    def observe_verified(self, length: int, tokens: float, steps: float) -> None:
        """Adds `steps` decode steps of single requests in which the engine verified `length` draft
        tokens, and which generated `tokens` tokens.

        The estimates of all lengths are scaled by what such steps gained, relative to what was
        expected: they include all requests and so follow a change of traffic at once. The relation
        between the lengths remains that of :meth:`observe`.
        """
        expected = self._estimate(length)
        if length == 0 or expected is None or not 0 < steps <= tokens <= steps * (1 + length):
            return
        decay = math.exp(-steps / DECAY_STEPS)
        self._gained = self._gained * decay + tokens - steps
        self._expected = self._expected * decay + steps * (expected - 1)

    def tokens_per_step(self, length: int) -> float | None:
        """Returns the estimate for one length; None if too little was observed."""
        if length == 0:
            return 1.0
        estimate = self._estimate(length)
        if estimate is None:
            return None
        scale = (self._gained + PRIOR_GAIN) / (self._expected + PRIOR_GAIN)
        return min(1 + scale * (estimate - 1), 1.0 + length)

    def _estimate(self, length: int) -> float | None:
        if self._steps.get(length, 0.0) < MIN_OBSERVED:
            return None
        return self._tokens[length] / self._steps[length]

    def relative_error(self, length: int) -> float:
        """Returns the approximate standard error of :meth:`tokens_per_step`, relative to it."""
        if length == 0 or self._steps[length] == 0:
            return 0.0
        return RELATIVE_DEVIATION / math.sqrt(self._steps[length])


class Request(Protocol):
    """What the sampler reads of a request, as of vLLM's ``Request``."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    def is_finished(self) -> bool: ...


@dataclass
class _Sample:
    """A request that is being sampled.

    Attributes:
        length: Number of its tokens in the sampler's row.
        accepted: For the tokens from `first` on, how many tokens of the draft before them are
            right.
        positions: By draft length, the position of the next step.
    """

    request: Request
    length: int
    first: int
    accepted: list[int]
    positions: dict[int, int]


class AcceptanceSampler:
    """Observes the text of some running requests.

    Args:
        config: The settings of the drafts. A store is not supported.
        lengths: The draft lengths; the longest is at most `config.k`.
        capacity: The largest length of a request.
        acceptance: Receives the observations.
        num_slots: Number of requests that are sampled at the same time.
        seed: Of the choice of requests.

    Raises:
        ValueError: `config` has a store.
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
        if config.store is not None:
            raise ValueError("AcceptanceSampler: config: expected no store, got one")
        self._lengths = tuple(length for length in lengths if length)
        self._max_length = max(self._lengths)
        self._acceptance = acceptance
        self._random = random.Random(seed)
        self._token_ids = np.zeros((num_slots, capacity), np.int32)
        self._samples: list[_Sample | None] = [None] * num_slots
        self._next = 0
        index = None
        if config.is_ladder:
            index = make_index(config, num_slots, num_slots * capacity, kind="numpy")
        self._drafting = Drafting(config, kind="numpy", index=index)

    def sample(self, running: Sequence[Request]) -> None:
        """Observes the new text of one request, and chooses the request that takes its place."""
        slot = self._next % min(len(self._samples), max(len(running), 1))
        self._next = slot + 1
        sample = self._samples[slot]
        if sample is not None:
            is_finished = sample.request.is_finished()
            self._observe(slot, sample, is_finished)
            if is_finished:
                self._samples[slot] = None
        if not running:
            return
        request = running[self._random.randrange(len(running))]
        if self._samples[slot] is None or request is not sample.request:  # type: ignore[union-attr]
            self._begin(slot, request)

    def _begin(self, slot: int, request: Request) -> None:
        self._samples[slot] = None
        length = len(request.all_token_ids)
        if not 0 < length < self._token_ids.shape[1] or request.is_finished():
            return
        self._token_ids[slot, :length] = request.all_token_ids[:length]
        positions = dict.fromkeys(self._lengths, length)
        self._samples[slot] = _Sample(request, length, length, [], positions)

    def _observe(self, slot: int, sample: _Sample, is_finished: bool) -> None:
        end = min(len(sample.request.all_token_ids), self._token_ids.shape[1])
        if end < sample.length or end - sample.length > MAX_NEW_TOKENS:
            self._samples[slot] = None  # truncated, or too much to draft for in one step
            return
        row = self._token_ids[slot]
        row[sample.length : end] = sample.request.all_token_ids[sample.length : end]
        # A draft can be compared when all of its tokens are known, or the text has ended.
        known = end if is_finished else end - self._max_length
        for position in range(sample.first + len(sample.accepted), known):
            sample.accepted.append(self._count_accepted(slot, position, row[position:end]))
        sample.length = end
        for length, start in sample.positions.items():
            position, steps = start, 0
            while position < known:
                accepted = min(sample.accepted[position - sample.first], length)
                position = min(position + 1 + accepted, end)
                steps += 1
            sample.positions[length] = position
            self._acceptance.observe(length, position - start, steps)
        del sample.accepted[: min(sample.positions.values()) - sample.first]
        sample.first = min(sample.positions.values())

    def _count_accepted(self, slot: int, position: int, text: npt.NDArray[np.int32]) -> int:
        """Returns how many tokens of the draft at a position equal those of the text."""
        drafts: Any = self._drafting.propose(
            self._token_ids,
            np.full(len(self._token_ids), position, np.int32),
            row_indices=np.array([slot], np.int32),
            k=self._max_length,
            fill=True,
        ).draft_token_ids[0]
        compared = min(len(text), self._max_length)
        is_wrong = drafts[:compared] != text[:compared]
        return int(is_wrong.argmax()) if is_wrong.any() else compared
