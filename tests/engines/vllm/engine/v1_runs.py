"""Runs V1's runner with different drafting methods, and records its outputs and drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cpu_platform  # before modules that import numba
import engines
import pytest
import torch
from engines import LADDER, LOOKUP, K
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import plugin, v1_device
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.spec_decode import ngram_proposer, ngram_proposer_gpu
from vllm.v1.worker import gpu_model_runner

Request = tuple[list[int], SamplingParams]

STOCK = ngram_proposer.NgramProposer
STOCK_ASYNC = ngram_proposer_gpu.NgramProposerGPU
REPLACED = [
    (ngram_proposer, "NgramProposer"),
    (gpu_model_runner, "NgramProposerGPU"),
    (gpu_model_runner, "update_scheduler_for_invalid_drafts"),
]
MAX_MODEL_LEN = 512

OPTIONS: dict[str, Any] = {
    **engines.OPTIONS,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 12,
    "num_gpu_blocks_override": 36,  # too few for twelve requests: preemption
}

# One engine runs several sets of requests. Seeded requests crash vLLM's CPU runner (0.32.0) if one
# of them is prefilled in chunks, with or without speculation, so they do not chunk.
ENGINE_OPTIONS: dict[tuple[str, ...], dict[str, Any]] = {
    ("greedy", "structured", "logprobs"): {},
    ("sampled",): {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 400,
    },
}


@dataclass(frozen=True)
class Method:
    """A drafting method."""

    speculative_config: dict[str, Any] | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    uses_plugin: bool = False

    @property
    def is_async(self) -> bool:
        return (
            self.speculative_config is not None and self.speculative_config["method"] == "ngram_gpu"
        )


NGRAM = {"method": "ngram", "num_speculative_tokens": K, **LOOKUP}
NGRAM_GPU = {**NGRAM, "method": "ngram_gpu"}


def async_method(drafts: str, engine: str, **more: Any) -> Method:
    section = {"drafts": drafts, "engine": engine, **more}
    return Method(NGRAM_GPU, {"ngram_npu": section}, uses_plugin=True)


def class_method(
    section: dict[str, Any],
    model: str = "ngram_npu.engines.vllm.NgramProposer",
    *,
    uses_plugin: bool = False,
) -> Method:
    config = {"method": "custom_class", "model": model, "num_speculative_tokens": K}
    return Method(config, {"ngram_npu": section}, uses_plugin)


INDEX = {**LOOKUP, "engine": "index"}

# Together, the class with the index and the plugin with the scan cover both engines.
METHODS = {
    "none": Method(),
    "ngram": Method(NGRAM),
    "custom_class": class_method(INDEX),
    "plugin": Method(NGRAM, {"ngram_npu": {"engine": "scan"}}, uses_plugin=True),
    "async_stock": Method(NGRAM_GPU),
    "padded": async_method("padded", "index"),
    "padded_scan": async_method("padded", "scan"),
    "trimmed": async_method("trimmed", "scan"),
    "keep_drafting": class_method({**INDEX, "keep_drafting": True}),
    "trimmed_keep_drafting": async_method("trimmed", "scan", keep_drafting=True),
    "ladder": class_method(LADDER),
    "ladder_padded": async_method("padded", "auto", **LADDER),
    # The plugin rejects requests whose text a store must keep separate.
    "store": class_method({**LADDER, "store": "live"}, uses_plugin=True),
    "store_padded": async_method("padded", "auto", **LADDER, store="finish", metrics=True),
    "store_live_padded": async_method("padded", "auto", **LADDER, store="live", metrics=True),
}


@dataclass
class Output:
    """Output of a request, or of one of its n samples."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: Any
    logprobs: list[dict[int, float]] | None


@dataclass
class Run:
    """Results of one batch of requests from one engine."""

    outputs: list[list[Output]]
    steps_of_requests: dict[str, dict[int, list[int]]]
    """By request and sample: the draft at each row length at which a token was sampled."""
    mismatches: list[str]
    """Drafts that differ from the stock class's drafts for the same rows."""
    preemptions: int
    accepted: int
    prefilling_rows: int
    """Rows in which a step of the prefill sampled no token."""
    waits: int
    """Number of times the host waited for the number of drafts (asynchronous scheduling)."""
    steps: int

    @property
    def drafts(self) -> list[list[int]]:
        """All drafts, including empty ones."""
        return [draft for steps in self.steps_of_requests.values() for draft in steps.values()]

    def find_different(self, other: Run) -> list[int]:
        """Returns the requests whose tokens, text or finish reason differ."""
        texts = [
            [
                [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in samples]
                for samples in run.outputs
            ]
            for run in (self, other)
        ]
        assert len(texts[0]) == len(texts[1])
        return [i for i, text in enumerate(texts[0]) if text != texts[1][i]]


class RecordingEngine(engines.Engine):
    """An engine with one drafting method that records drafts, for several batches of requests."""

    def __init__(self, model: Path, method: Method, **options: Any) -> None:
        super().__init__(
            model,
            speculative_config=method.speculative_config,
            additional_config=method.additional_config,
            **{**OPTIONS, "async_scheduling": method.is_async, **options},
        )
        assert (self.batch_queue_size == 2) == method.is_async
        if getattr(self.runner, "_num_valid_draft_tokens_event", None) is not None:
            self.runner._num_valid_draft_tokens_event = cpu_platform.Event()  # counts the waits
        self._reset()
        if self.drafter is not None:
            record = self._record_async if method.is_async else self._record
            self.drafter.propose = record(self.drafter.propose)

    def _reset(self) -> None:
        self._drafts: dict[str, dict[int, list[int]]] = {}
        self._mismatches: list[str] = []
        self._prefilling_rows = self._steps = 0

    def run(self, requests: Sequence[Request]) -> Run:
        """Runs all requests at once, from an empty prefix cache."""
        assert self.llm.reset_prefix_cache()
        self._reset()
        waits, before = self._count_waits(), self.read_counters()
        results = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in requests],
            [params for _, params in requests],
            use_tqdm=False,
        )
        after = self.read_counters()
        return Run(
            outputs=[[_make_output(sample) for sample in result.outputs] for result in results],
            steps_of_requests=self._drafts,
            mismatches=self._mismatches,
            preemptions=after[0] - before[0],
            accepted=after[1] - before[1],
            prefilling_rows=self._prefilling_rows,
            waits=self._count_waits() - waits,
            steps=self._steps,
        )

    def _record(self, propose: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
        """Wraps `propose` to record drafts and compare them with the stock class's."""
        stock = STOCK(self.llm.llm_engine.vllm_config) if _is_ours(self.drafter) else None
        if stock is not None:
            stock.min_n, stock.max_n = LOOKUP.values()  # vLLM sets them to 0 for a custom class

        def recorded(*args: Any, **kwargs: Any) -> list[list[int]]:
            self._steps += 1
            sampled, num_tokens, token_ids = args[-3:]
            expected = stock.propose(K, sampled, num_tokens, token_ids) if stock else None
            drafts = propose(*args, **kwargs)
            for i, req_id in enumerate(self.runner.input_batch.req_ids):
                if sampled[i]:
                    self._add_draft(req_id, int(num_tokens[i]), list(drafts[i]))
                self._prefilling_rows += not sampled[i]
                if expected is not None and drafts[i] != expected[i]:
                    self._mismatches.append(f"{req_id}: {drafts[i]} instead of {expected[i]}")
            return drafts

        return recorded

    def _record_async(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        """Like `_record`, for tensors; padding is checked but not recorded."""
        stock: Any = None
        if _is_ours(self.drafter):
            stock = STOCK_ASYNC(self.llm.llm_engine.vllm_config, torch.device("cpu"), self.runner)

        def recorded(k: int, lengths: Any, token_ids: Any, sampled: Any, counts: Any) -> Any:
            expected = stock and stock.propose(k, lengths, token_ids.clone(), sampled, counts)
            drafts, num_drafts = propose(k, lengths, token_ids, sampled, counts)
            expected_drafts, expected_counts = expected or (drafts, num_drafts)
            ends = expected_counts if num_drafts is None else num_drafts
            self._steps += 1
            for i, req_id in enumerate(self.runner.input_batch.req_ids):
                count, end = int(counts[i]), int(ends[i])
                self._prefilling_rows += count == 0
                if count == 0:
                    continue
                length = int(lengths[i]) + count
                draft, rest = drafts[i, :end].tolist(), drafts[i, end:].tolist()
                self._add_draft(req_id, length, draft)
                padding = int(token_ids[i, length - 1]) if num_drafts is None else -1
                right = expected_drafts[i, : int(expected_counts[i])].tolist()
                if draft != right or rest != [padding] * len(rest):
                    self._mismatches.append(f"{req_id}: {draft} {rest} instead of {right}")
            return drafts, num_drafts

        return recorded

    def _add_draft(self, req_id: str, length: int, draft: list[int]) -> None:
        name = req_id.rpartition("-")[0]  # without the random suffix that vLLM appends
        self._drafts.setdefault(name, {})[length] = draft

    def _count_waits(self) -> int:
        """Counts the waits for the number of drafts; 0 if the runner has no event for it."""
        event = getattr(self.runner, "_num_valid_draft_tokens_event", None)
        return 0 if event is None else event.waits


def _is_ours(drafter: Any) -> bool:
    return any(c.__module__.startswith("ngram_npu.") for c in type(drafter).__mro__)


def _make_output(sample: Any) -> Output:
    logprobs = None
    if sample.logprobs is not None:
        logprobs = [{token: p.logprob for token, p in step.items()} for step in sample.logprobs]
    return Output(
        list(sample.token_ids), sample.text, sample.finish_reason, sample.stop_reason, logprobs
    )


@contextmanager
def start_engine(
    model: Path, method: Method, drafter: type | None = None, **options: Any
) -> Iterator[RecordingEngine]:
    """Starts an engine for the block. With the plugin, the stock classes are replaced meanwhile;
    `drafter` replaces the asynchronous one."""
    with ExitStack() as stack:
        patches = stack.enter_context(pytest.MonkeyPatch.context())
        for module, name in REPLACED:
            patches.setattr(module, name, getattr(module, name))  # restored at the end
        patches.setattr(INDEX_POLICY, "max_scan_tokens", -1)  # the tests have few tokens
        if method.uses_plugin:
            plugin.install()
            assert ngram_proposer.NgramProposer is plugin.StockNgramProposer
            assert gpu_model_runner.NgramProposerGPU is v1_device.AsyncNgramProposer
        if drafter is not None:
            patches.setattr(gpu_model_runner, "NgramProposerGPU", drafter)
        if method.is_async:
            stack.enter_context(cpu_platform.allow_async_scheduling())
        try:
            engine = RecordingEngine(model, method, **options)
            try:
                yield engine
            finally:
                engine.close()
        finally:
            cleanup_dist_env_and_memory()


def run(model: Path, method: Method, sets: tuple[str, ...]) -> dict[str, Run]:
    """Runs sets of requests that share an engine."""
    prompts = Prompts(model)
    with start_engine(model, method, **ENGINE_OPTIONS[sets]) as engine:
        return {name: engine.run(REQUEST_SETS[name](prompts)) for name in sets}


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "values": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 6},
        "kind": {"enum": ["first kind", "second kind"]},
    },
    "required": ["name", "values", "kind"],
    "additionalProperties": False,
}


class Prompts:
    """Passages of the corpus by number and length in tokens."""

    def __init__(self, model: Path) -> None:
        self._ids = engines.encode_corpus(model, 200_000)

    def __call__(self, number: int, length: int, repeated: int = 0) -> list[int]:
        """Returns `length` tokens, followed by a copy of the first `repeated` ones."""
        start = number * 977 % (len(self._ids) - MAX_MODEL_LEN)
        passage = self._ids[start : start + length]
        return passage + passage[:repeated]


def make_greedy(prompts: Prompts) -> list[Request]:
    """Makes 48 requests: chunks, shared prefixes, stops, penalties, ends at max_model_len."""
    requests: list[Request] = []
    shared = prompts(1000, 130)
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
                prompt = shared + prompts(i, 15 + i)
            case 6:
                params |= {"stop_token_ids": prompts(i, 40)[30:], "bad_words": ["self"]}
        requests.append((prompt, SamplingParams(temperature=0, **params)))
    return requests


def make_sampled(prompts: Prompts) -> list[Request]:
    """Makes 24 requests, 40 samples: seeds, several samples per prompt, filters, penalties."""
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


def make_structured(prompts: Prompts) -> list[Request]:
    """Makes 12 requests with a grammar and four without."""
    kinds = [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex=r"(abc|abd)( (abc|abd)){4,9}\."),
        StructuredOutputsParams(choice=["one and one and one", "two and two and two and two"]),
        None,
    ]
    requests: list[Request] = []
    for i in range(16):
        params = SamplingParams(temperature=0, max_tokens=70, structured_outputs=kinds[i % 4])
        requests.append((prompts(i, 25 + 31 * i % 150, repeated=8), params))
    return requests


def make_logprobs(prompts: Prompts) -> list[Request]:
    """Makes 10 requests with log probabilities."""
    requests: list[Request] = []
    for i in range(10):
        params = SamplingParams(
            temperature=0, max_tokens=30, ignore_eos=True, logprobs=i % 4, prompt_logprobs=1
        )
        requests.append((prompts(i, 30 + 29 * i % 150, repeated=10), params))
    return requests


REQUEST_SETS = {
    "greedy": make_greedy,
    "sampled": make_sampled,
    "structured": make_structured,
    "logprobs": make_logprobs,
}
