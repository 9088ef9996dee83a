"""vLLM's engine in this process: options and helpers for both runners."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

RUNNER = "v2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "v1"

if RUNNER == "v1":
    import cpu_platform  # noqa: F401, before modules that import numba
else:
    import vllm.v1.worker.cpu.shm  # noqa: F401, replaces events

from tiny_model import corpus  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

K = 4
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
LADDER = {"sizes": "ladder", "min_draft_probability": 0.177}

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_batched_tokens": 96,  # fewer than the prompts of a step have: prefill in chunks
    "block_size": 32,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}


class Engine:
    """An engine in this process. `close` frees it even if a caller keeps this object."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        self.llm = LLM(str(model), **arguments)
        core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.batch_queue_size: int = core.batch_queue_size
        self.worker = core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        name = "speculator" if RUNNER == "v2" else "drafter"
        self.drafter: Any = getattr(self.runner, name, None)

    def generate(self, prompts: list[Any], params: Any, **more: Any) -> list[list[int]]:
        """Returns the token ids of each prompt's output."""
        outputs = self.llm.generate(prompts, params, use_tqdm=False, **more)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def read_counters(self) -> tuple[int, int]:
        """Returns vLLM's counts of preemptions and of accepted draft tokens."""
        values = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        accepted = values.get("vllm:spec_decode_num_accepted_tokens", 0)
        return int(values.get("vllm:num_preemptions", 0)), int(accepted)

    def close(self) -> None:
        vars(self).clear()
        gc.collect()


@contextmanager
def start_engine(
    model: Path, method: str, changes: dict[str, Any] | None = None, **options: Any
) -> Iterator[Engine]:
    """Starts an engine of this environment's runner for the block.

    Args:
        method: name in the METHODS of v1_runs or v2_runs.
        changes: changes to the method's options of ngram_npu.
        options: further arguments of the engine.
    """
    if RUNNER == "v1":
        import v1_runs

        v1_method = v1_runs.METHODS[method]
        if changes is not None:
            section = {**v1_method.additional_config["ngram_npu"], **changes}
            v1_method = replace(v1_method, additional_config={"ngram_npu": section})
        with v1_runs.start_engine(model, v1_method, **options) as engine:
            yield engine
    else:
        import v2_runs
        from ngram_npu.engines.vllm import plugin

        v2_method = v2_runs.METHODS[method]
        if changes is not None:
            v2_method = replace(v2_method, ours={**(v2_method.ours or {}), **changes})
        if v2_method.ours is not None:
            plugin.install_v2()
        arguments = {**v2_method.arguments, **options}
        with v2_runs.start_engine(model, arguments, v2_runs.Run()) as engine:
            yield engine


def encode_corpus(model: Path, length: int) -> list[int]:
    """Returns the tokens of a passage of the corpus of `length` characters."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens: list[int] = tokenizer.encode(corpus()[1_000_000 : 1_000_000 + length])
    return tokens


def greedy(max_tokens: int = 40, extra_args: dict[str, Any] | None = None) -> SamplingParams:
    """Returns parameters of greedy sampling of exactly `max_tokens`."""
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args
    )
