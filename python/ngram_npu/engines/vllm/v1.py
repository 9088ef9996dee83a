"""Contains the drafters of vLLM's V1 runner.

The synchronous runner (``method="custom_class"`` and ``"ngram"``) has its rows in an array on the
host and takes drafts as lists. The asynchronous one (``"ngram_gpu"``) has them on its device and
verifies ``num_speculative_tokens`` tokens of every request. Requests move between the rows of both.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ngram_npu._C as _C
from ngram_npu.engines.vllm.drafter import ATTRIBUTE, Drafter
from ngram_npu.engines.vllm.options import Method, Options, read_options
from ngram_npu.engines.vllm.patching import (
    RUNNER,
    find_argument,
    is_wrapped,
    logger,
    parameter_names,
    wrap_function,
)
from ngram_npu.engines.vllm.ranks import exit_worker_on_error
from ngram_npu.engines.vllm.request_scopes import UNKNOWN_RUNNER, require_request_checks
from ngram_npu.ops import correct_num_computed_tokens_, prepare_next_token_ids
from ngram_npu.store import Scope
from ngram_npu.tensors import Int32Array


class StockNgramProposer:
    """Replaces vLLM's ``NgramProposer``."""

    _method: Method = "ngram"

    def __init__(self, vllm_config: Any) -> None:
        options = read_options(vllm_config, self._method)
        self.k = options.ngram.k
        self._keep_drafting, self._max_model_len = options.keep_drafting, options.max_model_len
        check_runner(options, getattr(sys.modules.get(RUNNER), "GPUModelRunner", None))
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
        self.k, self._runner = options.ngram.k, runner
        self.ngram_npu = BatchDrafter(vllm_config, options, device, runner, pads=True)

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
        scopes = self.ngram_npu.find_scopes(len(num_tokens_no_spec))
        step = self.ngram_npu.step_sampled(
            token_ids_gpu, num_tokens_no_spec, sampled, k=k, scopes=scopes
        )
        if self.ngram_npu.stats is not None and k > 0:
            self.ngram_npu.stats.observe(started, step.num_sampled, step.drafts.num_draft_tokens)
        return step.drafts.draft_token_ids, None


class BatchDrafter(Drafter):
    """Drafts for the batch of the asynchronous runner, which passes no requests to its drafter. A
    request may be in another row in each step."""

    def __init__(
        self, vllm_config: Any, options: Options, device: torch.device, runner: Any, *, pads: bool
    ) -> None:
        check_runner(options, type(runner))
        super().__init__(vllm_config, options, device, "ngram_gpu", pads=pads)
        self._runner = runner
        self._scopes: dict[str, Scope] = {}
        """By request."""
        self._last_requests: Sequence[str] = ()
        self._last_scopes: torch.Tensor | None = None

    @exit_worker_on_error
    def begin_step(self, scheduler_output: Any) -> None:
        if self._store is not None:
            for name in scheduler_output.finished_req_ids:
                self._scopes.pop(name, None)
            for request in scheduler_output.scheduled_new_reqs:
                self._scopes[request.req_id] = self.find_scope(request)
                self._last_requests = ()  # an earlier request may have had the same name
        super().begin_step(scheduler_output)

    def find_scopes(self, batch: int) -> torch.Tensor | None:
        """Returns the scopes [B] int64 of a step's requests; None without a store."""
        if self._store is None:
            return None
        requests = self._runner.input_batch.req_ids[:batch]
        if requests != self._last_requests:
            scopes = [self._scopes[name] for name in requests]
            tensor = torch.tensor(scopes, dtype=torch.int64, device="cpu")
            if self.device is not None and self.device.type != "cpu":
                tensor = tensor.pin_memory().to(self.device, non_blocking=True)
            self._last_requests, self._last_scopes = list(requests), tensor
        return self._last_scopes


def install(module: Any) -> None:
    """Makes the V1 runner in ``module`` pass the scheduler's output to its drafter before each
    step."""
    runner = getattr(module, "GPUModelRunner", None)
    stock = getattr(runner, "execute_model", None)
    if inspect.isfunction(stock) and parameter_names(stock)[:2] == ["self", "scheduler_output"]:
        wrap_function(runner, "__init__", init_runner)


def init_runner(stock: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps the constructor of V1's ``GPUModelRunner``, which vLLM-Ascend's runner calls too.
    Replaces ``execute_model`` of the instance, because a subclass may override the function without
    a call of the one that it overrides."""
    stock(runner, *args, **kwargs)
    execute_model = runner.execute_model

    def begin_and_execute(*args: Any, **kwargs: Any) -> Any:
        # A runner of another pipeline stage, or with another method, has no drafter of ours.
        drafter = getattr(getattr(runner, "drafter", None), ATTRIBUTE, None)
        if drafter is not None:
            drafter.begin_step(find_argument(args, kwargs, 0, "scheduler_output"))
        return execute_model(*args, **kwargs)

    runner.execute_model = begin_and_execute


def check_runner(options: Options, runner_class: type | None) -> None:
    """Raises ValueError if a store is on, and the plugin has not wrapped what the store needs: the
    check of requests, and the constructor of the runner or of its base (None: outside vLLM)."""
    if not options.store:
        return
    require_request_checks()
    if runner_class is not None and not any(
        is_wrapped(vars(base).get("__init__"), init_runner) for base in runner_class.__mro__
    ):
        raise ValueError(UNKNOWN_RUNNER.format("execute_model"))


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
