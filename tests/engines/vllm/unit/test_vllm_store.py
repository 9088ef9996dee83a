"""The store of vLLM's drafters: its options, scopes and files, and the worker's methods."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_engine import (
    CPU,
    WORDS,
    GPUModelRunner,
    lora,
    sampling_params,
    store_config,
)
from ngram_npu import NgramStore, scope_of
from ngram_npu.engines.vllm import NgramProposer, sharing, v1_device
from ngram_npu.engines.vllm.extension import StoreExtension
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.sharing import scope_of_request
from residence import compute_resident_share


def test_store_options_are_read() -> None:
    off = read_options(store_config(store=None), "v2")
    assert (off.ngram.store, off.store_tokens, off.store_file) == (None, None, "")
    on = read_options(store_config(store_tokens=5000, store_file="/x/y", store_seed="/s"), "v2")
    assert (on.ngram.store, on.store_tokens, on.store_file) == ("live", 5000, "/x/y")
    assert (on.store_seed, on.store_save_minutes, on.scope) == ("/s", 1, "shared")
    for method in ("v2", "ngram_gpu", "beside"):
        assert read_options(store_config(scope="required"), method).scope == "required"
    data_parallel = store_config(store_file="/x/y")
    data_parallel.parallel_config.data_parallel_index = 2
    assert read_options(data_parallel, "v2").store_file == "/x/y.2"


def test_store_tokens_below_minimum_raises() -> None:
    with pytest.raises(ValueError, match=r"store_tokens: expected at least 12288, .* 12 slots"):
        NgramProposer(store_config(store_tokens=12287))


@pytest.mark.parametrize(("requests", "capacity"), [(1024, 1 << 24), (16384, 2048 * 16384)])
def test_default_store_tokens_depend_on_max_num_seqs(requests: int, capacity: int) -> None:
    vllm_config = store_config()
    vllm_config.scheduler_config.max_num_seqs = requests
    shared_store = NgramProposer(vllm_config).shared_store
    assert shared_store is not None
    assert shared_store.contents.token_capacity == capacity
    assert compute_resident_share(shared_store.contents.tensor) == 1


def test_scope_of_request_differs_by_adapter_scope_and_salt() -> None:
    params = sampling_params
    assert scope_of_request(None, None, None) == scope_of_request(None, params(), "") == 0
    two_keys = params(7)
    two_keys.extra_args["other"] = 1
    assert scope_of_request(None, two_keys, None) == 7
    assert scope_of_request(None, params("a"), None) == scope_of("a")
    assert scope_of_request(lora(1, "x"), None, None) == scope_of('ngram_npu: [[1, "x"], null]')
    encoded = ('ngram_npu: [[1, "x"], null]', 'ngram_npu: [null, null, "a"]')
    scopes = [
        scope_of_request(adapter, params(name), salt)
        for adapter in (None, lora(1, "x"), lora(2, "x"), lora(1, "y"))
        for name in (None, 7, "7", "a", "b", -1, 1.5, ["a"], ["a", "b"], *encoded)
        for salt in (None, "a", "b", "7", "null", *encoded)
    ]
    assert len(set(scopes)) == len(scopes)
    assert all(0 <= scope < 2**63 for scope in scopes)


# Store files.


def create_proposer(**options: Any) -> tuple[NgramProposer, Any]:
    """Returns a proposer with a store, and the store."""
    proposer = NgramProposer(store_config(**options))
    assert proposer.shared_store is not None
    return proposer, proposer.shared_store.contents


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
    """The store file already contains the seed's text, unless the seed is a new one."""
    store_file, seeds, fresh = tmp_path / "file", {}, itertools.count()
    for name, first in (("monday", 100), ("tuesday", 200)):
        seed_store = NgramStore(1, 8192)
        seed_store.warm([range(first, first + 30)])
        seed_store.save(tmp_path / name)
        seeds[name] = (tmp_path / name).read_bytes()

    def load_hundreds(seed: str) -> set[int]:
        """Runs an engine with this seed. Returns its stored tokens, divided by 100."""
        options = {"store_seed": str(tmp_path / seed)} if seed else {}
        proposer, store = create_proposer(store_tokens=16384, store_file=str(store_file), **options)
        store.warm([[next(fresh)]])
        texts = store._texts()
        del proposer, store
        gc.collect()
        tokens = [token for _, text in texts for token in text.tolist()]
        assert len(tokens) == len(set(tokens)), "expected each text only once"
        return {token // 100 for token in tokens} - {0}

    hundreds = [load_hundreds(seed) for seed in ("monday", "monday", "", "tuesday")]
    assert hundreds == [{1}, {1}, {1}, {1, 2}]
    assert all((tmp_path / name).read_bytes() == data for name, data in seeds.items())
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
        NgramProposer(store_config(store_seed=str(tmp_path / seed), **options))


def test_store_seed_of_another_tokenizer_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "store")
    NgramStore(1, 4096, tokenizer="0f" * 16).save(path)
    NgramProposer(store_config(store_file=path))
    assert "files are not compared with the tokenizer: ModuleNotFoundError" in caplog.text
    module: Any = ModuleType("vllm.tokenizers")
    module.cached_tokenizer_from_config = lambda model_config: SimpleNamespace(
        get_vocab=lambda: {"a": 0}
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)
    with pytest.raises(ValueError, match=r"store_seed: .*of another tokenizer"):
        NgramProposer(store_config(store_seed=path))


def test_store_is_saved_when_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval is the default of a minute. Text that follows soon waits for the interval."""
    path = tmp_path / "store"
    monkeypatch.setattr(sharing, "IDLE_S", 0.02)
    proposer, store = create_proposer(store_file=str(path))
    store.warm([WORDS])
    wait_for_tokens(path, len(WORDS))
    store.warm([WORDS])
    time.sleep(0.3)
    assert load_count(path) == len(WORDS)
    del proposer, store
    gc.collect()
    wait_for_tokens(path, 2 * len(WORDS))  # saved when the engine ends
    assert not [t for t in threading.enumerate() if t.name == "ngram_npu store"]


def test_store_that_is_never_idle_is_saved_at_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fresh = tmp_path / "store", itertools.count()
    monkeypatch.setattr(sharing, "IDLE_S", 0.02)
    proposer, store = create_proposer(store_file=str(path), store_save_minutes=0.3 / 60)
    shared: Any = proposer.shared_store
    read_words, started = shared._read_words, time.monotonic()
    changing = lambda *names: (*read_words(*names), next(fresh))  # noqa: E731
    monkeypatch.setattr(shared, "_read_words", changing)
    store.warm([WORDS])
    wait_for_tokens(path, len(WORDS))
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize(
    ("timeout", "minutes", "loss"),
    [(0, 1.0, "text since the last save"), (0, 0.0, "all text"), (5, 1.0, ""), (5, 0.0, "")],
)
def test_startup_logs_save_times_and_possible_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, timeout: int, minutes: float, loss: str
) -> None:
    path = tmp_path / "store"
    vllm_config = store_config(store_file=str(path), store_save_minutes=minutes)
    vllm_config.shutdown_timeout = timeout
    NgramProposer(vllm_config)
    assert "store=live is on: all requests of this engine draft from each other's t" in caplog.text
    (line,) = [m for m in caplog.messages if f"store_file={path} is written" in m]
    assert ("at least every 1 min while it comes in" in line) == bool(minutes)
    assert line.endswith("when the engine ends")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == bool(loss)
    assert all(f"and {loss} is lost; --shutdown-timeout 10" in warning for warning in warnings)


def test_text_that_arrives_during_a_save_is_saved_at_the_next_interval(tmp_path: Path) -> None:
    path, saves = tmp_path / "store", []
    proposer, store = create_proposer(store_file=str(path), store_save_minutes=0.001)
    time.sleep(0.2)
    assert not path.exists(), "an empty store is not saved"
    save = store.save

    def save_while_text_arrives(path: str) -> None:
        save(path)
        saves.append(path)
        if len(saves) == 1:
            store.warm([WORDS])

    store.save = save_while_text_arrives
    store.warm([WORDS[:9]])
    wait_until(lambda: len(saves) >= 2)
    assert load_count(path) == 9 + len(WORDS)
    time.sleep(0.2)
    assert len(saves) == 2, "an unchanged store is not saved again"
    del proposer


# The worker's methods.


def create_async_proposer() -> Any:
    return v1_device.AsyncNgramProposer(store_config(), CPU, GPUModelRunner())


def create_worker(model_runner: Any) -> Any:
    worker: Any = StoreExtension()
    worker.model_runner = model_runner
    return worker


@pytest.mark.parametrize("runner", ["V1", "V2", "V2 with a neural drafter"])
def test_worker_warms_merges_and_clears_the_store(tmp_path: Path, runner: str) -> None:
    proposer = create_async_proposer()
    runners = {
        "V1": SimpleNamespace(drafter=proposer),
        "V2": SimpleNamespace(speculator=proposer),
        "V2 with a neural drafter": SimpleNamespace(speculator=SimpleNamespace(ngram_npu=proposer)),
    }
    worker = create_worker(runners[runner])
    file_store = NgramStore(1, 4096)
    file_store.warm([range(30)], scope="b")
    file_store.save(tmp_path / "store")
    owners: list[tuple[Any, ...]] = [
        *(("a",), ("a", (1, "adapter")), ("a", (1, "adapter"), "salt"), (None, None, "a"), ())
    ]
    sizes = {}
    for length, owner in enumerate(owners, 4):
        worker.ngram_npu_store_warm([WORDS[:length]], *owner)
        name, adapter, salt = (*owner, None, None, None)[:3]
        scope = scope_of_request(adapter and lora(*adapter), sampling_params(name), salt)
        sizes[scope] = length
    worker.ngram_npu_store_merge(str(tmp_path / "store"))
    store = proposer.shared_store.contents
    assert store.scopes == {**sizes, scope_of("b"): 30}
    for owner, scope in zip(owners, list(sizes), strict=True):
        worker.ngram_npu_store_clear(*owner)
        del sizes[scope]
        assert store.scopes == {**sizes, scope_of("b"): 30}
    assert worker.ngram_npu_store_statistics()["tokens_held"] == 30
    worker.ngram_npu_store_clear(all_scopes=True)
    assert worker.ngram_npu_store_statistics()["tokens_held"] == 0


def test_worker_merge_of_a_missing_file_raises_or_ends_a_rank(tmp_path: Path) -> None:
    proposer = create_async_proposer()
    worker = create_worker(SimpleNamespace(drafter=proposer))
    with pytest.raises(FileNotFoundError):
        worker.ngram_npu_store_merge(str(tmp_path / "missing"))
    proposer.has_other_ranks = True
    with pytest.raises(ValueError, match="expected a vector of token ids"):
        worker.ngram_npu_store_warm([["a"]])
    with pytest.raises(SystemExit):
        worker.ngram_npu_store_merge(str(tmp_path / "missing"))


@pytest.mark.parametrize("arguments", [("a",), (None, (1, "adapter")), (None, None, "salt")])
def test_worker_of_a_synchronous_runner_rejects_scopes(arguments: tuple[Any, ...]) -> None:
    worker = create_worker(SimpleNamespace(drafter=NgramProposer(store_config())))
    with pytest.raises(ValueError, match="scope: expected none, this runner has one for all"):
        worker.ngram_npu_store_clear(*arguments)
    worker.model_runner.drafter = NgramProposer(store_config(store=None))
    with pytest.raises(RuntimeError, match="store: this engine has none"):
        worker.ngram_npu_store_statistics()
