"""Speculators for vLLM's V2 model runner, in place of its ``NgramGPUSpeculator``.

The runner keeps a request in one row of its token buffer for as long as it runs, and appends the
sampled tokens before it asks for drafts. So a step is one lookup, and two operators more with a
store. The row of a request is its slot in the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ngram_npu import _library
from ngram_npu.engines.vllm.drafter import ATTRIBUTE, Drafter
from ngram_npu.engines.vllm.options import Method, Options, read_options
from ngram_npu.engines.vllm.ranks import exit_worker_on_error
from ngram_npu.engines.vllm.request_scopes import UNKNOWN_RUNNER, require_request_checks
from ngram_npu.proposer import Drafts


class RowDrafter(Drafter):
    """Drafts for the rows of the V2 runner, which verifies all tokens of a draft."""

    has_request_data = False
    """Whether the runner passes on the scheduler's data of new requests, and their rows."""

    def __init__(
        self, vllm_config: Any, options: Options, device: torch.device, req_states: Any, label: str
    ) -> None:
        if options.store:
            require_request_checks()
            if not self.has_request_data:
                raise ValueError(UNKNOWN_RUNNER.format("add_requests"))
        super().__init__(vllm_config, options, device, label, pads=True)
        self._rows = req_states.all_token_ids.gpu, req_states.total_len.gpu
        if options.store and len(self._rows[0]) > options.max_num_seqs:
            raise ValueError(
                f"ngram_npu: store: expected at most {options.max_num_seqs} rows, max_num_seqs, "
                f"got {len(self._rows[0])}"
            )
        self._scopes = torch.zeros(len(self._rows[0]), dtype=torch.int64, device=device)
        shape = options.max_num_seqs, self.k
        self._no_drafts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._no_counts = torch.zeros(options.max_num_seqs, dtype=torch.int32, device=device)

    def draft(
        self, rows: torch.Tensor, num_sampled: torch.Tensor, k: int | None, *, int64: bool = False
    ) -> Drafts[torch.Tensor]:
        """Returns drafts [B, self.k] for these rows.

        Args:
            k: Number of draft tokens that the runner will verify (default: all). With 0 there is no
                lookup, and the results are buffers that later steps reuse; text is stored.
        """
        scopes = None
        if self._store is not None:
            # The operators ignore rows out of range, but reading their scopes is an error.
            scopes = self._scopes[rows.clamp(0, len(self._scopes) - 1)]
        if k != 0:
            return self.step(*self._rows, rows, num_sampled, scopes=scopes, int64=int64)
        self.store_text(*self._rows, rows, num_sampled, scopes)
        drafts, counts = self._no_drafts[: len(rows)], self._no_counts[: len(rows)]
        return Drafts(drafts if int64 else drafts.to(torch.int32), counts, counts)

    @exit_worker_on_error
    def begin(self, row: int, request: Any) -> None:
        """A request, also one that was preempted, begins in ``row``."""
        if self._store is not None:
            self._store.begin_requests(row)
            self._scopes[row] = self.find_scope(request)


def add_requests(stock: Callable[..., None], runner: Any, scheduler_output: Any) -> None:
    """Wraps ``GPUModelRunner.add_requests``: passes the scheduler's output, and the rows of new
    requests, to the speculator. The runner calls the function in every step, also without requests.
    """
    stock(runner, scheduler_output)
    drafter = getattr(runner.speculator, ATTRIBUTE, None)
    if isinstance(drafter, RowDrafter):
        for request in scheduler_output.scheduled_new_reqs:
            drafter.begin(runner.req_states.req_id_to_index[request.req_id], request)
        drafter.begin_step(scheduler_output)


def unsupported_state_reason(device: torch.device, req_states: Any, kernel: str) -> str:
    """Returns why the runner's state cannot be looked up in; empty if it can.

    Args:
        kernel: The operator that the device must have.
    """
    if device.type not in ("cpu", "cuda", "npu"):
        return f"no kernels for {device.type}"
    if not _library.has_kernel(kernel, device.type):
        return f"no kernels for {device.type}: {_library.backends()[device.type].reason}"
    for name, rank in (("all_token_ids", 2), ("total_len", 1)):
        tensor = getattr(getattr(req_states, name, None), "gpu", None)
        if not isinstance(tensor, torch.Tensor):
            return f"the runner's state has no {name}.gpu"
        actual = tensor.dim(), tensor.dtype, tensor.device.type, tensor.stride(-1)
        expected = rank, torch.int32, device.type, 1
        if actual != expected:
            return f"{name}.gpu (rank, dtype, device, stride) is {actual}, expected {expected}"
    if not hasattr(req_states, "req_id_to_index"):
        return "the runner's state has no req_id_to_index"
    return ""


class NgramSpeculator:
    """Drafts ``num_speculative_tokens`` tokens for every request."""

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
        self.vllm_config, self.device, self.req_states = vllm_config, device, req_states
        self.speculative_config = speculative = vllm_config.speculative_config
        self.num_speculative_steps = speculative.num_speculative_tokens
        self.max_num_reqs, self.max_model_len = options.max_num_seqs, options.max_model_len
        label = f"{speculative.method}, V2 runner"
        self.ngram_npu = RowDrafter(vllm_config, options, device, req_states, label)
        self.enable_adaptive_verification = bool(
            getattr(speculative, "enable_adaptive_verification", False)
        )
        """Whether the runner reads the probability that each draft token is accepted."""
        if self.enable_adaptive_verification:
            shape = options.max_num_seqs, self.ngram_npu.k
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
        drafter = self.ngram_npu
        if dummy_run:
            shape = input_batch.num_reqs, drafter.k
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        started = time.perf_counter()
        k = 0 if kwargs.get("skip_drafts") else num_speculative_tokens
        drafts = drafter.draft(input_batch.idx_mapping, num_sampled, k, int64=True)
        tokens: torch.Tensor = drafts.draft_token_ids
        if k == 0:
            return tokens
        if self.enable_adaptive_verification:
            confidence = self.draft_token_confidence_probs[: len(tokens)]
            confidence.copy_(drafter.costs.compute_probabilities(*_get_cost_columns(drafts)))
        if drafter.stats is not None:
            counts = drafts.num_draft_tokens
            counts = counts if k is None else counts.clamp(max=k)  # the runner verifies no more
            drafter.stats.observe(started, num_sampled, counts)
        return tokens


def _get_cost_columns(drafts: Drafts[torch.Tensor]) -> tuple[Any, Any, Any]:
    return drafts.match_len, drafts.num_draft_tokens, drafts.agreement


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
            kernel = "store_append_" if options.store else "ngram_propose"
            reason = unsupported_state_reason(device, req_states, kernel)
            if not reason:
                return super().__new__(cls)
            refuse(reason)
            return stock(vllm_config, device, req_states, *args, **kwargs)

    return Speculator
