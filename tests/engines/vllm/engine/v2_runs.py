"""Runs the V2 runner with different drafting methods, and compares each row's draft with the stock
speculator's or, with a neural drafter, with the draft that the reference chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import (
    MAX_MODEL_LEN,
    STORE,
    VLLM_DRAFTS,
    BatchResult,
    CountingEvent,
    Engine,
    K,
    Method,
    Request,
    StoreDraftCounter,
    encode_corpus,
    start_engine,
)
from ngram_npu import NgramConfig, StoreStatistics
from ngram_npu.draft_costs import DraftCosts
from ngram_npu.engines.vllm.drafter import ATTRIBUTE
from ops.reference import merge_drafts_, ngram_propose
from toy_speculators import CandidateSpeculator, SuccessorSpeculator
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

GRAMMAR = r"( self\.[a-z]+ = [a-z]+\n)+"
NGRAM_SOURCE = 2
"""The number for an n-gram draft in the sources that the merge operator returns."""
AUTO_LOOKUP: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "overlap": True}
"""Arguments of the reference for the default lookup."""


def make_neural_method(
    name: str,
    options: dict[str, Any] | None = None,
    *,
    asynchronous: bool = True,
    **speculative: Any,
) -> Method:
    """Makes a method with a neural drafter and n-gram drafts."""
    return Method(name, {"neural": True, **(options or {})}, asynchronous, speculative)


METRICS = {"metrics": True}
ADAPTIVE = {"enable_adaptive_verification": True}

# vLLM schedules "ngram" synchronously only.
METHODS = {
    "none": Method(asynchronous=True),
    "stock": Method("ngram_gpu", asynchronous=True),
    "async": Method("ngram_gpu", {**VLLM_DRAFTS, **METRICS}, asynchronous=True),
    "sync": Method("ngram", VLLM_DRAFTS),
    "auto": Method("ngram_gpu", METRICS, asynchronous=True),
    "auto-adaptive": Method("ngram_gpu", METRICS, True, ADAPTIVE),
    "store": Method("ngram_gpu", {**STORE, **METRICS}, asynchronous=True),
    "store-sync": Method("ngram", STORE),
    "draft-async": make_neural_method("draft_model", METRICS),
    "draft-sync": make_neural_method("draft_model", asynchronous=False),
    "eagle-async": make_neural_method("eagle", METRICS),
    "eagle-sync": make_neural_method("eagle", asynchronous=False),
    "eagle-small-batches": make_neural_method(
        "eagle",
        asynchronous=False,
        # The first batch size, the last batch size, and the number of draft tokens for these.
        num_speculative_tokens_per_batch_size=[[1, 1, 4], [2, 8, 0]],
    ),
    "mtp": make_neural_method("mtp"),
    "adaptive": make_neural_method("draft_model", **ADAPTIVE),
    "draft-store": make_neural_method("draft_model", STORE),
    "eagle-store": make_neural_method("eagle", STORE),
    "successors": replace(
        make_neural_method("draft_model", METRICS), speculator=SuccessorSpeculator
    ),
    "candidates": replace(make_neural_method("draft_model"), speculator=CandidateSpeculator),
}

REQUEST_COUNTS = {"eagle-small-batches": 8, "mtp": 8}
"""Methods that run fewer requests."""


@dataclass
class Run(BatchResult):
    """Results of one batch of requests from one engine."""

    prefilling: int = 0
    """Number of rows, over all steps, that sampled nothing because they were in prefill."""
    partly_accepted: int = 0
    """Number of rows, over all steps, with some, but not all, of their drafts accepted."""
    mismatches: list[str] = field(default_factory=list)
    """Descriptions of the drafts that differ from the expected drafts."""
    state_changes: int = 0
    """Number of calls of `propose` that changed the runner's state."""
    waits: int = 0
    """Number of times the host waited for an event."""
    waits_in_propose: int = 0
    num_counted_drafts: int = 0
    """Number of drafts in the drafter's statistics; 0 without metrics."""
    not_verified: int = 0
    """Number of draft tokens that vLLM chose not to verify."""
    store: StoreStatistics | None = None
    """Statistics of the shared store, after its integrity check."""
    stored_texts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Scope and tokens of each text in the store."""
    drafts: list[tuple[str, list[int]]] = field(default_factory=list)
    """Request and draft of each row, in the order of the steps."""
    grammars: int = 0
    """Number of steps with requests that have a grammar."""
    scopes: int = 0
    """Number of scopes with text in the store."""
    num_store_drafts: int = 0
    """Number of drafts from the store."""
    num_replaced: int = 0
    """Number of rows, over all steps, that got an n-gram draft instead of their neural draft."""
    num_kept: int = 0
    """Number of rows, over all steps, that sampled a token and kept their neural draft."""
    steps_without_drafts: int = 0
    """Number of steps in which the runner requested no draft tokens."""
    neural_results: int = 0
    """Number of verification results of neural drafts that the acceptance estimator received."""
    ngram_results: int = 0
    """Number of verification results of n-gram drafts that the acceptance estimator received."""


def make_requests(model: Path) -> list[Request]:
    """Makes 20 requests: some are prefilled in chunks, share a prefix, have stop conditions,
    penalties, a grammar or a salt, or end at max_model_len."""
    ids = encode_corpus(model, 60_000)
    requests = []
    for i in range(20):
        length = 16 + 37 * i % 70
        start = i * 577
        prompt = ids[start : start + length] + ids[start : start + 12]
        params: dict[str, Any] = {"max_tokens": 20 + 7 * i % 30, "ignore_eos": True}
        match i % 5:
            case 1:  # ends at the model's maximum length
                prompt = ids[start : start + MAX_MODEL_LEN - 14 - i]
                params["max_tokens"] = MAX_MODEL_LEN - len(prompt)
            case 2:
                params["stop_token_ids"] = prompt[5:15]
            case 3:
                params["repetition_penalty"] = 1.3
            case 4:
                prompt = ids[:64] + prompt[:16]
                params["extra_args"] = {"cache_salt": "tenant"}
            case 0 if i >= 10:
                params["structured_outputs"] = StructuredOutputsParams(regex=GRAMMAR)
        requests.append((prompt, SamplingParams(temperature=0, **params)))
    return requests


def run_method(model: Path, name: str, count: int = 20) -> Run:
    """Runs the first `count` requests at once, with a new engine for the named method."""
    result, method = Run(), METHODS[name]
    count = min(count, REQUEST_COUNTS.get(name, count))
    with start_engine(model, method) as engine:
        if method.is_adaptive:
            _count_not_verified(engine.runner.adaptive_verification, result)
        if (method.options or {}).get("neural"):
            _NeuralRecorder(engine, method, result)
        elif method.name:
            record_drafts(engine, result)
        has_store = "store" in (method.options or {})
        counter = StoreDraftCounter(engine) if has_store else None
        serve_requests(engine, make_requests(model)[:count], result)
        drafter = getattr(engine.drafter, ATTRIBUTE, None)
        if drafter is not None and drafter.stats is not None:
            result.num_counted_drafts = int(drafter.stats._sums["drafts"])
        if counter is not None:
            engine.store.check_integrity()
            result.num_store_drafts, result.store = counter.count, engine.store.statistics
            result.scopes = len(engine.store.scopes)
            result.stored_texts = [(scope, text.tolist()) for scope, text in engine.store.texts()]
        del drafter, counter
    return result


def serve_requests(engine: Engine, requests: Sequence[Request], result: Run) -> None:
    """Runs all requests at once, and writes outputs and counts to `result`."""
    waits = CountingEvent.waits
    engine.serve(requests, result)
    result.waits = CountingEvent.waits - waits


def call_stock(stock: Any, state: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the stock speculator's drafts. In rows in prefill, whose drafts vLLM ignores, returns
    copies of the prompt's last token, which our speculator drafts there."""
    drafts = stock.propose(batch, *args, **kwargs)
    rows = batch.idx_mapping
    last_tokens = state.all_token_ids.gpu[rows, state.total_len.gpu[rows] - 1]
    return torch.where(args[4][:, None] > 0, drafts, last_tokens[:, None])


@contextmanager
def _observe_propose(state: Any, num_sampled: torch.Tensor, result: Run) -> Iterator[None]:
    """Counts the rows of a step, and in the block the waits and changes of the runner's state."""
    state_copies = state.all_token_ids.gpu.clone(), state.total_len.gpu.clone()
    waits = CountingEvent.waits
    yield
    result.waits_in_propose += CountingEvent.waits - waits
    tensors = state.all_token_ids.gpu, state.total_len.gpu
    result.state_changes += not all(map(torch.equal, state_copies, tensors))
    result.steps += 1
    result.prefilling += int((num_sampled == 0).sum())
    result.partly_accepted += int(((num_sampled > 1) & (num_sampled <= K)).sum())


def record_drafts(engine: Engine, result: Run) -> None:
    """Compares the drafts in every step with those of the stock speculator for the same state."""
    speculator, state = engine.drafter, engine.runner.req_states
    stock = NgramGPUSpeculator(engine.llm.llm_engine.vllm_config, engine.runner.device, state)
    propose = speculator.propose

    def propose_and_record(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dummy_run"):
            drafts: torch.Tensor = propose(input_batch, *args, **kwargs)
            return drafts
        expected = call_stock(stock, state, input_batch, *args, **kwargs)
        num_sampled = args[4]
        with _observe_propose(state, num_sampled, result):
            drafts = propose(input_batch, *args, **kwargs)
        result.grammars += input_batch.has_structured_output_reqs

        rows = zip(input_batch.req_ids, drafts.tolist(), expected.tolist(), strict=True)
        for name, draft, expected_draft in rows:
            result.drafts.append((name.partition("-")[0], draft))  # without random digits
            if draft != expected_draft:
                result.mismatches.append(f"{name}: {draft} instead of {expected_draft}")
        return drafts

    speculator.propose = propose_and_record


class _NeuralRecorder:
    """Compares the drafts in every step with those that the reference chooses. The choice depends
    on the acceptance of neural drafts, of which the reference has its own copy."""

    def __init__(self, engine: Engine, method: Method, result: Run) -> None:
        runner = engine.runner
        self._state, self._result = runner.req_states, result
        lookup = runner.speculator.ngram_npu
        self._compares_drafts = "store" not in (method.options or {}) and not method.is_adaptive
        self._acceptance = np.zeros_like(lookup.neural_acceptance.numpy())
        # By row of the runner's state: whether the last step replaced the neural draft.
        self._is_replaced = torch.zeros(len(self._acceptance), dtype=torch.bool)
        self._neural_drafts = torch.empty(0)
        self._neural_propose, lookup._neural_propose = lookup._neural_propose, self._propose_neural
        self._propose, runner.speculator.propose = runner.speculator.propose, self._record
        self._add_request, self._state.add_request = self._state.add_request, self._reset_row
        if method.is_adaptive:
            estimator = runner.speculator.acceptance_estimator
            self._estimate, estimator.step = estimator.step, self._count_and_estimate

    def _reset_row(self, req_id: str, *args: Any, **kwargs: Any) -> None:
        self._add_request(req_id, *args, **kwargs)
        row = self._state.req_id_to_index[req_id]
        self._acceptance[row], self._is_replaced[row] = 0, False

    def _propose_neural(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = self._neural_propose(*args, **kwargs)
        self._neural_drafts = drafts.clone()
        return drafts

    def _count_and_estimate(
        self, rows: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor
    ) -> None:
        had_drafts = (sampled - 1).clamp(min=0) + rejected > 0
        num_ngram = int((had_drafts & self._is_replaced[rows]).sum())
        self._result.ngram_results += num_ngram
        self._result.neural_results += int(had_drafts.sum()) - num_ngram
        self._estimate(rows, sampled, rejected)

    def _record(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dummy_run"):
            drafts: torch.Tensor = self._propose(batch, *args, **kwargs)
            return drafts
        result, num_sampled = self._result, args[4]
        with _observe_propose(self._state, num_sampled, result):
            drafts = self._propose(batch, *args, **kwargs)
        num_requested = kwargs["num_speculative_tokens"]
        result.steps_without_drafts += num_requested == 0
        has_sampled, rows = num_sampled > 0, batch.idx_mapping
        is_replaced = (drafts != self._neural_drafts).any(1)
        self._is_replaced[rows[has_sampled]] = is_replaced[has_sampled]
        result.num_replaced += int((has_sampled & is_replaced).sum())
        result.num_kept += int((has_sampled & ~is_replaced).sum())
        if self._compares_drafts and num_requested == K:
            self._compare_drafts(batch, num_sampled.numpy(), drafts)
        return drafts

    def _compare_drafts(self, batch: Any, num_sampled: Any, drafts: torch.Tensor) -> None:
        rows = batch.idx_mapping.numpy()
        num_verified = (np.diff(batch.cu_num_logits_np) - 1).astype(np.int32)
        tokens = self._state.all_token_ids.gpu.numpy()
        lengths = self._state.total_len.gpu.numpy()
        ngram, num_ngram, match_len = ngram_propose(
            *(tokens, lengths),
            row_indices=rows,
            num_sampled=num_sampled,
            k=K,
            **AUTO_LOOKUP,
            fill=True,
        )
        expected, _, source = merge_drafts_(
            *(self._neural_drafts.numpy(), ngram, num_ngram, match_len),
            draft_costs=DraftCosts(NgramConfig(k=K)).compute_costs(match_len, num_ngram),
            row_indices=rows,
            num_sampled=num_sampled,
            num_scheduled_drafts=num_verified,
            neural_acceptance=self._acceptance,
        )
        pairs = zip(drafts.tolist(), expected.tolist(), strict=True)
        for i, (draft, expected_draft) in enumerate(pairs):
            if draft != expected_draft:
                name = "n-grams" if source[i] == NGRAM_SOURCE else "the neural drafter"
                line = f"{batch.req_ids[i]}: {draft} instead of {expected_draft} from {name}"
                self._result.mismatches.append(line)


def _count_not_verified(manager: Any, result: Run) -> None:
    """Counts the draft tokens that vLLM chooses not to verify."""
    get_num_tokens = manager.get_num_tokens

    def count_and_get(num_tokens: Any, drafts: Any) -> Any:
        num_chosen = get_num_tokens(num_tokens, drafts)
        result.not_verified += sum(num_tokens.values()) - num_chosen
        return num_chosen

    manager.get_num_tokens = count_and_get
