"""What the plugin puts in the place of vLLM-Ascend's two n-gram drafters and of a launcher.

All of it works on tensors of any device that has kernels. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.startup import compare_ranks
from ngram_npu.engines.vllm.v1_device import as_matrix, never_empty
from ngram_npu.engines.vllm.v1_sync import StockNgramProposer
from ngram_npu.ops import ngram_step_


class AscendNgramProposer(StockNgramProposer):
    """vLLM-Ascend's drafter of ``method="ngram"``: on the host, on its copy of the tokens."""

    def __init__(self, vllm_config: Any, runner: object) -> None:
        super().__init__(vllm_config)

    def dummy_run(self, num_tokens: int, *args: object, **kwargs: object) -> None:
        """Does nothing. The runner calls it to profile, to warm up and during graph capture; our
        kernels are compiled ahead of time and are not part of the model's graphs."""


class AscendNgramProposerNPU:
    """vLLM-Ascend's drafter of ``method="ngram_gpu"``: on the device, for asynchronous scheduling.
    The runner reads ``min_n``, ``max_n`` and ``k`` and calls :func:`triton_ngram_spec_decode` with
    them.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """

    load_model, dummy_run = StockNgramProposer.load_model, AscendNgramProposer.dummy_run

    def __init__(self, vllm_config: Any, device: torch.device, runner: object) -> None:
        global _keep_drafting
        options = read_options(vllm_config, "ngram_gpu")
        config = options.ngram
        options.takes_index("npu")  # refuses one
        compare_ranks(vllm_config, options, None)
        self.min_n, self.max_n, self.k = config.min_n, config.max_n, config.k
        _keep_drafting = options.keep_drafting


# Global, because the launcher is not told for which model it drafts; a process has one runner.
_keep_drafting = False


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
    """``ngram_step_`` with ``advance=False`` under the name of vLLM-Ascend's launcher, with its
    arguments and results. There may be more sampled tokens than rows, or lists of different
    lengths. Two differences from the original: no draft reaches beyond the row's capacity, and if
    the sampled tokens do not fit into the row, the next token is the last sampled one, not the last
    one that fits.
    """
    batch, capacity = token_ids.shape
    found = ngram_step_(
        token_ids,
        num_tokens_no_spec,
        as_matrix(sampled_token_ids, token_ids.device)[:batch],
        discard=discard_request_mask,
        advance=False,
        vocab_size=vocab_size,
        min_n=min_n,
        max_n=max_n,
        k=k,
        max_len=capacity,
    )
    if _keep_drafting:
        found = never_empty(found)
    return found.next_token_ids, found.draft_token_ids, found.num_draft_tokens, found.num_sampled
