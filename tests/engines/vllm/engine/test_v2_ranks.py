"""Two tensor-parallel ranks on the V2 runner, with random delays and calls to the store."""

from __future__ import annotations

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


def start(
    model: Path, log: Path, overrides: dict[str, Any], *calls: list[Any], **options: Any
) -> EngineProcess:
    """Starts an engine with two ranks. `options` are further arguments of `EngineProcess`."""
    method = options.pop("method", "store")
    if "beside" in (METHODS[method].options or {}):
        options["NGRAM_NPU_VLLM_BESIDE"] = "1"
    overrides = {"tensor_parallel_size": 2, **overrides}
    return EngineProcess(
        model, log, method, CHOSEN, *calls, overrides=overrides, **{**RANKS, **options}
    )


@pytest.mark.prove
@pytest.mark.parametrize("method", ["async-index", "draft-sync", "eagle-store"])
def test_ranks_with_random_delays_draft_equally(
    model: Path, runs: Runs, tmp_path: Path, method: str
) -> None:
    process = start(model, tmp_path / "log", DELAYED, ["report_drafts"], method=method)
    result, _ = process.read_result()
    assert result["token_ids"] == runs("none").get_token_ids(CHOSEN)
    first, second = result["rpc_results"][0]
    assert first == second
    assert first[1] > 10


def test_ranks_with_store_calls_draft_equally_and_one_saves(
    model: Path, runs: Runs, tmp_path: Path
) -> None:
    statistics = ["ngram_npu_store_statistics"]
    process = start(
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
    result, log = process.read_result()
    assert log.count("drafts for this engine") == 1
    assert result["token_ids"] == runs("none").get_token_ids(CHOSEN)
    assert all(first == second for first, second in result["rpc_results"])
    served, _, warm, _, salted, _, cleared, _ = (first for first, _ in result["rpc_results"])
    assert served["tokens_inserted"] > 0
    assert warm["tokens_held"] == served["tokens_held"] + 27
    assert 27 < salted["tokens_held"] < warm["tokens_held"], "the salt's text is in another scope"
    assert cleared["tokens_held"] == 27
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store"]
    saved = NgramStore.load(tmp_path / "store")
    saved.check_integrity()
    # vLLM may end the worker before the save that follows the last call.
    assert 27 <= saved.statistics.tokens_held <= salted["tokens_held"]
