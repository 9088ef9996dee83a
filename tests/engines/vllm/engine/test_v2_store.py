"""The store of a running V2 engine: seed, calls between steps, and its file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import v2_runs
from engines import Engine, encode_corpus, greedy, start_engine
from ngram_npu import NgramStore
from ngram_npu.engines.vllm.options import EXTRA_ARGUMENT, vocabulary_digest
from ngram_npu.engines.vllm.sharing import scope_of_request
from ngram_npu.store import file as store_file
from ngram_npu_cli.learn.fit_draft_costs import Costs

EXTENSION = "ngram_npu.engines.vllm.extension.StoreExtension"


@contextmanager
def _start_engine(model: Path, **options: Any) -> Iterator[Engine]:
    """Starts an engine with changed options of the store and its methods in the worker."""
    method = v2_runs.METHODS["store"].with_options(**options)
    with start_engine(model, method, worker_extension_cls=EXTENSION) as engine:
        yield engine


def call(engine: Engine, name: str, *arguments: Any) -> Any:
    """Calls a method of the store in the worker and returns its result."""
    (result,) = engine.llm.collective_rpc(f"ngram_npu_store_{name}", args=arguments)
    return result


def test_store_is_seeded_changed_by_calls_and_saved(model: Path, tmp_path: Path, runs: Any) -> None:
    file, result = tmp_path / "store", v2_runs.Run()
    requests = v2_runs.make_requests(model)
    saving = {"store_file": str(file), "store_save_minutes": 0.002}
    with _start_engine(model, **saving) as engine:
        vocabulary = vocabulary_digest(engine.runner.model_config)
        engine.serve(requests, result)
        statistics = call(engine, "statistics")
        assert statistics["calls_skipped"] == 0
        num_tokens = statistics["tokens_held"]
        deadline = time.monotonic() + 60
        while not (file.exists() and NgramStore.load(file).statistics.tokens_held == num_tokens):
            assert time.monotonic() < deadline, "the store is saved while the engine runs"
            time.sleep(0.05)
        call(engine, "warm", [[5, 6, 7]] * 3, "other tenant")
        call(engine, "merge", str(file))
        assert call(engine, "statistics")["tokens_held"] > num_tokens + 9
        call(engine, "clear")
        call(engine, "clear", "tenant")
        assert engine.drafter.shared_store.contents.scopes.keys() != {0}
        assert call(engine, "statistics")["tokens_held"] == 9
        call(engine, "merge", str(file))
        engine.drafter.shared_store.contents.check_integrity()
    assert result.find_different(runs("none")) == []
    assert store_file.describe(file).tokenizer == vocabulary
    saved = NgramStore.load(file, tokenizer=vocabulary).statistics
    assert saved.tokens_held > num_tokens

    # Draft costs of the same tokenizer, with which all of the store's drafts are used, or none.
    for logit in (40, -768):
        tables = np.zeros((16, 32), int), np.full((16, 56), logit), np.zeros((4096, 2), int)
        costs_file = tmp_path / "costs"
        Costs(*tables, tokenizer=vocabulary).save(costs_file)
        seeded, before = v2_runs.Run(), file.read_bytes()
        options = {"store_seed": str(file), "costs_file": str(costs_file)}
        with _start_engine(model, **options) as engine:
            engine.serve(requests, seeded)
            statistics = call(engine, "statistics")
        assert seeded.find_different(runs("none")) == []
        assert file.read_bytes() == before
        assert statistics["hits"] > saved.hits
        drafts = statistics["drafts"] - saved.drafts  # a file contains the counts
        if logit > 0:
            assert drafts > 0
            assert seeded.accepted > result.accepted + 50, "the seed contains all of this text"
        else:
            assert drafts == 0


def test_clear_of_salt_and_scope_removes_only_their_text(model: Path) -> None:
    prompt, params = encode_corpus(model, 2_000)[:60], greedy(40, {EXTRA_ARGUMENT: "a"})
    with _start_engine(model, store="finish") as engine:
        store = engine.drafter.shared_store.contents
        for salt in ("a", "b", "c"):
            engine.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], params)
        before = set(store.scopes)
        call(engine, "clear", "a", None, "b")
        assert before - set(store.scopes) == {scope_of_request(None, params, "b")}
