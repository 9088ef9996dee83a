"""Engines in separate processes, as deployed: options, text, ranks, and a rank that is killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import RUNNER
from ngram_npu import NgramStore
from processes import (
    ASYNC_V1,
    ONE_ENGINE,
    SERVE,
    Process,
    assert_store_has_tokens,
    find_start_lines,
    make_python_path,
    save_often,
)

if TYPE_CHECKING:
    from conftest import Runs

# Requests without further conditions.
if RUNNER == "v1":
    import v1_runs

    CHOSEN = [0, 7, 8, 15, 16, 23]
    METHOD, STORE_METHOD = "custom_class", "store_padded"
    LINE = "(method custom_class): prompt_lookup_min=2 prompt_lookup_max=4"
else:
    import v2_runs

    CHOSEN = [0, 5, 6, 11]
    METHOD, STORE_METHOD = "async-index", "store"
    LINE = "(method ngram_gpu, V2 runner): prompt_lookup_min=2 prompt_lookup_max=4"


def start(
    model: Path,
    log: Path,
    method: str,
    changes: dict[str, Any] | None = None,
    *calls: list[Any],
    **environment: str,
) -> Process:
    """Starts an engine in another process for the chosen requests."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}
    if RUNNER == "v1":
        v1_method = v1_runs.METHODS[method]
        requests = v1_runs.make_greedy(v1_runs.Prompts(model))
        arguments = {
            **v1_runs.OPTIONS,
            "speculative_config": v1_method.speculative_config,
            "additional_config": v1_method.additional_config,
            "async_scheduling": v1_method.is_async,
        }
        if v1_method.is_async:
            environment["PYTHONPATH"] = make_python_path(*ASYNC_V1)
    else:
        requests = v2_runs.make_requests(model)
        arguments = v2_runs.METHODS[method].arguments
    prompts = [(requests[i][0], requests[i][1].max_tokens) for i in CHOSEN]
    arguments = {**arguments, **(changes or {})}
    return Process(log, SERVE, model, arguments, prompts, list(calls), **environment)


def read_expected(runs: Runs) -> list[list[int]]:
    """Returns the token ids of an engine without speculation."""
    outputs = runs("none").outputs
    if RUNNER == "v1":
        return [outputs[i][0].token_ids for i in CHOSEN]
    return [outputs[i][0] for i in CHOSEN]


def test_engine_process_drafts_and_reports(model: Path, runs: Runs, tmp_path: Path) -> None:
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "DEBUG"}
    environment |= (
        {"VLLM_LOG_STATS_INTERVAL": "0.01"} if RUNNER == "v1" else {"NGRAM_NPU_VLLM": "1"}
    )
    process = start(model, tmp_path / "log", METHOD, **environment)
    result, log = process.read_result()
    assert result["token_ids"] == read_expected(runs)
    (line,) = find_start_lines(log)
    assert "MainProcess" not in line
    assert LINE in line
    assert "engine=index" in line
    assert result["metrics"]["ngram_npu_draft_tokens_total"] > 50
    if RUNNER == "v1":
        assert "ngram_npu metrics: last " in log
        assert "not checked" not in log  # the runner's call is checked
        # The plugin is not enabled, so this process loaded only its entry point.
        assert result["imported"] == ["ngram_npu_vllm_plugin"]
    else:
        assert "match_policy=latest" in line
        assert "not enabled" not in log
        assert "Batch queue is enabled with size 2" in log
        assert log.count("ngram_npu acceptance: by match length ") == 1  # as the worker ended


METHODS_WITH_RANKS = {
    "v1": [
        "store_padded",
        # Without a store, and with a store of unfinished text, drafting is the same.
        pytest.param("padded", marks=pytest.mark.prove),
        pytest.param("store_live_padded", marks=pytest.mark.prove),
    ],
    "v2": [pytest.param("async-index", marks=pytest.mark.prove)],
}


@pytest.mark.parametrize("method", METHODS_WITH_RANKS[RUNNER])
def test_two_ranks_draft_equally_and_one_counts_and_saves(
    model: Path, runs: Runs, tmp_path: Path, method: str
) -> None:
    file = tmp_path / "store"
    saving = {"NGRAM_NPU_VLLM_STORE_FILE": str(file)} if "store" in method else {}
    process = start(
        model,
        tmp_path / "log",
        method,
        {"tensor_parallel_size": 2, "worker_cls": "workers.ReportingWorker"},
        ["report_drafts"],
        **ONE_ENGINE,
        **saving,
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
        VLLM_LOGGING_LEVEL="DEBUG",
    )
    result, log = process.read_result()
    assert result["token_ids"] == read_expected(runs)
    first, second = result["answers"][0]
    assert first == second
    _, steps = first
    assert steps > 10
    (line,) = find_start_lines(log)
    assert "Worker" in line  # from its entry point, in the rank's own process
    assert "(method ngram_gpu" in line
    assert "Batch queue is enabled with size 2" in log
    assert "not enabled" not in log
    if saving:
        assert "drafts=padded" in line
        count = result["metrics"]["ngram_npu_proposals_total"]
        assert steps / 2 < count <= steps, "one rank counts"
        saved = NgramStore.load(file)
        saved.check_integrity()
        assert saved.statistics.tokens_entered > 0


def test_killed_rank_ends_engine_and_leaves_valid_store_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "store"
    changes = {"tensor_parallel_size": 2, "worker_cls": "workers.KilledWorker"}
    environment = {**ONE_ENGINE, **save_often(file)}
    process = start(model, tmp_path / "log", STORE_METHOD, changes, **environment)
    status, log = process.wait()
    assert status != 0
    (line,) = [line for line in log.splitlines() if "died unexpectedly" in line]
    assert "VllmWorker-1" in line
    assert "EngineDeadError" in log
    assert "RESULT " not in log
    assert_store_has_tokens(file)


@pytest.mark.skipif(RUNNER == "v2", reason="test_v2_plugin tests the configuration's error")
def test_unknown_option_raises_when_engine_starts(model: Path) -> None:
    config = v1_runs.METHODS["custom_class"].speculative_config
    method = v1_runs.Method(config, {"ngram_npu": {"prompt_lookup": 3}})
    # The configuration raises if a test has loaded the plugin in this process, else the engine.
    message = "ngram_npu: unknown option 'prompt_lookup' in additi"
    with (
        pytest.raises((RuntimeError, ValueError), match=message),
        v1_runs.start_engine(model, method),
    ):
        pass
