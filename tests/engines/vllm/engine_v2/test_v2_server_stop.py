"""The store's file of `vllm serve`, whose workers vLLM kills when it is stopped."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path

import v2_runs
from http_server import Server
from ngram_npu import NgramStore

SIGNALS = signal.SIGTERM, signal.SIGINT
PATIENCE_S = 60


def complete(server: Server) -> list[int]:
    """The token ids of an answer."""
    form = {
        "model": "tiny",
        "prompt": "import os\nimport sys\n",
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps(form).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        token_ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return token_ids


def wait_for_tokens(file: Path, count: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while not file.exists() or NgramStore.load(file).statistics.tokens_held < count:
        assert time.monotonic() < until, "the store is saved while the server runs"
        time.sleep(0.5)


def test_file_of_a_stopped_server_has_the_text_of_its_requests(model: Path, tmp_path: Path) -> None:
    arguments = v2_runs.METHODS["store"].arguments
    for name in ("speculative_config", "additional_config"):
        arguments[name] = json.dumps(arguments[name])
    servers = {}
    for stop in SIGNALS:
        folder = tmp_path / stop.name
        folder.mkdir()
        servers[stop] = Server(
            model,
            folder,
            {**arguments, "served_model_name": "tiny"},
            NGRAM_NPU_VLLM="1",
            NGRAM_NPU_VLLM_STORE_FILE=str(folder / "store"),
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
        )
    try:
        for stop, server in servers.items():
            server.wait_until_ready()
            token_ids, file = complete(server), tmp_path / stop.name / "store"
            wait_for_tokens(file, len(token_ids))
            server.process.send_signal(stop)
            server.process.wait(PATIENCE_S)
            ((_, text),) = NgramStore.load(file)._texts()
            assert text.tolist() == token_ids
            log = server.log.read_text()
            assert f"store_file={file} is written 1 s after text stops coming in" in log
            assert "with shutdown_timeout=0 vLLM kills its workers" in log
    finally:
        for server in servers.values():
            server.stop()
