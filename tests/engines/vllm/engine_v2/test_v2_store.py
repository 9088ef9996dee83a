"""The store of a running engine: what it begins with, what it is told between steps, its file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import v2_runs
from ngram_npu import NgramStore, store_file
from ngram_npu.engines.vllm import plugin
from ngram_npu.engines.vllm.options import EXTRA_ARGUMENT
from ngram_npu.engines.vllm.sharing import scope_of_request
from ngram_npu.tokenizer_digest import digest_of
from ngram_npu_cli.learn.fit_draft_costs import Costs

EXTENSION = "ngram_npu.engines.vllm.extension.StoreExtension"


@contextmanager
def _engine(model: Path, result: v2_runs.Run, **options: Any) -> Iterator[tuple[Any, Any]]:
    plugin.install_v2()  # an engine's end takes it back
    given = v2_runs.METHODS["store"].arguments
    ours = {**given["additional_config"]["ngram_npu"], **options}
    given |= {"additional_config": {"ngram_npu": ours}, "worker_extension_cls": EXTENSION}
    with v2_runs.engine(model, given, result) as made:
        yield made
        del made


def test_a_store_is_seeded_told_and_saved(
    model: Path, tmp_path: Path, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, result = tmp_path / "own", v2_runs.Run()
    saving = {"store_file": str(own), "store_save_minutes": 0.002}
    with _engine(model, result, **saving) as (llm, runner):
        vocabulary = digest_of(llm.get_tokenizer().get_vocab())
        asked = v2_runs.requests(llm.get_tokenizer())
        v2_runs.serve(llm, asked, result)
        (found,) = llm.collective_rpc("ngram_npu_store_statistics")
        assert found["calls_busy"] == 0
        held = found["tokens_held"]
        until = time.monotonic() + 60
        while not (own.exists() and NgramStore.load(own).statistics.tokens_held == held):
            assert time.monotonic() < until, "it is saved while the engine runs"
            time.sleep(0.05)
        llm.collective_rpc("ngram_npu_store_warm", args=([[5, 6, 7]] * 3, "other tenant"))
        llm.collective_rpc("ngram_npu_store_merge", args=(str(own),))
        (found,) = llm.collective_rpc("ngram_npu_store_statistics")
        assert found["tokens_held"] > held + 9
        llm.collective_rpc("ngram_npu_store_clear")
        llm.collective_rpc("ngram_npu_store_clear", args=("tenant",))
        assert runner.speculator.shared_store.contents.scopes.keys() != {0}
        (found,) = llm.collective_rpc("ngram_npu_store_statistics")
        assert found["tokens_held"] == 9
        llm.collective_rpc("ngram_npu_store_merge", args=(str(own),))
        runner.speculator.shared_store.contents.check_integrity()
        del llm, runner
    assert result.differing(runs("none")) == []
    assert store_file.describe(own).tokenizer == vocabulary
    saved = NgramStore.load(own, tokenizer=vocabulary)
    assert saved.statistics.tokens_held > held

    # Costs, of the same tokenizer, by which the store's drafts are worth it, and are not.
    for logit in (40, -768):
        tables = np.zeros((16, 32), int), np.full((16, 56), logit), np.zeros((4096, 2), int)
        costs = tmp_path / "costs"
        Costs(*tables, tokenizer=vocabulary).save(costs)
        seeded = v2_runs.Run()
        with _engine(model, seeded, store_seed=str(own), costs_file=str(costs)) as (llm, runner):
            before = own.read_bytes()
            v2_runs.serve(llm, asked, seeded)
            (found,) = llm.collective_rpc("ngram_npu_store_statistics")
            del llm, runner
        assert seeded.differing(runs("none")) == []
        assert own.read_bytes() == before
        assert found["hits"] > saved.statistics.hits
        drafts = found["drafts"] - saved.statistics.drafts  # a file keeps the counts
        if logit > 0:
            assert drafts > 0
            assert seeded.accepted > result.accepted + 50, "it has said all of this before"
        else:
            assert drafts == 0

    monkeypatch.setattr("ngram_npu.engines.vllm.options.digest_of", lambda vocabulary: "0f" * 16)
    with (
        pytest.raises(ValueError, match=r"store_seed: .* of another tokenizer"),
        _engine(model, v2_runs.Run(), store_seed=str(own)),
    ):
        pass


def test_salted_requests_draft_from_own_text_only(model: Path) -> None:
    tenants: list[tuple[dict[str, str], dict[str, Any]]] = [
        (salt, scope)
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
        for scope in ({}, {EXTRA_ARGUMENT: "a"})
    ]
    drafts: list[int] = []
    with _engine(model, v2_runs.Run(), store="finish") as (llm, runner):
        held = runner.speculator.shared_store.contents
        prompt, greedy = v2_runs.requests(llm.get_tokenizer())[0]
        for salt, extra in [*tenants, *tenants]:
            before = held.statistics.drafts
            greedy.extra_args = extra
            llm.generate([{"prompt_token_ids": prompt, **salt}], greedy, use_tqdm=False)
            drafts.append(held.statistics.drafts - before)
        greedy.extra_args = {"ngram_npu_scop": "a"}
        with pytest.raises(ValueError, match="ngram_npu: unknown key 'ngram_npu_scop'"):
            llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        llm.collective_rpc("ngram_npu_store_clear", args=("a", None, "b"))
        scopes = dict(held.scopes)
        del llm, runner
    assert drafts[: len(tenants)] == [0] * len(tenants)
    assert min(drafts[len(tenants) :]) > 0, "of its own text"
    named = [
        scope_of_request(None, SimpleNamespace(extra_args=extra), salt.get("cache_salt"))
        for salt, extra in tenants
    ]
    assert set(scopes) == set(named[:-1]), "the last one's was cleared"
