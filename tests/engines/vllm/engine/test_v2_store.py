"""Tests the store of a running V2 engine: its seed, calls of its methods, and its file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import v2_runs
from engines import Engine, encode_corpus, make_params, start_engine
from ngram_npu import NgramStore
from ngram_npu.engines.vllm.options import EXTRA_ARGUMENT, PROMPT_ARGUMENT, vocabulary_digest
from ngram_npu.engines.vllm.sharing import prompt_scope_of_request, scope_of_request
from ngram_npu.store import file as store_file
from ngram_npu.store import scope_of
from ngram_npu_cli.learn.fit_draft_costs import Costs

STORE_EXTENSION = "ngram_npu.engines.vllm.extension.StoreExtension"


@contextmanager
def _start_engine(model: Path, **options: Any) -> Iterator[Engine]:
    """Starts an engine with changed options of the store. The worker has the store's methods."""
    method = v2_runs.METHODS["store"].with_options(**options)
    with start_engine(model, method, worker_extension_cls=STORE_EXTENSION) as engine:
        yield engine


def call_store(engine: Engine, name: str, *arguments: Any) -> Any:
    """Calls a method of the store in the worker and returns its result."""
    (result,) = engine.llm.collective_rpc(f"ngram_npu_store_{name}", args=arguments)
    return result


def test_store_is_seeded_changed_by_calls_and_saved(model: Path, tmp_path: Path, runs: Any) -> None:
    file, result = tmp_path / "store", v2_runs.Run()
    requests = v2_runs.make_requests(model)
    save_options = {"store_file": str(file), "store_save_minutes": 0.002}
    with _start_engine(model, **save_options) as engine:
        vocabulary = vocabulary_digest(engine.runner.model_config)
        engine.serve(requests, result)
        statistics = call_store(engine, "statistics")
        assert statistics["calls_skipped"] == 0
        num_tokens = statistics["tokens_held"]
        deadline = time.monotonic() + 60
        while not (file.exists() and NgramStore.load(file).statistics.tokens_held == num_tokens):
            assert time.monotonic() < deadline, "expected a save of the store while the engine runs"
            time.sleep(0.05)
        call_store(engine, "warm", [[5, 6, 7]] * 3, "other tenant")
        call_store(engine, "merge", str(file))
        assert call_store(engine, "statistics")["tokens_held"] > num_tokens + 9
        call_store(engine, "clear")
        call_store(engine, "clear", "tenant")
        assert engine.drafter.shared_store.contents.scopes.keys() != {0}
        assert call_store(engine, "statistics")["tokens_held"] == 9
        call_store(engine, "merge", str(file))
        engine.drafter.shared_store.contents.check_integrity()
    assert result.find_different(runs("none")) == []
    assert store_file.describe(file).tokenizer == vocabulary
    file_statistics = NgramStore.load(file, tokenizer=vocabulary).statistics
    assert file_statistics.tokens_held > num_tokens

    # Costs of the same tokenizer. The first logit makes all drafts of the store likely, the second
    # logit makes all of them unlikely.
    for logit, count in ((40, len(requests)), (-768, 4)):
        tables = np.zeros((16, 32), int), np.full((16, 56), logit), np.zeros((4096, 2), int)
        costs_file = tmp_path / "costs"
        Costs(*tables, tokenizer=vocabulary).save(costs_file)
        seeded_result, file_bytes = v2_runs.Run(), file.read_bytes()
        options = {"store_seed": str(file), "costs_file": str(costs_file)}
        with _start_engine(model, **options) as engine:
            engine.serve(requests[:count], seeded_result)
            statistics = call_store(engine, "statistics")
        assert seeded_result.outputs == runs("none").outputs[:count]
        assert file.read_bytes() == file_bytes
        assert statistics["hits"] > file_statistics.hits
        # The counts of the file are the initial counts of the engine's store.
        num_drafts = statistics["drafts"] - file_statistics.drafts
        if logit > 0:
            assert num_drafts > 0
            # The seed contains all of this text.
            assert seeded_result.num_accepted > result.num_accepted + 50
        else:
            assert num_drafts == 0


def test_prompt_scope_drafts_more_and_keeps_text_equal(model: Path) -> None:
    """After each run, the text in the tenant's own scope is removed. So a run drafts from an
    earlier one only if it is of the same tenant and names the prompt scope."""
    tokens = encode_corpus(model, 8_000)
    prompts = [{"prompt_token_ids": tokens[200 * i :][:40]} for i in range(8)]
    with start_engine(model, v2_runs.METHODS["none"]) as engine:
        expected = engine.generate(prompts, make_params(32))
    num_accepted = []
    with _start_engine(model, prompt_scopes=True) as engine:
        shared = engine.drafter.shared_store
        for tenant, name in (("a", "prompt"), ("a", None), ("b", "prompt"), ("a", "prompt")):
            extra_args = {EXTRA_ARGUMENT: tenant} | ({PROMPT_ARGUMENT: name} if name else {})
            params, accepted = make_params(32, extra_args), engine.read_counters()[1]
            assert engine.generate(prompts, params) == expected
            num_accepted.append(engine.read_counters()[1] - accepted)
            assert shared.settle()
            shared.contents.clear(scope_of_request(None, params, None))
        shared.contents.check_integrity()
        scopes = {prompt_scope_of_request(scope_of(tenant), params) for tenant in ("a", "b")}
        assert len(scopes) == 2
        assert scopes <= shared.contents.scopes.keys()
        del shared
    assert num_accepted[3] > max(num_accepted[:3]) + 5
