"""Two tensor-parallel ranks on the V2 runner: as on two nodes, and with calls to the store."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ngram_npu import NgramStore
from processes import METHODS, RANKS, EngineProcess
from test_v2_store import EXTENSION

if TYPE_CHECKING:
    from conftest import Runs

CHOSEN = [0, 5]
DELAYED = {"worker_cls": "workers.DelayedWorker"}


def _start(
    model: Path, log: Path, changes: dict[str, Any], *calls: list[Any], **options: Any
) -> EngineProcess:
    """Starts an engine with two ranks. `options` are further arguments of `EngineProcess`."""
    method = options.pop("method", "store")
    if "beside" in (METHODS[method].ours or {}):
        options["NGRAM_NPU_VLLM_BESIDE"] = "1"
    changes = {"tensor_parallel_size": 2, **changes}
    return EngineProcess(
        model, log, method, CHOSEN, *calls, changes=changes, **{**RANKS, **options}
    )


def test_ranks_in_separate_processes_draft_equally_and_first_logs(
    model: Path, runs: Runs, tmp_path: Path
) -> None:
    """As on two nodes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    changes = {**DELAYED, "distributed_executor_backend": "external_launcher"}
    processes = [
        _start(
            model,
            tmp_path / str(rank),
            changes,
            ["report_drafts"],
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in (0, 1)
    ]
    (first, first_log), (second, second_log) = [node.read_result() for node in processes]
    assert first["token_ids"] == second["token_ids"] == runs("none").get_token_ids(CHOSEN)
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
    assert result["token_ids"] == runs("none").get_token_ids(CHOSEN)
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
