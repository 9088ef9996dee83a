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
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(llm, **json.loads(line))), file=answers, flush=True)


def _run(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    before, started = _counters(llm), time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = _counters(llm)
    return {
        "seconds": seconds,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        **{name: after[name] - before[name] for name in after},
    }


def _counters(llm: Any) -> dict[str, int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(values.get(name, 0)) for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED)}


if __name__ == "__main__":
    main()
