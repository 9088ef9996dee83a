"""Proposers that break one rule each, for the comparisons to find. Drafts cannot change what comes
out; but a proposer is handed the runner's own lists and buffers, and these it can spoil."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from ngram_npu.vllm import NgramProposer


class WrongProposer(NgramProposer):
    """Does what ``fault`` names, now and then; a method of this class."""

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
        """Not wrong, only useless: it must not show."""
        draft[:] = [self._chooser.randrange(1000) for _ in draft]


class MixedUpProposer(NgramProposer):
    """Its index is told that rows are requests which they are not, at every step anew."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        rows = self._drafter.engine._rows  # type: ignore[attr-defined]
        assign, chooser = rows.assign, np.random.default_rng(0)

        def wrong(*args: Any) -> Any:
            found = assign(*args)
            return found._replace(
                slots=chooser.permutation(found.slots), new=np.zeros_like(found.new)
            )

        rows.assign = wrong
