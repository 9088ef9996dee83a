"""What vLLM's asynchronous V1 runner calls: the drafter of ``method="ngram_gpu"``, and the
correction of counts as one operator.

After a step with drafts, that runner or vLLM-Ascend's corrects on the device what the host assumed:
some dozen small operators in one function, a global of the runner's module, for every asynchronous
method. What follows from the counts (positions, lengths, slots) is in the middle of
``_prepare_inputs``, where no plugin reaches: docs/design/upstream.md.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from ngram_npu import _library
from ngram_npu.drafting import Drafting
from ngram_npu.engines.vllm.admission import keeps_salts
from ngram_npu.engines.vllm.options import CORRECTION, read_options
from ngram_npu.engines.vllm.patching import put, refuse, serve
from ngram_npu.engines.vllm.sharing import NO_SCOPES, SharedStore, scope_of_request
from ngram_npu.engines.vllm.startup import compare_ranks, index_for, or_end, start, workspace
from ngram_npu.engines.vllm.stats import DeviceStats
from ngram_npu.ops import correct_num_computed_tokens_, prepare_next_token_ids

CORRECTION_NAME = "update_num_computed_tokens_for_batch_change"
CORRECTION_WHAT = "the correction of counts"


class AsyncNgramProposer:
    """Replaces vLLM's ``NgramProposerGPU``. Its drafts are padded or trimmed: for trimmed ones, as
    in vLLM, the host waits for the number of tokens found before it prepares the next step.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        options = read_options(vllm_config, "ngram_gpu")
        config = replace(options.ngram, vocab_size=vllm_config.model_config.get_vocab_size())
        self.k, self.device, self._runner = config.k, device, runner
        self._padded = options.drafts == "padded"
        self._keep_drafting = options.keep_drafting
        slots = 2 * options.max_num_seqs
        index = index_for(options, slots, "torch") if options.takes_index(device.type) else None
        self.shared_store: SharedStore | None = None
        if options.ngram.store is not None:
            if not keeps_salts(runner):
                raise ValueError(NO_SCOPES.format("_update_states"))
            self.shared_store = SharedStore(vllm_config, options, slots, "torch")
            self.shared_store.scoped = True
        self.one_of_many = compare_ranks(vllm_config, options, self.shared_store)
        self._drafting = Drafting(
            config,
            kind="torch",
            index=index,
            store=None if self.shared_store is None else self.shared_store.held,
            workspace=workspace("ngram_step_", options, device),
        )
        self._slots = None if index is None else _IndexSlots(self._drafting, slots)
        engine = "scan" if index is None else "index"
        speaks = start(self, vllm_config, options, "ngram_gpu", engine)
        counts = speaks and options.metrics
        self._stats = DeviceStats(self, vllm_config, options, index) if counts else None

    def load_model(self, *args: object, **kwargs: object) -> None:
        """There is no model. The runner calls this before its first step."""
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
        """The newest token [B], the number of valid sampled tokens [B], and the sampled tokens
        [B, M], -1 for discarded requests, that is those still in prefill; all int32. The lengths
        given are without the sampled tokens."""
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

    @or_end
    def propose(
        self,
        num_speculative_tokens: int,
        num_tokens_no_spec: torch.Tensor,
        token_ids_gpu: torch.Tensor,
        valid_sampled_token_ids_gpu: torch.Tensor,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes the sampled tokens into the rows, leaves the lengths as they are, and drafts: [B,
        num_speculative_tokens], and the number of tokens found [B]. Trimmed, -1 is in unused
        places; padded, there is no number."""
        started = time.perf_counter()
        k = min(num_speculative_tokens, self.k)
        sampled = as_matrix(valid_sampled_token_ids_gpu, token_ids_gpu.device)[: len(token_ids_gpu)]
        slots = scopes = None
        if self._slots is not None:
            names = self._runner.input_batch.req_ids[: len(num_tokens_no_spec)]
            slots, scopes = self._slots.of(names, self._runner.requests)
        found = self._drafting.step(
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
            self.shared_store.check_not_skipped()
        if self._stats is not None and k > 0:
            lengths = num_tokens_no_spec + found.num_sampled
            values = found.num_sampled, found.match_len, found.num_draft_tokens
            self._stats.observe_tensors(started, slice(len(lengths)), lengths, *values)
        if self._padded:
            return found.draft_token_ids, None
        if self._keep_drafting and k > 0:
            found = never_empty(found)
        return found.draft_token_ids, found.num_draft_tokens


def never_empty(found: Any) -> Any:
    """Gives each request that sampled tokens but has no draft its newest token as a draft."""
    none = (found.num_draft_tokens == 0) & (found.num_sampled > 0)
    drafts = found.draft_token_ids
    drafts[:, 0] = torch.where(none, found.next_token_ids, drafts[:, 0])
    return found._replace(num_draft_tokens=found.num_draft_tokens + none)


def as_matrix(sampled: torch.Tensor | list[list[int]], device: torch.device) -> torch.Tensor:
    if isinstance(sampled, torch.Tensor):
        return sampled.to(torch.int32)
    width = max([1, *map(len, sampled)])
    rows = [[*row, *[-1] * (width - len(row))] for row in sampled]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)


class _IndexSlots:
    """The slot of each request in an index and in a store, and its scope there."""

    def __init__(self, drafting: Drafting, count: int) -> None:
        self._drafting = drafting
        self._free = list(range(count))
        self._known: dict[str, tuple[int, int]] = {}
        self._requests: Sequence[str] = ()
        self._found: tuple[torch.Tensor, torch.Tensor]

    def of(
        self, requests: Sequence[str], alive: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [B] int32 and scopes [B] int64 of a step's requests; frees the slots of requests
        that are not alive."""
        if requests == self._requests:
            return self._found
        freed = [name for name in self._known if name not in alive]
        new = [name for name in requests if name not in self._known]
        lacking = len(new) - len(self._free) - len(freed)
        if lacking > 0:  # preempted requests lose their slots, those known longest first
            here = {*requests, *freed}
            freed += [name for name in self._known if name not in here][:lacking]
        if freed:
            slots = [self._known.pop(name)[0] for name in freed]
            self._drafting.end(torch.tensor(slots, dtype=torch.int32, device="cpu"))
            self._free += slots
        for name in new:
            request = alive[name]
            owner = ("lora_request", "sampling_params", "cache_salt")
            scope = scope_of_request(*(getattr(request, part, None) for part in owner))
            self._known[name] = self._free.pop(), scope
        self._requests = list(requests)
        known = torch.tensor(
            [self._known[name] for name in requests], dtype=torch.int64, device="cpu"
        )
        slots_of, scopes = known.reshape(-1, 2).T.contiguous()
        self._found = slots_of.int(), scopes
        return self._found


def install_correction(runner: ModuleType, device: Callable[[Any], str]) -> None:
    """Replaces the function in the runner's module if the environment asks for it, and logs one
    line. ``device`` takes the type of its device from it. Never raises; may be called again."""

    def replace(runner: Any) -> str | None:
        kind = device(runner)
        has_kernel = _library.has_kernel("correct_num_computed_tokens_", kind)
        doubt = "" if has_kernel else f"there is no kernel for {kind!r}"
        return put(runner, {CORRECTION_NAME: update_num_computed_tokens_for_batch_change}, doubt)

    refused = f" for {CORRECTION_WHAT}, which is left as it is"
    wish = os.environ.get(CORRECTION, "0")
    if wish not in ("0", "1"):
        refuse(refused, f"{CORRECTION}: expected 0 or 1, got {wish!r}")
    elif wish == "1":
        serve(runner.__name__, replace, CORRECTION_WHAT, refused, logging.INFO)


def update_num_computed_tokens_for_batch_change(
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    prev_positions: torch.Tensor,
    valid_sampled_token_count: torch.Tensor,
    prev_num_draft_tokens: torch.Tensor,
    cpu_num_computed_tokens: torch.Tensor,
) -> None:
    """``correct_num_computed_tokens_`` under the name and with the arguments of vLLM's function."""
    correct_num_computed_tokens_(
        num_computed_tokens,
        num_accepted_tokens,
        prev_positions=prev_positions,
        num_sampled_prev=valid_sampled_token_count.int(),  # int64 from some of Ascend's drafters
        num_draft_prev=prev_num_draft_tokens,
        host_num_computed_tokens=cpu_num_computed_tokens,
    )
