"""Tests `vllm serve` on the V2 runner: the store file of a stopped server, and data parallelism."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines import K
from ngram_npu import NgramStore
from processes import METHODS, Server, assert_store_has_tokens
from v2_runs import make_requests

if TYPE_CHECKING:
    from conftest import Runs

REQUEST_INDICES = [0, 5, 6, 11]
TIMEOUT_S = 120


def _wait_until(condition: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        time.sleep(0.2)


def _complete(server: Server, prompt: Any, max_tokens: int | None) -> list[int]:
    token_ids: list[int] = server.complete(prompt, max_tokens).choices[0].token_ids
    return token_ids


def test_store_file_of_stopped_server_contains_its_text(model: Path, tmp_path: Path) -> None:
    """vLLM kills the workers when the server stops, so the store must be saved before."""
    servers = {}
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        folder = tmp_path / stop_signal.name
        servers[stop_signal] = Server(
            model,
            folder,
            METHODS["store"].make_arguments(model),
            NGRAM_NPU_VLLM_STORE_FILE=str(folder / "store"),
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
        )
    try:
        for stop_signal, server in servers.items():
            server.wait_until_ready()
            token_ids = _complete(server, "import os\nimport sys\n", 40)
            file = tmp_path / stop_signal.name / "store"

            # The store holds back the tokens of the last step.
            def is_saved(file: Path = file, count: int = len(token_ids) - K - 1) -> bool:
                return file.exists() and NgramStore.load(file).statistics.tokens_held >= count

            _wait_until(is_saved, server)
            server.process.send_signal(stop_signal)
            server.process.wait(TIMEOUT_S)
            ((_, stored_text),) = NgramStore.load(file).texts()
            # The step that began before the request ended may have added its tokens.
            assert len(stored_text) <= len(token_ids) + K + 1
            assert stored_text[: len(token_ids)].tolist() == token_ids[: len(stored_text)]
            log = server.log.read_text()
            assert f"store_file={file} is written when no request runs" in log
            assert "with shutdown_timeout=0 vLLM kills its workers" in log
    finally:
        for server in servers.values():
            server.stop()


def test_data_parallel_engines_have_separate_store_files_and_metric_labels(
    model: Path, runs: Runs, tmp_path: Path
) -> None:
    metrics, files = tmp_path / "metrics", [tmp_path / "store", tmp_path / "store.1"]
    metrics.mkdir()
    server = Server(
        model,
        tmp_path,
        {**METHODS["store"].make_arguments(model), "data_parallel_size": 2},
        NGRAM_NPU_VLLM_STORE_FILE=str(files[0]),
        PROMETHEUS_MULTIPROC_DIR=str(metrics),
        CPU_VISIBLE_MEMORY_NODES="0,0",  # otherwise vLLM 0.33 needs a node for each engine
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_LOG_STATS_INTERVAL="1",
    )
    requests = make_requests(model)

    def complete(number: int) -> list[int]:
        prompt, params = requests[number]
        return _complete(server, prompt, params.max_tokens)

    try:
        server.wait_until_ready()
        with ThreadPoolExecutor() as pool:  # concurrently, so that both engines get requests
            outputs = list(pool.map(complete, REQUEST_INDICES * 2))
        assert outputs == runs("none").get_token_ids(REQUEST_INDICES) * 2
        _wait_until(lambda: all(file.exists() for file in files), server)
        rows = dict(
            re.findall(r'^ngram_npu_rows_total{engine="(\d)".* (\S+)$', server.get("metrics"), re.M)
        )
    finally:
        server.stop()
    assert rows.keys() == {"0", "1"}
    assert min(map(float, rows.values())) > 0
    for file in files:
        assert_store_has_tokens(file)
