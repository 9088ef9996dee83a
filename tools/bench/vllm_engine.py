"""Runs vLLM's engine in a separate process, for `tools/bench/ops/vllm_end_to_end.py` and
`vllm_draft_length.py`.

    python -m tools.bench.vllm_engine MODEL ENGINE-ARGUMENTS

ENGINE-ARGUMENTS is JSON. Each line of JSON on standard input is a batch, {"prompts": [[token, ...],
...], "max_tokens": N}. The answer to a batch is one line on standard output. vLLM's own output goes
to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from ngram_npu.engines.vllm.auto_k import ATTRIBUTE
    from vllm import LLM

    llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    # Only asynchronous drafters of the V1 runner have update_token_ids_ngram.
    drafting_stopwatch = Stopwatch(drafter, "update_token_ids_ngram", "propose")
    observer = getattr(core.scheduler, ATTRIBUTE, None)
    observing_stopwatch = Stopwatch(observer, "observe_schedule", "observe_update")
    steps = _count_steps(core.scheduler)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        drafting_stopwatch.seconds = observing_stopwatch.seconds = 0.0
        steps.clear()
        answer = _run_batch(llm, **json.loads(line)) | {
            "drafting_seconds": drafting_stopwatch.seconds,
            "observing_seconds": observing_stopwatch.seconds,
            "steps": steps,
        }
        print(json.dumps(answer), file=answers, flush=True)


class Stopwatch:
    """Adds up the time in the functions of an object; ignores functions that it does not have."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, self._wrap(getattr(owner, name)))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_time(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - start

        return call_and_time


def _count_steps(scheduler: Any) -> Counter[int]:
    """Returns a counter of the steps that the scheduler schedules from now on, by the number of
    tokens that they draft for the next step."""
    steps: Counter[int] = Counter()
    schedule = scheduler.schedule

    def schedule_and_count(*arguments: Any, **keywords: Any) -> Any:
        output = schedule(*arguments, **keywords)
        if output.num_scheduled_tokens:
            steps[output.num_spec_tokens_to_schedule] += 1
        return output

    scheduler.schedule = schedule_and_count
    return steps


def _run_batch(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "torch_threads": torch.get_num_threads(),
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
    }


if __name__ == "__main__":
    main()
