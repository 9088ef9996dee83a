"""Sampled text keeps the target's distribution when n-gram drafts replace sampled drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import v2_runs
from engines import Engine, encode_corpus, start_engine
from ops.reference.drafting import LATEST, compute_draft
from transformers import LlamaForCausalLM
from vllm import SamplingParams

REQUESTS, TOKENS = 80, 10
RANKS = 6
LOOKUP = (1, 4)  # sampled text rarely repeats two consecutive tokens of the prompt
SIZES = {"prompt_lookup_min": LOOKUP[0], "prompt_lookup_max": LOOKUP[1]}
METHOD = v2_runs.make_beside_method("draft_model", SIZES, draft_sample_method="probabilistic")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with start_engine(model, METHOD, max_num_seqs=20, num_gpu_blocks_override=200) as engine:
        yield engine


def _sample(engine: Engine, prompt: list[int], seed: int) -> list[list[int]]:
    params = [
        SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, seed=seed + i)
        for i in range(REQUESTS)
    ]
    return engine.generate([{"prompt_token_ids": prompt}] * REQUESTS, params)


def _chi_square(model: Path, prompt: list[int], texts: list[list[int]]) -> float:
    """Returns chi-squared over the counts of sampled tokens by rank in the target's distribution.

    Tokens that n-grams draft are counted separately. The expected counts are the target's
    probabilities given the previous tokens. There are at most 2 * RANKS + 1 degrees of freedom.
    """
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    observed, expected = np.zeros((2, RANKS + 1)), np.zeros((2, RANKS + 1))
    for text in texts:
        ids = torch.tensor([prompt + text])
        with torch.no_grad():
            probs = target(ids).logits[0, len(prompt) - 1 : -1].softmax(-1)
        for place, p in enumerate(probs):
            draft, _ = compute_draft(prompt + text[:place], *LOOKUP, 1, LATEST, True, 10**9)
            cell = torch.full((len(p),), RANKS)
            cell[p.topk(RANKS).indices] = torch.arange(RANKS)
            drafted = torch.zeros(len(p), dtype=torch.long)
            if draft:
                drafted[draft[0]] = 1
            np.add.at(expected, (drafted.numpy(), cell.numpy()), p.numpy())
            observed[int(drafted[text[place]]), int(cell[text[place]])] += 1
    cells = expected > 5
    return float(((observed - expected)[cells] ** 2 / expected[cells]).sum())


def test_sampled_text_has_distribution_of_target(model: Path, engine: Engine) -> None:
    prompt = encode_corpus(model, 2_000)[:120]
    lookup = engine.drafter.ngram_npu
    lookup._match_costs.zero_()  # prefers n-grams after the neural drafter's first error
    right = _chi_square(model, prompt, _sample(engine, prompt, 0))
    # Fault: replaced drafts keep the neural drafter's logits.
    lookup._make_one_hot = lambda *_: None
    wrong = _chi_square(model, prompt, _sample(engine, prompt, REQUESTS))
    assert right < 40, wrong  # 1 of 10,000 at 13 degrees of freedom
    assert wrong > 80, right
