"""vLLM's engine in a process of its own, for `tools/bench/ops/vllm_end_to_end.py`.

    python -m tools.bench.vllm_engine MODEL ENGINE-ARGUMENTS

The arguments are JSON. Every line of JSON on standard input is a batch, {"prompts": [[token, ...],
...], "max_tokens": N}, and is answered by one line on standard output. vLLM's own output goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    stopwatch = Stopwatch()
    core = llm.llm_engine.engine_core.engine_core
    drafter = getattr(core.model_executor.driver_worker.worker.model_runner, "drafter", None)
    for call in ("update_token_ids_ngram", "propose"):  # the first: asynchronous drafters only
        if hasattr(drafter, call):
            setattr(drafter, call, stopwatch.around(getattr(drafter, call)))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(llm, stopwatch, **json.loads(line))), file=answers, flush=True)


class Stopwatch:
    """The time inside some functions."""

    seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def _run(
    llm: Any, stopwatch: Stopwatch, prompts: list[list[int]], max_tokens: int
) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    stopwatch.seconds = 0.0
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    before = _counters(llm)
    started, cpu_started = time.perf_counter(), time.process_time()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    after = _counters(llm)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "drafting_seconds": stopwatch.seconds,
        "torch_threads": torch.get_num_threads(),
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        **{name: after[name] - before[name] for name in after},
    }


def _counters(llm: Any) -> dict[str, int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(values.get(name, 0)) for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED)}


if __name__ == "__main__":
    main()
