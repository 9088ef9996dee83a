"""Tests that switching drafting off and on between the steps of an engine changes no text, and that
nothing is verified while drafting is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import (
    RUNNER,
    STORE,
    VLLM_DRAFTS,
    Engine,
    Method,
    encode_corpus,
    make_params,
    start_engine,
)
from ngram_npu.engines.vllm import scheduler as scheduler_module

METHODS = {
    "v1": {
        "custom_class": Method("custom_class", STORE),
        "padded": Method("ngram_gpu", {}, True),
    },
    "v2": {
        "async": Method("ngram_gpu", STORE, True),
        "sync": Method("ngram", VLLM_DRAFTS),
        "neural": Method("eagle", {"neural": True}, True),
    },
}[RUNNER]
PERIOD = 7
"""Number of steps after which the test switches."""


@pytest.fixture(autouse=True, scope="module")
def _install_hooks() -> None:
    scheduler_module.install()


def _generate(engine: Engine, model: Path) -> list[list[int]]:
    ids = encode_corpus(model, 5_000)
    prompts = [{"prompt_token_ids": ids[start : start + 40]} for start in range(0, 800, 100)]
    return engine.generate(prompts, make_params(60))


def _switch_periodically(engine: Engine) -> list[tuple[bool, int]]:
    """Returns a list that receives, for each step, whether drafting has been on since the step
    before, and the number of scheduled draft tokens."""
    core: Any = engine.llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    stock_schedule, steps = scheduler.schedule, list[tuple[bool, int]]()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        enabled = len(steps) // PERIOD % 2 == 0
        if len(steps) % PERIOD == 0:
            engine.llm.collective_rpc(scheduler_module.METHOD, args=(enabled,))
        output = stock_schedule(*args, **kwargs)
        num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        # The first step after a switch still has the drafts of the step before.
        steps.append((enabled or len(steps) % PERIOD == 0, num_drafts))
        return output

    scheduler.schedule = schedule
    return steps


@pytest.mark.parametrize("name", METHODS)
def test_switch_keeps_text_and_stops_drafts(model: Path, name: str) -> None:
    # A preempted request, or one with a prefix hit, may begin with a step that vLLM pads.
    options = {"enable_prefix_caching": False, "num_gpu_blocks_override": 100}
    with start_engine(model, Method(), **options) as engine:
        expected = _generate(engine, model)
    with start_engine(model, METHODS[name], **options) as engine:
        steps = _switch_periodically(engine)
        assert _generate(engine, model) == expected
        assert sum(num_drafts for is_on, num_drafts in steps if not is_on) == 0
        assert sum(num_drafts for is_on, num_drafts in steps if is_on) > 50
        assert engine.read_counters()[1] > 10
