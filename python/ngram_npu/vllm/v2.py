"""N-gram drafts for vLLM's V2 model runner, in place of its ``NgramGPUSpeculator``.

The runner gives a request one row of its token buffer for as long as it runs, and appends the
sampled tokens before it asks for drafts. So one lookup is all there is to do: the row of a request
is its slot of the index too, and nothing waits for the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ngram_npu import _library
from ngram_npu.vllm.after_import import parameters
from ngram_npu.vllm.device import vector, workspace
from ngram_npu.vllm.device_stats import DeviceStats
from ngram_npu.vllm.engines import cost_arguments, index_for, takes_index
from ngram_npu.vllm.options import read_options
from ngram_npu.vllm.proposer import start
from ngram_npu.vllm.sharing import SharedStore, scope_of_request


class NgramSpeculator:
    """Drafts ``num_speculative_tokens`` tokens for every request, those of the stock speculator
    unless the options say otherwise.

    The runner verifies all of them. Where the lookup finds fewer, the newest token fills the rest.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """

    # What the runner reads of any speculator.
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False

    sees_requests = False
    """Whether the runner says of new requests what their scopes are."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        options = read_options(vllm_config, "v2")
        self.k = options.ngram.k
        self.device = device
        self._state = req_states.all_token_ids.gpu, req_states.total_len.gpu
        self._arguments = options.ngram.lookup_arguments | {"fill": True}
        # Made before vLLM measures how much memory is left for its KV cache. In host memory only
        # what is used is committed.
        self.index: Any = None
        self._begun: list[int] = []  # rows given to new requests since the last lookup
        self._ended: list[int] = []  # and rows taken from those that have finished
        self._store: SharedStore | None = None
        self._announced: dict[str, int] = {}  # scopes of requests that are about to begin
        self._scopes = torch.zeros(options.max_num_seqs, dtype=torch.int64)  # by row
        if takes_index(options, device.type):
            self.index = index_for(options, options.max_num_seqs, device)
            self._arguments.update(cost_arguments(options, self.index))
            if options.ngram.store is not None:
                self._store = SharedStore(options, options.max_num_seqs, "torch")
            self._watch(req_states)
        asked = getattr(vllm_config.speculative_config, "enable_adaptive_verification", False)
        self.enable_adaptive_verification = asked and "costs" in self._arguments
        """Whether the runner asks how likely each draft token is to be accepted."""
        shape = options.max_num_seqs, self.k
        self._draft_costs = torch.zeros(shape, dtype=torch.uint8, device=device)
        if self.enable_adaptive_verification:
            self.draft_token_confidence_probs = torch.zeros(shape, device=device)
            """[max_num_seqs, k] in the order of the batch: of each token, if those before it are
            accepted."""
        op = "ngram_propose" if self.index is None else "ngram_index_propose_"
        self._arguments.update(workspace(op, options, device))
        method = f"{vllm_config.speculative_config.method}, V2 runner"
        speaks = start(vllm_config, options, method, "index" if self.index else "scan", device)
        if speaks and self._store is not None:
            self._store.announce(self, scoped=self.sees_requests)
        self._stats: DeviceStats | None = None
        if speaks and options.metrics:
            self._stats = DeviceStats(vllm_config, options, len(self._state[1]), self.index, device)

    def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """The lookup is no part of the model's graphs."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: torch.Tensor,
        num_rejected: object,
        last_sampled: object,
        *args: object,
        dummy_run: bool = False,
        **kwargs: object,
    ) -> torch.Tensor:
        """Drafts for the requests of a step, whose sampled tokens are in the buffer already.

        Args:
            input_batch: its ``idx_mapping`` [B] int64 has the requests' rows.
            num_sampled: [B] int32; 0: the request's prefill goes on.
            dummy_run: a warm-up without requests; nothing is looked up.
            others: not used.

        Returns:
            [B, num_speculative_tokens] int64.
        """
        if dummy_run:
            shape = input_batch.num_reqs, self.k
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        started = time.perf_counter()
        rows = input_batch.idx_mapping
        drafts, counts, match_len = self._look_up(rows, num_sampled)
        if self._stats is not None:
            values = self._state[1][rows], num_sampled, match_len, counts
            self._stats.observe(started, input_batch.idx_mapping_np, values)
        return drafts.to(torch.int64)

    def _look_up(self, rows: torch.Tensor, num_sampled: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Drafts [B, k], filled up, how many tokens were found [B], and the length of their match
        [B]; int32."""
        requests = {"row_indices": rows, "num_sampled": num_sampled, **self._arguments}
        ops = torch.ops.ngram_npu
        if self.index is None:
            found: tuple[torch.Tensor, ...] = ops.ngram_propose(*self._state, **requests)
        else:
            self._reset_begun()
            if self.enable_adaptive_verification or self._store is not None:
                requests["draft_costs"] = self._draft_costs[: len(rows)]
            found = ops.ngram_index_propose_(
                *self._state, self.index.tensor, slot_indices=rows, **requests
            )
            if self._store is not None:
                self._store.step(
                    ops.ngram_store_step_,
                    (*self._state, num_sampled),
                    found,
                    requests["draft_costs"],
                    row_indices=rows,
                    scopes=self._scopes[rows],
                )
                drafts = found[0]  # those of the store end in -1
                newest = self._state[0][rows, self._state[1][rows].long() - 1]
                torch.where(drafts < 0, newest[:, None], drafts, out=drafts)
            if self.enable_adaptive_verification:
                confidence = self.draft_token_confidence_probs[: len(rows)]
                torch.exp2(requests["draft_costs"] / -16, out=confidence)
        return found

    def announce(self, requests: Iterable[Any]) -> None:
        """Requests that are about to begin, as the scheduler describes them."""
        if self._store is not None:
            for request in requests:
                self._announced[request.req_id] = scope_of_request(
                    request.lora_request, request.sampling_params
                )

    def _watch(self, req_states: Any) -> None:
        """Notes which rows the runner gives to new requests, and which it takes from others: they
        have finished, or are preempted and begin anew."""
        add_request = req_states.add_request

        def added(req_id: str, *args: Any, **kwargs: Any) -> None:
            add_request(req_id, *args, **kwargs)
            row = req_states.req_id_to_index[req_id]
            self._begun.append(row)
            self._scopes[row] = self._announced.pop(req_id, 0)

        req_states.add_request = added
        remove_request = getattr(req_states, "remove_request", None)
        if self._store is None or remove_request is None:
            return

        def removed(req_id: str, *args: Any, **kwargs: Any) -> Any:
            row = req_states.req_id_to_index.get(req_id)
            if row is not None:
                self._ended.append(row)
            return remove_request(req_id, *args, **kwargs)

        req_states.remove_request = removed

    def _reset_begun(self) -> None:
        if self._store is not None and (ended := sorted({*self._ended, *self._begun})):
            self._store.held.finish(vector(ended, self.device))
            self._ended.clear()
        if self._begun:
            self.index.reset(vector(sorted(set(self._begun)), self.device))  # a row twice: once
            self._begun.clear()


def telling(add_requests: Callable[..., None]) -> Callable[..., None]:
    """vLLM's ``GPUModelRunner.add_requests`` for a runner whose speculator is to know of them."""

    @functools.wraps(add_requests)
    def told(self: Any, scheduler_output: Any) -> None:
        speculator = getattr(self, "speculator", None)
        if isinstance(speculator, NgramSpeculator):
            speculator.announce(scheduler_output.scheduled_new_reqs)
        add_requests(self, scheduler_output)

    return told


def in_place_of(stock: Callable[..., Any], refuse: Callable[[str], None]) -> type:
    """The class that stands in for the stock speculator.

    Where the runner's state is not what the operators take, it makes a stock one and tells
    ``refuse`` why.
    """

    class Speculator(NgramSpeculator):
        def __new__(cls, vllm_config: Any, device: torch.device, req_states: Any) -> Any:
            doubt = _doubt(device, req_states)
            if not doubt:
                return super().__new__(cls)
            refuse(doubt)
            return stock(vllm_config, device, req_states)

    return Speculator


def _doubt(device: torch.device, req_states: Any) -> str:
    """Why the runner's state cannot be looked up in; empty: it can."""
    if device.type not in ("cpu", "cuda"):
        return f"no kernels for {device.type}"
    if not _library.has_kernel("ngram_propose", device.type):
        return f"no kernels for {device.type}: {_library.backends()[device.type].reason}"
    for name, rank in (("all_token_ids", 2), ("total_len", 1)):
        tensor = getattr(getattr(req_states, name, None), "gpu", None)
        if not isinstance(tensor, torch.Tensor):
            return f"the runner's state has no {name}.gpu"
        found = tensor.dim(), tensor.dtype, tensor.device.type, tensor.stride(-1)
        expected = rank, torch.int32, device.type, 1
        if found != expected:
            return f"{name}.gpu (rank, dtype, device, stride) is {found}, expected {expected}"
    for name in ("add_request", "req_id_to_index"):
        if not hasattr(req_states, name):
            return f"the runner's state has no {name}"
    found_arguments = parameters(req_states.add_request)
    if found_arguments[:1] != ["req_id"]:
        return f"add_request takes ({', '.join(found_arguments)}), expected (req_id, ...)"
    return ""
