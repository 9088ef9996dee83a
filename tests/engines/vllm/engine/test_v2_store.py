"""Tests the store of a running V2 engine: calls of its methods, its file, and its seed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import v2_runs
from engines import Engine, start_engine
from ngram_npu import NgramStore
from ngram_npu.engines.vllm import saving as store_saving
from ngram_npu.engines.vllm.shared_store import vocabulary_digest
from ngram_npu.store import file as store_file

if TYPE_CHECKING:
    from conftest import Runs

STORE_EXTENSION = "ngram_npu.engines.vllm.extension.StoreExtension"


def call_store(engine: Engine, name: str, *arguments: Any) -> Any:
    """Calls a method of the store in the worker and returns its result."""
    (result,) = engine.llm.collective_rpc(f"ngram_npu_store_{name}", args=arguments)
    return result


def test_store_is_changed_by_calls_saved_and_seeded(
    model: Path, tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, result = tmp_path / "store", v2_runs.Run()
    requests = v2_runs.make_requests(model)
    method = v2_runs.METHODS["store"]
    monkeypatch.setattr(store_saving, "BUSY_SAVE_S", 0.1)
    saving = method.with_options(store_file=str(file))
    with start_engine(model, saving, worker_extension_cls=STORE_EXTENSION) as engine:
        vocabulary = vocabulary_digest(engine.runner.model_config)
        engine.serve(requests, result)
        num_tokens = call_store(engine, "statistics")["tokens_held"]
        engine.serve(requests[:1], v2_runs.Run())  # a step after the last text launches the copy
        deadline = time.monotonic() + 60
        while not (file.exists() and NgramStore.load(file).statistics.tokens_held >= num_tokens):
            assert time.monotonic() < deadline, "expected a save of the store while the engine runs"
            time.sleep(0.05)
        saved = Path(shutil.copy(file, tmp_path / "saved"))
        num_tokens = NgramStore.load(saved).statistics.tokens_held
        call_store(engine, "warm", [[5, 6, 7]] * 3, "other tenant")
        call_store(engine, "clear")
        call_store(engine, "clear", "tenant")
        assert call_store(engine, "statistics")["tokens_held"] == 9
        call_store(engine, "merge", str(saved))
        assert call_store(engine, "statistics")["tokens_held"] == 9 + num_tokens
        engine.store.check_integrity()
    assert result.find_different(runs("none")) == []
    assert store_file.describe(file).tokenizer == vocabulary
    assert NgramStore.load(file, tokenizer=vocabulary).statistics.tokens_held == 9 + num_tokens
    seeded, file_bytes = v2_runs.Run(), file.read_bytes()
    with start_engine(model, method.with_options(store_seed=str(file))) as engine:
        engine.serve(requests, seeded)
    assert seeded.find_different(runs("none")) == []
    assert seeded.num_accepted > result.num_accepted + 50, "the seed contains most of this text"
    assert file.read_bytes() == file_bytes
