"""Tests that two processes with the stages of a pipeline generate the same text as transformers,
whichever stage is late. The processes communicate with gloo."""

from __future__ import annotations

import random
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

pytest.importorskip("transformers")

from runner.workload import (
    NEW_TOKENS,
    NGRAM_BY_COST,
    SMALL_BATCH,
    Reference,
    make_prompts,
    make_runner,
)

from examples.runner import Pipeline, keep_layers_of_stage, load

NUM_STAGES = 2
MODES: dict[str, dict[str, Any]] = {
    "async padded": {},
    "async unpadded": {"padded": False},
    "sync by cost": {"asynchronous": False, "ngram": NGRAM_BY_COST},
    "async store": {"store": True},
}


class LatePipeline(Pipeline):
    """Delays each call at random. Stages are late at different times."""

    def _sleep(self) -> None:
        rng = self.__dict__.setdefault("rng", random.Random(self.stage))
        time.sleep(rng.choice((0.0, 0.0, 0.01)))

    def send_hidden(self, hidden: torch.Tensor) -> None:
        self._sleep()
        super().send_hidden(hidden)

    def receive_hidden(self, hidden: torch.Tensor) -> None:
        self._sleep()
        super().receive_hidden(hidden)

    def share_tokens(self, tokens: torch.Tensor) -> None:
        self._sleep()
        super().share_tokens(tokens)


def generate_in_stage(
    stage: int, folder: str, store: str, stops: tuple[int, ...]
) -> dict[str, tuple[list[list[int]], int]]:
    """Returns the texts and the number of accepted drafts of a stage, by mode."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=stage,
        world_size=NUM_STAGES,
        timeout=timedelta(seconds=60),
    )
    try:
        pipeline = LatePipeline()
        model = load(folder, dtype=torch.float64)
        keep_layers_of_stage(model, pipeline)
        assert len(model.model.layers) == 1
        results = {}
        for name, options in MODES.items():
            runner = make_runner(model, pipeline=pipeline, **options)
            prompts = make_prompts(SMALL_BATCH)
            texts = runner.generate(prompts, NEW_TOKENS, stop_token_ids=stops)
            results[name] = texts, runner.figures.accepted
        return results
    finally:
        distributed.destroy_process_group()


def test_texts_of_all_stages_equal_transformers(
    model_folder: str, greedy_run: Reference, tmp_path: Path
) -> None:
    arguments = model_folder, str(tmp_path / "store"), greedy_run.stops
    with ProcessPoolExecutor(NUM_STAGES, get_context("spawn")) as pool:
        futures = [pool.submit(generate_in_stage, n, *arguments) for n in range(NUM_STAGES)]
        results = [future.result() for future in futures]
    for name in MODES:
        for texts, num_accepted in (result[name] for result in results):
            assert texts == greedy_run.texts[:SMALL_BATCH], name
            assert num_accepted > 30, name


def test_draft_model_with_pipeline_raises(model: Any, draft_models: Any) -> None:
    pipeline: Any = object()
    with pytest.raises(ValueError, match="draft_model: expected None with a pipeline"):
        make_runner(model, draft_model=draft_models["good"], pipeline=pipeline)
