"""Tests that sampled text keeps the target's distribution when n-grams replace sampled drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engines import Engine, Method, encode_corpus, start_engine
from ops.reference import ngram_propose
from test_neural_engine import AUTO_LOOKUP
from transformers import LlamaForCausalLM
from vllm import SamplingParams

NUM_REQUESTS, NUM_TOKENS = 80, 10
NUM_RANKS = 6  # number of most likely tokens that are counted separately
METHOD = Method("draft_model", {"neural": True}, True, {"draft_sample_method": "probabilistic"})
pytestmark = pytest.mark.prove  # takes minutes


def _sample_texts(engine: Engine, prompt: list[int], seed: int) -> list[list[int]]:
    params = [
        SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed + i)
        for i in range(NUM_REQUESTS)
    ]
    return engine.generate([{"prompt_token_ids": prompt}] * NUM_REQUESTS, params)


def _compute_chi_squared(model: Path, prompt: list[int], texts: list[list[int]]) -> float:
    """Returns chi-squared over the counts of sampled tokens by rank in the target's distribution.

    Tokens that are the first token of an n-gram draft are counted separately. The expected counts
    are sums of the target's probabilities, given the previous tokens. There are at most
    2 * NUM_RANKS + 1 degrees of freedom.
    """
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    observed, expected = np.zeros((2, NUM_RANKS + 1)), np.zeros((2, NUM_RANKS + 1))
    for text in texts:
        ids = torch.tensor([prompt + text])
        with torch.no_grad():
            probs = target(ids).logits[0, len(prompt) - 1 : -1].softmax(-1)
        for position, p in enumerate(probs):
            draft = _draft_token(prompt + text[:position])
            ranks = torch.full((len(p),), NUM_RANKS)
            ranks[p.topk(NUM_RANKS).indices] = torch.arange(NUM_RANKS)
            is_drafted = torch.zeros(len(p), dtype=torch.long)
            if draft is not None:
                is_drafted[draft] = 1
            np.add.at(expected, (is_drafted.numpy(), ranks.numpy()), p.numpy())
            token = text[position]
            observed[int(is_drafted[token]), int(ranks[token])] += 1
    is_counted = expected > 5
    return float(((observed - expected)[is_counted] ** 2 / expected[is_counted]).sum())


def _draft_token(tokens: list[int]) -> int | None:
    """Returns the first token of the n-gram draft; None if there is no draft."""
    row, length = np.array([tokens], np.int32), np.array([len(tokens)], np.int32)
    drafts, counts, _ = ngram_propose(row, length, k=1, **AUTO_LOOKUP)
    return int(drafts[0, 0]) if counts[0] else None


def test_sampled_text_has_distribution_of_target(model: Path) -> None:
    prompt = encode_corpus(model, 2_000)[:120]
    with start_engine(model, METHOD, max_num_seqs=20, num_gpu_blocks_override=200) as engine:
        lookup = engine.drafter.ngram_npu
        compute_costs = lookup.costs.compute_costs
        # Prefers n-grams after the neural drafter's first error.
        lookup.costs.compute_costs = lambda *args: compute_costs(*args).zero_()
        correct_texts = _sample_texts(engine, prompt, 0)
        # Makes a fault: replaced drafts keep the neural drafter's logits.
        lookup._make_one_hot = lambda *_: None
        faulty_texts = _sample_texts(engine, prompt, NUM_REQUESTS)
        del lookup
    correct = _compute_chi_squared(model, prompt, correct_texts)
    faulty = _compute_chi_squared(model, prompt, faulty_texts)
    assert correct < 40, faulty  # exceeded with a probability of 1/10,000 (13 degrees of freedom)
    assert faulty > 80, correct
