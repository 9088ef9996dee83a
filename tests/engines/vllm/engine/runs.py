"""Runs the same requests with different drafting methods, and compares the drafts of each step with
those of vLLM's own class for the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engines import (
    LOOKUP,
    MAX_MODEL_LEN,
    RUNNER,
    STORE,
    VLLM_DRAFTS,
    BatchResult,
    Engine,
    K,
    Method,
    Request,
    StoreDraftCounter,
    encode_corpus,
    start_engine,
)
from ngram_npu.engines.vllm.drafter import ATTRIBUTE
from store_integrity import check_integrity
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

# vLLM's own classes, which the plugin replaces later.
if RUNNER == "v1":
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer
    from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU
else:
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

METRICS = {"metrics": True}
PRIVATE_STORE = {**STORE, "scope": "private"}

# vLLM schedules "ngram" and "custom_class" synchronously only.
METHODS = {
    "v1": {
        "none": Method(),
        "sync": Method("ngram", VLLM_DRAFTS),
        "async": Method("ngram_gpu", {**VLLM_DRAFTS, **METRICS}, asynchronous=True),
        "store-sync": Method("custom_class", STORE),
        "store": Method("ngram_gpu", {**PRIVATE_STORE, **METRICS}, asynchronous=True),
    },
    "v2": {
        "none": Method(asynchronous=True),
        "async": Method("ngram_gpu", {**VLLM_DRAFTS, **METRICS}, asynchronous=True),
        "sync": Method("ngram", VLLM_DRAFTS),
        "store-sync": Method("ngram", STORE),
        "store": Method("ngram_gpu", {**PRIVATE_STORE, **METRICS}, asynchronous=True),
    },
}[RUNNER]


@dataclass
class Run(BatchResult):
    """Results of one batch of requests from one engine."""

    mismatches: list[str] = field(default_factory=list)
    """Drafts that differ from those of vLLM's class."""
    num_drafts: int = 0
    """Number of rows, over all steps, that sampled a token and got a draft."""
    num_sampled: int = 0
    """Number of rows, over all steps, that sampled a token."""
    num_in_prefill: int = 0
    """Number of rows, over all steps, that sampled nothing because they were in prefill."""
    num_counted_drafts: int = 0
    """Number of drafts in the drafter's statistics; 0 without metrics."""
    stored_texts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Scope and tokens of each text in the store, after its integrity check."""
    num_store_drafts: int = 0
    """Number of drafts from the store."""


def make_requests(model: Path, *, salts: bool = True) -> list[Request]:
    """Makes 16 requests: some are prefilled in chunks, share a prefix, have stop conditions,
    penalties or a grammar, or end at max_model_len. Every second one has a salt."""
    ids = encode_corpus(model, 60_000)
    requests = []
    for i in range(16):
        start, length = i * 577, 16 + 37 * i % 70
        prompt = ids[start : start + length] + ids[start : start + 12]
        params: dict[str, Any] = {"max_tokens": 20 + 7 * i % 30, "ignore_eos": True}
        match i % 8:
            case 1:  # ends at the model's maximum length
                prompt = ids[start : start + MAX_MODEL_LEN - 14 - i]
                params["max_tokens"] = MAX_MODEL_LEN - len(prompt)
            case 2:
                params["stop_token_ids"] = prompt[5:15]
            case 3:
                params["repetition_penalty"] = 1.3
            case 4:
                prompt = ids[:64] + prompt[:16]
            case 5:
                params["structured_outputs"] = StructuredOutputsParams(
                    regex=r"( self\.[a-z]+ = [a-z]+\n)+"
                )
            case 6:
                params |= {"presence_penalty": 0.7, "frequency_penalty": 0.4}
            case 7:
                params |= {"stop": ["\n\n", "self", "return"]}
        if salts and i // 2 % 2:
            params["extra_args"] = {"cache_salt": "tenant"}
        requests.append((prompt, SamplingParams(temperature=0, **params)))
    return requests


def run_method(model: Path, method: Method, **options: Any) -> Run:
    """Runs all requests at once, with a new engine, and compares the drafts with those of vLLM's
    class, except with a store. `options` are further arguments of the engine."""
    result, has_store = Run(), "store" in (method.options or {})
    with start_engine(model, method, **options) as engine:
        if method.options is not None and not has_store:
            record_drafts(engine, method, result)
        counter = StoreDraftCounter(engine) if has_store else None
        engine.serve(make_requests(model, salts=knows_salts(method)), result)
        drafter = getattr(engine.drafter, ATTRIBUTE, None)
        if drafter is not None and drafter.stats is not None:
            result.num_counted_drafts = int(drafter.stats._sums["drafts"])
        if counter is not None:
            check_integrity(engine.store)
            result.num_store_drafts = counter.count
            result.stored_texts = [(scope, text.tolist()) for scope, text in engine.store.texts()]
        del drafter, counter
    return result


def knows_salts(method: Method) -> bool:
    """Returns whether the runner accepts requests with a salt: V1's synchronous classes do not know
    the salts, so with a store they reject such a request."""
    return method.name != "custom_class"


def record_drafts(engine: Engine, method: Method, result: Run) -> None:
    """Counts the engine's drafts and compares them with those of vLLM's class."""
    drafter, config = engine.drafter, engine.llm.llm_engine.vllm_config
    call: Callable[..., tuple[Any, list[list[int]], list[list[int]], list[bool]]]
    if RUNNER == "v2":
        call = _make_v2_call(drafter.propose, engine.runner, config)
    elif method.asynchronous:
        call = _make_v1_async_call(drafter.propose, engine.runner, config)
    else:
        call = _make_v1_sync_call(drafter.propose, config)

    def propose_and_record(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return propose(*args, **kwargs)
        returned, drafts, expected, has_sampled = call(*args, **kwargs)
        for draft, expected_draft, is_sampled in zip(drafts, expected, has_sampled, strict=True):
            result.num_sampled += is_sampled
            result.num_drafts += is_sampled and bool(draft)
            result.num_in_prefill += not is_sampled
            if draft != expected_draft:
                result.mismatches.append(f"{draft} instead of {expected_draft}")
        return returned

    propose, drafter.propose = drafter.propose, propose_and_record


def _make_v1_sync_call(propose: Any, config: Any) -> Any:
    stock = NgramProposer(config)
    stock.min_n, stock.max_n = LOOKUP.values()  # vLLM sets both to 0 for a custom class

    def call(*args: Any, **kwargs: Any) -> Any:
        samples, lengths, token_ids = args[-3:]
        drafts = propose(*args, **kwargs)
        expected = stock.propose(K, samples, lengths, token_ids)
        return drafts, [*map(list, drafts)], expected, [*map(bool, samples)]

    return call


def _make_v1_async_call(propose: Any, runner: Any, config: Any) -> Any:
    stock = NgramProposerGPU(config, torch.device("cpu"), runner)

    def call(k: int, lengths: Any, token_ids: Any, samples: Any, counts: Any) -> Any:
        # The stock class writes to `token_ids`, so it gets a copy.
        expected, expected_counts = stock.propose(k, lengths, token_ids.clone(), samples, counts)
        drafts, no_counts = propose(k, lengths, token_ids, samples, counts)
        assert no_counts is None, "expected padded drafts, whose number the host knows"
        newest = token_ids[torch.arange(len(counts)), (lengths + counts - 1).clamp(min=0)]
        is_padding = torch.arange(k) >= expected_counts[:, None]
        expected = torch.where(is_padding, newest[:, None], expected)
        has_sampled = (counts > 0).tolist()
        rows = [*zip(drafts.tolist(), expected.tolist(), has_sampled, strict=True)]
        # vLLM ignores the drafts of rows in prefill.
        ours, theirs = ([row[i] if row[2] else [] for row in rows] for i in (0, 1))
        return (drafts, no_counts), ours, theirs, has_sampled

    return call


def _make_v2_call(propose: Any, runner: Any, config: Any) -> Any:
    state = runner.req_states
    stock = NgramGPUSpeculator(config, runner.device, state)

    def call(batch: Any, *args: Any, **kwargs: Any) -> Any:
        expected = call_stock(stock, state, batch, *args, **kwargs)
        copies = state.all_token_ids.gpu.clone(), state.total_len.gpu.clone()
        drafts = propose(batch, *args, **kwargs)
        tensors = state.all_token_ids.gpu, state.total_len.gpu
        assert all(map(torch.equal, copies, tensors)), "the drafter changed the runner's state"
        return drafts, drafts.tolist(), expected.tolist(), (args[4] > 0).tolist()

    return call


def call_stock(stock: Any, state: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the drafts of V2's stock speculator. In rows in prefill, whose drafts vLLM ignores,
    returns copies of the prompt's last token, which our speculator drafts there."""
    drafts = stock.propose(batch, *args, **kwargs)
    rows = batch.idx_mapping
    last_tokens = state.all_token_ids.gpu[rows, state.total_len.gpu[rows] - 1]
    return torch.where(args[4][:, None] > 0, drafts, last_tokens[:, None])
