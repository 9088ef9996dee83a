"""Defines the requests and options of the example runner's tests, and generates reference texts
without speculation."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from ngram_npu import NgramConfig, NgramStore
from tiny_model import STOP_TOKEN, make_log
from transformers import PreTrainedModel

from examples.runner import Figures, Pipeline, Runner, RunnerConfig

NEW_TOKENS = 32
SMALL_BATCH = 8
"""Number of requests in tests that run many times."""
NGRAM = NgramConfig(min_n=2, max_n=4, k=4)
NGRAM_BY_COST = NgramConfig(k=4, min_draft_probability=0.12)


def make_prompts(count: int = 24, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [list(make_log(rng, rng.randint(1, 90))) for _ in range(count)]


def make_runner(
    model: PreTrainedModel,
    *,
    store: NgramStore | bool = False,
    draft_model: PreTrainedModel | None = None,
    pipeline: Pipeline | None = None,
    **changes: Any,
) -> Runner:
    """Makes a runner with six rows. Long prompts need several steps. The blocks suffice only for
    three long requests, so requests are preempted whatever the model generates. With
    ``store=True``, the runner has a new store."""
    options: dict[str, Any] = {
        "ngram": NGRAM,
        "max_rows": 6,
        "row_capacity": 160,
        "block_size": 4,
        "num_blocks": 64,
        "max_step_tokens": 48,
    }
    config = RunnerConfig(**options | changes)
    shared_store = NgramStore(1 << 14) if store is True else store or None
    return Runner(model, config, store=shared_store, draft_model=draft_model, pipeline=pipeline)


@dataclass(frozen=True)
class Reference:
    """Texts without speculation, which end at a stop token."""

    texts: list[list[int]]
    stops: tuple[int, ...]


def generate_small_batch(
    model: PreTrainedModel, stops: tuple[int, ...], **changes: Any
) -> tuple[list[list[int]], Figures]:
    """Returns the texts of the first `SMALL_BATCH` prompts, and the runner's counts."""
    runner = make_runner(model, **changes)
    texts = runner.generate(make_prompts(SMALL_BATCH), NEW_TOKENS, stop_token_ids=stops)
    return texts, runner.figures


def pad_left(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Returns the prompts as one batch for transformers."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


def generate_with_transformers(folder: str) -> Reference:
    """Generates greedy text with transformers, in one left-padded batch.

    The stop token is the rarest token that one of the first `SMALL_BATCH` requests generates before
    its last token. So it ends at least one request early, but only few, whatever the model learned.
    """
    from transformers import AutoModelForCausalLM

    prompts = make_prompts()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    output = model.generate(
        **pad_left(prompts), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=STOP_TOKEN
    )
    rows = output[:, max(map(len, prompts)) :].tolist()
    counts = Counter(token for row in rows[:SMALL_BATCH] for token in row[:-1])
    del counts[STOP_TOKEN]
    stops = (STOP_TOKEN, min(counts, key=lambda token: counts[token]))
    texts = []
    for row in rows:
        length = next((i + 1 for i, token in enumerate(row) if token in stops), NEW_TOKENS)
        texts.append(row[:length])
    return Reference(texts, stops)
