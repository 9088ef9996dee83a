"""A server of two engines of a model that is not divided: each has its store's file and label."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import v2_runs
from http_server import Server
from ngram_npu import NgramStore
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from conftest import Runs

ASKED = [0, 5, 6, 11]
PATIENCE_S = 120


@pytest.mark.slow
def test_each_engine_has_its_file_and_its_label(model: Path, runs: Runs, tmp_path: Path) -> None:
    metrics, files = tmp_path / "metrics", [tmp_path / "store", tmp_path / "store.1"]
    metrics.mkdir()
    arguments = v2_runs.METHODS["store"].arguments
    for name in ("speculative_config", "additional_config"):
        arguments[name] = json.dumps(arguments[name])
    server = Server(
        model,
        tmp_path,
        {**arguments, "served_model_name": "tiny", "data_parallel_size": 2},
        NGRAM_NPU_VLLM="1",
        NGRAM_NPU_VLLM_STORE_FILE=str(files[0]),
        NGRAM_NPU_VLLM_STORE_SAVE_MINUTES="0.0001",
        PROMETHEUS_MULTIPROC_DIR=str(metrics),
        CPU_VISIBLE_MEMORY_NODES="0,0",  # else vLLM 0.33 wants a node for each engine
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_LOG_STATS_INTERVAL="1",
    )
    requests = v2_runs.requests(AutoTokenizer.from_pretrained(model))

    def ask(number: int) -> list[int]:
        prompt, params = requests[number]
        form = {
            "model": "tiny",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": params.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        asked = urllib.request.Request(
            url, json.dumps(form).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            said: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return said

    try:
        server.wait_until_ready()
        with ThreadPoolExecutor() as pool:  # at once: both engines get some
            said = list(pool.map(ask, ASKED * 2))
        assert said == [runs("none").outputs[i][0] for i in ASKED] * 2
        until = time.monotonic() + PATIENCE_S
        while not all(file.exists() for file in files):
            assert time.monotonic() < until, server.log.read_text()[-4000:]
            time.sleep(0.1)
        rows = dict(
            re.findall(r'^ngram_npu_rows_total{engine="(\d)".* (\S+)$', server.get("metrics"), re.M)
        )
    finally:
        server.stop()
    assert rows.keys() == {"0", "1"}
    assert min(map(float, rows.values())) > 0
    for file in files:
        held = NgramStore.load(file)
        held.check_integrity()
        assert held.statistics.tokens_held > 0
