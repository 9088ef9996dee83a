"""The requests and sizes of the text comparisons: joins, ends, preemption, chunks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.runner import Runner, RunnerConfig
from transformers import PreTrainedModel

from runner.tiny_model import transcript

NEW_TOKENS = 32
STOP_TOKENS = (ord("z"), ord("8"))
"""The model sometimes samples "8", so some requests end early."""
LADDER = NgramConfig(sizes="ladder", k=4, min_draft_probability=0.177)
LIVE = replace(LADDER, store="live", store_tokens=8192)
FINISH = replace(LIVE, store="finish")
CONSECUTIVE = NgramConfig(min_n=2, max_n=4, k=4)


def prompts(count: int = 40, seed: int = 1) -> list[list[int]]:
    chooser = random.Random(seed)
    return [list(transcript(chooser, chooser.randint(1, 90))) for _ in range(count)]


def runner(
    model: PreTrainedModel,
    *,
    store: NgramStore | None = None,
    draft_model: PreTrainedModel | None = None,
    **changes: Any,
) -> Runner:
    """Six rows, and blocks for fewer; prompts longer than a step."""
    settings: dict[str, Any] = {
        "ngram": CONSECUTIVE,
        "engine": "scan",
        "max_rows": 6,
        "row_capacity": 160,
        "block_size": 4,
        "num_blocks": 100,
        "max_step_tokens": 48,
    }
    return Runner(model, RunnerConfig(**settings | changes), store=store, draft_model=draft_model)


def texts(model: PreTrainedModel, count: int = 40, **changes: Any) -> list[list[int]]:
    return runner(model, **changes).generate(prompts(count), NEW_TOKENS, stop_token_ids=STOP_TOKENS)


def by_transformers(folder: str, asked: list[list[int]]) -> list[list[int]]:
    """The texts of transformers' own greedy generate, in one left-padded batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    longest = max(map(len, asked))
    padding = [longest - len(prompt) for prompt in asked]
    out = model.generate(
        torch.tensor([[0] * n + p for n, p in zip(padding, asked, strict=True)]),
        attention_mask=torch.tensor(
            [[0] * n + [1] * len(p) for n, p in zip(padding, asked, strict=True)]
        ),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=list(STOP_TOKENS),
        pad_token_id=0,
    )
    found = []
    for row in out[:, longest:].tolist():
        ends = [at for at, token in enumerate(row) if token in STOP_TOKENS]
        found.append(row[: ends[0] + 1] if ends else row)
    return found
