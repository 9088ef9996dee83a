"""Tests engines in separate processes, as in a deployment: options, text, ranks, a killed rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import RUNNER
from processes import (
    RANK_ENVIRONMENT,
    EngineProcess,
    assert_store_has_tokens,
    find_start_lines,
)

if TYPE_CHECKING:
    from conftest import Runs

# Requests that need only a prompt and a number of tokens, as serve_offline.py runs them.
if RUNNER == "v1":
    REQUEST_INDICES = [0, 7, 8, 15, 16, 23]
    METHOD, STORE_METHOD = "custom_class", "store_padded"
    EXPECTED_LINE = "(method custom_class): lookup=ngram (n-grams of 2 to 5 tokens, earliest match"
else:
    REQUEST_INDICES = [0, 5, 6, 11]
    METHOD, STORE_METHOD = "async", "store"
    EXPECTED_LINE = "(method ngram_gpu, V2 runner): lookup=ngram (n-grams of 2 to 5 tokens, late"


def test_engine_process_drafts_and_logs_options(model: Path, runs: Runs, tmp_path: Path) -> None:
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "DEBUG"}
    environment |= (
        {"VLLM_LOG_STATS_INTERVAL": "0.01"} if RUNNER == "v1" else {"NGRAM_NPU_VLLM": "1"}
    )
    process = EngineProcess(model, tmp_path / "log", METHOD, REQUEST_INDICES, **environment)
    result, log = process.read_result()
    assert result["token_ids"] == runs("none").get_token_ids(REQUEST_INDICES)
    (line,) = find_start_lines(log)
    assert "MainProcess" not in line
    assert EXPECTED_LINE in line
    assert result["metrics"]["ngram_npu_draft_tokens_total"] > 50
    if RUNNER == "v1":
        assert "ngram_npu metrics: last " in log
        # The plugin is not enabled, so this process loaded only its entry point.
        assert result["imported"] == ["ngram_npu_vllm_plugin"]
    else:
        assert "not enabled" not in log
        assert "Batch queue is enabled with size 2" in log
        assert log.count("ngram_npu metrics: last ") == 1  # as the worker ended


@pytest.mark.skipif(RUNNER == "v2", reason="test_v2_ranks tests two ranks in V2")
def test_two_ranks_draft_equally_and_one_rank_counts_and_saves(
    model: Path, runs: Runs, tmp_path: Path
) -> None:
    file = tmp_path / "store"
    process = EngineProcess(
        model,
        tmp_path / "log",
        STORE_METHOD,
        REQUEST_INDICES,
        ["report_drafts"],
        overrides={"tensor_parallel_size": 2, "worker_cls": "workers.ReportingWorker"},
        **RANK_ENVIRONMENT,
        NGRAM_NPU_VLLM_STORE_FILE=str(file),
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
        VLLM_LOGGING_LEVEL="DEBUG",
    )
    result, log = process.read_result()
    assert result["token_ids"] == runs("none").get_token_ids(REQUEST_INDICES)
    first, second = result["rpc_results"][0]
    assert first == second
    _, steps = first
    assert steps > 10
    (line,) = find_start_lines(log)
    assert "Worker" in line  # the rank's own process loaded the plugin
    assert "(method ngram_gpu" in line
    assert "Batch queue is enabled with size 2" in log
    assert "not enabled" not in log
    count = result["metrics"]["ngram_npu_proposals_total"]
    assert steps / 2 < count <= steps, "expected the count of one rank"
    assert_store_has_tokens(file)


@pytest.mark.skipif(RUNNER == "v1", reason="V2 tests it: the same code saves the stores")
def test_killed_rank_ends_engine_and_leaves_valid_store_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "store"
    overrides = {"tensor_parallel_size": 2, "worker_cls": "workers.KilledWorker"}
    environment = {**RANK_ENVIRONMENT, "NGRAM_NPU_VLLM_STORE_FILE": str(file)}
    process = EngineProcess(
        model, tmp_path / "log", STORE_METHOD, REQUEST_INDICES, overrides=overrides, **environment
    )
    status, log = process.wait()
    assert status != 0
    (line,) = [line for line in log.splitlines() if "died unexpectedly" in line]
    assert "VllmWorker-1" in line
    assert "EngineDeadError" in log
    assert "RESULT " not in log
    assert_store_has_tokens(file)
