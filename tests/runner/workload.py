"""Requests and sizes of the runner's tests, and the reference texts without speculation."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from ngram_npu import NgramConfig, NgramStore
from runner.tiny_model import STOP, transcript
from transformers import PreTrainedModel

from examples.runner import Figures, Runner, RunnerConfig

NEW_TOKENS = 32
FEW = 8
"""Number of requests in tests that run many times."""
LADDER = NgramConfig(sizes="ladder", k=4, min_draft_probability=0.177)
LIVE = replace(LADDER, store="live", store_tokens=8192)
FINISH = replace(LIVE, store="finish")
CONSECUTIVE = NgramConfig(min_n=2, max_n=4, k=4)


def make_prompts(count: int = 24, seed: int = 1) -> list[list[int]]:
    chooser = random.Random(seed)
    return [list(transcript(chooser, chooser.randint(1, 90))) for _ in range(count)]


def make_runner(
    model: PreTrainedModel,
    *,
    store: NgramStore | None = None,
    draft_model: PreTrainedModel | None = None,
    **changes: Any,
) -> Runner:
    """Makes a runner with six rows, in which long prompts need several steps. The blocks suffice
    for three long requests, so requests are preempted whatever the model generates."""
    settings: dict[str, Any] = {
        "ngram": CONSECUTIVE,
        "engine": "scan",
        "max_rows": 6,
        "row_capacity": 160,
        "block_size": 4,
        "num_blocks": 64,
        "max_step_tokens": 48,
    }
    return Runner(model, RunnerConfig(**settings | changes), store=store, draft_model=draft_model)


@dataclass(frozen=True)
class Reference:
    """Texts without speculation, which end at a stop token."""

    texts: list[list[int]]
    stops: tuple[int, ...]


def generate_few(
    model: PreTrainedModel, stops: tuple[int, ...], **changes: Any
) -> tuple[list[list[int]], Figures]:
    """Generates the texts of the first few requests. Returns them and the runner's counts."""
    runner = make_runner(model, **changes)
    texts = runner.generate(make_prompts(FEW), NEW_TOKENS, stop_token_ids=stops)
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

    The stop token is the rarest token that one of the first few requests generates before its last
    token, so it ends at least one request early, but few, whatever the model has learned.
    """
    from transformers import AutoModelForCausalLM

    prompts = make_prompts()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    output = model.generate(
        **pad_left(prompts), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=STOP
    )
    rows = output[:, max(map(len, prompts)) :].tolist()
    counts = Counter(token for row in rows[:FEW] for token in row[:-1] if token != STOP)
    stops = (STOP, min(counts, key=lambda token: counts[token]))
    texts = []
    for row in rows:
        length = next((i + 1 for i, token in enumerate(row) if token in stops), NEW_TOKENS)
        texts.append(row[:length])
    return Reference(texts, stops)
