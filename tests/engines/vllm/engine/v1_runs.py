"""Runs V1's runner with different drafting methods, and records the drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engines import (
    LOOKUP,
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
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.spec_decode.ngram_proposer import NgramProposer
from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU

METHODS = {
    "none": Method(),
    "ngram": Method("ngram"),
    "custom_class": Method("custom_class", VLLM_DRAFTS),
    "plugin": Method("ngram", VLLM_DRAFTS),
    "async_stock": Method("ngram_gpu", asynchronous=True),
    "padded": Method("ngram_gpu", VLLM_DRAFTS, asynchronous=True),
    "auto": Method("custom_class", {}),
    "auto_padded": Method("ngram_gpu", {"metrics": True}, asynchronous=True),
    "store": Method("custom_class", STORE),
    "store_padded": Method("ngram_gpu", {**STORE, "metrics": True}, asynchronous=True),
}

# Engine arguments by sets of requests that share an engine. vLLM's CPU runner (0.32.0) crashes if a
# seeded request is prefilled in chunks, so the engine of sampled requests does not use chunks.
ENGINE_OPTIONS: dict[tuple[str, ...], dict[str, Any]] = {
    ("greedy", "structured"): {},
    ("sampled",): {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 400,
    },
}


@dataclass
class Run(BatchResult):
    """Results of one batch of requests from one engine."""

    drafts_by_length: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """By request and sample: the draft at each row length after a step that sampled tokens."""
    mismatches: list[str] = field(default_factory=list)
    """Drafts that differ from the stock class's drafts for the same rows."""
    num_rows_in_prefill: int = 0
    """Number of rows, over all steps, that sampled no token because they were in prefill."""
    draft_count_waits: int = 0
    """Number of times the host waited for the number of drafts (asynchronous scheduling)."""
    stored_texts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Scope and tokens of each text in the store, after its integrity check; from all runs of the
    engine."""
    num_store_drafts: int = 0
    """Number of drafts from the store in all runs of the engine."""

    @property
    def drafts(self) -> list[list[int]]:
        """All drafts, including empty ones."""
        return [draft for steps in self.drafts_by_length.values() for draft in steps.values()]


class Recorder:
    """Compares the drafts in every step with those of the stock class for the same rows."""

    def __init__(self, engine: Engine, method: Method) -> None:
        self._engine = engine
        if getattr(engine.runner, "_num_valid_draft_tokens_event", None) is not None:
            engine.runner._num_valid_draft_tokens_event = CountingEvent()
        if engine.drafter is None:
            return
        self._counter: StoreDraftCounter | None = None
        if "store" in (method.options or {}):
            self._counter = StoreDraftCounter(engine)
        config, self._stock = engine.llm.llm_engine.vllm_config, None
        record: Callable[..., Any] = self._record
        if method.asynchronous:
            record = self._record_async
            if method.options is not None:
                self._stock = NgramProposerGPU(config, torch.device("cpu"), engine.runner)
        elif method.options is not None:
            self._stock = NgramProposer(config)
            # vLLM sets both bounds to 0 for a custom class.
            self._stock.min_n, self._stock.max_n = LOOKUP.values()
        self._propose, engine.drafter.propose = engine.drafter.propose, record

    def run(self, requests: Sequence[Request]) -> Run:
        """Runs all requests at once, from an empty prefix cache."""
        self._run, waits = Run(), CountingEvent.waits
        self._engine.serve(requests, self._run)
        self._run.draft_count_waits = CountingEvent.waits - waits
        if self._engine.drafter is not None and self._counter is not None:
            self._engine.store.check_integrity()
            texts = self._engine.store.texts()
            self._run.stored_texts = [(scope, text.tolist()) for scope, text in texts]
            self._run.num_store_drafts = self._counter.count
        return self._run

    def _record(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        samples, num_tokens, token_ids = args[-3:]
        drafts: list[list[int]] = self._propose(*args, **kwargs)
        expected = drafts
        if self._stock is not None:
            expected = self._stock.propose(K, samples, num_tokens, token_ids)
        self._run.steps += 1
        for i, req_id in enumerate(self._engine.runner.input_batch.req_ids):
            if samples[i]:
                self._add_draft(req_id, int(num_tokens[i]), list(drafts[i]))
            self._run.num_rows_in_prefill += not samples[i]
            if drafts[i] != expected[i]:
                self._run.mismatches.append(f"{req_id}: {drafts[i]} instead of {expected[i]}")
        return drafts

    def _record_async(
        self, k: int, lengths: Any, token_ids: Any, samples: Any, counts: Any
    ) -> tuple[Any, Any]:
        """Does the same as `_record` for tensors. Padding is checked but not recorded."""
        # The stock class writes to `token_ids`, so it gets a copy.
        arguments = k, lengths, token_ids.clone(), samples, counts
        expected = None if self._stock is None else self._stock.propose(*arguments)
        drafts, num_drafts = self._propose(k, lengths, token_ids, samples, counts)
        expected_drafts, expected_counts = expected or (drafts, num_drafts)
        draft_lengths = expected_counts if num_drafts is None else num_drafts
        self._run.steps += 1
        for i, req_id in enumerate(self._engine.runner.input_batch.req_ids):
            count, end = int(counts[i]), int(draft_lengths[i])
            if count == 0:
                self._run.num_rows_in_prefill += 1
                continue
            length = int(lengths[i]) + count
            draft, padding = drafts[i, :end].tolist(), drafts[i, end:].tolist()
            self._add_draft(req_id, length, draft)
            pad_token = int(token_ids[i, length - 1]) if num_drafts is None else -1
            expected_draft = expected_drafts[i, : int(expected_counts[i])].tolist()
            if draft != expected_draft or padding != [pad_token] * len(padding):
                line = f"{req_id}: {draft} {padding} instead of {expected_draft}"
                self._run.mismatches.append(line)
        return drafts, num_drafts

    def _add_draft(self, req_id: str, length: int, draft: list[int]) -> None:
        name = req_id.rpartition("-")[0]  # without the random suffix that vLLM appends
        self._run.drafts_by_length.setdefault(name, {})[length] = draft


def run_sets(model: Path, method: Method, sets: tuple[str, ...]) -> dict[str, Run]:
    """Runs sets of requests that share an engine."""
    with start_engine(model, method, **ENGINE_OPTIONS[sets]) as engine:
        recorder = Recorder(engine, method)
        return {name: recorder.run(make_requests(model, name)) for name in sets}


def make_requests(model: Path, name: str = "greedy") -> list[Request]:
    """Makes a set of requests."""
    make_set = {"greedy": _make_greedy, "sampled": _make_sampled, "structured": _make_structured}
    return make_set[name](Prompts(model))


class Prompts:
    """Makes prompts from passages of the corpus."""

    def __init__(self, model: Path) -> None:
        self._ids = encode_corpus(model, 200_000)

    def __call__(self, number: int, length: int, repeated: int = 0) -> list[int]:
        """Returns `length` tokens from the passage `number`, followed by a copy of its first
        `repeated` tokens."""
        start = number * 977 % (len(self._ids) - MAX_MODEL_LEN)
        passage = self._ids[start : start + length]
        return passage + passage[:repeated]


def _make_greedy(prompts: Prompts) -> list[Request]:
    """Makes 48 requests: some are prefilled in chunks, share a prefix, have stop conditions,
    penalties or log probabilities, or end at max_model_len."""
    requests: list[Request] = []
    shared_prefix = prompts(1000, 130)
    for i in range(48):
        prompt = prompts(i, 20 + 53 * i % 330, repeated=12)
        params: dict[str, Any] = {"max_tokens": 24 + 7 * i % 60, "ignore_eos": True}
        match i % 8:
            case 1:  # ends at the model's maximum length
                prompt = prompts(i, MAX_MODEL_LEN - 10 - 5 * i % 40)
                params["max_tokens"] = MAX_MODEL_LEN - len(prompt)
            case 2:
                params |= {"stop": ["\n\n", "self", "return"], "ignore_eos": False}
            case 3:
                params["repetition_penalty"] = 1.3
            case 4:
                params |= {"presence_penalty": 0.7, "frequency_penalty": 0.4}
            case 5:
                prompt = shared_prefix + prompts(i, 15 + i)
            case 6:
                params |= {"stop_token_ids": prompts(i, 40)[30:], "bad_words": ["self"]}
            case 7:
                params["logprobs"] = i // 8 % 4
        requests.append((prompt, SamplingParams(temperature=0, **params)))
    return requests


def _make_sampled(prompts: Prompts) -> list[Request]:
    """Makes 24 requests with seeds and 40 samples in total, some with top_p, top_k or penalties."""
    requests: list[Request] = []
    for i in range(24):
        params = SamplingParams(
            temperature=(0.2, 0.5, 1.0)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            top_k=(0, 20, 0)[i % 3],
            seed=100 + i,
            n=3 if i % 3 == 1 else 1,
            max_tokens=40,
            ignore_eos=True,
            repetition_penalty=1.2 if i % 5 == 4 else 1.0,
        )
        requests.append((prompts(i, 30 + 41 * i % 200, repeated=10), params))
    return requests


def _make_structured(prompts: Prompts) -> list[Request]:
    """Makes 12 requests with a grammar and four without."""
    properties = {"name": {"type": "string", "maxLength": 12}, "number": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    grammars = [
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(regex=r"(abc|abd)( (abc|abd)){4,9}\."),
        StructuredOutputsParams(choice=["one and one and one", "two and two and two and two"]),
        None,
    ]
    requests: list[Request] = []
    for i in range(16):
        params = SamplingParams(temperature=0, max_tokens=70, structured_outputs=grammars[i % 4])
        requests.append((prompts(i, 25 + 31 * i % 150, repeated=8), params))
    return requests
