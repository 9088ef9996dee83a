"""Looking up n-grams in the rows of vLLM's V2 runner.

The runner gives a request one row of its token buffer for as long as it runs, and appends the
sampled tokens before it asks for drafts. So one lookup is all there is to do: the row of a request
is its slot of the index too, and nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ngram_npu import _library
from ngram_npu.drafting import Drafting, Drafts
from ngram_npu.vllm.after_import import parameters
from ngram_npu.vllm.device import DeviceStats, vector, workspace
from ngram_npu.vllm.engines import index_for, takes_index
from ngram_npu.vllm.options import Options
from ngram_npu.vllm.proposer import start
from ngram_npu.vllm.ranks import compare_ranks, or_end
from ngram_npu.vllm.sharing import SharedStore, scope_of_request

BESIDE = "ngram_npu"
"""The attribute of a neural speculator that holds the lookup beside it."""


class RowLookup:
    """What speculators of the V2 runner share: the lookup, what it keeps of each row, the counters.

    Drafts are filled up with the newest token, since the runner verifies all of their tokens.
    """

    sees_requests = False
    """Whether the runner says of new requests what their scopes are."""
    _keeps_rows = False
    """Whether more than an index is kept of a row that a new request must not find there."""

    def __init__(
        self, vllm_config: Any, options: Options, device: torch.device, req_states: Any, method: str
    ) -> None:
        self.k = options.ngram.k
        self.device = device
        self._state = req_states.all_token_ids.gpu, req_states.total_len.gpu
        self._begun: list[int] = []  # rows given to new requests since the last lookup
        self._ended: list[int] = []  # and rows taken from those that have finished
        self._store: SharedStore | None = None
        self._announced: dict[str, int] = {}  # scopes of requests that are about to begin
        self._scopes = torch.zeros(options.max_num_seqs, dtype=torch.int64)  # by row
        # Made before vLLM measures how much memory is left for its KV cache. In host memory only
        # what is used is committed.
        self.index = None
        if takes_index(options, device.type):
            self.index = index_for(options, options.max_num_seqs, "torch")
            if options.ngram.store is not None:
                self._store = SharedStore(options, options.max_num_seqs, "torch")
        self.one_of_many = compare_ranks(vllm_config, options, self._store)
        self._drafting = Drafting(
            options.ngram,
            kind="torch",
            index=self.index,
            store=None if self._store is None else self._store.held,
            workspace=workspace("ngram_propose_", options, device),
        )
        if self._keeps_rows or self.index is not None:
            self._watch(req_states)
        shape = options.max_num_seqs, self.k
        self._draft_costs = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._gives_costs = self._store is not None
        """Whether a lookup says what its draft tokens cost."""
        engine = "index" if self.index else "scan"
        self.speaks = start(vllm_config, options, method, engine, device)
        if self.speaks and self._store is not None:
            self._store.announce(self, scoped=self.sees_requests)
        self._stats: DeviceStats | None = None
        if self.speaks and options.metrics:
            self._stats = DeviceStats(self, vllm_config, options, len(self._state[1]), self.index)

    @property
    def _knows_costs(self) -> bool:
        """Whether a lookup can say what its draft tokens cost."""
        return self._drafting.config.cost_limit is not None

    @or_end
    def _look_up(
        self, rows: torch.Tensor, num_sampled: torch.Tensor, *, int64: bool = False
    ) -> Drafts[torch.Tensor]:
        """Drafts [B, k], filled up (with ``int64`` a scan's are int64), how many tokens were found
        [B], and the length of their match [B]; int32. Where ``_gives_costs``, the first B rows of
        ``_draft_costs`` are theirs."""
        self._begin_rows()
        drafts = self._drafting.propose(
            *self._state,
            num_sampled=num_sampled,
            row_indices=rows,
            slot_indices=rows,
            scopes=None if self._store is None else self._scopes[rows],
            fill=True,
            draft_costs=self._draft_costs[: len(rows)] if self._gives_costs else None,
            int64=int64,
        )
        if self._store is not None:
            self._store.check_not_skipped()
        return drafts

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

    def _begin_rows(self) -> None:
        if self._store is not None and (ended := sorted({*self._ended, *self._begun})):
            self._store.held.finish(vector(ended, self.device))
            self._ended.clear()
        if self._begun:
            self._reset(vector(sorted(set(self._begun)), self.device))  # a row twice: once
            self._begun.clear()

    def _reset(self, rows: torch.Tensor) -> None:
        """Forgets what is kept of these rows, [N] int32."""
        if self.index is not None:
            self.index.reset(rows)


def is_warm_up(input_batch: Any) -> bool:
    """Whether vLLM's worker has made the requests of this step up to warm its kernels, as
    ``_warmup_0_``. It gives them no other sign; to the ids of others it appends random digits."""
    name = input_batch.req_ids[0]
    return name.startswith("_") and "warmup_" in name and name.endswith("_")


def telling(add_requests: Callable[..., None]) -> Callable[..., None]:
    """vLLM's ``GPUModelRunner.add_requests`` for a runner whose speculator is to know of them."""

    @functools.wraps(add_requests)
    def told(self: Any, scheduler_output: Any) -> None:
        speculator = getattr(self, "speculator", None)
        lookup = getattr(speculator, BESIDE, speculator)
        if isinstance(lookup, RowLookup):
            lookup.announce(scheduler_output.scheduled_new_reqs)
        add_requests(self, scheduler_output)

    return told


def doubt_of_state(device: torch.device, req_states: Any) -> str:
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
