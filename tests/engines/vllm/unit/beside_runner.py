"""Stand-ins for vLLM: a neural speculator, and requests for it."""

from __future__ import annotations

import functools
from typing import Any

import configs
import torch
from v2_state import RequestState, batch_of

R, S, K, VOCAB = 6, 96, 4, 64


class StandaloneARSpeculator:
    """Like vLLM's for ``draft_model``, with drafts given by the test."""

    enable_adaptive_verification = False
    draft_watermarker = None

    def __init__(self, probabilistic: bool = False) -> None:
        self.drafts = torch.zeros(R, K, dtype=torch.int64)
        self.draft_logits = torch.zeros(R, K, VOCAB) if probabilistic else None
        self.draft_token_confidence_probs = torch.full((R, K), 0.5)
        self.observed: list[tuple[list[int], list[int]]] = []
        self.given: dict[str, Any] = {}

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: Any,
        next_prefill_tokens: Any,
        temperature: Any,
        seeds: Any,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        self.given = dict(locals())
        return self.drafts[: input_batch.num_reqs]

    def observe_verification(self, idx_mapping: Any, num_sampled: Any, num_rejected: Any) -> None:
        self.observed.append((num_sampled.tolist(), num_rejected.tolist()))


class State(RequestState):
    """Rows hold a repeated passage, which n-grams continue, or no token twice."""

    def __init__(self) -> None:
        super().__init__(R, S)


PASSAGE = list(range(10, 30))
TWICE = [*PASSAGE, *PASSAGE[:12]]
ONCE = list(range(30, 62))


config = functools.partial(
    configs.config, method="draft_model", k=K, rows=R, length=S, vocabulary=VOCAB, beside=True
)


def step(
    speculator: Any, rows: list[int], sampled: list[int], verified: int = K, **more: Any
) -> torch.Tensor:
    """The drafts of a step that verified this many drafts of each request."""
    num_sampled = torch.tensor(sampled, dtype=torch.int32)
    num_rejected = (verified + 1 - num_sampled) * (num_sampled > 0)
    drafts: torch.Tensor = speculator.propose(
        batch_of(rows),
        *[None] * 4,
        num_sampled,
        num_rejected,
        *[None] * 4,
        dp_sync_state=None,
        **more,
    )
    return drafts
