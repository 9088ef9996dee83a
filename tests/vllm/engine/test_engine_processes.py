"""As deployed: the engine in a process of its own, our class found by name or by entry point."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import request_sets
from engine_runs import ENGINE, METHODS
from processes import ONE_ENGINE, SERVE, Process
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
    asynchronous: bool = False,
    **environment: str,
) -> tuple[dict[str, Any], str]:
    """Result and log of an engine in another process; ``asynchronous``: of its workers too."""
    if asynchronous:
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
    return Process(
        folder / "log", SERVE, model, arguments, asked, list(calls), **environment
    ).result()


def _started(log: str) -> list[str]:
    return [line for line in log.splitlines() if "drafts for this engine" in line]


def test_custom_class_in_another_process(model: Path, runs: Runs, tmp_path: Path) -> None:
    result, log = serve(
        model,
        tmp_path,
        "custom_class",
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
        VLLM_LOG_STATS_INTERVAL="0.01",
    )
    expected = runs("none", "greedy").outputs
    assert result["token_ids"] == [expected[i][0].token_ids for i in PLAIN]
    (line,) = _started(log)
    assert "MainProcess" not in line
    assert "(method custom_class): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert "engine=index" in line
    assert "ngram_npu metrics: last " in log
    assert "not checked" not in log  # the runner's call is
    assert result["metrics"]["ngram_npu_draft_tokens_total"] > 50
    # Not enabled: this process only loaded the entry point.
    assert result["imported"] == ["ngram_npu_vllm_plugin"]


def test_plugin_by_its_entry_point(model: Path, runs: Runs, tmp_path: Path) -> None:
    result, log = serve(model, tmp_path, "plugin", NGRAM_NPU_VLLM="1")
    expected = runs("none", "greedy").outputs
    assert result["token_ids"] == [expected[i][0].token_ids for i in PLAIN]
    (line,) = _started(log)
    assert "MainProcess" not in line
    assert "(method ngram): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert "engine=scan" in line
    assert "not enabled" not in log


def test_the_asynchronous_proposer_by_its_entry_point(
    model: Path, runs: Runs, tmp_path: Path
) -> None:
    result, log = serve(
        model,
        tmp_path,
        "padded",
        asynchronous=True,
        NGRAM_NPU_VLLM="1",
        VLLM_LOGGING_LEVEL="DEBUG",
    )
    expected = runs("none", "greedy").outputs
    assert result["token_ids"] == [expected[i][0].token_ids for i in PLAIN]
    (line,) = _started(log)
    assert "MainProcess" not in line
    assert "(method ngram_gpu): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert "engine=index" in line
    assert "drafts=padded" in line
    assert "Batch queue is enabled with size 2" in log
    assert "not enabled" not in log


def test_two_ranks_draft_alike_and_one_speaks(model: Path, runs: Runs, tmp_path: Path) -> None:
    result, log = serve(
        model,
        tmp_path,
        "store_padded",
        {"tensor_parallel_size": 2, "worker_cls": "odd_workers.NotingWorker"},
        ["drafted"],
        asynchronous=True,
        **ONE_ENGINE,
    )
    expected = runs("none", "greedy").outputs
    assert result["token_ids"] == [expected[i][0].token_ids for i in PLAIN]
    first, second = result["answers"][0]
    assert first == second
    assert first[1] > 10
    assert len(_started(log)) == 1


def test_an_unknown_option_stops_the_engine_with_one_line(model: Path) -> None:
    from engine_runs import Method, engine

    method = Method(METHODS["custom_class"].speculative_config, {"ngram_npu": {"prompt_lookup": 3}})
    with pytest.raises(RuntimeError, match="ngram_npu: unknown option 'prompt_lookup' in additi"):
        engine(model, method).__enter__()
