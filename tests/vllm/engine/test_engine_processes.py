"""As deployed: the engine in a process of its own, our class found by name or by entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
import request_sets
from engine_runs import ENGINE, METHODS
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from conftest import Runs

SCRIPT = Path(__file__).with_name("serve_offline.py")
PLAIN = [0, 7, 8, 15, 16, 23]  # requests of the greedy set without further conditions


def serve(
    model: Path,
    method: str,
    more: dict[str, Any] | None = None,
    *,
    asynchronous: bool = False,
    **environment: str,
) -> tuple[dict[str, Any], str]:
    """Result and log of an engine in another process; ``asynchronous``: of its workers too."""
    if asynchronous:
        paths = [str(SCRIPT.with_name("site")), str(SCRIPT.parent)]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    requests = request_sets.greedy(request_sets.Prompts(AutoTokenizer.from_pretrained(model)))
    arguments = {
        **ENGINE,
        "speculative_config": METHODS[method].speculative_config,
        "additional_config": METHODS[method].additional_config,
        "async_scheduling": METHODS[method].is_async,
        **(more or {}),
    }
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            str(model),
            json.dumps(arguments),
            json.dumps([(requests[i][0], requests[i][1].max_tokens) for i in PLAIN]),
        ],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT ")), log


def _started(log: str) -> list[str]:
    return [line for line in log.splitlines() if "drafts for this engine" in line]


def test_custom_class_in_another_process(model: Path, runs: Runs, tmp_path: Path) -> None:
    result, log = serve(
        model,
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


def test_plugin_by_its_entry_point(model: Path, runs: Runs) -> None:
    result, log = serve(model, "plugin", NGRAM_NPU_VLLM="1")
    expected = runs("none", "greedy").outputs
    assert result["token_ids"] == [expected[i][0].token_ids for i in PLAIN]
    (line,) = _started(log)
    assert "MainProcess" not in line
    assert "(method ngram): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert "engine=scan" in line
    assert "not enabled" not in log


def test_the_asynchronous_proposer_by_its_entry_point(model: Path, runs: Runs) -> None:
    result, log = serve(
        model,
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


def test_an_unknown_option_stops_the_engine_with_one_line(model: Path) -> None:
    from engine_runs import Method, engine

    method = Method(METHODS["custom_class"].speculative_config, {"ngram_npu": {"prompt_lookup": 3}})
    with pytest.raises(RuntimeError, match="ngram_npu: unknown option 'prompt_lookup' in additi"):
        engine(model, method).__enter__()


def test_metrics_are_in_vllms_registry(runs: Runs) -> None:
    run = runs("custom_class", "greedy")
    found: defaultdict[str, float] = defaultdict(float)  # over all models that engines served
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("ngram_npu_"):
                found[sample.name] += sample.value
    drafted = sum(len(draft) for steps in run.drafts.values() for draft in steps.values())
    assert found["ngram_npu_draft_tokens_total"] >= drafted > 0
    assert found["ngram_npu_rows_total"] > found["ngram_npu_drafts_total"] > 0
    assert found["ngram_npu_proposals_total"] > 0
    assert found["ngram_npu_propose_seconds_total"] > 0
