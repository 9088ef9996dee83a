"""Greedy choice, or seeded sampling whose randomness depends on request and position.

A token is the argmax of its logits plus Gumbel noise, which is a sample of their softmax. The noise
is a function of seed, request and position, not of a generator's state. So a token is the same in
any step and batch, with drafts or without, and `verify_greedy` verifies it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Raises:
        ValueError: a temperature that is negative or not finite, a negative top_k, or a top_p
            outside (0, 1].
    """

    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest likeliest tokens that have this probability together."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # nan, too
            raise ValueError(
                f"Sampling: temperature: expected at least 0 and finite, got {self.temperature}"
            )
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                "Sampling: top_k, top_p: expected at least 0 and within (0, 1], got "
                f"{self.top_k} and {self.top_p}"
            )

    def scores(
        self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[L,V] scores, whose argmax is the token to take.

        Args:
            logits: [L,V].
            requests: [L] int64, the request of each row.
            positions: [L] int64, the position of the token in its request.
        """
        if self.temperature == 0:
            return logits
        noise = gumbel_noise(self.seed, requests, positions, logits.shape[-1])
        return self._likeliest(logits.double() / self.temperature) + noise

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, with minus infinity for tokens that are not to be sampled."""
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            likely = ordered.softmax(-1)
            beyond = likely.cumsum(-1) - likely >= self.top_p
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -math.inf)
        return logits


def gumbel_noise(
    seed: int, requests: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """[L, vocab_size] float64; each row depends only on seed, request and position."""
    start = torch.tensor(seed, dtype=torch.int64, device=requests.device)
    key = _mixed(_mixed(_mixed(start) ^ requests) ^ positions)
    counter = torch.arange(vocab_size, device=requests.device) * _signed(0x9E3779B97F4A7C15)
    bits = _shifted(_mixed(key[:, None] + counter), 11)
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer. int64 products wrap as those of uint64 do."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts to the right as uint64, filling with zeros."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
