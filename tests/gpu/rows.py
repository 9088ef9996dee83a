"""Rows that grow on a device, and the CPU's results for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tools.bench.gpu.ours import make_index, workspace

MIN_N, MAX_N, K = 2, 4, 5
CAPACITY = 1 << 13
WIDTH = 3


class Rows:
    """Rows that gain up to WIDTH tokens per step, on a device; with an index or without.

    The step's input is a tensor of fixed address that :meth:`sample` fills, as a sampler would.
    """

    def __init__(
        self, device: str, batch: int, indexed: bool, seed: int, match_policy: int = 0
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._match_policy = match_policy
        start = self._rng.integers(0, 3000, batch, dtype=np.int32)
        tokens = self._rng.integers(0, 40, (batch, CAPACITY), dtype=np.int32)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.lengths = torch.from_numpy(start).to(device)
        self.sampled = torch.zeros((batch, WIDTH), dtype=torch.int32, device=device)
        self.discard = torch.zeros(batch, dtype=torch.bool, device=device)
        self.workspace = workspace("ngram_index_step_" if indexed else "ngram_step_", batch, device)
        self._index: Any = None
        self.index = None
        if indexed:
            self._index = make_index(batch, batch * CAPACITY, MIN_N, MAX_N, device)
            self.index = self._index.tensor
            self.append()
        self._start = self.tokens.clone(), self.lengths.clone()

    def restart(self) -> None:
        """As before the first step; the index notices by itself."""
        for mine, start in zip((self.tokens, self.lengths), self._start, strict=True):
            mine.copy_(start)

    def sample(self) -> None:
        shape = self.sampled.shape
        tokens = self._rng.integers(0, 40, shape, dtype=np.int32)
        tokens[np.arange(shape[1]) >= self._rng.integers(0, shape[1] + 1, (shape[0], 1))] = -1
        self.sampled.copy_(torch.from_numpy(tokens))
        self.discard.copy_(torch.from_numpy(self._rng.random(shape[0]) < 0.1))

    def redraw_lengths(self) -> None:
        """Draws new lengths, including the shortest and the longest: as of other requests."""
        lengths = self._rng.integers(0, CAPACITY + 1, len(self.lengths), dtype=np.int32)
        lengths[self._rng.permutation(len(lengths))[:4]] = [0, 1, CAPACITY - 1, CAPACITY]
        self.lengths.copy_(torch.from_numpy(lengths))

    def append(self) -> None:
        self._index.append(self.tokens, self.lengths, match_policy=self._match_policy)

    def reset(self, slots: torch.Tensor) -> None:
        self._index.reset(slots)

    def check_index(self) -> None:
        """Checks that each slot is the index of its current row."""
        held = zip(self.tokens.cpu().numpy(), self.lengths.tolist(), strict=True)
        self._index.check_integrity({i: row[:length] for i, (row, length) in enumerate(held)})

    def step(self) -> tuple[torch.Tensor, ...]:
        rows = (self.tokens, self.lengths, self.sampled)
        keywords = {
            "discard": self.discard,
            "min_n": MIN_N,
            "max_n": MAX_N,
            "k": K,
            "match_policy": self._match_policy,
            "max_len": CAPACITY,
            "workspace": self.workspace,
        }
        if self.index is None:
            return torch.ops.ngram_npu.ngram_step_(*rows, **keywords)
        return torch.ops.ngram_npu.ngram_index_step_(*rows, self.index, **keywords)


def same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return len(got) == len(expected) and all(
        torch.equal(mine.cpu(), truth.cpu()) for mine, truth in zip(got, expected, strict=True)
    )
