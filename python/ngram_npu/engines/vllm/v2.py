"""Speculators for vLLM's V2 model runner: n-gram drafts in place of its ``NgramGPUSpeculator``, and
n-gram drafts with a neural drafter.

The runner keeps a request in one row of its token buffer for as long as it runs, and appends the
sampled tokens before it asks for drafts. So a step on the device is one lookup, and two operators
more with a store in its memory. With an index, and so with a ladder or a store in host memory, the
host drafts in the order of the device's stream. The row of a request is its slot in index and
store. No step waits for the device.

With a neural drafter, each row of a step gets one of two drafts: the neural one, or the n-gram
draft where more accepted tokens are expected of it. The choice depends on the request's text and on
how many tokens of its drafts were accepted, never on a token that was sampled for a draft, so
rejection sampling does not change the distribution of the text. All tensor-parallel ranks choose
the same, because they get the same data.
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
from ngram_npu.config import default_match_costs
from ngram_npu.drafting import Drafting, Drafts
from ngram_npu.engines.vllm.feed.delivery import ROW_TOKENS
from ngram_npu.engines.vllm.feed.insertion import (
    insert_texts,
    make_device_inserter,
    make_job_inserter,
)
from ngram_npu.engines.vllm.options import Method, Options, read_options
from ngram_npu.engines.vllm.patching import class_mismatch, logger, parameter_names
from ngram_npu.engines.vllm.sharing import (
    UNKNOWN_RUNNER,
    SharedStore,
    compare_ranks,
    exit_worker_on_error,
)
from ngram_npu.engines.vllm.stats import DeviceStats, log_start
from ngram_npu.engines.vllm.v1_device import make_workspace
from ngram_npu.engines.vllm.v1_sync import index_for
from ngram_npu.engines.vllm.v2_device_store import DeviceStoreDrafts
from ngram_npu.host_drafting import HostDrafting, Stop
from ngram_npu.index import NgramIndex
from ngram_npu.ops import gather_sampled_tokens_, merge_drafts_
from ngram_npu.store import scope_of

LOOKUP_ATTRIBUTE = "ngram_npu"
"""Attribute of a neural speculator that holds its :class:`NeuralDrafterWrapper`."""

SETTLE_S = 10.0
"""How long the end of an engine waits for the last jobs before the store is saved."""

NEURAL_SPECULATORS = {
    "draft_model": "StandaloneARSpeculator",
    "eagle": "EagleSpeculator",
    "eagle3": "EagleSpeculator",
    "mtp": "MTPSpeculator",
}
"""vLLM's class for each supported method."""

NGRAM = 2
"""The source of a row's draft, in ``merge_drafts_``, if it is an n-gram draft."""
NO_TOKEN = 255
"""The cost at a position without a draft token."""


class RowLookup:
    """Base of the speculators. Drafts are padded, since the runner verifies all of their tokens."""

    has_request_data = False
    """Whether the runner passes on the scheduler's data of new requests, which has their scopes."""

    def __init__(
        self, vllm_config: Any, options: Options, device: torch.device, req_states: Any, method: str
    ) -> None:
        self.k, self.device = options.ngram.k, device
        self._state = req_states.all_token_ids.gpu, req_states.total_len.gpu
        self._announced: dict[str, Any] = {}  # data of requests that will be added next
        # Allocated before vLLM measures how much memory is left for its KV cache.
        self.index: NgramIndex | None = None
        store: SharedStore | None = None
        on_host = options.drafts_on_host(device.type)
        if on_host and options.uses_index():
            self.index = index_for(options, options.max_num_seqs, "numpy")
        if options.has_store:
            if not self.has_request_data:
                raise ValueError(UNKNOWN_RUNNER.format("add_requests"))
            store = SharedStore(vllm_config, options, options.max_num_seqs, "numpy", device)
            store.has_scopes = True
        self.shared_store = store
        self.has_other_ranks = compare_ranks(vllm_config, options, store)
        self._host: HostDrafting | None = None
        self._store_drafts: DeviceStoreDrafts | None = None
        if on_host:
            self._host = HostDrafting(
                options.ngram,
                num_rows=options.max_num_seqs,
                capacity=options.max_model_len,
                max_sampled=self.k + 1,
                device=device,
                lag=vllm_config.max_concurrent_batches - 1,
                index=self.index,
                store=None if store is None else store.host_contents,
                num_text_rows=0 if store is None else store.num_text_rows,
                text_capacity=ROW_TOKENS,
            )
            if store is not None:
                store.text_inserter = make_job_inserter(store, self._host)
                store.settle = functools.partial(self._host.settle, SETTLE_S)
            shape = options.max_num_seqs, self.k + 2
            self._sampled = torch.zeros(shape, dtype=torch.int32, device=device)
            has_kernel = _library.has_kernel("gather_sampled_tokens_", device.type)
            self._gather = gather_sampled_tokens_ if has_kernel else gather_with_torch
        else:
            workspace = make_workspace("ngram_propose_", options, device)
            self._drafting = Drafting(options.ngram, kind="torch", workspace=workspace)
            if store is not None:
                contents = store.device_contents
                self._store_drafts = DeviceStoreDrafts(contents, *self._state, self.k + 1)
                store.text_inserter = make_device_inserter(store)
        self._watch_rows(req_states)
        shape = options.max_num_seqs, self.k
        self._draft_costs = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._no_drafts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._no_counts = torch.zeros(options.max_num_seqs, dtype=torch.int32, device=device)
        self._computes_costs = False
        """Whether a lookup writes the costs of its draft tokens."""
        engine = ("index" if self.index else "scan") + (" on the host" if on_host else "")
        engine += " and store on the device" if self._store_drafts else ""
        self.is_logging_rank = log_start(self, vllm_config, options, method, engine)
        counts = self.is_logging_rank and options.metrics
        self._stats = DeviceStats(self, vllm_config, options, self.index) if counts else None

    @exit_worker_on_error
    def _look_up(
        self,
        input_batch: Any,
        num_sampled: torch.Tensor,
        k: int | None = None,
        *,
        int64: bool = False,
    ) -> Drafts[torch.Tensor]:
        """Returns padded drafts [B, self.k] (int64 if ``int64`` is set), the number of tokens
        before the padding [B], and the length of their match [B]; int32. If ``_computes_costs``,
        the first B rows of ``_draft_costs`` are their costs.

        Args:
            k: Number of draft tokens that the runner will verify (default: all). With 0 there is no
                lookup, and the results are buffers that later steps reuse; the index and the store
                are updated.
        """
        rows = input_batch.idx_mapping
        scopes: torch.Tensor | None = None
        if self._store_drafts is not None:
            scopes = self._store_drafts.append(rows, num_sampled)
        if k == 0:
            self._update_host(input_batch, num_sampled)
            drafts, counts = self._no_drafts[: len(rows)], self._no_counts[: len(rows)]
            return Drafts(drafts if int64 else drafts.to(torch.int32), counts, counts)
        if self._host is not None:
            sampled = self._gather_sampled(rows, num_sampled)
            result = self._host.propose(np.asarray(input_batch.idx_mapping_np, np.int32), sampled)
            if self._computes_costs:
                self._draft_costs[: len(rows)] = result.draft_costs
            drafts = result.draft_token_ids
            return Drafts(drafts if int64 else drafts.to(torch.int32), *result[1:3])
        from_rows: Drafts[torch.Tensor] = self._drafting.propose(
            *self._state,
            num_sampled=num_sampled,
            row_indices=rows,
            fill=True,
            draft_costs=self._draft_costs[: len(rows)] if self._computes_costs else None,
            int64=int64,
        )
        if self._store_drafts is not None and scopes is not None:
            self._store_drafts.replace(rows, num_sampled, scopes, from_rows)
        return from_rows

    def _update_host(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        """Passes the sampled tokens to the index and the store, without a lookup."""
        if self._host is not None:
            sampled = self._gather_sampled(input_batch.idx_mapping, num_sampled)
            self._host.update(np.asarray(input_batch.idx_mapping_np, np.int32), sampled)

    def _gather_sampled(self, rows: torch.Tensor, num_sampled: torch.Tensor) -> torch.Tensor:
        """Returns [B, 2 + k] int32: the number of sampled tokens, then the tokens."""
        if self.shared_store is not None:
            self.shared_store.check_not_skipped()
        sampled = self._sampled[: len(rows)]
        self._gather(*self._state, num_sampled, row_indices=rows, sampled_tokens=sampled)
        return sampled

    @exit_worker_on_error
    def _run_empty_step(self) -> None:
        """Runs an empty step on the host, in a dummy run that vLLM times."""
        if self._host is not None:
            empty = torch.empty(0, self.k + 2, dtype=torch.int32, device=self.device)
            self._host.propose(np.empty(0, np.int32), empty)

    def _watch_rows(self, req_states: Any) -> None:
        """Observes which rows the runner assigns to requests, and which it frees because a request
        has finished or is preempted. A preempted request begins again."""
        add_request, remove_request = req_states.add_request, req_states.remove_request
        signature = inspect.signature(add_request)

        @functools.wraps(add_request)  # another speculator may read its signature
        def add(*args: Any, **kwargs: Any) -> None:
            add_request(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            row = req_states.req_id_to_index[arguments["req_id"]]
            self._begin(row, arguments, req_states.max_model_len)  # which vLLM may lower

        def remove(req_id: str, *args: Any, **kwargs: Any) -> Any:
            row = req_states.req_id_to_index.get(req_id)
            if row is not None:
                self._end(row, idle=len(req_states.req_id_to_index) == 1)
            return remove_request(req_id, *args, **kwargs)

        req_states.add_request, req_states.remove_request = add, remove

    @exit_worker_on_error
    def _begin(self, row: int, arguments: Mapping[str, Any], max_length: int) -> None:
        """A request begins in ``row``. ``arguments`` are those of ``add_request``."""
        request = self._announced.pop(arguments["req_id"], None)
        scope, prompt_scope = 0, None
        if self.shared_store is not None and request is not None:
            scope = self.shared_store.find_scope(
                request.lora_request,
                request.sampling_params,
                getattr(request, "cache_salt", None),  # exists if it is passed on
            )
            prompt_scope = self.shared_store.find_prompt_scope(scope, request.sampling_params)
        elif self.shared_store is not None:  # its owner is unknown, so it shares with no request
            scope = scope_of(f"ngram_npu: unannounced {arguments['req_id']}")
        if self._store_drafts is not None:
            self._store_drafts.begin(row, scope)
        if self._host is None:
            return
        prompt_len = arguments["prompt_len"]
        stop = Stop((), prompt_len + arguments["max_tokens"], prompt_len)
        if request is not None:
            stop = add_stop_rules(stop, request.sampling_params)
        stop = stop._replace(max_length=min(stop.max_length, max_length))
        text = arguments["all_token_ids"]
        self._host.begin(row, text, scope=scope, prompt_scope=prompt_scope, stop=stop)

    @exit_worker_on_error
    def _end(self, row: int, *, idle: bool) -> None:
        """The request in ``row`` ends. With ``idle`` no request is left, so there may be no further
        step that stores its text: it is stored now."""
        if self._host is not None:
            self._host.end(row)
            if idle and self.shared_store is not None:
                self._host.flush()


def gather_with_torch(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    *,
    row_indices: torch.Tensor,
    sampled_tokens: torch.Tensor,
) -> None:
    """Does what ``gather_sampled_tokens_`` does for valid rows, on a device for which this build
    has no kernels. The host drafts for such a device too."""
    rows = row_indices.clamp(0, len(token_ids) - 1)  # reading another row is an error
    newest = torch.arange(sampled_tokens.shape[1] - 1, device=token_ids.device)
    columns = (num_tokens[rows] - num_sampled)[:, None] + newest
    columns.clamp_(0, token_ids.shape[1] - 1)
    sampled_tokens[:, 0] = num_sampled
    sampled_tokens[:, 1:] = token_ids[rows[:, None], columns]


def add_stop_rules(stop: Stop, params: Any) -> Stop:
    """Adds the rules of the sampling parameters by which vLLM's scheduler ends a request for its
    tokens (``check_stop``). Stop strings are found elsewhere."""
    tokens = params.stop_token_ids or ()
    if params.eos_token_id is not None:
        tokens = *tokens, params.eos_token_id
    stop = stop._replace(tokens=tuple(tokens))
    if (repetition := params.repetition_detection) is None:
        return stop
    return stop._replace(
        min_output=params.min_tokens,
        min_pattern=repetition.min_pattern_size,
        max_pattern=repetition.max_pattern_size,
        min_count=repetition.min_count,
    )


def is_warm_up(input_batch: Any) -> bool:
    """Returns whether vLLM's worker made up this step's requests to warm its kernels. It names them
    like ``_warmup_0_``; to the ids of others it appends random digits."""
    first = input_batch.req_ids[:1]
    return any(n.startswith("_") and "warmup_" in n and n.endswith("_") for n in first)


def add_requests(stock: Callable[..., None], runner: Any, scheduler_output: Any) -> None:
    """Wraps ``GPUModelRunner.add_requests``: passes the data of new requests, and fed texts, to
    the speculator. The runner calls the function in every step, also without requests."""
    lookup = getattr(runner.speculator, LOOKUP_ATTRIBUTE, runner.speculator)
    if isinstance(lookup, RowLookup):
        lookup._announced |= {new.req_id: new for new in scheduler_output.scheduled_new_reqs}
        insert_texts(lookup, scheduler_output)
    stock(runner, scheduler_output)


def unsupported_state_reason(device: torch.device, req_states: Any, kernel: str) -> str:
    """Returns why the runner's state cannot be looked up in; empty if it can.

    Args:
        kernel: The operator that the device must have; empty: none.
    """
    if device.type not in ("cpu", "cuda", "npu"):
        return f"no kernels for {device.type}"
    if kernel and not _library.has_kernel(kernel, device.type):
        return f"no kernels for {device.type}: {_library.backends()[device.type].reason}"
    for name, rank in (("all_token_ids", 2), ("total_len", 1)):
        tensor = getattr(getattr(req_states, name, None), "gpu", None)
        if not isinstance(tensor, torch.Tensor):
            return f"the runner's state has no {name}.gpu"
        actual = tensor.dim(), tensor.dtype, tensor.device.type, tensor.stride(-1)
        expected = rank, torch.int32, device.type, 1
        if actual != expected:
            return f"{name}.gpu (rank, dtype, device, stride) is {actual}, expected {expected}"
    for name in ("add_request", "remove_request", "req_id_to_index"):
        if not hasattr(req_states, name):
            return f"the runner's state has no {name}"
    read = {"req_id", "prompt_len", "all_token_ids", "max_tokens"}
    missing = ", ".join(sorted(read - {*parameter_names(req_states.add_request)}))
    return f"add_request takes no {missing}" if missing else ""


class NgramSpeculator(RowLookup):
    """Drafts as the stock speculator unless options change it: ``num_speculative_tokens`` for every
    request, padded with the newest token."""

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
        # The attributes that the stock constructor, which does not run, sets from its arguments.
        self.vllm_config, self.req_states = vllm_config, req_states
        self.speculative_config = speculative = vllm_config.speculative_config
        self.num_speculative_steps = speculative.num_speculative_tokens
        self.max_num_reqs, self.max_model_len = options.max_num_seqs, options.max_model_len
        method = f"{speculative.method}, V2 runner"
        super().__init__(vllm_config, options, device, req_states, method)
        adaptive = getattr(speculative, "enable_adaptive_verification", False)
        self.enable_adaptive_verification = adaptive and options.ngram.cost_limit is not None
        """Whether the runner reads the probability that each draft token is accepted."""
        self._computes_costs = self.enable_adaptive_verification
        if self._computes_costs:
            shape = options.max_num_seqs, self.k
            self.draft_token_confidence_probs = torch.zeros(shape, device=device)
            """[max_num_seqs, k] in the order of the batch: the probability that a token is accepted
            if those before it are."""

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
        num_speculative_tokens: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Returns drafts [B, k] int64 for the requests of a step, which the runner may write to.
        Their sampled tokens are already in the buffer; those with ``num_sampled`` 0 are still in
        prefill. A dummy run is a warm-up without requests.

        Args:
            num_speculative_tokens: Number of draft tokens that the runner will verify, at most k
                (default: k); none with ``skip_drafts``, which only newer versions pass.
        """
        if dummy_run or is_warm_up(input_batch):
            if self.enable_adaptive_verification:
                self._run_empty_step()
            shape = input_batch.num_reqs, self.k
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        started = time.perf_counter()
        rows = input_batch.idx_mapping
        k = 0 if kwargs.get("skip_drafts") else num_speculative_tokens
        drafts, counts, match_len = self._look_up(input_batch, num_sampled, k, int64=True)
        if k == 0:
            return drafts
        if self.enable_adaptive_verification:
            confidence = self.draft_token_confidence_probs[: len(rows)]
            torch.exp2(self._draft_costs[: len(rows)] / -16, out=confidence)
        if self._stats is not None:
            if k is not None:
                counts = counts.clamp(max=k)  # the runner verifies no more
            values = self._state[1][rows], num_sampled, match_len, counts
            self._stats.observe_tensors(started, input_batch.idx_mapping_np, *values)
        return drafts.to(torch.int64)


def make_replacement(stock: type, refuse: Callable[[str], None], method: Method = "v2") -> type:
    """Returns the class that replaces the stock speculator.

    It derives from it, so that the runner also finds members that this module does not know. The
    stock constructor does not run, because it allocates what the stock lookup needs. If the
    operators cannot use the runner's state, a stock speculator is created, and ``refuse`` gets the
    reason.
    """

    class Speculator(NgramSpeculator, stock):  # type: ignore[misc]
        _method = method

        def __new__(
            cls, vllm_config: Any, device: torch.device, req_states: Any, *args: Any, **kwargs: Any
        ) -> Any:
            options = read_options(vllm_config, method)
            kernel = "device_store_append_" if options.device_store else "ngram_propose"
            if options.drafts_on_host(device.type):
                kernel = ""
            reason = unsupported_state_reason(device, req_states, kernel)
            if not reason:
                return super().__new__(cls)
            refuse(reason)
            return stock(vllm_config, device, req_states, *args, **kwargs)

    return Speculator


class NeuralDrafterWrapper(RowLookup):
    """Adds n-gram drafts to those of one neural speculator by replacing its ``propose``. The
    instance keeps its class, so that the runner treats it as before. ``neural_acceptance`` is that
    of ``merge_drafts_`` (docs/ops/merge_drafts.md)."""

    def __init__(
        self, vllm_config: Any, options: Options, device: torch.device, req_states: Any, neural: Any
    ) -> None:
        on_device = device.type != "cpu" and not options.drafts_on_host(device.type)
        rows = req_states.all_token_ids
        if on_device and options.dense_rows and getattr(rows, "write_contents", None) is not None:
            # The rows, which are still empty, move from host memory to the device's, as for vLLM's
            # own n-gram method.
            shape = tuple(rows.gpu.shape)
            req_states.all_token_ids = type(rows)(shape, dtype=rows.dtype, device=rows.device)
        method = f"{vllm_config.speculative_config.method}, V2 runner, with n-gram drafts"
        super().__init__(vllm_config, options, device, req_states, method)
        shape = options.max_num_seqs, 2
        self.neural_acceptance = torch.zeros(shape, dtype=torch.int32, device=device)
        self._neural, self._neural_propose = neural, neural.propose
        self._computes_costs = options.ngram.cost_limit is not None
        self._steps = torch.arange(self.k, device=device)
        self._match_costs = torch.from_numpy(default_match_costs().copy()).to(device)
        self._threshold = round(options.beside_threshold * 65536)
        self._logits: torch.Tensor | None = None
        """[rows + 1, k, V]: the speculator's logits, and a spare row that absorbs writes."""
        if (logits := neural.draft_logits) is not None:
            self._logits = logits.new_zeros(len(logits) + 1, *logits.shape[1:])
            self._logits[:-1] = logits
            neural.draft_logits = self._logits[:-1]
            self._zero = logits.new_zeros(())
        self._adaptive = bool(getattr(neural, "enable_adaptive_verification", False))
        if self._adaptive:
            self._observe_verification = neural.observe_verification
            neural.observe_verification = self.observe_verification
        neural.propose = self.propose
        setattr(neural, LOOKUP_ATTRIBUTE, self)

    def _begin(self, row: int, arguments: Mapping[str, Any], max_length: int) -> None:
        self.neural_acceptance[row].zero_()
        super()._begin(row, arguments, max_length)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: object,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Returns for each row the speculator's draft, or the n-gram draft if more accepted tokens
        are expected of it."""
        hidden = attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        kwargs |= {"dummy_run": dummy_run, "num_speculative_tokens": num_speculative_tokens}
        neural: torch.Tensor = self._neural_propose(
            input_batch, *hidden, num_sampled, num_rejected, *args, **kwargs
        )
        if dummy_run or is_warm_up(input_batch):
            if self._adaptive:
                self._run_empty_step()
            return neural
        started = time.perf_counter()
        k = self.k if num_speculative_tokens is None else num_speculative_tokens
        k = 0 if kwargs.get("skip_drafts") else k  # only newer versions pass it
        rows = input_batch.idx_mapping
        ngram, num_ngram, match_len = self._look_up(input_batch, num_sampled, k)
        limit = None
        if k < self.k:  # the runner verifies only k tokens
            num_ngram = num_ngram.clamp(max=k)
            limit = torch.full((len(neural),), k, dtype=torch.int32, device=self.device)
        drafts: torch.Tensor
        drafts, num_drafts, source = merge_drafts_(
            neural,
            ngram,
            num_ngram,
            match_len,
            num_neural_draft_tokens=limit,
            draft_costs=self._draft_costs[: len(neural)] if self._computes_costs else None,
            neural_draft_costs=self._neural_draft_costs(neural),
            match_costs=None if self._computes_costs else self._match_costs,
            row_indices=rows,
            num_sampled=num_sampled,
            num_scheduled_drafts=(num_sampled + num_rejected).sub_(1),
            neural_acceptance=self.neural_acceptance,
            threshold=self._threshold,
        )
        if self._logits is None and not self._adaptive and self._stats is None:
            return drafts
        replaced = source == NGRAM
        if self._logits is not None:
            self._make_one_hot(rows, drafts, replaced)
        if self._adaptive:
            self._write_confidence(match_len, num_ngram, replaced)
        if self._stats is not None:
            match_len = match_len * replaced  # 0 marks a neural draft
            num_drafts = num_drafts * (num_sampled > 0)
            values = self._state[1][rows], num_sampled, match_len, num_drafts
            self._stats.observe_tensors(started, input_batch.idx_mapping_np, *values)
        return drafts

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Passes the outcome of neural drafts to the speculator, not that of n-gram drafts."""
        is_neural = self.neural_acceptance[idx_mapping, 1] > 1
        self._observe_verification(idx_mapping, num_sampled * is_neural, num_rejected * is_neural)

    def _neural_draft_costs(self, neural: torch.Tensor) -> torch.Tensor | None:
        """Returns the costs of the neural tokens as vLLM predicts them; None if these tokens are
        sampled, since the choice would then depend on them."""
        if not self._adaptive or self._logits is not None:
            return None
        predicted = self._neural.draft_token_confidence_probs[: len(neural), : neural.shape[1]]
        costs: torch.Tensor = (predicted.log2() * -16).round_().clamp_(0, NO_TOKEN)
        return costs.to(torch.uint8)

    def _make_one_hot(
        self, rows: torch.Tensor, drafts: torch.Tensor, replaced: torch.Tensor
    ) -> None:
        """Gives n-gram draft tokens probability 1 in rejection sampling. Rows that keep their
        neural draft write to the spare row instead."""
        logits = self._logits
        assert logits is not None
        written = torch.where(replaced, rows.long(), len(logits) - 1)
        logits.index_fill_(0, written, float("-inf"))
        tokens = drafts.clamp(0, logits.shape[2] - 1)
        logits.index_put_((written[:, None], self._steps, tokens), self._zero)

    def _write_confidence(
        self, match_len: torch.Tensor, num_ngram: torch.Tensor, replaced: torch.Tensor
    ) -> None:
        """Writes how likely n-gram draft tokens are to be accepted, by which vLLM chooses what to
        verify."""
        if self._computes_costs:
            costs = self._draft_costs[: len(match_len)]
        else:
            lengths = (match_len[:, None] + self._steps).clamp_(max=len(self._match_costs) - 1)
            costs = self._match_costs[lengths]
        costs = costs.masked_fill(self._steps >= num_ngram[:, None], NO_TOKEN)
        probs = self._neural.draft_token_confidence_probs[: len(match_len)]
        torch.where(replaced[:, None], torch.exp2(costs / -16), probs, out=probs)


def attach_ngram_drafts(
    vllm_config: Any, options: Options, device: torch.device, req_states: Any, neural: Any
) -> str:
    """Adds n-gram drafts to those of vLLM's speculator ``neural``. Returns why it cannot, and then
    changes nothing; empty if it did."""
    reason = unsupported_reason(vllm_config, options, device, req_states, neural)
    if not reason:
        wrapper = NeuralDrafterWrapper(vllm_config, options, device, req_states, neural)
        if wrapper.is_logging_rank:
            logger.info(
                f"ngram_npu: beside=True: a request's n-gram draft replaces the one of "
                f"{type(neural).__name__} where it promises more accepted tokens than that "
                "request's neural drafts had, and at least "
                f"{options.beside_threshold:g} (beside_threshold)"
            )
    return reason


def unsupported_reason(
    vllm_config: Any, options: Options, device: torch.device, req_states: Any, neural: Any
) -> str:
    """Returns why n-gram drafts cannot be added to this speculator; empty if they can."""
    method, name = vllm_config.speculative_config.method, type(neural).__name__
    if method not in NEURAL_SPECULATORS:
        return f"method is {method!r}, expected one of {', '.join(NEURAL_SPECULATORS)}"
    if name != NEURAL_SPECULATORS[method]:
        return f"{method!r} is served by {name}, expected {NEURAL_SPECULATORS[method]}"
    methods = "propose", "observe_verification"
    if mismatch := class_mismatch(name, type(neural), NeuralDrafterWrapper, *methods):
        return mismatch
    if getattr(neural, "draft_watermarker", None) is not None:
        return "drafts are watermarked, which n-gram drafts cannot be"
    if not hasattr(neural, "draft_logits"):
        return f"{name} has no draft_logits"
    if neural.draft_logits is not None:
        shape = tuple(neural.draft_logits.shape)
        tokens = vllm_config.model_config.get_vocab_size()
        if len(shape) != 3 or shape[1] != options.ngram.k or shape[2] < tokens:
            expected = f"(rows, {options.ngram.k}, {tokens} or more)"
            return f"draft_logits have shape {shape}, expected {expected}"
    return unsupported_state_reason(device, req_states, "merge_drafts_")
