"""Tests the store of vLLM's drafters: its options, scopes and files, and the worker's methods."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_engine import (
    CPU,
    STORE,
    V2,
    WORDS,
    GPUModelRunner,
    make_adapter,
    make_params,
    make_store_config,
)
from ngram_npu import NgramStore, scope_of
from ngram_npu.engines.vllm import NgramProposer, options, shared_store, v1, v2
from ngram_npu.engines.vllm.drafter import ATTRIBUTE
from ngram_npu.engines.vllm.extension import StoreExtension
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.scopes import find_scope
from ngram_npu.store import SHARED_SCOPE


def test_store_options_are_read() -> None:
    read = read_options(make_store_config(store=False), "v2")
    assert (read.store, read.store_file) == (False, "")
    section = {"store_tokens": 7000, "store_file": "/x/y", "store_seed": "/s"}
    read = read_options(make_store_config(**section), "v2")
    assert (read.store, read.store_tokens, read.store_file) == (True, 7000, "/x/y")
    assert (read.store_seed, read.scope) == ("/s", "shared")
    for method in ("v2", "ngram_gpu", "beside"):
        assert read_options(make_store_config(scope="required"), method).scope == "required"
    vllm_config = make_store_config(store_file="/x/y")
    vllm_config.parallel_config.data_parallel_index = 2
    assert read_options(vllm_config, "v2").store_file == "/x/y.2"


def test_store_tokens_below_minimum_raises() -> None:
    with pytest.raises(ValueError, match=r"store_tokens: expected at least 6144, .* 6 requests"):
        NgramProposer(make_store_config(store_tokens=6143))


@pytest.mark.parametrize(("requests", "capacity"), [(1024, 1 << 20), (2048, 1 << 21)])
def test_default_store_tokens_depend_on_max_num_seqs(requests: int, capacity: int) -> None:
    vllm_config = make_store_config()
    del vllm_config.additional_config["ngram_npu"]["store_tokens"]
    vllm_config.scheduler_config.max_num_seqs = requests
    assert read_options(vllm_config, "v2").store_tokens == capacity
    assert options.STORE_TOKENS == 1 << 20


def test_scope_of_request_differs_by_adapter_scope_and_salt() -> None:
    def find(adapter: Any, params: Any, salt: str | None) -> int:
        return find_scope(adapter, params, salt, is_exchanged=False)

    assert find(None, None, None) == find(None, make_params(), "") == 0
    params_with_other_key = make_params("a")
    params_with_other_key.extra_args["other"] = 1
    assert find(None, params_with_other_key, None) == scope_of("a")
    scopes = [
        find(adapter, make_params(name), salt)
        for adapter in (None, make_adapter(1, "x"), make_adapter(2, "x"), make_adapter(1, "y"))
        for name in (None, "7", "a", "b", -1, 1.5, ["a"], ["a", "b"])
        for salt in (None, "a", "b", "7", "null")
    ]
    assert len(set(scopes)) == len(scopes)
    assert all(0 <= scope < 2**63 for scope in scopes)


# Store files.


def create_proposer(**options: Any) -> tuple[NgramProposer, Any]:
    """Returns a proposer with a store, and the store."""
    proposer = NgramProposer(make_store_config(**options))
    return proposer, get_store(proposer)


def get_store(proposer: Any) -> Any:
    return getattr(proposer, ATTRIBUTE).shared_store.contents


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_tokens(path: Path, count: int) -> None:
    wait_until(lambda: path.exists() and load_count(path) == count)


def load_count(path: Path) -> int:
    """Returns the number of tokens in a store file."""
    return NgramStore.load(path).statistics.tokens_held


def test_store_seed_is_loaded_once_and_never_written(tmp_path: Path) -> None:
    """The saved store file contains the seed's text, so the next engine loads only a new seed."""
    store_file, seed_bytes, new_tokens = tmp_path / "file", {}, itertools.count()
    for name, first in (("monday", 100), ("tuesday", 200)):
        seed_store = NgramStore(8192)
        seed_store.warm([range(first, first + 30)])
        seed_store.save(tmp_path / name)
        seed_bytes[name] = (tmp_path / name).read_bytes()

    def load_hundreds(seed: str) -> set[int]:
        """Runs an engine with this seed. Returns its stored tokens, divided by 100."""
        options = {"store_seed": str(tmp_path / seed)} if seed else {}
        proposer, store = create_proposer(store_file=str(store_file), **options)
        store.warm([[next(new_tokens)]])
        texts = store.texts()
        del proposer, store
        gc.collect()
        tokens = [token for _, text in texts for token in text.tolist()]
        assert len(tokens) == len(set(tokens)), "expected each text only once"
        return {token // 100 for token in tokens} - {0}

    hundreds = [load_hundreds(seed) for seed in ("monday", "monday", "", "tuesday")]
    assert hundreds == [{1}, {1}, {1}, {1, 2}]
    assert all((tmp_path / name).read_bytes() == data for name, data in seed_bytes.items())
    assert load_hundreds("monday") == {1, 2}
    assert load_hundreds("tuesday") == {1, 2}


@pytest.mark.parametrize(
    ("message", "seed", "store_file"),
    [
        ("expected another file", "a", "a"),
        (".*No such file", "missing", ""),
        (".*not a store file", __file__, ""),
    ],
)
def test_invalid_store_seed_raises(
    tmp_path: Path, message: str, seed: str, store_file: str
) -> None:
    options = {"store_file": str(tmp_path / store_file)} if store_file else {}
    with pytest.raises(ValueError, match=f"ngram_npu: store_seed: {message}"):
        NgramProposer(make_store_config(store_seed=str(tmp_path / seed), **options))


def test_store_seed_of_another_tokenizer_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "store")
    NgramStore(4096, tokenizer="0f" * 16).save(path)
    NgramProposer(make_store_config(store_file=path))
    assert "files are not compared with the tokenizer: ModuleNotFoundError" in caplog.text
    module: Any = ModuleType("vllm.tokenizers")
    module.cached_tokenizer_from_config = lambda model_config: SimpleNamespace(
        get_vocab=lambda: {"a": 0}
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)
    with pytest.raises(ValueError, match=r"store_seed: .*of another tokenizer"):
        NgramProposer(make_store_config(store_seed=path))


def test_store_is_saved_when_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that arrives soon after a save is saved later."""
    path = tmp_path / "store"
    monkeypatch.setattr(shared_store, "IDLE_S", 0.02)
    proposer, store = create_proposer(store_file=str(path))
    thread = getattr(proposer, ATTRIBUTE).shared_store._thread
    store.warm([WORDS])
    wait_for_tokens(path, len(WORDS))
    store.warm([WORDS])
    time.sleep(0.3)
    assert load_count(path) == len(WORDS)
    del proposer, store
    gc.collect()
    wait_for_tokens(path, 2 * len(WORDS))  # saved when the engine ends
    assert not thread.is_alive()


def test_store_that_is_never_idle_is_saved_at_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, counter = tmp_path / "store", itertools.count()
    monkeypatch.setattr(shared_store, "IDLE_S", 0.02)
    monkeypatch.setattr(shared_store, "BUSY_SAVE_S", 0.3)
    _proposer, store = create_proposer(store_file=str(path))
    start_time = time.monotonic()
    # The revision differs in each call, as if text arrived all the time.
    monkeypatch.setattr(NgramStore, "revision", property(lambda store: next(counter)))
    store.warm([WORDS])
    wait_for_tokens(path, len(WORDS))
    assert time.monotonic() - start_time >= 0.3


@pytest.mark.parametrize("timeout", [0, 5])
def test_startup_logs_when_the_store_is_saved_and_which_text_may_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, timeout: int
) -> None:
    path = tmp_path / "store"
    vllm_config = make_store_config(store_file=str(path))
    vllm_config.shutdown_timeout = timeout
    NgramProposer(vllm_config)
    assert "the store is on: all requests of this engine draft from each other's t" in caplog.text
    (line,) = [m for m in caplog.messages if f"store_file={path} is written" in m]
    assert line.endswith("at least every 60 s while it comes in, and when the engine ends")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == (timeout == 0)
    assert all("is lost; --shutdown-timeout 10" in warning for warning in warnings)


def test_file_with_more_text_than_the_store_is_refused_and_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "file"
    larger = NgramStore(65536)
    larger.warm([range(begin, begin + 400) for begin in range(0, 20_000, 400)])
    larger.save(file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"store_file: expected at most 16384 tok.* got 20000"):
        create_proposer(store_file=str(file))
    assert file.read_bytes() == before
    _, store = create_proposer(store_file=str(file), store_tokens=65536)
    assert store.statistics.tokens_held == 20_000


def test_text_that_arrives_during_a_save_is_saved_at_the_next_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved_paths = tmp_path / "store", []
    monkeypatch.setattr(shared_store, "BUSY_SAVE_S", 0.06)
    monkeypatch.setattr(shared_store, "IDLE_SAVE_S", 0.01)
    proposer, store = create_proposer(store_file=str(path))
    time.sleep(0.2)
    assert not path.exists(), "expected no save of an empty store"
    save = store.save

    def save_while_text_arrives(path: str) -> None:
        save(path)
        saved_paths.append(path)
        if len(saved_paths) == 1:
            store.warm([WORDS])

    store.save = save_while_text_arrives
    store.warm([WORDS[:9]])
    wait_until(lambda: len(saved_paths) >= 2)
    assert load_count(path) == 9 + len(WORDS)
    time.sleep(0.2)
    assert len(saved_paths) == 2, "expected no further save of an unchanged store"
    del proposer


# The worker's methods.


def create_async_proposer() -> Any:
    return v1.AsyncNgramProposer(make_store_config(), CPU, GPUModelRunner())


def create_worker(model_runner: Any) -> Any:
    worker: Any = StoreExtension()
    worker.model_runner = model_runner
    return worker


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_worker_warms_merges_and_clears_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.setattr(v2.RowDrafter, "has_request_data", True)
    proposer = create_async_proposer() if runner == "V1" else V2(**STORE).speculator
    name = "drafter" if runner == "V1" else "speculator"
    worker = create_worker(SimpleNamespace(**{name: proposer}))
    file_store = NgramStore(4096)
    file_store.warm([range(30)], scope="b")
    file_store.save(tmp_path / "store")
    owners: list[tuple[Any, ...]] = [
        *(("a",), ("a", (1, "adapter")), ("a", (1, "adapter"), "salt"), (None, None, "a"), ())
    ]
    token_counts = {}  # by scope
    for length, owner in enumerate(owners, 4):
        worker.ngram_npu_store_warm([WORDS[:length]], *owner)
        name, adapter, salt = (*owner, None, None, None)[:3]
        lora = adapter and make_adapter(*adapter)
        scope = find_scope(lora, make_params(name), salt, is_exchanged=False)
        token_counts[scope] = length
    worker.ngram_npu_store_merge(str(tmp_path / "store"))
    store = get_store(proposer)
    assert store.scopes == {**token_counts, scope_of("b"): 30}
    for owner, scope in zip(owners, list(token_counts), strict=True):
        worker.ngram_npu_store_clear(*owner)
        del token_counts[scope]
        assert store.scopes == {**token_counts, scope_of("b"): 30}
    assert worker.ngram_npu_store_statistics()["tokens_held"] == 30
    worker.ngram_npu_store_clear(all_scopes=True)
    assert worker.ngram_npu_store_statistics()["tokens_held"] == 0
    for num_kept in (4, 4, 0):
        worker.ngram_npu_store_warm([WORDS[:4]])
        worker.ngram_npu_store_mark_update(2 if num_kept else 1)
        assert worker.ngram_npu_store_statistics()["tokens_held"] == num_kept


def test_scopes_of_requests_with_different_owners_differ() -> None:
    adapters = [None, make_adapter(1, "a"), make_adapter(2, "a")]
    owners = itertools.product(adapters, (None, "a", "None", "cache_salt"), (None, "a", "None"))
    scopes = [
        find_scope(adapter, make_params(name), salt, is_exchanged=False)
        for adapter, name, salt in owners
    ]
    assert len(set(scopes)) == len(scopes)
    assert scopes[0] == SHARED_SCOPE


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_request_with_salt_alone_has_the_scope_of_learned_text(is_exchanged: bool) -> None:
    scope = find_scope(None, make_params(None), "tenant", is_exchanged=is_exchanged)
    assert scope == scope_of(("cache_salt", "tenant"))


def test_worker_that_merges_a_missing_file_raises_or_ends_its_rank(tmp_path: Path) -> None:
    proposer = create_async_proposer()
    worker = create_worker(SimpleNamespace(drafter=proposer))
    with pytest.raises(FileNotFoundError):
        worker.ngram_npu_store_merge(str(tmp_path / "missing"))
    getattr(proposer, ATTRIBUTE).has_other_ranks = True
    with pytest.raises(ValueError, match="expected a vector of token ids"):
        worker.ngram_npu_store_warm([["a"]])
    with pytest.raises(SystemExit):
        worker.ngram_npu_store_merge(str(tmp_path / "missing"))


@pytest.mark.parametrize("arguments", [("a",), (None, (1, "adapter")), (None, None, "salt")])
def test_worker_of_a_synchronous_runner_rejects_scopes(arguments: tuple[Any, ...]) -> None:
    worker = create_worker(SimpleNamespace(drafter=NgramProposer(make_store_config())))
    with pytest.raises(ValueError, match="scope: expected none, this runner has one for all"):
        worker.ngram_npu_store_clear(*arguments)
    worker.model_runner.drafter = NgramProposer(make_store_config(store=False))
    with pytest.raises(RuntimeError, match="store: this engine has none"):
        worker.ngram_npu_store_statistics()
