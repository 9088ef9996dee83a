"""Two tensor-parallel ranks in vLLM's engine: each with an environment of its own, as on two nodes;
both below one engine; and one of them failing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import v2_runs
from ngram_npu import NgramStore
from ngram_npu.vllm.extension import StoreExtension
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow

SERVE = Path(__file__).parents[1] / "engine" / "serve_offline.py"
ASKED = [0, 5]
PATIENCE_S = 900


def _start(
    model: Path,
    log: Path,
    more: dict[str, Any],
    *,
    method: str = "store",
    calls: list[list[Any]] | None = None,
    **environment: str,
) -> Any:
    requests = v2_runs.requests(AutoTokenizer.from_pretrained(model))
    given = v2_runs.METHODS[method].arguments
    arguments = {**given, "tensor_parallel_size": 2, **more}
    asked = [(requests[i][0], requests[i][1].max_tokens) for i in ASKED]
    said = [json.dumps(each) for each in (arguments, asked, calls or [])]
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, str(SERVE), str(model), *said],
            env={**os.environ, "NGRAM_NPU_VLLM": "1", **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


ONE_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # fewer NUMA nodes than ranks
}
"""Environment of an engine that has both ranks below it."""


def _two_nodes(model: Path, logs: Path, second: dict[str, str]) -> tuple[list[int], list[str]]:
    """Exit status and log of each rank; ``second`` is in the environment of one only."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    paths = [logs / str(rank) for rank in (0, 1)]
    started = [
        _start(
            model,
            path,
            {
                "distributed_executor_backend": "external_launcher",
                "worker_cls": "odd_workers.LateWorker",
            },
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            **(second if rank else {}),
        )
        for rank, path in enumerate(paths)
    ]
    ends = [process.wait(PATIENCE_S) for process in started]
    return ends, [path.read_text() for path in paths]


def test_ranks_that_are_alike_serve_and_one_speaks(model: Path, tmp_path: Path) -> None:
    ends, (first, second) = _two_nodes(model, tmp_path, {})
    assert ends == [0, 0], first[-3000:] + second[-3000:]
    said = [_result(log)["token_ids"] for log in (first, second)]
    assert said[0] == said[1]
    drafted = [re.findall(r"DRAFTED (\w{64} [1-9]\d*)", log) for log in (first, second)]
    assert drafted[0] == drafted[1] != []
    assert first.count("drafts for this engine") == 1
    assert "drafts for this engine" not in second


def test_all_ranks_are_told_alike_and_one_saves(model: Path, tmp_path: Path) -> None:
    counted = ["ngram_npu_store_statistics"]
    process = _start(
        model,
        tmp_path / "log",
        {"worker_extension_cls": f"{StoreExtension.__module__}.StoreExtension"},
        method="store-finish",
        calls=[
            counted,
            ["ngram_npu_store_warm", [[5, 8, 13] * 9], "tenant"],
            counted,
            ["ngram_npu_store_clear", None],
            counted,
        ],
        NGRAM_NPU_VLLM_STORE_FILE=str(tmp_path / "store"),
        **ONE_ENGINE,
    )
    assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()[-4000:]
    result = _result((tmp_path / "log").read_text())
    assert all(first == second for first, second in result["answers"])
    served, _, warm, _, cleared = (first for first, _ in result["answers"])
    assert served["tokens_entered"] > 0
    assert warm["tokens_held"] == served["tokens_held"] + 27
    assert cleared["tokens_held"] == 27
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store"]
    saved = NgramStore.load(tmp_path / "store")
    saved.check_integrity()
    assert saved.statistics.tokens_held == 27


def test_a_rank_that_is_killed_ends_the_engine_and_leaves_a_whole_file(
    model: Path, tmp_path: Path
) -> None:
    process = _start(
        model,
        tmp_path / "log",
        {"worker_cls": "odd_workers.KilledWorker"},
        NGRAM_NPU_VLLM_STORE_FILE=str(tmp_path / "store"),
        NGRAM_NPU_VLLM_STORE_SAVE_MINUTES="0.0001",
        **ONE_ENGINE,
    )
    assert process.wait(PATIENCE_S) != 0
    log = (tmp_path / "log").read_text()
    (line,) = [line for line in log.splitlines() if "died unexpectedly" in line]
    assert "VllmWorker-1" in line
    assert "EngineDeadError" in log
    assert "RESULT " not in log
    saved = NgramStore.load(tmp_path / "store")
    saved.check_integrity()
    assert saved.statistics.tokens_held > 0


def test_ranks_with_other_options_do_not_start(model: Path, tmp_path: Path) -> None:
    ends, logs = _two_nodes(model, tmp_path, {"NGRAM_NPU_VLLM_OVERLAP": "0"})
    assert 0 not in ends
    for log in logs:
        assert "overlap: expected the same on all ranks of an engine, got True on rank 0" in log


def test_a_rank_that_cannot_draft_ends_the_engine(model: Path, tmp_path: Path) -> None:
    process = _start(
        model,
        tmp_path / "log",
        {"worker_cls": "odd_workers.FailingWorker"},
        **ONE_ENGINE,
    )
    assert process.wait(PATIENCE_S) != 0
    log = (tmp_path / "log").read_text()
    assert "this rank cannot draft, so its worker ends" in log
    assert "EngineDeadError" in log
    assert "RESULT " not in log


def _result(log: str) -> Any:
    (line,) = [line for line in log.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))
