"""Tests two tensor-parallel ranks on the V2 runner, with random delays and calls to the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import STORE
from ngram_npu import NgramStore
from processes import METHODS, RANK_ENVIRONMENT, EngineProcess
from test_v2_store import STORE_EXTENSION

if TYPE_CHECKING:
    from conftest import Runs

REQUEST_INDICES = [0, 5]
DELAYED_WORKER = {"worker_cls": "workers.DelayedWorker"}


def start_ranks(
    model: Path, log: Path, overrides: dict[str, Any], *calls: list[Any], **options: Any
) -> EngineProcess:
    """Starts an engine with two ranks. `options` are further arguments of `EngineProcess`."""
    method = options.pop("method", "store")
    if "neural" in (METHODS[method].options or {}):
        options["NGRAM_NPU_VLLM_NEURAL"] = "1"
    overrides = {"tensor_parallel_size": 2, **overrides}
    options |= RANK_ENVIRONMENT
    return EngineProcess(
        model, log, method, REQUEST_INDICES, *calls, overrides=overrides, **options
    )


@pytest.mark.prove
@pytest.mark.parametrize("method", ["async", "draft-sync", "eagle-store"])
def test_ranks_with_random_delays_have_equal_drafts(
    model: Path, runs: Runs, tmp_path: Path, method: str
) -> None:
    log, call = tmp_path / "log", ["report_drafts"]
    process = start_ranks(model, log, DELAYED_WORKER, call, method=method)
    result, _ = process.read_result()
    assert result["token_ids"] == runs("none").get_token_ids(REQUEST_INDICES)
    first, second = result["rpc_results"][0]
    assert first == second
    _, steps = first
    assert steps > 10


@pytest.mark.parametrize("options", [{}, STORE], ids=["no store", "store"])
def test_ranks_with_draft_lengths_by_load_have_equal_drafts(
    model: Path, runs: Runs, tmp_path: Path, options: dict[str, Any]
) -> None:
    overrides = {**DELAYED_WORKER, "additional_config": {"ngram_npu": {"k": "auto", **options}}}
    process = start_ranks(model, tmp_path / "log", overrides, ["report_drafts"], method="async")
    result, log = process.read_result()
    assert log.count("k='auto': each step drafts 0 or 4 tokens per request") == 1
    assert result["token_ids"] == runs("none").get_token_ids(REQUEST_INDICES)
    first, second = result["rpc_results"][0]
    assert first == second


def test_ranks_with_store_calls_have_equal_drafts_and_one_rank_saves_store(
    model: Path, runs: Runs, tmp_path: Path
) -> None:
    statistics = ["ngram_npu_store_statistics"]
    process = start_ranks(
        model,
        tmp_path / "log",
        {**DELAYED_WORKER, "worker_extension_cls": STORE_EXTENSION},
        statistics,
        ["ngram_npu_store_warm", [[5, 8, 13] * 9], "tenant"],
        statistics,
        ["ngram_npu_store_clear", None],
        statistics,
        ["ngram_npu_store_clear", "salt"],
        statistics,
        ["report_drafts"],
        salt="salt",
        NGRAM_NPU_VLLM_STORE_FILE=str(tmp_path / "store"),
    )
    result, log = process.read_result()
    assert log.count("drafts for this engine") == 1
    assert result["token_ids"] == runs("none").get_token_ids(REQUEST_INDICES)
    assert all(first == second for first, second in result["rpc_results"])
    results = [first for first, _ in result["rpc_results"][0:8:2]]  # the statistics
    after_requests, after_warm, after_clear, after_salt_clear = results
    assert after_requests["tokens_held"] > 0
    assert after_warm["tokens_held"] == after_requests["tokens_held"] + 27
    # The text of the request with a cache salt is in another scope, so the first clear keeps it.
    assert 27 < after_clear["tokens_held"] < after_warm["tokens_held"]
    assert after_salt_clear["tokens_held"] == 27
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store"]
    store = NgramStore.load(tmp_path / "store")
    store.check_integrity()
    # vLLM may end the worker before the save that follows the last call.
    assert 27 <= store.statistics.tokens_held <= after_clear["tokens_held"]
