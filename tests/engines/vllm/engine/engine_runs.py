"""vLLM's engine in this process with a choice of drafters, and its outputs and drafts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cpu_platform  # before modules that import numba
import pytest
import torch
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import plugin, v1_device
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.spec_decode import ngram_proposer, ngram_proposer_gpu
from vllm.v1.worker import gpu_model_runner

Request = tuple[list[int], SamplingParams]

LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
K = 4
STOCK = ngram_proposer.NgramProposer
STOCK_ASYNC = ngram_proposer_gpu.NgramProposerGPU
REPLACED = [
    (ngram_proposer, "NgramProposer"),
    (gpu_model_runner, "NgramProposerGPU"),
    (gpu_model_runner, "update_scheduler_for_invalid_drafts"),
]
MAX_MODEL_LEN = 512

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 96,  # less than most prompts: prefill in chunks
    "block_size": 32,
    "num_gpu_blocks_override": 36,  # too few for twelve requests: preemption
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}


@dataclass(frozen=True)
class Method:
    """One way of drafting."""

    speculative_config: dict[str, Any] | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    plugged: bool = False

    @property
    def is_async(self) -> bool:
        return (
            self.speculative_config is not None and self.speculative_config["method"] == "ngram_gpu"
        )


def asynchronous(drafts: str, engine: str, **more: Any) -> Method:
    config = {"method": "ngram_gpu", "num_speculative_tokens": K, **LOOKUP}
    section = {"drafts": drafts, "engine": engine, **more}
    return Method(config, {"ngram_npu": section}, plugged=True)


def custom_class(model: str, **more: Any) -> Method:
    config = {"method": "custom_class", "model": model, "num_speculative_tokens": K}
    return Method(config, {"ngram_npu": {**LOOKUP, "engine": "index", **more}})


LADDER = {"sizes": "ladder", "min_draft_probability": 0.177}

# Covers both engines without running each method with each: the class uses the index, the plugin
# scans.
METHODS = {
    "none": Method(),
    "ngram": Method({"method": "ngram", "num_speculative_tokens": K, **LOOKUP}),
    "custom_class": custom_class("ngram_npu.engines.vllm.NgramProposer"),
    "plugin": Method(
        {"method": "ngram", "num_speculative_tokens": K, **LOOKUP},
        {"ngram_npu": {"engine": "scan"}},
        plugged=True,
    ),
    "async_stock": Method({"method": "ngram_gpu", "num_speculative_tokens": K, **LOOKUP}),
    "padded": asynchronous("padded", "index"),
    "padded_scan": asynchronous("padded", "scan"),
    "trimmed": asynchronous("trimmed", "scan"),
    "kept": custom_class("ngram_npu.engines.vllm.NgramProposer", keep_drafting=True),
    "trimmed_kept": asynchronous("trimmed", "scan", keep_drafting=True),
    "ladder": Method(
        {
            "method": "custom_class",
            "model": "ngram_npu.engines.vllm.NgramProposer",
            "num_speculative_tokens": K,
        },
        {"ngram_npu": LADDER},
    ),
    "ladder_padded": asynchronous("padded", "auto", **LADDER),
    "store": Method(
        {
            "method": "custom_class",
            "model": "ngram_npu.engines.vllm.NgramProposer",
            "num_speculative_tokens": K,
        },
        {"ngram_npu": {**LADDER, "store": "live"}},
        plugged=True,  # which refuses requests that a store must separate
    ),
    "store_padded": asynchronous("padded", "auto", **LADDER, store="finish", metrics=True),
    "store_live_padded": asynchronous("padded", "auto", **LADDER, store="live", metrics=True),
}


@dataclass
class Output:
    """Output of one request, or of one of its n samples."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: Any
    logprobs: list[dict[int, float]] | None


@dataclass
class Run:
    """Results of one batch of requests from one engine."""

    outputs: list[list[Output]]
    drafts: dict[str, dict[int, list[int]]]
    """By request and sample: the draft at each row length at which something was sampled."""
    mismatches: list[str]
    """Drafts that differ from the stock class's drafts for the same rows."""
    preemptions: int
    accepted: int
    discarded_rows: int
    """Rows without a sampled token in a step of their prefill."""
    waits: int
    """Waits of the host for the number of drafts, under asynchronous scheduling."""
    steps: int

    def differing(self, other: Run) -> list[int]:
        """The requests whose tokens, text or finish reason differ."""
        return [
            i
            for i, (a, b) in enumerate(zip(self.outputs, other.outputs, strict=True))
            if [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in a]
            != [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in b]
        ]


class Engine:
    """An engine with one method of drafting, for several batches of requests."""

    def __init__(self, model: Path, method: Method, **engine: Any) -> None:
        self.llm = LLM(
            str(model),
            speculative_config=method.speculative_config,
            additional_config=method.additional_config,
            **{**ENGINE, "async_scheduling": method.is_async, **engine},
        )
        core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        assert (core.batch_queue_size == 2) == method.is_async
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.drafter = getattr(self.runner, "drafter", None)
        if getattr(self.runner, "_num_valid_draft_tokens_event", None) is not None:
            self.runner._num_valid_draft_tokens_event = cpu_platform.Event()  # one that counts
        self._drafts: dict[str, dict[int, list[int]]] = {}
        self._mismatches: list[str] = []
        self._discarded_rows = 0
        self._steps = 0
        if self.drafter is not None:
            recorder = self._async_recorder if method.is_async else self._recorder
            self.drafter.propose = recorder(self.drafter.propose)

    def run(self, requests: Sequence[Request]) -> Run:
        """Runs all of the requests at once, from an empty prefix cache."""
        assert self.llm.reset_prefix_cache()
        self._drafts, self._mismatches, self._discarded_rows = {}, [], 0
        self._steps, waits = 0, self._waits()
        before = self._counters()
        results = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in requests],
            [params for _, params in requests],
            use_tqdm=False,
        )
        after = self._counters()
        return Run(
            outputs=[[_output(sample) for sample in result.outputs] for result in results],
            drafts=self._drafts,
            mismatches=self._mismatches,
            preemptions=after["preemptions"] - before["preemptions"],
            accepted=after["accepted"] - before["accepted"],
            discarded_rows=self._discarded_rows,
            waits=self._waits() - waits,
            steps=self._steps,
        )

    def close(self) -> None:
        del self.llm, self.runner, self.drafter
        gc.collect()

    def _recorder(self, propose: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
        stock = STOCK(self.llm.llm_engine.vllm_config) if _is_ours(self.drafter) else None
        if stock is not None:
            stock.min_n, stock.max_n = LOOKUP.values()  # vLLM zeroes them for a custom class

        def recorded(*args: Any, **kwargs: Any) -> list[list[int]]:
            self._steps += 1
            sampled, num_tokens, token_ids = args[-3:]
            expected = stock.propose(K, sampled, num_tokens, token_ids) if stock else None
            drafts = propose(*args, **kwargs)
            for i, req_id in enumerate(self.runner.input_batch.req_ids):
                if sampled[i]:
                    name = req_id.rpartition("-")[0]  # without what vLLM appends at random
                    self._drafts.setdefault(name, {})[int(num_tokens[i])] = list(drafts[i])
                self._discarded_rows += not sampled[i]
                if expected is not None and drafts[i] != expected[i]:
                    self._mismatches.append(f"{req_id}: {drafts[i]} instead of {expected[i]}")
            return drafts

        return recorded

    def _async_recorder(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        """Like the other, for tensors; padding is left out."""
        stock: Any = None
        if _is_ours(self.drafter):
            stock = STOCK_ASYNC(self.llm.llm_engine.vllm_config, torch.device("cpu"), self.runner)

        def recorded(k: int, lengths: Any, token_ids: Any, sampled: Any, counts: Any) -> Any:
            expected = stock and stock.propose(k, lengths, token_ids.clone(), sampled, counts)
            drafts, found = propose(k, lengths, token_ids, sampled, counts)
            expected_drafts, expected_counts = expected or (drafts, found)
            ends = expected_counts if found is None else found
            self._steps += 1
            for i, req_id in enumerate(self.runner.input_batch.req_ids):
                count, end = int(counts[i]), int(ends[i])
                self._discarded_rows += count == 0
                if count == 0:
                    continue
                name = req_id.rpartition("-")[0]
                length = int(lengths[i]) + count
                draft, rest = drafts[i, :end].tolist(), drafts[i, end:].tolist()
                self._drafts.setdefault(name, {})[length] = draft
                filling = int(token_ids[i, length - 1]) if found is None else -1
                right = expected_drafts[i, : int(expected_counts[i])].tolist()
                if draft != right or rest != [filling] * len(rest):
                    self._mismatches.append(f"{req_id}: {draft} {rest} instead of {right}")
            return drafts, found

        return recorded

    def _waits(self) -> int:
        """Waits for the event of the number of drafts; None if nobody may wait."""
        event = getattr(self.runner, "_num_valid_draft_tokens_event", None)
        return 0 if event is None else event.waits

    def _counters(self) -> dict[str, int]:
        values = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        return {
            "preemptions": int(values.get("vllm:num_preemptions", 0)),
            "accepted": int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
        }


def _is_ours(drafter: Any) -> bool:
    return any(c.__module__.startswith("ngram_npu.") for c in type(drafter).__mro__)


def _output(sample: Any) -> Output:
    logprobs = None
    if sample.logprobs is not None:
        logprobs = [{token: p.logprob for token, p in step.items()} for step in sample.logprobs]
    return Output(
        list(sample.token_ids), sample.text, sample.finish_reason, sample.stop_reason, logprobs
    )


@contextmanager
def engine(
    model: Path, method: Method, drafter: type | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine for the block; with a plugged method, the stock classes are replaced meanwhile, the
    asynchronous one by ``drafter``."""
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        for module, name in REPLACED:
            patched.setattr(module, name, getattr(module, name))  # to be restored
        patched.setattr(INDEX_POLICY, "scanned_tokens", -1)  # tests have few tokens
        if method.plugged:
            plugin.install()
            assert ngram_proposer.NgramProposer is plugin.StockNgramProposer
            assert gpu_model_runner.NgramProposerGPU is v1_device.AsyncNgramProposer
        if drafter is not None:
            patched.setattr(gpu_model_runner, "NgramProposerGPU", drafter)
        if method.is_async:
            stack.enter_context(cpu_platform.asynchronous())
        try:
            made = Engine(model, method, **options)
            try:
                yield made
            finally:
                made.close()
        finally:
            cleanup_dist_env_and_memory()
