"""Two tensor-parallel ranks in vLLM's engine: each with an environment of its own, as on two nodes;
both below one engine; and one of them failing."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import beside_runs
import pytest
import v2_runs
from ngram_npu import NgramStore
from processes import ONE_ENGINE, SERVE, Process, assert_died_and_left, saved_often
from test_v2_store import EXTENSION
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from conftest import Runs

pytestmark = pytest.mark.slow

ASKED = [0, 5]
LATE = {"worker_cls": "odd_workers.LateWorker"}


def _start(
    model: Path,
    log: Path,
    more: dict[str, Any],
    *calls: list[Any],
    method: str = "store",
    salt: str = "",
    **environment: str,
) -> Process:
    """``salt`` is that of the last request."""
    requests = v2_runs.requests(AutoTokenizer.from_pretrained(model))
    if method in beside_runs.METHODS:
        given = beside_runs.METHODS[method].arguments(model)
        environment["NGRAM_NPU_VLLM_BESIDE"] = "1"
    else:
        given = v2_runs.METHODS[method].arguments
    arguments = {**given, "tensor_parallel_size": 2, **more}
    asked = [[requests[i][0], requests[i][1].max_tokens] for i in ASKED]
    asked[-1] += [salt] if salt else []
    environment = {**ONE_ENGINE, **environment}
    return Process(log, SERVE, model, arguments, asked, list(calls), **environment)


def _two_nodes(model: Path, logs: Path, second: dict[str, str]) -> list[Process]:
    """A process of each rank; ``second`` is in the environment of one only."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"distributed_executor_backend": "external_launcher"}
    return [
        _start(
            model,
            logs / str(rank),
            {**LATE, **alone},
            ["drafted"],
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


def _expected(runs: Runs) -> list[list[int]]:
    return [runs("none").outputs[i][0] for i in ASKED]


def test_ranks_that_are_alike_serve_and_one_speaks(model: Path, runs: Runs, tmp_path: Path) -> None:
    (first, log), (second, silent) = [node.result() for node in _two_nodes(model, tmp_path, {})]
    assert first["token_ids"] == second["token_ids"] == _expected(runs)
    assert first["answers"] == second["answers"]
    ((_, steps),) = first["answers"][0]
    assert steps > 0
    assert log.count("drafts for this engine") == 1
    assert "drafts for this engine" not in silent


@pytest.mark.prove
@pytest.mark.parametrize("method", ["async-index", "draft-sync", "eagle-store"])
def test_ranks_of_an_engine_draft_alike(
    model: Path, runs: Runs, tmp_path: Path, method: str
) -> None:
    result, _ = _start(model, tmp_path / "log", LATE, ["drafted"], method=method).result()
    assert result["token_ids"] == _expected(runs)
    first, second = result["answers"][0]
    assert first == second
    assert first[1] > 10


def test_all_ranks_are_told_alike_and_one_saves(model: Path, tmp_path: Path) -> None:
    counted = ["ngram_npu_store_statistics"]
    process = _start(
        model,
        tmp_path / "log",
        {**LATE, "worker_extension_cls": EXTENSION},
        counted,
        ["ngram_npu_store_warm", [[5, 8, 13] * 9], "tenant"],
        counted,
        ["ngram_npu_store_clear", None],
        counted,
        ["ngram_npu_store_clear", None, None, "salt"],
        counted,
        ["drafted"],
        method="store-finish",
        salt="salt",
        NGRAM_NPU_VLLM_STORE_FILE=str(tmp_path / "store"),
    )
    result, _ = process.result()
    assert all(first == second for first, second in result["answers"])
    served, _, warm, _, salted, _, cleared, _ = (first for first, _ in result["answers"])
    assert served["tokens_entered"] > 0
    assert warm["tokens_held"] == served["tokens_held"] + 27
    assert 27 < salted["tokens_held"] < warm["tokens_held"], "the salt's text is another scope's"
    assert cleared["tokens_held"] == 27
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store"]
    saved = NgramStore.load(tmp_path / "store")
    saved.check_integrity()
    assert saved.statistics.tokens_held == 27


def test_a_rank_that_is_killed_ends_the_engine_and_leaves_a_whole_file(
    model: Path, tmp_path: Path
) -> None:
    path, worker = tmp_path / "store", {"worker_cls": "odd_workers.KilledWorker"}
    process = _start(model, tmp_path / "log", worker, **saved_often(path))
    assert_died_and_left(process, path)


def test_ranks_with_other_options_do_not_start(model: Path, tmp_path: Path) -> None:
    nodes = _two_nodes(model, tmp_path, {"NGRAM_NPU_VLLM_OVERLAP": "0"})
    for status, log in [node.end() for node in nodes]:
        assert status != 0
        assert "overlap: expected the same on all ranks of an engine, got True on rank 0" in log


def test_a_rank_that_cannot_draft_ends_the_engine(model: Path, tmp_path: Path) -> None:
    failing = {"worker_cls": "odd_workers.FailingWorker"}
    status, log = _start(model, tmp_path / "log", failing).end()
    assert status != 0
    assert "this rank cannot draft, so its worker ends" in log
    assert "EngineDeadError" in log
    assert "RESULT " not in log
