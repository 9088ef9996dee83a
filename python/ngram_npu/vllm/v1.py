"""The drafter of vLLM's V1 runner for ``method="ngram_gpu"``, its asynchronous n-gram method."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ngram_npu.vllm.device import DeviceDrafter, Found, look_up, vector, workspace
from ngram_npu.vllm.device_stats import DeviceStats
from ngram_npu.vllm.engines import cost_arguments, index_for, takes_index
from ngram_npu.vllm.options import Options, read_options
from ngram_npu.vllm.proposer import start
from ngram_npu.vllm.sharing import SharedStore, scope_of_request


class AsyncNgramProposer(DeviceDrafter):
    """Replaces vLLM's ``NgramProposerGPU``.

    Its drafts are padded or trimmed. Padded drafts always have the requested length, with the
    newest token in unused places, so the host need not know how many tokens were found. With
    trimmed drafts, as in vLLM, the host waits for that number before it prepares the next step.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        options = read_options(vllm_config, "ngram_gpu")
        super().__init__(options, vllm_config.model_config.get_vocab_size(), device)
        self._runner = runner
        self._padded = options.drafts == "padded"
        self._keep_drafting = self._keep_drafting and not self._padded
        self._lookup.update(options.ngram.lookup_arguments)
        self._slots: _IndexSlots | None = None
        if takes_index(options, device.type):
            self._slots = _IndexSlots(options, device)
            self._lookup.update(cost_arguments(options, self._slots.index))
        op = "ngram_step_" if self._slots is None else "ngram_index_step_"
        self._lookup.update(workspace(op, options, device))
        speaks = start(
            vllm_config, options, "ngram_gpu", "index" if self._slots else "scan", device
        )
        if speaks and self._slots is not None and self._slots.store is not None:
            self._slots.store.announce(self, scoped=True)
        self._stats: DeviceStats | None = None
        if speaks and options.metrics:
            index = self._slots.index if self._slots else None
            self._stats = DeviceStats(vllm_config, options, options.max_num_seqs, index, device)

    def load_model(self, *args: object, **kwargs: object) -> None:
        """There is no model. The runner calls this before its first step."""
        if self._padded:
            self._runner._num_valid_draft_tokens_event = None

    def _look_up(
        self, token_ids: torch.Tensor, num_tokens: torch.Tensor, sampled: torch.Tensor, k: int
    ) -> Found:
        started = time.perf_counter()
        found = self._find(token_ids, num_tokens, sampled, k)
        if self._stats is not None and k > 0:
            lengths = num_tokens + found.num_sampled
            values = lengths, found.num_sampled, found.match_len, found.num_draft_tokens
            self._stats.observe(started, slice(len(num_tokens)), values)
        return found

    def _find(
        self, token_ids: torch.Tensor, num_tokens: torch.Tensor, sampled: torch.Tensor, k: int
    ) -> Found:
        if self._slots is None:
            return super()._look_up(token_ids, num_tokens, sampled, k)
        requests = self._runner.input_batch.req_ids[: len(num_tokens)]
        slots = self._slots.of(requests, self._runner.requests)
        lookup = {**self._lookup, "k": max(k, 1)}
        store = self._slots.store
        if store is not None:
            shape = len(num_tokens), max(k, 1)
            lookup["draft_costs"] = torch.empty(shape, dtype=torch.uint8, device=self.device)
        found = look_up(
            token_ids,
            num_tokens,
            sampled,
            None,
            index=self._slots.index.tensor,
            slot_indices=slots,
            **lookup,
        )
        if store is not None:
            store.step(
                torch.ops.ngram_npu.ngram_store_step_,
                (token_ids, num_tokens + found.num_sampled, found.num_sampled),
                (found.draft_token_ids, found.num_draft_tokens, found.match_len),
                lookup["draft_costs"],
                slot_indices=slots,
                scopes=self._slots.scopes,
            )
        return found

    def _given(self, found: Found, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._padded:
            return super()._given(found, k)
        drafts = found.draft_token_ids[:, :k]
        return torch.where(drafts < 0, found.next_token_ids.unsqueeze(1), drafts), None


def unless_padded(trim: Callable[..., None]) -> Callable[..., None]:
    """vLLM's ``update_scheduler_for_invalid_drafts`` for a runner whose drafts may be padded."""

    def update_scheduler_for_invalid_drafts(
        num_valid_draft_tokens_event: Any,
        num_valid_draft_tokens_cpu: Any,
        scheduler_output: Any,
        req_id_to_index: Any,
    ) -> None:
        if num_valid_draft_tokens_event is not None:
            trim(
                num_valid_draft_tokens_event,
                num_valid_draft_tokens_cpu,
                scheduler_output,
                req_id_to_index,
            )

    return update_scheduler_for_invalid_drafts


class _IndexSlots:
    """An index, possibly a store, and the slot of each request in them."""

    def __init__(self, options: Options, device: torch.device) -> None:
        count = 2 * options.max_num_seqs
        self.index = index_for(options, count, device)
        self._device = device
        self._free = list(range(count))
        self._slot_of: dict[str, int] = {}
        self._requests: Sequence[str] = ()
        self._slots = vector([], device)
        self.store: SharedStore | None = None
        if options.ngram.store is not None:
            self.store = SharedStore(options, count, "torch")
        self.scopes: torch.Tensor | None = None
        """[B] int64, scopes of the requests of the last call."""
        self._scope_of: dict[str, int] = {}

    def of(self, requests: Sequence[str], alive: Mapping[str, Any]) -> torch.Tensor:
        """The slots of a step's requests; frees the slots of requests that are not alive."""
        if requests != self._requests:
            self._change(requests, alive)
        return self._slots

    def _change(self, requests: Sequence[str], alive: Mapping[str, Any]) -> None:
        freed = [name for name in self._slot_of if name not in alive]
        new = [name for name in requests if name not in self._slot_of]
        lacking = len(new) - len(self._free) - len(freed)
        if lacking > 0:  # preempted requests lose their slots, those known longest first
            here = {*requests, *freed}
            freed += [name for name in self._slot_of if name not in here][:lacking]
        if freed:
            slots = [self._slot_of.pop(name) for name in freed]
            self.index.reset(vector(slots, self._device))
            if self.store is not None:
                self.store.held.finish(vector(slots, self._device))
            self._free += slots
        for name in new:
            self._slot_of[name] = self._free.pop()
        if self.store is not None:
            self._note_scopes(freed, new, alive)
            scopes = [self._scope_of[name] for name in requests]
            self.scopes = torch.tensor(scopes, dtype=torch.int64)
        self._requests = list(requests)
        self._slots = vector([self._slot_of[name] for name in requests], self._device)

    def _note_scopes(
        self, freed: Sequence[str], new: Sequence[str], alive: Mapping[str, Any]
    ) -> None:
        for name in freed:
            del self._scope_of[name]
        for name in new:
            request = alive[name]
            self._scope_of[name] = scope_of_request(
                getattr(request, "lora_request", None), getattr(request, "sampling_params", None)
            )
