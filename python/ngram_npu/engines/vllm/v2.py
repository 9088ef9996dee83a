"""N-gram drafts for vLLM's V2 model runner: what its speculators share, and the one in place of its
``NgramGPUSpeculator``.

The runner gives a request one row of its token buffer for as long as it runs, and appends the
sampled tokens before it asks for drafts. So one lookup is all there is to do on the device. With an
index, and so with a ladder or a store, the host drafts, in the order of the device's stream: then
the row of a request is its slot of both. Nothing waits for the device either way.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ngram_npu import _library
from ngram_npu.drafting import Drafting, Drafts
from ngram_npu.engines.vllm.options import Method, Options, read_options
from ngram_npu.engines.vllm.patching import parameters
from ngram_npu.engines.vllm.sharing import NO_SCOPES, SharedStore, scope_of_request
from ngram_npu.engines.vllm.startup import compare_ranks, index_for, or_end, start, workspace
from ngram_npu.engines.vllm.stats import DeviceStats
from ngram_npu.host_drafting import HostDrafting, Stop
from ngram_npu.index import NgramIndex
from ngram_npu.scopes import scope_of

BESIDE = "ngram_npu"
"""The attribute of a neural speculator that holds the lookup beside it."""

ATTRIBUTES = (
    *("vllm_config", "req_states", "speculative_config", "num_speculative_steps"),
    *("max_num_reqs", "max_model_len", "k", "device", "index", "shared_store", "one_of_many"),
    *("speaks", "enable_adaptive_verification", "draft_token_confidence_probs"),
)
"""What the constructor of a speculator sets on itself."""

SETTLE_S = 10.0
"""How long the end of an engine waits for the last jobs before the store is saved."""


class RowLookup:
    """What speculators of the V2 runner share. Drafts are filled up, since the runner verifies all
    of their tokens."""

    sees_requests = False
    """Whether the runner says of new requests what their scopes are."""

    def __init__(
        self, vllm_config: Any, options: Options, device: torch.device, req_states: Any, method: str
    ) -> None:
        self.k, self.device = options.ngram.k, device
        self._state = req_states.all_token_ids.gpu, req_states.total_len.gpu
        self._announced: dict[str, Any] = {}  # requests that are about to begin
        # Made before vLLM measures how much memory is left for its KV cache.
        self.index: NgramIndex | None = None
        store: SharedStore | None = None
        on_host = options.drafts_on_host(device.type)
        if on_host and options.takes_index():
            self.index = index_for(options, options.max_num_seqs, "numpy")
            if options.ngram.store is not None:
                if not self.sees_requests:
                    raise ValueError(NO_SCOPES.format("add_requests"))
                store = SharedStore(vllm_config, options, options.max_num_seqs, "numpy")
        self.shared_store = store
        self.one_of_many = compare_ranks(vllm_config, options, store)
        self._host: HostDrafting | None = None
        if on_host:
            self._host = HostDrafting(
                options.ngram,
                num_rows=options.max_num_seqs,
                capacity=options.max_model_len,
                most_sampled=self.k + 1,
                device=device,
                lag=vllm_config.max_concurrent_batches - 1,
                index=self.index,
                store=None if store is None else store.held,
            )
            if store is not None:
                store.settle = functools.partial(self._host.settle, SETTLE_S)
                store.scoped = True
            self._newest = torch.arange(self.k + 1, device=device)
        else:
            scratch = workspace("ngram_propose_", options, device)
            self._drafting = Drafting(options.ngram, kind="torch", workspace=scratch)
        self._watch(req_states)
        shape = options.max_num_seqs, self.k
        self._draft_costs = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._gives_costs = False
        """Whether a lookup says what its draft tokens cost."""
        engine = ("index" if self.index else "scan") + (" on the host" if on_host else "")
        self.speaks = start(self, vllm_config, options, method, engine)
        counts = self.speaks and options.metrics
        self._stats = DeviceStats(self, vllm_config, options, self.index) if counts else None

    @or_end
    def _look_up(
        self, input_batch: Any, num_sampled: torch.Tensor, *, int64: bool = False
    ) -> Drafts[torch.Tensor]:
        """Drafts [B, k], filled up (with ``int64`` they are int64), how many tokens were found [B],
        and the length of their match [B]; int32. Where ``_gives_costs``, the first B rows of
        ``_draft_costs`` are theirs."""
        rows = input_batch.idx_mapping
        if self._host is not None:
            if self.shared_store is not None:
                self.shared_store.check_not_skipped()
            token_ids, num_tokens = self._state
            # The lookup ignores rows that are out of range, but reading one is an error.
            read = rows.clamp(0, len(token_ids) - 1)
            at = (num_tokens[read] - num_sampled)[:, None] + self._newest
            newest = token_ids[read[:, None], at.clamp_(0, token_ids.shape[1] - 1)]
            sampled = torch.cat((num_sampled[:, None].to(torch.int32), newest), dim=1)
            found = self._host.propose(np.asarray(input_batch.idx_mapping_np, np.int32), sampled)
            self._draft_costs[: len(rows)] = found.draft_costs
            drafts = found.draft_token_ids
            return Drafts(drafts if int64 else drafts.to(torch.int32), *found[1:3])
        return self._drafting.propose(
            *self._state,
            num_sampled=num_sampled,
            row_indices=rows,
            fill=True,
            draft_costs=self._draft_costs[: len(rows)] if self._gives_costs else None,
            int64=int64,
        )

    @or_end
    def _round_trip(self) -> None:
        """In a dummy run that vLLM times: what a step on the host costs at least."""
        if self._host is not None:
            empty = torch.empty(0, self.k + 2, dtype=torch.int32, device=self.device)
            self._host.propose(np.empty(0, np.int32), empty)

    def _watch(self, req_states: Any) -> None:
        """Notes which rows the runner gives to new requests, and which it takes from others: they
        have finished, or are preempted and begin anew."""
        add_request, remove_request = req_states.add_request, req_states.remove_request
        signature = inspect.signature(add_request)

        @functools.wraps(add_request)  # whose signature another speculator may read
        def added(*args: Any, **kwargs: Any) -> None:
            add_request(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            row = req_states.req_id_to_index[given["req_id"]]
            self._begin(row, given, req_states.max_model_len)  # which may shrink

        def removed(req_id: str, *args: Any, **kwargs: Any) -> Any:
            row = req_states.req_id_to_index.get(req_id)
            if row is not None:
                self._end(row, idle=len(req_states.req_id_to_index) == 1)
            return remove_request(req_id, *args, **kwargs)

        req_states.add_request, req_states.remove_request = added, removed

    @or_end
    def _begin(self, row: int, given: Mapping[str, Any], longest: int) -> None:
        request = self._announced.pop(given["req_id"], None)
        if self._host is None:
            return
        stop = Stop((), given["prompt_len"] + given["max_tokens"], given["prompt_len"])
        scope = 0
        if request is None:
            if self.shared_store is not None:  # it is not known whose it is
                scope = scope_of(f"ngram_npu: unannounced {given['req_id']}")
        else:
            stop = stop_of(stop, request.sampling_params)
            scope = scope_of_request(
                request.lora_request,
                request.sampling_params,
                getattr(request, "cache_salt", None),  # there if it is passed on
            )
        stop = stop._replace(max_length=min(stop.max_length, longest))
        self._host.begin(row, given["all_token_ids"], scope=scope, stop=stop)

    @or_end
    def _end(self, row: int, *, idle: bool) -> None:
        """With ``idle`` no request is left, and so the next step, which would take the end along,
        may never come: the text that waits for it gets into the store now."""
        if self._host is not None:
            self._host.end(row)
            if idle and self.shared_store is not None:
                self._host.flush()


def stop_of(stop: Stop, params: Any) -> Stop:
    """How vLLM's scheduler ends a request for its tokens (``check_stop``), without stop strings,
    which are found elsewhere. ``stop`` says what is known without the sampling parameters."""
    ends = params.stop_token_ids or ()
    if params.eos_token_id is not None:
        ends = *ends, params.eos_token_id
    stop = stop._replace(tokens=tuple(ends))
    if (repetition := params.repetition_detection) is None:
        return stop
    return stop._replace(
        min_output=params.min_tokens,
        min_pattern=repetition.min_pattern_size,
        max_pattern=repetition.max_pattern_size,
        min_count=repetition.min_count,
    )


def is_warm_up(input_batch: Any) -> bool:
    """Whether vLLM's worker has made the requests of this step up to warm its kernels, as
    ``_warmup_0_``. It gives them no other sign; to the ids of others it appends random digits."""
    first = input_batch.req_ids[:1]
    return any(n.startswith("_") and "warmup_" in n and n.endswith("_") for n in first)


def add_requests(stock: Callable[..., None], runner: Any, scheduler_output: Any) -> None:
    """vLLM's ``GPUModelRunner.add_requests`` for a runner whose speculator is to know of them."""
    lookup = getattr(runner.speculator, BESIDE, runner.speculator)
    if isinstance(lookup, RowLookup):
        lookup._announced |= {new.req_id: new for new in scheduler_output.scheduled_new_reqs}
    stock(runner, scheduler_output)


def doubt_of_state(device: torch.device, req_states: Any, kernel: str) -> str:
    """Why the runner's state cannot be looked up in; empty: it can. ``kernel``: the operator that
    the device needs; empty: none."""
    if device.type not in ("cpu", "cuda", "npu"):
        return f"no kernels for {device.type}"
    if kernel and not _library.has_kernel(kernel, device.type):
        return f"no kernels for {device.type}: {_library.backends()[device.type].reason}"
    for name, rank in (("all_token_ids", 2), ("total_len", 1)):
        tensor = getattr(getattr(req_states, name, None), "gpu", None)
        if not isinstance(tensor, torch.Tensor):
            return f"the runner's state has no {name}.gpu"
        found = tensor.dim(), tensor.dtype, tensor.device.type, tensor.stride(-1)
        expected = rank, torch.int32, device.type, 1
        if found != expected:
            return f"{name}.gpu (rank, dtype, device, stride) is {found}, expected {expected}"
    for name in ("add_request", "remove_request", "req_id_to_index"):
        if not hasattr(req_states, name):
            return f"the runner's state has no {name}"
    read = {"req_id", "prompt_len", "all_token_ids", "max_tokens"}
    lacking = ", ".join(sorted(read - {*parameters(req_states.add_request)}))
    return f"add_request takes no {lacking}" if lacking else ""


class NgramSpeculator(RowLookup):
    """Drafts those of the stock speculator unless the options say otherwise, for every request
    ``num_speculative_tokens``: the newest token fills the rest.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """

    _method: Method = "v2"

    # Attributes that the runner reads of any speculator.
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        req_states: Any,
        *args: object,
        **kwargs: object,
    ) -> None:
        options = read_options(vllm_config, self._method)
        speculative = vllm_config.speculative_config
        method = f"{speculative.method}, V2 runner"
        super().__init__(vllm_config, options, device, req_states, method)
        asked = getattr(speculative, "enable_adaptive_verification", False)
        self.enable_adaptive_verification = asked and options.ngram.cost_limit is not None
        """Whether the runner asks how likely each draft token is to be accepted."""
        self._gives_costs = self.enable_adaptive_verification
        if self._gives_costs:
            shape = options.max_num_seqs, self.k
            self.draft_token_confidence_probs = torch.zeros(shape, device=device)
            """[max_num_seqs, k] in the order of the batch: of each token, if those before it are
            accepted."""

    def init_cudagraph_manager(
        self, cudagraph_mode: object, *args: object, **kwargs: object
    ) -> None:
        """Does nothing: the lookup is not part of the model's graphs."""

    def capture(self, *args: object, **kwargs: object) -> None:
        """Does nothing: there is nothing to capture."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: torch.Tensor,
        *args: object,
        dummy_run: bool = False,
        **kwargs: object,
    ) -> torch.Tensor:
        """[B, num_speculative_tokens] int64, for the requests of a step, whose sampled tokens are
        already in the buffer. With ``num_sampled`` 0 a request is still in prefill; a dummy run is
        a warm-up without requests."""
        if dummy_run or is_warm_up(input_batch):
            if self.enable_adaptive_verification:
                self._round_trip()
            shape = input_batch.num_reqs, self.k
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        started = time.perf_counter()
        rows = input_batch.idx_mapping
        drafts, counts, match_len = self._look_up(input_batch, num_sampled, int64=True)
        if self.enable_adaptive_verification:
            confidence = self.draft_token_confidence_probs[: len(rows)]
            torch.exp2(self._draft_costs[: len(rows)] / -16, out=confidence)
        if self._stats is not None:
            values = self._state[1][rows], num_sampled, match_len, counts
            self._stats.observe_tensors(started, input_batch.idx_mapping_np, *values)
        return drafts.to(torch.int64)


def in_place_of(stock: type, refuse: Callable[[str], None], method: Method = "v2") -> type:
    """The class that replaces the stock speculator. It derives from it, so that the runner also
    finds members that this module does not know. The stock constructor does not run, because it
    allocates what the stock lookup needs; the attributes that it sets from its arguments are set.
    If the operators cannot use the runner's state, it creates a stock speculator and passes the
    reason to ``refuse``."""

    class Speculator(NgramSpeculator, stock):  # type: ignore[misc]
        _method = method

        def __new__(
            cls, vllm_config: Any, device: torch.device, req_states: Any, *args: Any, **kwargs: Any
        ) -> Any:
            on_host = read_options(vllm_config, method).drafts_on_host(device.type)
            doubt = doubt_of_state(device, req_states, "" if on_host else "ngram_propose")
            if not doubt:
                return super().__new__(cls)
            refuse(doubt)
            return stock(vllm_config, device, req_states, *args, **kwargs)

        def __init__(
            self, vllm_config: Any, device: torch.device, req_states: Any, *args: Any, **kwargs: Any
        ) -> None:
            self.vllm_config, self.req_states = vllm_config, req_states
            self.speculative_config = vllm_config.speculative_config
            self.num_speculative_steps = self.speculative_config.num_speculative_tokens
            self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
            self.max_model_len = vllm_config.model_config.max_model_len
            super().__init__(vllm_config, device, req_states, *args, **kwargs)

    return Speculator
