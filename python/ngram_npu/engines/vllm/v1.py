"""Contains the drafters of vLLM's V1 runner.

The synchronous runner (``method="custom_class"`` and ``"ngram"``) has its rows in an array on the
host and takes drafts as lists. The asynchronous one (``"ngram_gpu"``) has them on its device and
verifies ``num_speculative_tokens`` tokens of every request. Requests move between the rows of both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import ngram_npu._C as _C
from ngram_npu.engines.vllm.drafter import Drafter
from ngram_npu.engines.vllm.feed.insertion import require_wrapped_runner
from ngram_npu.engines.vllm.options import Method, Options, read_options
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.engines.vllm.request_scopes import UNKNOWN_RUNNER, keeps_cache_salts
from ngram_npu.ops import correct_num_computed_tokens_, prepare_next_token_ids
from ngram_npu.tensors import Int32Array


class StockNgramProposer:
    """Replaces vLLM's ``NgramProposer``."""

    _method: Method = "ngram"

    def __init__(self, vllm_config: Any) -> None:
        options = read_options(vllm_config, self._method)
        self.k = options.ngram.k
        self._keep_drafting, self._max_model_len = options.keep_drafting, options.max_model_len
        if options.store_feed:
            require_wrapped_runner()
        # The scheduler uses the drafts of one rank, and no sampled token is uncertain.
        self.ngram_npu = Drafter(
            vllm_config,
            options,
            None,
            self._method,
            pads=False,
            has_scopes=False,
            holds_back=False,
            compares_ranks=False,
        )

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Does nothing, because there is no model. vLLM calls this method."""

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32Array,
        token_ids_cpu: Int32Array,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts as :meth:`NgramProposer.propose`. A draft has at most ``num_speculative_tokens``
        tokens, a number that vLLM may reduce for large batches."""
        batch = len(sampled_token_ids)
        if batch == 0 or token_ids_cpu.shape[1] == 0:
            return [[] for _ in sampled_token_ids]
        started = time.perf_counter()
        k = self.k if num_speculative_tokens > self.k else num_speculative_tokens
        num_sampled = _C.count_items(sampled_token_ids)
        lengths = num_tokens_no_spec[:batch]
        drafts = self.ngram_npu.step(token_ids_cpu[:batch], lengths, None, num_sampled, k)
        lists = _C.list_drafts(drafts.draft_token_ids, drafts.num_draft_tokens)
        if self._keep_drafting and k > 0:
            limit = self._max_model_len
            for draft, sampled, n in zip(lists, sampled_token_ids, lengths.tolist(), strict=True):
                if sampled and not draft and n < limit:
                    draft.append(sampled[-1])
        if self.ngram_npu.stats is not None:
            self.ngram_npu.stats.observe(started, num_sampled, drafts.num_draft_tokens)
        return lists


class NgramProposer(StockNgramProposer):
    """Drafts for vLLM's V1 model runner with synchronous scheduling, as a custom class.

    Raises:
        ValueError: An option is unknown, malformed, or contradicts another. The message is one
            line.
    """

    _method = "custom_class"
    _draft = StockNgramProposer.propose  # super() takes longer

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if getattr(vllm_config.speculative_config, "num_speculative_tokens_per_batch_size", None):
            logger.warning(
                "ngram_npu: num_speculative_tokens_per_batch_size has no effect: vLLM does not "
                "pass it to a custom class; use method 'ngram' with NGRAM_NPU_VLLM=1 instead"
            )

    def propose(  # type: ignore[override]
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32Array,
        token_ids_cpu: Int32Array,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Returns a draft for each request, possibly empty.

        Args:
            sampled_token_ids: Tokens that this step sampled for each request. A request without
                sampled tokens is still in prefill and gets no draft.
            num_tokens_no_spec: [max_num_seqs] int32, lengths of the rows with the sampled tokens.
            token_ids_cpu: [max_num_seqs, max_model_len] int32. Row i is that of request i.
            slot_mappings: Not used.

        Raises:
            ValueError: An array has the wrong dtype, shape or stride, or the runner passes other
                arguments.
        """
        # vLLM has no version number for the interface of custom classes, so the ranks are checked.
        ranks = getattr(num_tokens_no_spec, "ndim", None), getattr(token_ids_cpu, "ndim", None)
        if ranks != (1, 2):
            raise ValueError(
                "ngram_npu: propose: expected num_tokens_no_spec of rank 1 and token_ids_cpu of "
                f"rank 2, got {ranks[0]} and {ranks[1]}: this vLLM's runner calls a custom class "
                "with other arguments"
            )
        return self._draft(self.k, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


class AsyncNgramProposer:
    """Replaces vLLM's ``NgramProposerGPU``."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        options = read_options(vllm_config, "ngram_gpu")
        check_runner(options, runner)
        self.k, self._runner = options.ngram.k, runner
        self.ngram_npu = Drafter(vllm_config, options, device, "ngram_gpu", pads=True)
        self._scopes = BatchScopes(self.ngram_npu, runner)

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Called before the first step; loads no model. Removes the runner's event for the numbers
        of drafts, so that the runner does not wait for them."""
        self._runner._num_valid_draft_tokens_event = None

    def update_token_ids_ngram(
        self,
        sampled_token_ids: torch.Tensor | list[list[int]],
        gpu_input_batch: Any,
        token_ids_gpu: torch.Tensor,
        num_tokens_no_spec: torch.Tensor,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the newest token [B], the number of valid sampled tokens [B], and the sampled
        tokens [B, M], -1 for discarded requests, which are still in prefill. All are int32.

        Args:
            num_tokens_no_spec: Lengths of the rows without the sampled tokens.
        """
        batch = gpu_input_batch.num_reqs
        sampled = to_matrix(sampled_token_ids, token_ids_gpu.device)[:batch]
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
    ) -> tuple[torch.Tensor, None]:
        """Writes the sampled tokens into the rows, without changing the lengths, and drafts.

        Returns:
            The draft tokens [B, num_speculative_tokens], and None for the number of draft tokens,
            because the drafts are padded.
        """
        started = time.perf_counter()
        k = min(num_speculative_tokens, self.k)
        sampled = to_matrix(valid_sampled_token_ids_gpu, token_ids_gpu.device)[: len(token_ids_gpu)]
        scopes = self._scopes.find(len(num_tokens_no_spec))
        step = self.ngram_npu.step_sampled(
            token_ids_gpu, num_tokens_no_spec, sampled, k=k, scopes=scopes
        )
        if self.ngram_npu.stats is not None and k > 0:
            self.ngram_npu.stats.observe(started, step.num_sampled, step.drafts.num_draft_tokens)
        return step.drafts.draft_token_ids, None


class BatchScopes:
    """The scopes of the requests in the batch of the asynchronous runner, which it passes to no
    drafter. A request may be in another row in each step."""

    def __init__(self, drafter: Drafter, runner: Any) -> None:
        self._drafter, self._runner = drafter, runner
        self._last_requests: Sequence[str] = ()
        self._last_scopes: torch.Tensor | None = None

    def find(self, batch: int) -> torch.Tensor | None:
        """Returns the scopes [B] int64 of a step's requests; None without a store."""
        if self._drafter.shared_store is None:
            return None
        requests = self._runner.input_batch.req_ids[:batch]
        if requests != self._last_requests:
            fields = "lora_request", "sampling_params", "cache_salt"
            scopes = [
                self._drafter.find_scope(*(getattr(request, field, None) for field in fields))
                for request in (self._runner.requests[request_id] for request_id in requests)
            ]
            device = self._drafter.device
            tensor = torch.tensor(scopes, dtype=torch.int64, device="cpu")
            if device is not None and device.type != "cpu":
                tensor = tensor.pin_memory().to(device, non_blocking=True)
            self._last_requests, self._last_scopes = list(requests), tensor
        return self._last_scopes


def check_runner(options: Options, runner: Any) -> None:
    """Raises ValueError if the plugin has not wrapped the functions of the asynchronous runner that
    a store needs."""
    # The wrapped _update_states keeps the requests' salts.
    if options.store and not keeps_cache_salts(runner):
        raise ValueError(UNKNOWN_RUNNER.format("_update_states"))
    if options.store_feed:
        require_wrapped_runner()


def to_matrix(sampled: torch.Tensor | list[list[int]], device: torch.device) -> torch.Tensor:
    """Returns the sampled tokens as [B, M] int32, -1 in unused positions."""
    if isinstance(sampled, torch.Tensor):
        return sampled.to(torch.int32)
    width = max([1, *map(len, sampled)])
    rows = [[*row, *[-1] * (width - len(row))] for row in sampled]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)


def update_num_computed_tokens_for_batch_change(
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    prev_positions: torch.Tensor,
    valid_sampled_token_count: torch.Tensor,
    prev_num_draft_tokens: torch.Tensor,
    cpu_num_computed_tokens: torch.Tensor,
) -> None:
    """Calls ``correct_num_computed_tokens_`` with the arguments of vLLM's function, which corrects
    the numbers of computed tokens on the device (docs/design/upstream.md)."""
    correct_num_computed_tokens_(
        num_computed_tokens,
        num_accepted_tokens,
        prev_positions=prev_positions,
        num_sampled_prev=valid_sampled_token_count.int(),  # int64 from some of Ascend's drafters
        num_draft_prev=prev_num_draft_tokens,
        host_num_computed_tokens=cpu_num_computed_tokens,
    )
