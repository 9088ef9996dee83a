"""Contains the drafters of vLLM-Ascend's V1 runner."""

from __future__ import annotations

from typing import Any

import torch

from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.v1 import BatchDrafter, StockNgramProposer, to_matrix
from ngram_npu.proposer import Drafts


class AscendNgramProposer(StockNgramProposer):
    """Replaces vLLM-Ascend's drafter of ``method="ngram"``, which reads the tokens on the host."""

    def __init__(self, vllm_config: Any, runner: object) -> None:
        super().__init__(vllm_config)

    def dummy_run(self, num_tokens: int, *args: object, **kwargs: object) -> None:
        """Does nothing. The runner calls this method to profile, to warm up and to capture graphs,
        but the kernels are compiled ahead of time and are not part of the model's graphs."""


class AscendNgramProposerNPU:
    """Replaces vLLM-Ascend's drafter of ``method="ngram_gpu"``, which drafts on the device with
    asynchronous scheduling. The runner calls :func:`triton_ngram_spec_decode`, which does not
    receive the drafter."""

    load_model, dummy_run = StockNgramProposer.load_model, AscendNgramProposer.dummy_run
    current: AscendNgramProposerNPU
    """The newest instance; a process has one runner."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        options = read_options(vllm_config, "ngram_gpu")
        config = options.ngram
        self.min_n, self.max_n, self.k = config.min_n, config.max_n, config.k
        self.keep_drafting = options.keep_drafting
        self.ngram_npu = BatchDrafter(vllm_config, options, device, runner, pads=False)
        AscendNgramProposerNPU.current = self


def triton_ngram_spec_decode(
    token_ids: torch.Tensor,
    num_tokens_no_spec: torch.Tensor,
    sampled_token_ids: torch.Tensor | list[list[int]],
    discard_request_mask: torch.Tensor | None,
    vocab_size: int,
    min_n: int,
    max_n: int,
    k: int,
) -> tuple[torch.Tensor, ...]:
    """Drafts with arguments and results of vLLM-Ascend's function of this name, which uses Triton.
    There may be sampled tokens for more requests than rows, or lists of different lengths. The
    vocabulary and the lengths of n-grams are those of the drafter.

    The results differ from those of that function in two cases: no draft reaches beyond
    ``max_model_len``, and if the sampled tokens do not fit into the row, the next token is the last
    sampled token, not the last token that fits.
    """
    drafter = AscendNgramProposerNPU.current
    sampled = to_matrix(sampled_token_ids, token_ids.device)[: len(token_ids)]
    scopes = drafter.ngram_npu.find_scopes(len(token_ids))
    step = drafter.ngram_npu.step_sampled(
        token_ids, num_tokens_no_spec, sampled, discard_request_mask, k, scopes
    )
    drafts = step.drafts
    if drafter.keep_drafting:
        drafts = draft_newest_token(drafts, step.num_sampled, step.next_token_ids)
    return step.next_token_ids, drafts.draft_token_ids, drafts.num_draft_tokens, step.num_sampled


def draft_newest_token(
    drafts: Drafts[torch.Tensor], num_sampled: torch.Tensor, next_token_ids: torch.Tensor
) -> Drafts[torch.Tensor]:
    """Drafts the newest token for each request that sampled tokens but has no draft."""
    is_empty = (drafts.num_draft_tokens == 0) & (num_sampled > 0)
    tokens = drafts.draft_token_ids
    tokens[:, 0] = torch.where(is_empty, next_token_ids, tokens[:, 0])
    return drafts._replace(num_draft_tokens=drafts.num_draft_tokens + is_empty)
