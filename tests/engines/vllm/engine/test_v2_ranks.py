"""Two tensor-parallel ranks on the V2 runner: as on two nodes, with calls to the store, and with a
rank that cannot draft."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import beside_runs
import pytest
import v2_runs
from ngram_npu import NgramStore
from processes import ONE_ENGINE, SERVE, Process
from test_v2_store import EXTENSION

if TYPE_CHECKING:
    from conftest import Runs

CHOSEN = [0, 5]
DELAYED = {"worker_cls": "workers.DelayedWorker"}


def _start(
    model: Path,
    log: Path,
    changes: dict[str, Any],
    *calls: list[Any],
    method: str = "store",
    salt: str = "",
    **environment: str,
) -> Process:
    """Starts an engine with two ranks; `salt` is that of the last request."""
    requests = v2_runs.make_requests(model)
    if method in beside_runs.METHODS:
        arguments = beside_runs.METHODS[method].make_arguments(model)
        environment["NGRAM_NPU_VLLM_BESIDE"] = "1"
    else:
        arguments = v2_runs.METHODS[method].arguments
    arguments = {**arguments, "tensor_parallel_size": 2, **changes}
    prompts = [[requests[i][0], requests[i][1].max_tokens] for i in CHOSEN]
    prompts[-1] += [salt] if salt else []
    environment = {**ONE_ENGINE, **environment}
    return Process(log, SERVE, model, arguments, prompts, list(calls), **environment)


def _start_two_nodes(model: Path, logs: Path, second: dict[str, str]) -> list[Process]:
    """Starts a process for each rank; `second` is in the environment of the second only."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    changes = {**DELAYED, "distributed_executor_backend": "external_launcher"}
    return [
        _start(
            model,
            logs / str(rank),
            changes,
            ["report_drafts"],
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            **(second if rank else {}),
        )
        for rank in (0, 1)
    ]


def _read_expected(runs: Runs) -> list[list[int]]:
    return [runs("none").outputs[i][0] for i in CHOSEN]


def test_equal_ranks_draft_equally_and_first_rank_logs(
    model: Path, runs: Runs, tmp_path: Path
) -> None:
    processes = _start_two_nodes(model, tmp_path, {})
    (first, first_log), (second, second_log) = [node.read_result() for node in processes]
    assert first["token_ids"] == second["token_ids"] == _read_expected(runs)
    assert first["answers"] == second["answers"]
    ((_, steps),) = first["answers"][0]
    assert steps > 0
    assert first_log.count("drafts for this engine") == 1
    assert "drafts for this engine" not in second_log


@pytest.mark.prove
@pytest.mark.parametrize("method", ["async-index", "draft-sync", "eagle-store"])
def test_ranks_with_random_delays_draft_equally(
    model: Path, runs: Runs, tmp_path: Path, method: str
) -> None:
    process = _start(model, tmp_path / "log", DELAYED, ["report_drafts"], method=method)
    result, _ = process.read_result()
    assert result["token_ids"] == _read_expected(runs)
    first, second = result["answers"][0]
    assert first == second
    assert first[1] > 10


def test_store_calls_reach_all_ranks_and_one_saves(model: Path, tmp_path: Path) -> None:
    statistics = ["ngram_npu_store_statistics"]
    process = _start(
        model,
        tmp_path / "log",
        {**DELAYED, "worker_extension_cls": EXTENSION},
        statistics,
        ["ngram_npu_store_warm", [[5, 8, 13] * 9], "tenant"],
        statistics,
        ["ngram_npu_store_clear", None],
        statistics,
        ["ngram_npu_store_clear", None, None, "salt"],
        statistics,
        ["report_drafts"],
        method="store-finish",
        salt="salt",
        NGRAM_NPU_VLLM_STORE_FILE=str(tmp_path / "store"),
    )
    result, _ = process.read_result()
    assert all(first == second for first, second in result["answers"])
    served, _, warm, _, salted, _, cleared, _ = (first for first, _ in result["answers"])
    assert served["tokens_entered"] > 0
    assert warm["tokens_held"] == served["tokens_held"] + 27
    assert 27 < salted["tokens_held"] < warm["tokens_held"], "the salt's text is in another scope"
    assert cleared["tokens_held"] == 27
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store"]
    saved = NgramStore.load(tmp_path / "store")
    saved.check_integrity()
    assert saved.statistics.tokens_held == 27


def test_ranks_with_different_options_do_not_start(model: Path, tmp_path: Path) -> None:
    nodes = _start_two_nodes(model, tmp_path, {"NGRAM_NPU_VLLM_OVERLAP": "0"})
    for status, log in [node.wait() for node in nodes]:
        assert status != 0
        assert "overlap: expected the same on all ranks of an engine, got True on rank 0" in log


def test_rank_that_cannot_draft_ends_engine(model: Path, tmp_path: Path) -> None:
    changes = {"worker_cls": "workers.FailingWorker"}
    status, log = _start(model, tmp_path / "log", changes).wait()
    assert status != 0
    assert "this rank cannot draft, so its worker ends" in log
    assert "EngineDeadError" in log
    assert "RESULT " not in log
