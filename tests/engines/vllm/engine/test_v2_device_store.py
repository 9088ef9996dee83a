"""A running V2 engine whose store is in the memory of its device, here the CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import v2_runs
from engines import K, start_engine
from ngram_npu import NgramStore
from test_v2_ranks import REQUEST_INDICES, start_ranks
from test_v2_store import STORE_EXTENSION, call_store

if TYPE_CHECKING:
    from conftest import Runs

# Slow, so only in `make prove`: the other two methods and sync-scan together cover the same code.
SYNC = pytest.param("device-store-sync", marks=pytest.mark.prove)
METHODS = ["device-store", SYNC, "draft-device-store"]


def _contains(tokens: list[int], piece: list[int]) -> bool:
    return any(tokens[i : i + len(piece)] == piece for i in range(len(tokens) - len(piece) + 1))


@pytest.mark.parametrize("method", METHODS)
def test_text_with_device_store_equals_text_without_speculation(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.find_different(runs("none")) == []
    assert run.preemptions >= 3
    assert run.state_changes == run.waits_in_propose == 0


@pytest.mark.parametrize("method", METHODS)
def test_device_store_contains_generated_text_only(runs: Runs, method: str) -> None:
    """Prompts, and tokens of steps that ran after the end of a request, are not stored. With
    asynchronous scheduling, tokens that the last step verified after the stop are."""
    run = runs(method)
    outputs = run.get_token_ids()
    max_excess = K if v2_runs.METHODS[method].asynchronous else 0
    assert run.scopes == 2
    for _, text in run.stored_texts:
        num_pieces = min(max_excess + 1, len(text))
        pieces = [text[: len(text) - excess] for excess in range(num_pieces)]
        assert any(_contains(output, piece) for output in outputs for piece in pieces), text
    assert run.store is not None
    assert run.store.tokens_held == sum(len(text) for _, text in run.stored_texts)
    assert run.store.tokens_held > sum(map(len, outputs)) / 2


def test_device_store_drafts_text_that_the_row_does_not_contain(runs: Runs) -> None:
    """The stock speculator on the same state has other drafts, and fewer are accepted."""
    run = runs("device-store")
    assert len(run.mismatches) > 20
    assert run.num_accepted > runs("stock").num_accepted


def test_device_store_is_changed_by_calls_saved_and_seeded(
    model: Path, tmp_path: Path, runs: Runs
) -> None:
    file, result = tmp_path / "store", v2_runs.Run()
    requests = v2_runs.make_requests(model)
    method = v2_runs.METHODS["device-store"]
    saving = method.with_options(store_file=str(file), store_save_minutes=0.002)
    with start_engine(model, saving, worker_extension_cls=STORE_EXTENSION) as engine:
        engine.serve(requests, result)
        num_tokens = call_store(engine, "statistics")["tokens_held"]
        deadline = time.monotonic() + 60
        while not (file.exists() and NgramStore.load(file).statistics.tokens_held == num_tokens):
            assert time.monotonic() < deadline, "the store is saved while the engine runs"
            time.sleep(0.05)
        call_store(engine, "warm", [[5, 6, 7]] * 3, "other tenant")
        call_store(engine, "clear")
        call_store(engine, "clear", "tenant")
        assert call_store(engine, "statistics")["tokens_held"] == 9
        call_store(engine, "merge", str(file))
        assert call_store(engine, "statistics")["tokens_held"] == 9 + num_tokens
        engine.drafter.shared_store.contents.check_integrity()
    assert result.find_different(runs("none")) == []
    assert NgramStore.load(file).statistics.tokens_held == 9 + num_tokens
    seeded = v2_runs.Run()
    with start_engine(model, method.with_options(store_seed=str(file))) as engine:
        engine.serve(requests, seeded)
    assert seeded.find_different(runs("none")) == []
    assert seeded.num_accepted > result.num_accepted + 50, "the seed contains most of this text"


def test_ranks_with_device_stores_draft_equally(model: Path, runs: Runs, tmp_path: Path) -> None:
    calls: list[list[Any]] = [
        ["ngram_npu_store_warm", [[5, 8, 13] * 9], "tenant"],
        ["ngram_npu_store_statistics"],
        ["report_drafts"],
    ]
    overrides = {"worker_cls": "workers.ReportingWorker", "worker_extension_cls": STORE_EXTENSION}
    process = start_ranks(model, tmp_path / "log", overrides, *calls, method="device-store")
    result, _ = process.read_result()
    assert result["token_ids"] == runs("none").get_token_ids(REQUEST_INDICES)
    assert all(first == second for first, second in result["rpc_results"])
    assert result["rpc_results"][1][0]["tokens_held"] > 27
    assert result["rpc_results"][2][0][1] > 10
