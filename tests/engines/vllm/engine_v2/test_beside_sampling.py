"""Sampled text keeps the target's distribution if n-gram drafts replace sampled ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import beside_runs
import numpy as np
import pytest
import torch
import v2_runs
from ngram_npu.engines.vllm import plugin
from ops.reference.drafting import LATEST, draft_for
from tiny_model import corpus
from transformers import AutoTokenizer, LlamaForCausalLM
from vllm import SamplingParams
from vllm.v1.worker.gpu import model_runner

REQUESTS, TOKENS = 80, 10
RANKS = 6
LOOKUP = (1, 4)  # sampled text seldom repeats two tokens of the prompt in a row
SIZES = dict(zip(("prompt_lookup_min", "prompt_lookup_max"), LOOKUP, strict=True))
METHOD = beside_runs.Method("draft_model", ours=SIZES, sampled=True)


@pytest.fixture(scope="module")
def runner_and_llm(model: Path) -> Iterator[Any]:
    result = beside_runs.BesideRun()
    plugin.install_beside()
    arguments = METHOD.arguments(model) | {"max_num_seqs": 20, "num_gpu_blocks_override": 200}
    with v2_runs.engine(model, arguments, result) as (llm, runner):
        yield [llm, runner, result]
        del llm, runner
    model_runner.init_speculator = beside_runs.INIT_SPECULATOR


def _sampled(held: Any, prompt: list[int], seed: int) -> list[list[int]]:
    llm, _, result = held
    params = [
        SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, seed=seed + i)
        for i in range(REQUESTS)
    ]
    v2_runs.serve(llm, [(prompt, each) for each in params], result)
    return [tokens for tokens, _ in result.outputs]


def _chi_square(model: Path, prompt: list[int], texts: list[list[int]]) -> float:
    """Chi-squared over the counts of sampled tokens by their rank in the target's distribution;
    tokens that n-grams draft are counted apart. The target's probabilities given the previous
    tokens are the expected counts. At most 2 * RANKS + 1 degrees of freedom."""
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    observed, expected = np.zeros((2, RANKS + 1)), np.zeros((2, RANKS + 1))
    for text in texts:
        ids = torch.tensor([prompt + text])
        with torch.no_grad():
            probs = target(ids).logits[0, len(prompt) - 1 : -1].softmax(-1)
        for place, p in enumerate(probs):
            draft, _ = draft_for(prompt + text[:place], *LOOKUP, 1, LATEST, True, 10**9)
            cell = torch.full((len(p),), RANKS)
            cell[p.topk(RANKS).indices] = torch.arange(RANKS)
            drafted = torch.zeros(len(p), dtype=torch.long)
            if draft:
                drafted[draft[0]] = 1
            np.add.at(expected, (drafted.numpy(), cell.numpy()), p.numpy())
            observed[int(drafted[text[place]]), int(cell[text[place]])] += 1
    cells = expected > 5
    return float(((observed - expected)[cells] ** 2 / expected[cells]).sum())


def test_the_text_has_the_targets_distribution(model: Path, runner_and_llm: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.encode(corpus()[1_000_000:1_002_000])[:120]
    beside = runner_and_llm[1].speculator.ngram_npu
    beside._match_costs.zero_()  # always n-grams if there are any, after the drafter's first error
    written: list[int] = []
    make_one_hot = beside._make_one_hot

    def counted(rows: Any, drafts: Any, replaced: Any) -> None:
        written.append(int(replaced.sum()))
        make_one_hot(rows, drafts, replaced)

    beside._make_one_hot = counted
    right = _chi_square(model, prompt, _sampled(runner_and_llm, prompt, 0))
    assert sum(written) >= REQUESTS
    beside._make_one_hot = lambda *_: None  # the drafter's own logits stay
    wrong = _chi_square(model, prompt, _sampled(runner_and_llm, prompt, REQUESTS))
    assert right < 40, wrong  # 1 of 10,000 at 13 degrees of freedom
    assert wrong > 80, right
