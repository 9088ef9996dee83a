"""Tests that the example runner generates the same text as transformers with a model that has
M-RoPE. The images are placeholders: they determine the positions, but the model sees no pixels."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig

pytest.importorskip("transformers")

from transformers_models import BEGIN, END, IMAGE, make_image_model

from examples.runner import Runner, RunnerConfig, use_paged_attention

NEW_TOKENS = 40


def _make_prompts() -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Returns prompts, and the height and width of each image in patches."""
    rng = random.Random(0)
    prompts = []
    for number in range(12):
        tokens = [rng.randrange(2, 30) for _ in range(rng.randint(1, 9))]
        grids = [(rng.choice((4, 6, 8)), rng.choice((4, 6, 8))) for _ in range(number % 3)]
        for height, width in grids:
            tokens += [BEGIN, *[IMAGE] * (height * width // 4), END]
            tokens += [rng.randrange(2, 30) for _ in range(rng.randint(1, 9))]
        prompts.append((tokens, grids))
    return prompts


@pytest.mark.parametrize(
    ("family", "asynchronous"), [("Qwen2VL", False), ("Qwen2VL", True), ("Qwen3VL", True)]
)
def test_text_of_model_with_mrope_equals_transformers(family: str, asynchronous: bool) -> None:
    model, _, image = make_image_model(family)
    prompts, rope_positions, expected = [], [], []
    for tokens, grids in _make_prompts():
        prompt = torch.tensor([tokens])
        options: dict[str, Any] = {}
        if grids:
            options["image_grid_thw"] = torch.tensor([[1, *grid] for grid in grids])
        if grids and "mm_token_type_ids" in image:
            options["mm_token_type_ids"] = (prompt == IMAGE).int()
        output = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
        prompts.append(tokens)
        expected.append(output[0, len(tokens) :].tolist())
        if grids:
            positions, delta = model.model.get_rope_index(prompt, **options)
            rope_positions.append((positions[:, 0].numpy().astype(np.int32), int(delta)))
        else:
            rope_positions.append((None, 0))
    assert len({delta for _, delta in rope_positions}) > 3
    config = RunnerConfig(
        ngram=NgramConfig(min_n=1, k=3),
        asynchronous=asynchronous,
        max_rows=4,
        row_capacity=160,
        block_size=4,
        num_blocks=48,
        max_step_tokens=16,
    )
    with use_paged_attention(model):
        runner = Runner(model, config)
        texts = runner.generate(prompts, NEW_TOKENS, rope_positions=rope_positions)
        assert texts == expected
        wrong = Runner(model, config).generate(prompts, NEW_TOKENS)
    figures = runner.figures
    assert 10 < figures.accepted < figures.drafts - 10
    assert figures.preemptions > 0
    assert wrong != expected
