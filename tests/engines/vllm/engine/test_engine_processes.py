"""As deployed: the engine in a process of its own, our class found by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import request_sets
from engine_runs import ENGINE, METHODS
from processes import SERVE, Process
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from conftest import Runs

PLAIN = [0, 7, 8, 15, 16, 23]  # requests of the greedy set without further conditions


def serve(
    model: Path,
    folder: Path,
    method: str,
    more: dict[str, Any] | None = None,
    *calls: list[Any],
    **environment: str,
) -> Process:
    """An engine in another process, for the requests of ``PLAIN``."""
    if METHODS[method].is_async:
        paths = [str(SERVE.with_name("site")), str(SERVE.parent)]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    requests = request_sets.greedy(request_sets.Prompts(AutoTokenizer.from_pretrained(model)))
    arguments = {
        **ENGINE,
        "speculative_config": METHODS[method].speculative_config,
        "additional_config": METHODS[method].additional_config,
        "async_scheduling": METHODS[method].is_async,
        **(more or {}),
    }
    asked = [(requests[i][0], requests[i][1].max_tokens) for i in PLAIN]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}
    return Process(folder / "log", SERVE, model, arguments, asked, list(calls), **environment)


def said(runs: Runs) -> list[list[int]]:
    """By an engine without speculation."""
    return [runs("none", "greedy").outputs[i][0].token_ids for i in PLAIN]


def started(log: str) -> list[str]:
    return [line for line in log.splitlines() if "drafts for this engine" in line]


def test_custom_class_in_another_process(model: Path, runs: Runs, tmp_path: Path) -> None:
    result, log = serve(
        model,
        tmp_path,
        "custom_class",
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
        VLLM_LOG_STATS_INTERVAL="0.01",
    ).result()
    assert result["token_ids"] == said(runs)
    (line,) = started(log)
    assert "MainProcess" not in line
    assert "(method custom_class): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert "engine=index" in line
    assert "ngram_npu metrics: last " in log
    assert "not checked" not in log  # the runner's call is
    assert result["metrics"]["ngram_npu_draft_tokens_total"] > 50
    # Not enabled: this process only loaded the entry point.
    assert result["imported"] == ["ngram_npu_vllm_plugin"]


def test_an_unknown_option_stops_the_engine_with_one_line(model: Path) -> None:
    from engine_runs import Method, engine

    method = Method(METHODS["custom_class"].speculative_config, {"ngram_npu": {"prompt_lookup": 3}})
    # Of the configuration if a test has loaded the plugin in this process, else of the engine.
    message = "ngram_npu: unknown option 'prompt_lookup' in additi"
    with pytest.raises((RuntimeError, ValueError), match=message):
        engine(model, method).__enter__()
