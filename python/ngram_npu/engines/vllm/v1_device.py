"""Contains the drafter of ``method="ngram_gpu"`` in vLLM's asynchronous V1 runner, the drafters of
vLLM-Ascend's V1 runner, and a replacement for a function of vLLM that corrects the numbers of
computed tokens on the device (docs/design/upstream.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ngram_npu.drafting import Drafting
from ngram_npu.engines.vllm.feed.insertion import make_host_inserter
from ngram_npu.engines.vllm.options import Options, read_options
from ngram_npu.engines.vllm.request_scopes import keeps_cache_salts
from ngram_npu.engines.vllm.sharing import (
    UNKNOWN_RUNNER,
    SharedStore,
    compare_ranks,
    exit_worker_on_error,
    scope_of_request,
)
from ngram_npu.engines.vllm.stats import DeviceStats, log_start
from ngram_npu.engines.vllm.v1_sync import StockNgramProposer, index_for
from ngram_npu.ops import (
    correct_num_computed_tokens_,
    ngram_step_,
    prepare_next_token_ids,
    workspace_size,
)


def make_workspace(op: str, options: Options, device: torch.device) -> torch.Tensor | None:
    """Returns a workspace for ``op`` on a GPU, where each call would otherwise allocate one."""
    if device.type == "cpu":
        return None
    size = workspace_size(op, options.max_num_seqs)
    return torch.zeros(size, dtype=torch.int32, device=device)


class AsyncNgramProposer:
    """Replaces vLLM's ``NgramProposerGPU``. Drafts are padded or trimmed. With trimmed drafts, the
    host waits for the number of draft tokens before it prepares the next step, as in vLLM."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        options = read_options(vllm_config, "ngram_gpu")
        config = replace(options.ngram, vocab_size=vllm_config.model_config.get_vocab_size())
        self.k, self.device, self._runner = config.k, device, runner
        self._padded = options.drafts == "padded"
        self._keep_drafting = options.keep_drafting
        slots = 2 * options.max_num_seqs  # preempted requests keep their slots while some are free
        index = index_for(options, slots, "torch") if options.uses_index(device.type) else None
        self.shared_store: SharedStore | None = None
        if options.ngram.store is not None:
            # The plugin must have wrapped _update_states, which then keeps the requests' salts.
            if not keeps_cache_salts(runner):
                raise ValueError(UNKNOWN_RUNNER.format("_update_states"))
            self.shared_store = SharedStore(vllm_config, options, slots, "torch")
            self.shared_store.has_scopes = True
        # Raises an error if another rank has other options.
        self.has_other_ranks = compare_ranks(vllm_config, options, self.shared_store)
        store = self.shared_store
        if store is not None:
            store.text_inserter = make_host_inserter(store)
        self._drafting = Drafting(
            config,
            kind="torch",
            index=index,
            store=None if store is None else store.host_contents,
            workspace=make_workspace("ngram_step_", options, device),
        )
        self._slots = None if index is None else _IndexSlots(self._drafting, slots, store)
        engine = "scan" if index is None else "index"
        logs_on_this_rank = log_start(self, vllm_config, options, "ngram_gpu", engine)
        is_counting = logs_on_this_rank and options.metrics
        self._stats = DeviceStats(self, vllm_config, options, index) if is_counting else None

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Called before the first step; loads no model. With padded drafts, removes the runner's
        event for the numbers of drafts, so that the runner does not wait for them."""
        if self._padded:
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

    @exit_worker_on_error
    def propose(
        self,
        num_speculative_tokens: int,
        num_tokens_no_spec: torch.Tensor,
        token_ids_gpu: torch.Tensor,
        valid_sampled_token_ids_gpu: torch.Tensor,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes the sampled tokens into the rows, without changing the lengths, and drafts.

        Returns:
            The draft tokens [B, num_speculative_tokens], and the number of draft tokens of each
            request [B], None for padded drafts. Unused positions of trimmed drafts are -1.
        """
        started = time.perf_counter()
        k = min(num_speculative_tokens, self.k)
        sampled = to_matrix(valid_sampled_token_ids_gpu, token_ids_gpu.device)[: len(token_ids_gpu)]
        slots = scopes = None
        if self._slots is not None:
            request_ids = self._runner.input_batch.req_ids[: len(num_tokens_no_spec)]
            slots, scopes = self._slots.assign(request_ids, self._runner.requests)
        step = self._drafting.step(
            token_ids_gpu,
            num_tokens_no_spec,
            sampled,
            slot_indices=slots,
            scopes=scopes,
            advance=False,
            k=k,
            fill=self._padded,
        )
        if self.shared_store is not None:
            self.shared_store.check_not_skipped()  # raises if this step could not use the store
        if self._stats is not None and k > 0:
            lengths = num_tokens_no_spec + step.num_sampled
            values = step.num_sampled, step.match_len, step.num_draft_tokens
            self._stats.observe_tensors(started, slice(len(lengths)), lengths, *values)
        if self._padded:
            return step.draft_token_ids, None
        if self._keep_drafting and k > 0:
            step = draft_newest_token(step)
        return step.draft_token_ids, step.num_draft_tokens


def draft_newest_token(step: Any) -> Any:
    """Drafts the newest token for each request that sampled tokens but has no draft."""
    is_empty = (step.num_draft_tokens == 0) & (step.num_sampled > 0)
    drafts = step.draft_token_ids
    drafts[:, 0] = torch.where(is_empty, step.next_token_ids, drafts[:, 0])
    return step._replace(num_draft_tokens=step.num_draft_tokens + is_empty)


def to_matrix(sampled: torch.Tensor | list[list[int]], device: torch.device) -> torch.Tensor:
    """Returns the sampled tokens as [B, M] int32, -1 in unused positions."""
    if isinstance(sampled, torch.Tensor):
        return sampled.to(torch.int32)
    width = max([1, *map(len, sampled)])
    rows = [[*row, *[-1] * (width - len(row))] for row in sampled]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)


class _IndexSlots:
    """Assigns requests to slots of an index and of a store, and determines their scopes."""

    def __init__(self, drafting: Drafting, count: int, store: SharedStore | None) -> None:
        self._drafting = drafting
        self._find_scope = scope_of_request if store is None else store.find_scope
        self._free_slots = list(range(count))
        self._assignments: dict[str, tuple[int, int]] = {}  # slot and scope of each request
        self._last_requests: Sequence[str] = ()
        self._last_result: tuple[torch.Tensor, torch.Tensor]

    def assign(
        self, requests: Sequence[str], alive: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns slots [B] int32 and scopes [B] int64 of a step's requests, and frees the slots of
        requests that are not alive."""
        if requests == self._last_requests:
            return self._last_result
        freed_ids = [request_id for request_id in self._assignments if request_id not in alive]
        new_ids = [request_id for request_id in requests if request_id not in self._assignments]
        missing = len(new_ids) - len(self._free_slots) - len(freed_ids)
        if missing > 0:  # preempted requests lose their slots, the oldest first
            in_use = {*requests, *freed_ids}
            freed_ids += [i for i in self._assignments if i not in in_use][:missing]
        if freed_ids:
            slots = [self._assignments.pop(request_id)[0] for request_id in freed_ids]
            self._drafting.end(torch.tensor(slots, dtype=torch.int32, device="cpu"))
            self._free_slots += slots
        for request_id in new_ids:
            request = alive[request_id]
            scope_fields = ("lora_request", "sampling_params", "cache_salt")
            scope = self._find_scope(*(getattr(request, field, None) for field in scope_fields))
            self._assignments[request_id] = self._free_slots.pop(), scope
        self._last_requests = list(requests)
        pairs = [self._assignments[request_id] for request_id in requests]
        table = torch.tensor(pairs, dtype=torch.int64, device="cpu")
        slot_column, scopes = table.reshape(-1, 2).T.contiguous()
        self._last_result = slot_column.int(), scopes
        return self._last_result


def update_num_computed_tokens_for_batch_change(
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    prev_positions: torch.Tensor,
    valid_sampled_token_count: torch.Tensor,
    prev_num_draft_tokens: torch.Tensor,
    cpu_num_computed_tokens: torch.Tensor,
) -> None:
    """Calls ``correct_num_computed_tokens_`` with the arguments of vLLM's function."""
    correct_num_computed_tokens_(
        num_computed_tokens,
        num_accepted_tokens,
        prev_positions=prev_positions,
        num_sampled_prev=valid_sampled_token_count.int(),  # int64 from some of Ascend's drafters
        num_draft_prev=prev_num_draft_tokens,
        host_num_computed_tokens=cpu_num_computed_tokens,
    )


class AscendNgramProposer(StockNgramProposer):
    """Replaces vLLM-Ascend's drafter of ``method="ngram"``, which reads the tokens on the host."""

    def __init__(self, vllm_config: Any, runner: object) -> None:
        super().__init__(vllm_config)

    def dummy_run(self, num_tokens: int, *args: object, **kwargs: object) -> None:
        """Does nothing. The runner calls this method to profile, to warm up and to capture graphs,
        but the kernels are compiled ahead of time and are not part of the model's graphs."""


class AscendNgramProposerNPU:
    """Replaces vLLM-Ascend's drafter of ``method="ngram_gpu"``, which drafts on the device with
    asynchronous scheduling. The runner passes ``min_n``, ``max_n`` and ``k`` to
    :func:`triton_ngram_spec_decode`."""

    load_model, dummy_run = StockNgramProposer.load_model, AscendNgramProposer.dummy_run

    def __init__(self, vllm_config: Any, device: torch.device, runner: object) -> None:
        global _keep_drafting
        options = read_options(vllm_config, "ngram_gpu")
        config = options.ngram
        options.uses_index("npu")  # raises an error if an index is requested
        compare_ranks(vllm_config, options, None)
        self.min_n, self.max_n, self.k = config.min_n, config.max_n, config.k
        _keep_drafting = options.keep_drafting


# Global, because triton_ngram_spec_decode does not receive the drafter. A process has one runner.
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
    """Calls ``ngram_step_`` with ``advance=False``, with arguments and results of vLLM-Ascend's
    function of this name, which uses Triton. There may be sampled tokens for more requests than
    rows, or lists of different lengths.

    The results differ from those of that function in two cases: no draft reaches beyond the row's
    capacity, and if the sampled tokens do not fit into the row, the next token is the last sampled
    token, not the last token that fits.
    """
    batch, capacity = token_ids.shape
    step = ngram_step_(
        token_ids,
        num_tokens_no_spec,
        to_matrix(sampled_token_ids, token_ids.device)[:batch],
        discard=discard_request_mask,
        advance=False,
        vocab_size=vocab_size,
        min_n=min_n,
        max_n=max_n,
        k=k,
        max_len=capacity,
    )
    if _keep_drafting:
        step = draft_newest_token(step)
    return step.next_token_ids, step.draft_token_ids, step.num_draft_tokens, step.num_sampled
