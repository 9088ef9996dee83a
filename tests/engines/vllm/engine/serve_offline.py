"""Runs vLLM offline, as a user's script would: by default with the engine in another process.

Arguments: the model's folder; the engine's arguments as JSON; a JSON list of requests, each with a
prompt, a number of tokens to generate and optionally a `cache_salt`; and optionally a JSON list of
calls of `collective_rpc` for after the generation. The script prints its result as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    model, arguments, requests = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(model, **arguments)
    outputs = llm.generate(
        [
            {"prompt_token_ids": prompt, **({"cache_salt": salts[0]} if salts else {})}
            for prompt, _, *salts in requests
        ],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n, *_ in requests],
        use_tqdm=False,
    )
    calls = json.loads(sys.argv[4]) if len(sys.argv) > 4 else []
    rpc_results = [llm.collective_rpc(name, args=tuple(args)) for name, *args in calls]
    metrics = {
        sample.name: sample.value
        for family in get_prometheus_registry().collect()
        for sample in family.samples
        if sample.name.startswith("ngram_npu_")
    }
    result = {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "imported": sorted(name for name in sys.modules if name.startswith("ngram_npu")),
        "metrics": metrics,
        "rpc_results": rpc_results,
    }
    # A single write, because the engine's process may write to the same output at any time.
    sys.stdout.flush()
    os.write(1, f"\nRESULT {json.dumps(result)}\n".encode())


if __name__ == "__main__":  # vLLM spawns the engine's process, which imports this file again
    main()
