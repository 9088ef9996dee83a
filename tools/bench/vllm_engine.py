"""vLLM's engine in a separate process, for `tools/bench/ops/vllm_end_to_end.py`.

    python -m tools.bench.vllm_engine MODEL ENGINE-ARGUMENTS

The arguments are JSON. Each line of JSON on standard input is a batch, {"prompts": [[token, ...],
...], "max_tokens": N}; the answer is one line on standard output. vLLM's own output goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    stopwatch = Stopwatch()
    core = llm.llm_engine.engine_core.engine_core
    drafter = getattr(core.model_executor.driver_worker.worker.model_runner, "drafter", None)
    for name in ("update_token_ids_ngram", "propose"):  # the first: asynchronous drafters only
        if hasattr(drafter, name):
            setattr(drafter, name, stopwatch.wrap(getattr(drafter, name)))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(llm, stopwatch, **json.loads(line))), file=answers, flush=True)


class Stopwatch:
    """Adds up the time inside the wrapped functions."""

    seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def _run(
    llm: Any, stopwatch: Stopwatch, prompts: list[list[int]], max_tokens: int
) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    stopwatch.seconds = 0.0
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "drafting_seconds": stopwatch.seconds,
        "torch_threads": torch.get_num_threads(),
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
    }


if __name__ == "__main__":
    main()
