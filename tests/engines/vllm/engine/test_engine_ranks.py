"""Two tensor-parallel ranks below one asynchronous engine of V1; and one of them killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ngram_npu import NgramStore
from processes import ONE_ENGINE, assert_died_and_left, saved_often
from test_engine_processes import said, serve, started

if TYPE_CHECKING:
    from conftest import Runs


def _ranks(worker: str) -> dict[str, Any]:
    return {"tensor_parallel_size": 2, "worker_cls": f"odd_workers.{worker}"}


@pytest.mark.parametrize(
    "method",
    [
        "store_padded",
        # Drafting goes the same way without a store, and with one of text that is not finished.
        pytest.param("padded", marks=pytest.mark.prove),
        pytest.param("store_live_padded", marks=pytest.mark.prove),
    ],
)
def test_two_ranks_draft_alike_and_one_counts_and_saves(
    model: Path, runs: Runs, tmp_path: Path, method: str
) -> None:
    saving = {"NGRAM_NPU_VLLM_STORE_FILE": str(tmp_path / "store")} if "store" in method else {}
    result, log = serve(
        model,
        tmp_path,
        method,
        _ranks("NotingWorker"),
        ["drafted"],
        **ONE_ENGINE,
        **saving,
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
        VLLM_LOGGING_LEVEL="DEBUG",
    ).result()
    assert result["token_ids"] == said(runs)
    first, second = result["answers"][0]
    assert first == second
    assert first[1] > 10
    (line,) = started(log)
    assert "Worker" in line  # by its entry point, in the rank's own process
    assert "(method ngram_gpu)" in line
    assert "drafts=padded" in line
    assert "Batch queue is enabled with size 2" in log
    assert "not enabled" not in log
    if saving:
        counted = result["metrics"]["ngram_npu_proposals_total"]
        assert first[1] / 2 < counted <= first[1], "one rank counts"
        saved = NgramStore.load(tmp_path / "store")
        saved.check_integrity()
        assert saved.statistics.tokens_entered > 0


def test_a_rank_that_is_killed_ends_the_engine_and_leaves_a_whole_file(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    process = serve(
        model, tmp_path, "store_padded", _ranks("KilledWorker"), **ONE_ENGINE, **saved_often(path)
    )
    assert_died_and_left(process, path)
