"""Drafts on the runner's device, for vLLM's V1 runner and for vLLM-Ascend.

All of it works on tensors of any device that has kernels. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ngram_npu.ops import (
    ngram_index_step_,
    ngram_step_,
    prepare_next_token_ids,
    workspace_size,
)
from ngram_npu.vllm.options import Options


class Found(NamedTuple):
    """Result of a lookup, int32."""

    next_token_ids: torch.Tensor
    """[B], the newest token of each row."""
    draft_token_ids: torch.Tensor
    """[B, k], -1 in unused places."""
    num_draft_tokens: torch.Tensor
    num_sampled: torch.Tensor
    match_len: torch.Tensor


class DeviceDrafter:
    """The two methods that a runner calls per step for ``method="ngram_gpu"``."""

    def __init__(self, options: Options, vocab_size: int, device: torch.device) -> None:
        config = options.ngram
        self.min_n, self.max_n, self.k = config.min_n, config.max_n, config.k
        self.device = device
        self._lookup: dict[str, Any] = {
            "min_n": config.min_n,
            "max_n": config.max_n,
            "vocab_size": vocab_size,
        }
        self._keep_drafting = options.keep_drafting

    def update_token_ids_ngram(
        self,
        sampled_token_ids: torch.Tensor | list[list[int]],
        gpu_input_batch: Any,
        token_ids_gpu: torch.Tensor,
        num_tokens_no_spec: torch.Tensor,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Determines the valid sampled tokens.

        Args:
            sampled_token_ids: [B, M] int32 or lists of different lengths, -1 where rejected.
            gpu_input_batch: its ``num_reqs`` is B, its ``vocab_size`` the model's.
            token_ids_gpu: [R, S] int32, R >= B.
            num_tokens_no_spec: [R] int32, lengths without the sampled tokens.
            discard_request_mask: [>= B] bool, requests still in prefill.

        Returns:
            The newest token [B], the number of valid tokens [B], the sampled tokens [B, M] with -1
            for discarded requests; all int32.
        """
        batch = gpu_input_batch.num_reqs
        sampled = as_matrix(sampled_token_ids, token_ids_gpu.device)[:batch]
        discard = discard_request_mask[:batch]
        next_token_ids, counts = prepare_next_token_ids(
            sampled,
            discard=discard,
            token_ids=token_ids_gpu[:batch],
            num_tokens=num_tokens_no_spec[:batch],
            vocab_size=gpu_input_batch.vocab_size,
        )
        return next_token_ids, counts, sampled.masked_fill(discard.unsqueeze(1), -1)

    def propose(
        self,
        num_speculative_tokens: int,
        num_tokens_no_spec: torch.Tensor,
        token_ids_gpu: torch.Tensor,
        valid_sampled_token_ids_gpu: torch.Tensor,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes the sampled tokens into the rows, leaves the lengths as they are, and drafts.

        Args:
            num_speculative_tokens: draft tokens per request.
            num_tokens_no_spec, token_ids_gpu, valid_sampled_token_ids_gpu: [B], [B, S], [B, M].
            valid_sampled_tokens_count: [B]; not read, because it follows from the tokens.

        Returns:
            Drafts [B, num_speculative_tokens], -1 in unused places, and their lengths [B].
        """
        k = min(num_speculative_tokens, self.k)
        found = self._look_up(token_ids_gpu, num_tokens_no_spec, valid_sampled_token_ids_gpu, k)
        if self._keep_drafting:
            found = never_empty(found)
        return self._given(found, k)

    def _look_up(
        self, token_ids: torch.Tensor, num_tokens: torch.Tensor, sampled: torch.Tensor, k: int
    ) -> Found:
        return look_up(token_ids, num_tokens, sampled, None, **{**self._lookup, "k": max(k, 1)})

    def _given(self, found: Found, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return found.draft_token_ids[:, :k], found.num_draft_tokens.clamp(max=k)


def look_up(
    token_ids: torch.Tensor,
    num_tokens_no_spec: torch.Tensor,
    sampled_token_ids: torch.Tensor | list[list[int]],
    discard: torch.Tensor | None,
    *,
    index: torch.Tensor | None = None,
    **lookup: Any,
) -> Found:
    """Calls ``ngram_step_``, or ``ngram_index_step_`` if there is an index. The runner counts its
    tokens itself."""
    batch, capacity = token_ids.shape
    sampled = as_matrix(sampled_token_ids, token_ids.device)[:batch]
    arguments = {"discard": discard, "advance": False, "max_len": capacity, **lookup}
    if index is None:
        result = ngram_step_(token_ids, num_tokens_no_spec, sampled, **arguments)
    else:
        result = ngram_index_step_(token_ids, num_tokens_no_spec, sampled, index, **arguments)
    return Found(
        result.next_token_ids,
        result.draft_token_ids,
        result.num_draft_tokens,
        result.num_sampled,
        result.match_len,
    )


def never_empty(found: Found) -> Found:
    """Gives each request that sampled tokens but has no draft its newest token as a draft."""
    none = (found.num_draft_tokens == 0) & (found.num_sampled > 0)
    drafts = found.draft_token_ids
    drafts[:, 0] = torch.where(none, found.next_token_ids, drafts[:, 0])
    return found._replace(num_draft_tokens=found.num_draft_tokens + none)


def workspace(op: str, options: Options, device: torch.device) -> dict[str, torch.Tensor]:
    """The workspace of ``op`` on a GPU, as a keyword argument. Without it each call would allocate
    and zero one."""
    if device.type == "cpu":
        return {}
    size = workspace_size(op, options.max_num_seqs)
    return {"workspace": torch.zeros(size, dtype=torch.int32, device=device)}


def vector(values: list[int], device: torch.device) -> torch.Tensor:
    """[N] int32 on ``device``; copied from pinned memory, so that the copy does not wait."""
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def as_matrix(sampled: torch.Tensor | list[list[int]], device: torch.device) -> torch.Tensor:
    if isinstance(sampled, torch.Tensor):
        return sampled.to(torch.int32)
    width = max([1, *map(len, sampled)])
    rows = [[*row, *[-1] * (width - len(row))] for row in sampled]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)
