"""The rule that chooses a draft, on toy models: recorded at every position, simulated, and run.

The recordings stay in build/vllm, for ``python -m tools.beside.simulate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import beside_runs
import pytest
import v2_runs
from ngram_npu.engines.vllm import plugin
from tiny_model import corpus
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu import model_runner

from tools.beside.record import Recorder
from tools.beside.simulate import Completion, compare, neural_alone, ngram_alone, promising, walk

REQUESTS, TOKENS = 8, 70
OURS = promising(0)
KINDS = ["repeating", "plain", "nothing"]


def _prompts(ids: list[int], kind: str) -> list[list[int]]:
    """A passage given twice and begun a third time; a passage; or random tokens, for text that
    hardly repeats anything."""
    made = []
    for i in range(REQUESTS):
        start = 1000 + i * 577
        if kind == "repeating":
            passage = ids[start : start + 40]
            made.append([*passage, *passage, *passage[:10]])
        elif kind == "plain":
            made.append(ids[start : start + 60])
        else:
            made.append([(start + 7919 * j * j) % 1000 + 10 for j in range(40)])
    return made


class _Steps:
    """Each request's steps that verified drafts."""

    def __init__(self, runner: Any) -> None:
        self._propose = runner.speculator.ngram_npu.propose
        self.steps: dict[str, int] = {}
        runner.speculator.propose = self._counted

    def _counted(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        for req_id, begin, end in zip(
            batch.req_ids, batch.cu_num_logits_np, batch.cu_num_logits_np[1:], strict=False
        ):
            name = req_id.rpartition("-")[0]
            self.steps[name] = self.steps.get(name, 0) + int(end - begin > 1)
        return self._propose(batch, *args, **kwargs)


def _texts(llm: LLM, prompts: list[list[int]], kind: str) -> list[tuple[str, list[int]]]:
    assert llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    if kind == "nothing":  # else the toy model keeps repeating itself, whatever the prompt
        params.repetition_penalty = 1.3
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [(o.request_id, list(o.outputs[0].token_ids)) for o in outputs]


@pytest.fixture(scope="module")
def recorded(model: Path) -> Any:
    """By kind of prompt: the completions, and the engine's steps for each."""
    method = beside_runs.Method("eagle", asynchronous=False, ours=beside_runs.SCAN)
    room = {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 1024}
    found: dict[str, tuple[list[Completion], list[int]]] = {}
    plugin.install_beside()
    with v2_runs.engine(model, method.arguments(model) | room, v2_runs.Run()) as (llm, runner):
        ids = llm.get_tokenizer().encode(corpus()[1_000_000:1_030_000])
        for kind in KINDS:
            prompts = _prompts(ids, kind)
            recorder = Recorder(runner)
            said = _texts(llm, prompts, kind)
            completions = [
                recorder.completion(name, prompt, tokens)
                for prompt, (name, tokens) in zip(prompts, said, strict=True)
            ]
            counted = _Steps(runner)
            again = _texts(llm, prompts, kind)
            assert [tokens for _, tokens in again] == [tokens for _, tokens in said]
            steps = [counted.steps[name] for name, _ in again]
            assert None not in completions
            found[kind] = [c for c in completions if c is not None], steps
            lines = "".join(f"{completion.to_json()}\n" for completion in found[kind][0])
            (model.parent / f"beside-eagle-{kind}.jsonl").write_text(lines)
        del llm, runner, recorder, counted
    model_runner.init_speculator = beside_runs.INIT_SPECULATOR
    return found


def _accepted_per_step(completions: list[Completion], rule: Any) -> float:
    walks = [walk(completion, rule) for completion in completions]
    return sum(w.accepted for w in walks) / sum(w.steps for w in walks)


@pytest.mark.parametrize("kind", KINDS)
def test_the_simulator_takes_the_engines_steps(recorded: Any, kind: str) -> None:
    completions, steps = recorded[kind]
    assert [walk(completion, OURS).steps for completion in completions] == steps
    assert [walk(completion, neural_alone).steps for completion in completions] != steps


@pytest.mark.parametrize("kind", ["repeating", "plain"])
def test_both_together_accept_at_least_as_much_as_the_better_one(recorded: Any, kind: str) -> None:
    completions, _ = recorded[kind]
    alone = [_accepted_per_step(completions, rule) for rule in (neural_alone, ngram_alone)]
    assert _accepted_per_step(completions, OURS) >= max(alone)


def test_nothing_is_lost_where_ngrams_have_nothing_to_offer(recorded: Any) -> None:
    completions, _ = recorded["nothing"]
    neural = _accepted_per_step(completions, neural_alone)
    assert _accepted_per_step(completions, OURS) >= 0.97 * neural


def test_the_mean_over_positions_is_not_what_a_walk_gets(recorded: Any) -> None:
    rows = compare(recorded["repeating"][0], [0])
    assert any(row["accepted_per_position"] > 1.05 * row["accepted_per_step"] for row in rows)
