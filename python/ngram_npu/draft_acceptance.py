"""Estimates how many tokens a step generates, for each draft length, from verified steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

DECAY_REQUESTS, DECAY_STEPS = 500.0, 64.0
"""Number of verified requests after which the weight of an observation is 1/e, but at least this
number of steps. Steps without drafts count too, so that old observations expire at any length."""
PRIOR_WEIGHT = 1.0
"""Weight of the assumption that a draft token is accepted as often as the one before it."""


class Acceptance:
    """Estimates the tokens per step for each draft length, with exponentially decaying weights.

    The probability that a draft token is accepted is estimated for each position of a draft, given
    that all tokens before it were accepted. So a step informs the estimates of all draft lengths,
    and tokens that were not verified for a long time are estimated from those that were.

    Args:
        max_length: The longest draft length.
    """

    def __init__(self, max_length: int) -> None:
        self._verified = [0.0] * max_length
        """By position, the weight of drafts whose tokens before this position were accepted."""
        self._accepted = [0.0] * max_length
        """By position, the weight of those drafts whose token at this position was accepted too."""

    def observe(self, batch: int, num_accepted: Sequence[int]) -> None:
        """Counts a step.

        Args:
            batch: Number of requests in the step.
            num_accepted: By number of accepted draft tokens, from 0 to the step's draft length, the
                number of requests. Empty for a step without drafts.
        """
        decay = math.exp(-1 / max(DECAY_STEPS, DECAY_REQUESTS / batch))
        self._verified = [weight * decay for weight in self._verified]
        self._accepted = [weight * decay for weight in self._accepted]
        num_left = sum(num_accepted)
        for position, count in enumerate(num_accepted[:-1]):
            self._verified[position] += num_left
            num_left -= count
            self._accepted[position] += num_left

    def estimate_tokens_per_step(self, length: int) -> float | None:
        """Returns the estimate for a draft length; None before the first verified step."""
        if length and not self._verified[0]:
            return None
        tokens = reached = 1.0
        probability = 0.0
        for position in range(length):
            prior = PRIOR_WEIGHT if position else 0.0
            probability = (self._accepted[position] + prior * probability) / (
                self._verified[position] + prior
            )
            reached *= probability
            tokens += reached
        return tokens
