"""Greedy or seeded sampling with randomness that depends only on request and position.

The argmax of logits plus Gumbel noise is a sample of the softmax. The noise is a function of seed,
request and position, not of a generator's state. A request therefore samples the same token in any
step and batch, with or without drafts, and `verify_greedy` can verify sampled text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Raises:
        ValueError: temperature is negative or not finite, top_k is negative, or top_p is outside
            (0, 1].
    """

    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0: all."""
    top_p: float = 1.0
    """Total probability of the most likely tokens to sample from."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # also rejects NaN
            raise ValueError(
                f"Sampling: temperature: expected at least 0 and finite, got {self.temperature}"
            )
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                "Sampling: top_k, top_p: expected at least 0 and within (0, 1], got "
                f"{self.top_k} and {self.top_p}"
            )

    def compute_scores(
        self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Returns [L,V] scores; the argmax of a row is the sampled token.

        Args:
            logits: [L,V].
            requests: [L] int64, the id of each row's request.
            positions: [L] int64, the position of the sampled token in its request.
        """
        if self.temperature == 0:
            return logits
        noise = make_gumbel_noise(self.seed, requests, positions, logits.shape[-1])
        return self._mask_unlikely_tokens(logits.double() / self.temperature) + noise

    def _mask_unlikely_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Sets the logits of tokens outside top_k and top_p to minus infinity."""
        if 0 < self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -math.inf)
        if self.top_p < 1:
            sorted_logits, order = logits.sort(descending=True)
            probs = sorted_logits.softmax(-1)
            is_excluded = probs.cumsum(-1) - probs >= self.top_p
            is_excluded = is_excluded.scatter(-1, order, is_excluded)
            logits = logits.masked_fill(is_excluded, -math.inf)
        return logits


def make_gumbel_noise(
    seed: int, requests: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Returns [L, vocab_size] float64 noise; a row depends only on seed, request and position."""
    start = torch.tensor(seed, dtype=torch.int64, device=requests.device)
    key = _mix_bits(_mix_bits(_mix_bits(start) ^ requests) ^ positions)
    counter = torch.arange(vocab_size, device=requests.device) * _to_signed(0x9E3779B97F4A7C15)
    bits = _shift_right(_mix_bits(key[:, None] + counter), 11)
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _mix_bits(value: torch.Tensor) -> torch.Tensor:
    """Applies SplitMix64's finalizer; int64 products wrap like uint64 products."""
    value = value + _to_signed(0x9E3779B97F4A7C15)
    value = (value ^ _shift_right(value, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _to_signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def _shift_right(value: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Shifts to the right as uint64, filling with zeros."""
    return (value >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _to_signed(value: int) -> int:
    """Converts a uint64 value to the int64 value with the same bits."""
    return value - (1 << 64) if value >> 63 else value
