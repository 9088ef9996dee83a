"""What vLLM-Ascend's runner calls: its two n-gram drafters, and the function behind one of them.

Everything here works on tensors of any device that has kernels. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from ngram_npu.config import NgramConfig
from ngram_npu.ops import ngram_step_, prepare_next_token_ids
from ngram_npu.vllm.plugin import StockNgramProposer


class _Drafter:
    """A runner takes its drafter for a model's."""

    def load_model(self, *args: object, **kwargs: object) -> None:
        """There is no model."""

    def dummy_run(
        self,
        num_tokens: int,
        with_prefill: object = None,
        in_graph_capturing: object = None,
        num_reqs: object = None,
        num_tokens_across_dp: object = None,
        aclgraph_runtime_mode: object = None,
        batch_descriptor: object = None,
        dummy_compute_logits: object = lambda hidden_states: None,
        is_profile: bool = False,
    ) -> None:
        """The runner calls it to profile, to warm up and while it captures graphs. The kernels are
        compiled with the wheel and belong into no graph of the model's: there is nothing to do."""


class AscendNgramProposer(_Drafter, StockNgramProposer):
    """vLLM-Ascend's drafter of ``method="ngram"``: on the host, on its copy of the tokens."""

    def __init__(self, vllm_config: Any, runner: object) -> None:
        StockNgramProposer.__init__(self, vllm_config)


class AscendNgramProposerNPU(_Drafter):
    """vLLM-Ascend's drafter of ``method="ngram_gpu"``: on the device, for asynchronous scheduling.

    The runner reads ``min_n``, ``max_n`` and ``k`` and calls :func:`triton_ngram_spec_decode` with
    them; :meth:`update_token_ids_ngram` and :meth:`propose` are the two steps of the same in vLLM's
    own runner (``NgramProposerGPU``).

    Raises:
        ValueError: ``prompt_lookup_min``, ``prompt_lookup_max`` or ``num_speculative_tokens`` out
            of range.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: object) -> None:
        speculative = vllm_config.speculative_config
        config = NgramConfig(
            prompt_lookup_min=speculative.prompt_lookup_min,
            prompt_lookup_max=speculative.prompt_lookup_max,
            num_speculative_tokens=speculative.num_speculative_tokens,
        )
        self.min_n, self.max_n, self.k = config.min_n, config.max_n, config.k
        self.device = device
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()

    def update_token_ids_ngram(
        self,
        sampled_token_ids: torch.Tensor | list[list[int]],
        gpu_input_batch: Any,
        token_ids_gpu: torch.Tensor,
        num_tokens_no_spec: torch.Tensor,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which of the sampled tokens count.

        Args:
            sampled_token_ids: [B, M] int32 or lists of different lengths, -1 where rejected.
            gpu_input_batch: its ``num_reqs`` is B, its ``vocab_size`` the model's.
            token_ids_gpu: [R, S] int32, R >= B.
            num_tokens_no_spec: [R] int32, lengths without the sampled tokens.
            discard_request_mask: [>= B] bool, requests whose prefill goes on.

        Returns:
            The newest token [B], how many count [B], the sampled tokens [B, M] with -1 in place of
            the discarded requests'; all int32.
        """
        batch = gpu_input_batch.num_reqs
        sampled = _as_matrix(sampled_token_ids, token_ids_gpu.device)[:batch]
        discard = discard_request_mask[:batch]
        next_token_ids, counts = prepare_next_token_ids(
            sampled,
            discard,
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the sampled tokens into the rows, not into the lengths, and drafts.

        Args:
            num_speculative_tokens: drafts asked for.
            num_tokens_no_spec, token_ids_gpu, valid_sampled_token_ids_gpu: [B], [B, S], [B, M].
            valid_sampled_tokens_count: [B]; follows from the tokens and is not read.

        Returns:
            Drafts [B, num_speculative_tokens], -1 behind the last, and how many there are [B].
        """
        _, drafts, counts, _ = triton_ngram_spec_decode(
            token_ids_gpu,
            num_tokens_no_spec,
            valid_sampled_token_ids_gpu,
            None,
            self.vocab_size,
            self.min_n,
            self.max_n,
            num_speculative_tokens,
        )
        return drafts, counts


def triton_ngram_spec_decode(
    token_ids: torch.Tensor,
    num_tokens_no_spec: torch.Tensor,
    sampled_token_ids: torch.Tensor | list[list[int]],
    discard_request_mask: torch.Tensor | None,
    vocab_size: int,
    min_n: int,
    max_n: int,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``ngram_step_`` under the name and with the arguments of vLLM-Ascend's launcher.

    Args:
        token_ids: [B, S] int32; written at the ends of the rows.
        num_tokens_no_spec: [B] int32, not written.
        sampled_token_ids: [>= B, M] int32, or lists of different lengths.
        discard_request_mask: [B] bool.
        vocab_size, min_n, max_n, k: as in ``ngram_step_``.

    Returns:
        next_token_ids [B], draft_token_ids [B, k], num_valid_draft_tokens [B],
        valid_sampled_tokens_count [B]; int32. Beside theirs: no draft reaches beyond S, and in a
        row whose capacity cuts the sampled tokens off the newest is the last that was sampled, not
        the last that fits.
    """
    batch, capacity = token_ids.shape
    result = ngram_step_(
        token_ids,
        num_tokens_no_spec,
        _as_matrix(sampled_token_ids, token_ids.device)[:batch],
        discard_request_mask,
        min_n=min_n,
        max_n=max_n,
        k=k,
        advance=False,
        vocab_size=vocab_size,
        max_len=capacity,
    )
    return (
        result.next_token_ids,
        result.draft_token_ids,
        result.num_draft_tokens,
        result.num_sampled,
    )


def _as_matrix(sampled: torch.Tensor | list[list[int]], device: torch.device) -> torch.Tensor:
    if isinstance(sampled, torch.Tensor):
        return sampled.to(torch.int32)
    width = max([1, *map(len, sampled)])
    rows = [[*row, *[-1] * (width - len(row))] for row in sampled]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)
