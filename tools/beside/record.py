"""Records, at every position of greedy completions, what a neural drafter and what n-grams draft
there. Needs vLLM's V2 runner, with ngram_npu installed beside it.

    NGRAM_NPU_VLLM=1 python -m tools.beside.record --model MODEL --prompts FILE --output FILE \
      --speculative '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 4}'

The prompts are lines of JSON with a "prompt". Nothing that is drafted is verified, so that a step
goes on by one token and both draft at each of them. That takes as long as without speculation, and
the drafter's time besides. ``python -m tools.beside.simulate`` says what a rule makes of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tools.beside.simulate import Completion, Drafts


class Recorder:
    """Stands in for the ``propose`` of a runner's speculator that has n-gram drafts beside it."""

    def __init__(self, runner: Any) -> None:
        self._beside = runner.speculator.ngram_npu
        self._vocab_size = runner.vocab_size
        self._drafts: dict[str, dict[int, Drafts]] = {}
        self._costs = [int(cost) for cost in self._beside._match_costs]
        runner.speculator.propose = self._propose

    def _propose(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        neural: torch.Tensor = self._beside._neural_propose(batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return neural
        rows, num_sampled = batch.idx_mapping, args[4]
        ngram, counts, match_len = self._beside._look_up(batch, num_sampled)
        lengths = self._beside._state[1][rows].tolist()
        for i, (req_id, length) in enumerate(zip(batch.req_ids, lengths, strict=True)):
            if num_sampled[i] > 0:
                count, match = int(counts[i]), int(match_len[i])
                costs = [self._costs[min(match + j, 15)] for j in range(count)]
                if self._beside._computes_costs:
                    costs = self._beside._draft_costs[i, :count].tolist()
                found = Drafts(neural[i].tolist(), ngram[i, :count].tolist(), costs)
                self._drafts.setdefault(req_id, {})[length] = found
        return (neural + self._vocab_size // 2) % self._vocab_size  # what nobody would say

    def completion(self, req_id: str, prompt: Sequence[int], said: list[int]) -> Completion | None:
        """What was drafted for one request; None where a step went on by more than one token."""
        (found,) = (d for name, d in self._drafts.items() if name.rpartition("-")[0] == req_id)
        places = range(len(prompt) + 1, len(prompt) + len(said))
        if not all(place in found for place in places):
            return None
        return Completion(said, [found[place] for place in places])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.beside.record", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", required=True)
    add("--speculative", type=json.loads, required=True, help="vLLM's speculative_config")
    add("--prompts", type=Path, required=True)
    add("--output", type=Path, required=True)
    add("--max-tokens", type=int, default=256)
    add("--engine", type=json.loads, default={}, help="further arguments of vLLM's LLM")
    add("--options", type=json.loads, default={}, help="ngram_npu's options")
    given = parser.parse_args(arguments)
    os.environ.update(NGRAM_NPU_VLLM="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        given.model,
        speculative_config=given.speculative,
        additional_config={"ngram_npu": {**given.options, "beside": True}},
        **given.engine,
    )
    core: Any = llm.llm_engine.engine_core
    recorder = Recorder(core.engine_core.model_executor.driver_worker.worker.model_runner)
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=given.max_tokens))
    found = [
        recorder.completion(o.request_id, o.prompt_token_ids, list(o.outputs[0].token_ids))
        for o in outputs
    ]
    kept = [completion for completion in found if completion is not None]
    given.output.write_text("".join(f"{completion.to_json()}\n" for completion in kept))
    print(f"{given.output}: {len(kept)} of {len(found)} completions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
