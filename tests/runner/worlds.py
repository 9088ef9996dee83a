"""The requests and sizes of the text comparisons: joins, ends, preemption, chunks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from ngram_npu import NgramConfig, NgramStore
from transformers import PreTrainedModel

from examples.runner import Runner, RunnerConfig
from runner.tiny_model import STOP, transcript

NEW_TOKENS = 32
FEW = 8
"""Requests of the tests that run many times."""
LADDER = NgramConfig(sizes="ladder", k=4, min_draft_probability=0.177)
LIVE = replace(LADDER, store="live", store_tokens=8192)
FINISH = replace(LIVE, store="finish")
CONSECUTIVE = NgramConfig(min_n=2, max_n=4, k=4)


def prompts(count: int = 24, seed: int = 1) -> list[list[int]]:
    chooser = random.Random(seed)
    return [list(transcript(chooser, chooser.randint(1, 90))) for _ in range(count)]


def runner(
    model: PreTrainedModel,
    *,
    store: NgramStore | None = None,
    draft_model: PreTrainedModel | None = None,
    **changes: Any,
) -> Runner:
    """Six rows; prompts longer than a step. The blocks hold three of the longer requests, so that
    requests are preempted whatever the model says and however many of its tokens are drafted."""
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
class Plain:
    """Texts without speculation, which end at a stop token."""

    texts: list[list[int]]
    stops: tuple[int, ...]


def texts(model: PreTrainedModel, stops: tuple[int, ...], **changes: Any) -> list[list[int]]:
    """Those of the first few requests."""
    return runner(model, **changes).generate(prompts(FEW), NEW_TOKENS, stop_token_ids=stops)


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


def by_transformers(folder: str) -> Plain:
    """The greedy text of transformers' own generate, in one left-padded batch. The stop token is
    the rarest one that a request of the first few says before its end: it ends few early, but one
    at least, whatever the model learned."""
    from transformers import AutoModelForCausalLM

    asked = prompts()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    out = model.generate(
        **padded(asked), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=STOP
    )
    rows = out[:, max(map(len, asked)) :].tolist()
    counts = Counter(token for row in rows[:FEW] for token in row[:-1] if token != STOP)
    stops = (STOP, min(counts, key=lambda token: counts[token]))
    ends = [next((i for i, t in enumerate(row) if t in stops), NEW_TOKENS) + 1 for row in rows]
    return Plain([row[:end] for row, end in zip(rows, ends, strict=True)], stops)
