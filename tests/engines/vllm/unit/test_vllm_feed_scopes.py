"""Tests the scopes that engines exchange. All engines compute the same scope for an owner, and
different scopes for different owners."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import STORE, V2, Request, make_adapter, make_config
from ngram_npu import scope_of
from ngram_npu.engines.vllm.extension import StoreExtension
from ngram_npu.engines.vllm.scopes import compute_scope, fold_scope

FEED: dict[str, Any] = {**STORE, "store_feed": "tcp://10.0.0.1:5557"}
NAMES = (None, "a", "None", "null", "1", "ngram_npu_scope:", '["a", null]')
SALTS = (None, "a", "None", "null", "1", "ngram_npu_scope:", 'ngram_npu_scope:["a", null]')


def test_different_owners_have_different_scopes() -> None:
    adapters = (None, "", "a", "None", 'ngram_npu_scope:["a", null]')
    owners = [*itertools.product(adapters, NAMES, SALTS)]
    scopes = {compute_scope(adapter, fold_scope(name, salt)) for adapter, name, salt in owners}
    assert len(scopes) == len(owners)
    assert all(0 <= scope < 2**63 for scope in scopes)


def test_request_without_owner_has_scope_0() -> None:
    assert compute_scope(None, None) == compute_scope(None, "") == 0  # vLLM ignores an empty salt
    assert compute_scope(None, "None") != 0
    assert fold_scope(None, "") is None


@pytest.mark.parametrize("name", ["a", "None", "\ud800", "ü"])
def test_named_scope_is_that_of_engines_without_a_feed(name: Any) -> None:
    """So the files of a store, and those of ``ngram-npu learn``, remain valid."""
    assert compute_scope(None, fold_scope(name, None)) == scope_of(name)


def test_scopes_are_the_same_in_every_process() -> None:
    assert compute_scope("adapter", "salt") == 8019725298614929055
    assert compute_scope(None, fold_scope("tenant", "salt")) == 5101914381985612353


MALFORMED = [
    *("", "[", "1", "{}", "[1]", "[1, 2, 3]", "[" * 100_000, "9" * 9999),
    *("[true, null]", "[-1, null]", "[1.5, null]", "[[], null]", "[null, null]", "[1, null]"),
    *('["a",null]', '["a", null] ', '{"a": 1, "b": null}'),
]


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_salt_has_a_scope_of_its_own(content: str) -> None:
    """A publisher may send any salt. Only the exact result of ``fold_scope`` names a scope."""
    scope = compute_scope(None, "ngram_npu_scope:" + content)
    assert scope > 0
    assert scope not in (scope_of("a"), compute_scope(None, content or None))


def test_engine_with_feed_separates_text_by_adapter_name_and_salt() -> None:
    """An adapter's number differs between engines."""
    engine = V2(**{**FEED, "store_tokens": 20480})
    owners: list[dict[str, Any]] = [
        {"adapter": make_adapter(1, "a")},
        {"adapter": make_adapter(2, "a"), "scope": "b", "salt": fold_scope("b", None)},
        {"salt": "c"},
        {"scope": "d", "salt": fold_scope("d", None)},
        {"scope": "e"},  # admitted by a process without the plugin
        {},
    ]
    for i, owner in enumerate(owners):
        engine.begin(Request(str(i), [1], **owner))
        engine.step({str(i): [10 + i, 20 + i]})
        engine.step({str(i): [3]})  # a store on the device holds back the newest step
        engine.end(str(i))
    expected = {
        compute_scope("a", None),
        compute_scope("a", fold_scope("b", None)),
        compute_scope(None, "c"),
        scope_of("d"),
        scope_of("e"),
        0,
    }
    assert set(engine.store.scopes) == expected


def make_worker(engine: V2) -> Any:
    worker = StoreExtension()
    worker.model_runner = SimpleNamespace(speculator=engine.speculator)  # type: ignore[attr-defined]
    return worker


def test_extension_selects_the_scopes_of_requests() -> None:
    engine = V2(**FEED)
    worker = make_worker(engine)
    worker.ngram_npu_store_warm([[1, 2, 3]], scope="a", adapter=(7, "b"), salt="c")
    worker.ngram_npu_store_warm([[1, 2, 3]], scope="a")
    scope = compute_scope("b", fold_scope("a", "c"))
    assert set(engine.store.scopes) == {scope, scope_of("a")}
    worker.ngram_npu_store_clear(scope="a")
    assert set(engine.store.scopes) == {scope}


def test_publishing_engine_computes_the_scopes_of_engines_with_feed() -> None:
    vllm_config = make_config(**STORE)
    adapter = make_adapter(1, "a")
    engine = V2(**STORE)
    assert engine.drafter.find_scope(adapter, None, None) != compute_scope("a", None)
    vllm_config.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
    drafter = engine.make_speculator(vllm_config).ngram_npu
    assert drafter.find_scope(adapter, None, None) == compute_scope("a", None)
