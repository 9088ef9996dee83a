"""Neural drafters of the V2 runner that are no classes of vLLM: each drafts frequent successors."""

from __future__ import annotations

from typing import Any

import torch
from engines import K, encode_corpus
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator


def count_successors(model: Any, vocabulary: int) -> torch.Tensor:
    """Returns the two most frequent successors [vocabulary, 2] of each token in the corpus."""
    ids = torch.tensor(encode_corpus(model, 60_000))
    pairs = torch.bincount(ids[:-1] * vocabulary + ids[1:], minlength=vocabulary**2)
    return pairs.view(vocabulary, vocabulary).topk(2).indices


class SuccessorSpeculator(BaseSpeculator):
    """Drafts each token's most frequent successor. It has no logits, no method for the outcome of
    drafts, and parameters that vLLM's classes do not have."""

    supports_mm_inputs = False
    draft_logits: torch.Tensor | None = None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        model = vllm_config.model_config
        self._successors = count_successors(model.model, model.get_vocab_size())

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def propose(  # type: ignore[override]
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: torch.Tensor,
        next_prefill_tokens: Any,
        temperature: Any,
        seeds: Any,
        *,
        skip_drafts: bool = False,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **other: Any,
    ) -> torch.Tensor:
        rows, drafts = input_batch.idx_mapping, []
        token = last_sampled[rows, 0].clamp(min=0)
        for step in range(K):
            token = self.choose(rows, step, self._successors[token])
            drafts.append(token)
        return torch.stack(drafts, 1)

    def choose(self, rows: torch.Tensor, step: int, candidates: torch.Tensor) -> torch.Tensor:
        """Returns one of the candidates [B, 2] of each row."""
        return candidates[:, 0]


class CandidateSpeculator(SuccessorSpeculator):
    """Samples one of the two most frequent successors. As vLLM's DFlash2, it removes only its own
    old logits before it writes new ones."""

    PROBABILITIES = torch.tensor([0.7, 0.3])

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        shape = vllm_config.scheduler_config.max_num_seqs, K
        vocabulary = vllm_config.model_config.get_vocab_size()
        self.draft_logits = torch.full((*shape, vocabulary), float("-inf"))
        self._candidates = torch.zeros(*shape, 2, dtype=torch.int64)
        self._generator = torch.Generator().manual_seed(1)

    def choose(self, rows: torch.Tensor, step: int, candidates: torch.Tensor) -> torch.Tensor:
        assert self.draft_logits is not None
        logits = self.draft_logits[rows, step]
        logits.scatter_(1, self._candidates[rows, step], float("-inf"))
        logits.scatter_(1, candidates, self.PROBABILITIES.log().expand_as(candidates))
        self.draft_logits[rows, step], self._candidates[rows, step] = logits, candidates
        choice = torch.multinomial(
            self.PROBABILITIES, len(rows), replacement=True, generator=self._generator
        )
        return candidates.gather(1, choice[:, None])[:, 0]
