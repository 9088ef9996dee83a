"""Starts vLLM's engine in this process, and defines drafting methods, for both runners."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNNER = "v2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "v1"

if RUNNER == "v2":
    import vllm.v1.worker.cpu.shm  # noqa: F401, replaces torch.cuda.Event by a CPU event

import vllm_on_cpu  # noqa: E402

vllm_on_cpu.register()  # before modules that import numba

import pytest  # noqa: E402
import toy_drafters  # noqa: E402
from ngram_npu.draft_costs import OWN_DRAFT  # noqa: E402
from ngram_npu.engines.vllm import plugin, request_scopes  # noqa: E402
from ngram_npu.engines.vllm.drafter import ATTRIBUTE  # noqa: E402
from tiny_model import read_corpus  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

if RUNNER == "v1":
    from vllm.v1.spec_decode import ngram_proposer
    from vllm.v1.worker import gpu_model_runner

    REPLACED_NAMES = [
        (ngram_proposer, "NgramProposer"),
        (gpu_model_runner, "NgramProposerGPU"),
        (gpu_model_runner, "update_scheduler_for_invalid_drafts"),
    ]
else:
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator

    request_scopes.install()  # passes salts of requests to the runner, for a store
    REPLACED_NAMES = [(speculator, "NgramGPUSpeculator"), (model_runner, "init_speculator")]

Request = tuple[list[int], SamplingParams]

K = 4
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
VLLM_DRAFTS = {"lookup": "ngram"}
STORE = {"store": True, "store_tokens": 1 << 16, "scope": "shared"}
STORE_EXTENSION = "ngram_npu.engines.vllm.extension.StoreExtension"
MAX_MODEL_LEN = 256

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_batched_tokens": 96,  # fewer than the prompts of a step have: prefill in chunks
    "block_size": 32,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    # Too few blocks for all requests of a step, so that requests are preempted.
    "num_gpu_blocks_override": 10,
}


@dataclass(frozen=True)
class Method:
    """A drafting method, its scheduling, and its options."""

    name: str | None = None
    """vLLM's name; None: no speculation."""
    options: dict[str, Any] | None = None
    """Options of ngram_npu; None: vLLM's own classes draft."""
    asynchronous: bool = False
    speculative: dict[str, Any] = field(default_factory=dict)
    """Further entries of `speculative_config`."""

    @property
    def is_adaptive(self) -> bool:
        """Whether vLLM chooses which drafts to verify."""
        return "enable_adaptive_verification" in self.speculative

    def make_arguments(self, model: Path) -> dict[str, Any]:
        """Returns the engine's arguments for this target model."""
        speculative = {"method": self.name, "num_speculative_tokens": K, **self.speculative}
        if self.name in ("ngram", "ngram_gpu"):
            speculative |= LOOKUP
        elif self.name == "custom_class":
            speculative["model"] = "ngram_npu.engines.vllm.NgramProposer"
        elif self.name in toy_drafters.TRAIN_STEPS:
            speculative["model"] = str(toy_drafters.find_or_train_drafter(self.name, model))
        return {
            **OPTIONS,
            "speculative_config": speculative if self.name else None,
            "additional_config": {} if self.options is None else {"ngram_npu": self.options},
            "async_scheduling": self.asynchronous,
        }


@dataclass
class Output:
    """Output of a request."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: Any


@dataclass
class BatchResult:
    """Outputs and vLLM's counts of one batch of requests."""

    outputs: list[Output] = field(default_factory=list)
    preemptions: int = 0
    num_accepted: int = 0
    """Number of accepted draft tokens."""

    def get_token_ids(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs]

    def find_different(self, other_result: BatchResult) -> list[int]:
        """Returns the indices of requests with different tokens, text or finish reasons. The other
        result may have more requests."""
        pairs = zip(self.outputs, other_result.outputs[: len(self.outputs)], strict=True)
        return [i for i, (a, b) in enumerate(pairs) if a != b]


class Engine:
    """An engine in this process. `close` frees it even if a caller keeps this object."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        self.llm = LLM(str(model), **arguments)
        core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.batch_queue_size: int = core.batch_queue_size
        self.num_ranks: int = core.vllm_config.parallel_config.world_size
        if self.num_ranks > 1:  # the workers are in processes of their own
            return
        self.worker = core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        name = "speculator" if RUNNER == "v2" else "drafter"
        self.drafter: Any = getattr(self.runner, name, None)

    @property
    def uses_ngram_npu(self) -> bool:
        return hasattr(self.drafter, ATTRIBUTE)

    def find_scheduler(self) -> Any:
        core: Any = self.llm.llm_engine.engine_core
        return core.engine_core.scheduler

    @property
    def store(self) -> Any:
        return getattr(self.drafter, ATTRIBUTE).shared_store.contents

    def generate(self, prompts: list[Any], params: Any, **options: Any) -> list[list[int]]:
        """Returns the token ids of each prompt's output."""
        outputs = self.llm.generate(prompts, params, use_tqdm=False, **options)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def serve(self, requests: Sequence[Request], result: BatchResult) -> None:
        """Runs all requests at once, from an empty prefix cache, and writes outputs and vLLM's
        counts to `result`. A request's `extra_args` are fields of its prompt, such as a salt."""
        assert self.llm.reset_prefix_cache()
        old_counts = self.read_counters()
        prompts = [{"prompt_token_ids": tokens, **(p.extra_args or {})} for tokens, p in requests]
        params = [params for _, params in requests]
        answers = self.llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        result.outputs = [*map(_make_output, answers)]
        counts = self.read_counters()
        result.preemptions = counts[0] - old_counts[0]
        result.num_accepted = counts[1] - old_counts[1]

    def read_counters(self) -> tuple[int, int]:
        """Returns vLLM's counts of preemptions and of accepted draft tokens."""
        values = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        num_accepted = values.get("vllm:spec_decode_num_accepted_tokens", 0)
        return int(values.get("vllm:num_preemptions", 0)), int(num_accepted)

    def close(self) -> None:
        vars(self).clear()
        gc.collect()


def _make_output(answer: Any) -> Output:
    (sample,) = answer.outputs
    return Output(list(sample.token_ids), sample.text, sample.finish_reason, sample.stop_reason)


@contextmanager
def start_engine(model: Path, method: Method, **options: Any) -> Iterator[Engine]:
    """Starts an engine for the block. If the method has options of ngram_npu, the plugin replaces
    vLLM's classes in the block. `options` are further arguments of the engine."""
    with pytest.MonkeyPatch.context() as patches:
        for module, name in REPLACED_NAMES:
            patches.setattr(module, name, getattr(module, name))  # restored at the end
        if method.options is not None and RUNNER == "v1":
            plugin.install()
        elif method.options is not None:
            plugin.install_v2()
            plugin.install_neural()
        if method.is_adaptive:
            _allow_adaptive_verification(patches)
        try:
            engine = Engine(model, **{**method.make_arguments(model), **options})
            try:
                assert (engine.batch_queue_size == 2) == method.asynchronous
                if engine.num_ranks == 1:
                    assert engine.uses_ngram_npu == (method.options is not None)
                if method.is_adaptive:
                    # Two points (number of tokens, time) each for drafting and for verifying: each
                    # further verified token takes a tenth of the time of the first.
                    costs = [(1, 0.01), (8, 0.01)], [(1, 1.0), (101, 11.0)]
                    engine.runner.adaptive_verification.set_cost_curves(*costs)
                yield engine
            finally:
                engine.close()
        finally:
            cleanup_dist_env_and_memory()


class StoreDraftCounter:
    """Counts the drafts of an engine that are from its store."""

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        store = engine.store
        self._propose, store.propose = store.propose, self._propose_and_count

    def _propose_and_count(self, *args: Any, agreement: Any, **kwargs: Any) -> None:
        self._propose(*args, agreement=agreement, **kwargs)
        self.count += int((agreement != OWN_DRAFT).sum())


def _allow_adaptive_verification(patches: pytest.MonkeyPatch) -> None:
    """Removes vLLM's requirement of CUDA graphs, because the tests need only the times per step."""
    patches.setattr(VllmConfig, "_validate_adaptive_verification", lambda self: None)
    patches.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **_: mode)
    patches.setattr(
        adaptive_verification, "get_varlen_cudagraph_unsupported_backend", lambda *_, **__: None
    )


def contains_up_to(tokens: Sequence[int], stored: list[int], max_excess: int) -> bool:
    """Returns whether tokens contain a stored text without at most ``max_excess`` of its last
    tokens."""
    for excess in range(min(max_excess + 1, len(stored))):
        piece = stored[: len(stored) - excess]
        if any(tokens[i : i + len(piece)] == piece for i in range(len(tokens) - len(piece) + 1)):
            return True
    return False


def encode_corpus(model: Path, length: int) -> list[int]:
    """Returns the tokens of a passage of the corpus of `length` characters."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens: list[int] = tokenizer.encode(read_corpus()[1_000_000 : 1_000_000 + length])
    return tokens


def make_params(max_tokens: int = 40, extra_args: dict[str, Any] | None = None) -> SamplingParams:
    """Makes parameters for greedy sampling of exactly `max_tokens` tokens."""
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args
    )
