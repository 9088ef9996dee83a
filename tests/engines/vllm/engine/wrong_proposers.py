"""Proposers that break one rule each, for the comparisons to find. Drafts cannot change the
output; but a proposer receives the runner's own lists and buffers, and can corrupt these."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from ngram_npu.engines.vllm import NgramProposer
from ngram_npu.engines.vllm.v1_device import AsyncNgramProposer


class WrongProposer(NgramProposer):
    """Now and then calls the method of this class that ``fault`` names."""

    fault = ""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._chooser = random.Random(0)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        drafts = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        for row, sampled in enumerate(sampled_token_ids):
            if sampled and self._chooser.random() < 0.1:
                context = token_ids_cpu[row, : num_tokens_no_spec[row]]
                getattr(self, self.fault)(
                    sampled, drafts[row], num_tokens_no_spec[row : row + 1], context
                )
        return drafts

    def wrong_next_token(
        self, sampled: list[int], draft: list[int], length: np.ndarray, context: np.ndarray
    ) -> None:
        sampled[-1] = (sampled[-1] + 1) % 1000

    def wrong_count(
        self, sampled: list[int], draft: list[int], length: np.ndarray, context: np.ndarray
    ) -> None:
        length -= 1

    def wrong_context(
        self, sampled: list[int], draft: list[int], length: np.ndarray, context: np.ndarray
    ) -> None:
        context[-1] = (context[-1] + 1) % 1000

    def random_draft(
        self, sampled: list[int], draft: list[int], length: np.ndarray, context: np.ndarray
    ) -> None:
        """Not wrong, only useless: the comparisons must not find it."""
        draft[:] = [self._chooser.randrange(1000) for _ in draft]


class MixedUpRows:
    """A recogniser that assigns rows to the wrong requests, differently in every step."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._chooser = np.random.default_rng(0)

    def assign(self, *arguments: Any) -> Any:
        slots, _ = self._rows.assign(*arguments)
        return self._chooser.permutation(slots), np.zeros(0, np.int64)

    def forget_absent(self, steps: int) -> Any:
        return self._rows.forget_absent(steps)


class MixedUpProposer(NgramProposer):
    """Its index gets the wrong requests."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        engine: Any = self.engine
        engine._rows = MixedUpRows(engine._rows)


class WrongAsyncProposer(AsyncNgramProposer):
    """The same for asynchronous scheduling, in about one of three rows. Here a proposer also tells
    the runner which of the sampled tokens count."""

    fault = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generator = torch.Generator().manual_seed(0)

    def update_token_ids_ngram(self, *args: Any) -> Any:
        following, counts, valid = super().update_token_ids_ngram(*args)
        hit = (torch.rand(counts.shape, generator=self._generator) < 0.3) & (counts > 0)
        if self.fault == "wrong_next_token":
            following = torch.where(hit, (following + 1) % 1000, following)
        elif self.fault == "wrong_count":
            counts = counts - (hit & (counts > 1)).int()
        return following, counts, valid

    def propose(self, *args: Any) -> Any:
        drafts, counts = super().propose(*args)
        if self.fault == "random_draft":
            drafts = torch.randint(0, 1000, drafts.shape, generator=self._generator).int()
        elif self.fault == "not_padded":
            drafts = drafts.masked_fill(drafts == drafts[:, -1:], -1)
        return drafts, counts
