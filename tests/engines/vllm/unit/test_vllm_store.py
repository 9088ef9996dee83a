"""Tests the store of vLLM's drafters: its options and files, and the worker's methods."""

from __future__ import annotations

import gc
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import (
    CPU,
    STORE,
    V1,
    V2,
    WORDS,
    GPUModelRunner,
    K,
    Request,
    V1Async,
    make_scheduler_output,
    make_store_config,
)
from ngram_npu import NgramStore
from ngram_npu.engines.vllm import NgramProposer, saving, v1
from ngram_npu.engines.vllm.drafter import ATTRIBUTE
from ngram_npu.engines.vllm.extension import StoreExtension
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.shared_store import vocabulary_digest
from ngram_npu.store import scope_of_request, tokenizer_digest
from ngram_npu_cli import command


def test_store_options_are_read() -> None:
    section = {"store_tokens": 7000, "store_file": "/x/y", "store_seed": "/s", "scope": "private"}
    vllm_config = make_store_config(**section)
    read = read_options(vllm_config, "v2")
    assert (read.store, {name: getattr(read, name) for name in section}) == (True, section)
    vllm_config.parallel_config.data_parallel_index = 2
    assert read_options(vllm_config, "v2").store_file == "/x/y.2"


@pytest.mark.parametrize(("requests", "capacity"), [(1024, 1 << 20), (2048, 1 << 21)])
def test_default_store_tokens_depend_on_max_num_seqs(requests: int, capacity: int) -> None:
    vllm_config = make_store_config()
    del vllm_config.additional_config["ngram_npu"]["store_tokens"]
    vllm_config.scheduler_config.max_num_seqs = requests
    assert read_options(vllm_config, "v2").store_tokens == capacity
    with pytest.raises(ValueError, match=r"store_tokens: expected at least 6144, .* 6 requests"):
        read_options(make_store_config(store_tokens=6143), "v2")


@pytest.mark.parametrize(
    ("runner", "scope", "text", "num_unusable"),
    [
        ("V1", "shared", "all requests draft from each other's text; for servers with one ten", 20),
        ("V2", "shared", "each other's text; so do requests without both: for servers with on", 0),
        ("V2", "private", "each other's text; the text of requests without both is not stored", 30),
    ],
)
def test_startup_logs_who_shares_text_and_which_loaded_text_no_request_can_draft(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    runner: str,
    scope: str,
    text: str,
    num_unusable: int,
) -> None:
    seed = NgramStore(4096)
    seed.warm([range(30)])
    seed.warm([range(20)], scope=scope_of_request("tenant"))
    seed.save(tmp_path / "seed")
    options = {**STORE, "scope": scope, "store_seed": str(tmp_path / "seed")}
    V2(**options) if runner == "V2" else NgramProposer(make_store_config(**options))
    (line,) = [m for m in caplog.messages if "the store is on" in m]
    assert f"with scope={scope}: " in line
    assert text in line
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == bool(num_unusable)
    message = f"can draft {num_unusable} of 50 tokens from {tmp_path / 'seed'}: their text h"
    assert all(message in warning for warning in warnings)


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


def test_engine_drafts_text_that_learn_stored_for_the_salt_of_a_request(tmp_path: Path) -> None:
    logs, seed, answer = tmp_path / "logs.jsonl", tmp_path / "seed", "the quick brown fox"
    logs.write_text(json.dumps({"prompt": "a", "completion": answer, "user": {"salt": "tenant"}}))
    options = "--salt-field", "user.salt", "--tokenizer", "bytes"
    assert command.main(["learn", str(logs), "-o", str(seed), *options]) == 0
    engine = V2(**{**STORE, "scope": "private"}, store_seed=str(seed), vocabulary=256)
    engine.begin(Request("a", [1], "tenant"), Request("b", [1], "other"), Request("c", [1]))
    tokens = list(answer.encode())
    drafts = engine.step(dict.fromkeys("abc", tokens[:5]))
    assert drafts["a"] == tokens[5 : 5 + K]
    assert drafts["b"] == drafts["c"] != drafts["a"]


@pytest.mark.parametrize(
    ("seed", "store_file", "message"),
    [
        ("a", "a", "store_seed: expected another file than store_file"),
        ("missing", "", "store_seed: .*No such file"),
        (__file__, "", "store_seed: .*not a store file"),
        ("", __file__, "store_file: .*not a store file"),
        ("", "none/file", "store_file: expected an existing folder, got .*none"),
        ("", "large", "store_file: expected at most 16384 tok.* got 20000: raise store_tokens"),
    ],
)
def test_unusable_file_raises_before_a_store_is_made(
    tmp_path: Path, seed: str, store_file: str, message: str
) -> None:
    larger = NgramStore(65536)
    larger.warm([range(begin, begin + 400) for begin in range(0, 20_000, 400)])
    larger.save(tmp_path / "large")
    before = (tmp_path / "large").read_bytes()
    paths = {"store_seed": seed, "store_file": store_file}
    paths = {name: str(tmp_path / file) for name, file in paths.items() if file}
    vllm_config = make_store_config(**paths)
    with pytest.raises(ValueError, match=f"^ngram_npu: {message}") as raised:
        NgramProposer(vllm_config)
    assert "\n" not in str(raised.value)
    assert (tmp_path / "large").read_bytes() == before
    _, store = create_proposer(store_seed=str(tmp_path / "large"))
    assert 0 < store.statistics.tokens_held < 16384, "expected the last texts of a larger seed"


def test_file_in_a_folder_that_cannot_be_written_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match="store_file: expected a folder that can be written, got"):
        NgramProposer(make_store_config(store_file=str(tmp_path / "file")))


def test_store_seed_of_another_tokenizer_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "store")
    NgramStore(4096, tokenizer="0f" * 16).save(path)
    NgramProposer(make_store_config(store_file=path))
    assert "files are not compared with the tokenizer: ModuleNotFoundError" in caplog.text
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    module: Any = ModuleType("vllm.tokenizers")
    module.cached_tokenizer_from_config = lambda model_config: tokenizer
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)
    with pytest.raises(ValueError, match=r"store_seed: .*of another tokenizer"):
        NgramProposer(make_store_config(store_seed=path))
    # The order of tokens does not matter.
    assert vocabulary_digest(SimpleNamespace()) == tokenizer_digest({"b": 1, "a": 0})
    assert vocabulary_digest(SimpleNamespace(skip_tokenizer_init=True)) is None


def run_steps(proposer: Any, tokens: list[int]) -> None:
    """Runs steps of a request that samples these tokens."""
    rows, lengths = np.zeros((1, 96), np.int32), np.zeros(1, np.int32)
    for token in tokens:
        rows[0, lengths[0]] = token
        lengths[0] += 1
        proposer.propose([[token]], lengths, rows)


def end_requests(proposer: Any) -> None:
    """Does what vLLM's runner does once after the last request has ended."""
    getattr(proposer, ATTRIBUTE).begin_step(make_scheduler_output())


def test_store_is_saved_when_no_request_runs_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "store"
    proposer, store = create_proposer(store_file=str(path))
    saver = getattr(proposer, ATTRIBUTE).shared_store._saver
    end_requests(proposer)  # without text
    assert saver._thread is None, "expected no thread before the first step"
    run_steps(proposer, WORDS)
    assert saver._thread is None, "expected no save while the request runs"
    end_requests(proposer)
    wait_for_tokens(path, len(WORDS))
    run_steps(proposer, WORDS)
    end_requests(proposer)
    time.sleep(0.1)
    assert load_count(path) == len(WORDS), "expected no save soon after the last one"
    del proposer, store
    gc.collect()
    assert load_count(path) == 2 * len(WORDS)
    assert not saver._thread.is_alive()


@pytest.mark.parametrize("engine_class", [V1, V1Async, V2])
def test_runner_tells_its_drafter_when_no_request_runs(engine_class: Any) -> None:
    engine = engine_class(**STORE)
    saver = engine.drafter.shared_store._saver
    engine.begin(Request("a", [1], salt="owner"))
    engine.step({"a": WORDS[:K]})
    assert saver._thread is None
    engine.begin_step(make_scheduler_output())
    assert saver._thread is not None


def test_store_of_running_requests_is_saved_at_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=time.time, now=0.0)
    monkeypatch.setattr(saving, "time", clock)
    proposer, _store = create_proposer(store_file=str(path))
    clock.now = saving.BUSY_SAVE_S - 1
    run_steps(proposer, WORDS[:10])
    saver = getattr(proposer, ATTRIBUTE).shared_store._saver
    assert saver._thread is None
    clock.now = saving.BUSY_SAVE_S
    run_steps(proposer, WORDS[10:11])
    wait_for_tokens(path, 11)


def test_saves_take_at_most_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that takes three seconds is followed by a pause of a minute."""
    path, pauses = tmp_path / "store", queue.Queue[float]()
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=time.time, now=0.0)
    monkeypatch.setattr(saving, "time", clock)
    proposer, store = create_proposer(store_file=str(path))
    saver, save_copy = getattr(proposer, ATTRIBUTE).shared_store._saver, store.save_copy
    wait = saver._ended.wait

    def save_slowly(path: str, copy: Any) -> bool:
        clock.now += next(durations)
        is_saved: bool = save_copy(path, copy)
        return is_saved

    def note_pause(seconds: float) -> bool:
        pauses.put(seconds)
        return wait(0)

    store.save_copy, saver._ended.wait = save_slowly, note_pause
    durations = iter((3.0, 0.1))
    for pause in (60.0, saving.IDLE_SAVE_S):
        run_steps(proposer, WORDS[:3])
        end_requests(proposer)
        assert pauses.get(timeout=60) == pytest.approx(pause)


def test_failed_save_is_logged_and_repeated_after_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(saving, "IDLE_SAVE_S", 0.0)
    proposer, _store = create_proposer(store_file=str(folder / "store"))
    folder.rmdir()
    run_steps(proposer, WORDS[:5])
    end_requests(proposer)
    wait_until(lambda: "the store is not saved: FileNotFoundError" in caplog.text)
    folder.mkdir()
    saver = getattr(proposer, ATTRIBUTE).shared_store._saver
    wait_until(lambda: saver._copied_revision is None)
    assert saver._unsaved_since > 0
    end_requests(proposer)
    wait_for_tokens(folder / "store", 5)
    wait_until(lambda: saver._unsaved_since == 0)


@pytest.mark.parametrize("timeout", [0, 5])
def test_startup_logs_when_the_store_is_saved_and_which_text_may_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, timeout: int
) -> None:
    path = tmp_path / "store"
    vllm_config = make_store_config(store_file=str(path))
    vllm_config.shutdown_timeout = timeout
    NgramProposer(vllm_config)
    (line,) = [m for m in caplog.messages if f"store_file={path} is written" in m]
    assert line.endswith("every 60 s while requests run, and when the engine ends")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == (timeout == 0)
    assert all("is lost; --shutdown-timeout 10" in warning for warning in warnings)


def test_text_that_arrives_during_a_save_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_saves = tmp_path / "store", 0
    monkeypatch.setattr(saving, "IDLE_SAVE_S", 0.0)
    proposer, store = create_proposer(store_file=str(path))
    saver, save_copy = getattr(proposer, ATTRIBUTE).shared_store._saver, store.save_copy
    is_saving, may_end = threading.Event(), threading.Event()

    def save_while_text_arrives(path: str, copy: Any) -> bool:
        nonlocal num_saves
        num_saves += 1
        is_saving.set()
        assert may_end.wait(60)
        is_saved: bool = save_copy(path, copy)
        return is_saved

    store.save_copy = save_while_text_arrives
    run_steps(proposer, WORDS[:9])
    end_requests(proposer)
    assert is_saving.wait(60)
    run_steps(proposer, WORDS)
    assert saver._unsaved_since > 0
    may_end.set()
    wait_for_tokens(path, 9)
    end_requests(proposer)
    wait_for_tokens(path, 9 + len(WORDS))
    wait_until(lambda: saver._unsaved_since == 0)
    end_requests(proposer)
    time.sleep(0.05)
    assert num_saves == 2, "expected no further save of an unchanged store"


# The worker's methods.


def create_async_proposer(**options: Any) -> Any:
    return v1.AsyncNgramProposer(make_store_config(**options), CPU, GPUModelRunner())


def create_worker(model_runner: Any) -> Any:
    worker: Any = StoreExtension()
    worker.model_runner = model_runner
    return worker


def test_worker_warms_merges_and_clears_the_store(tmp_path: Path) -> None:
    proposer = create_async_proposer()
    worker = create_worker(SimpleNamespace(drafter=proposer))
    file_store = NgramStore(4096)
    file_store.warm([range(30)], scope=scope_of_request("b"))
    file_store.save(tmp_path / "store")
    keys: list[tuple[Any, ...]] = [("a",), ("a", "adapter"), (None, "adapter"), (None, "a"), ()]
    token_counts = {}  # by scope
    for length, arguments in enumerate(keys, 4):
        worker.ngram_npu_store_warm([WORDS[:length]], *arguments)
        token_counts[scope_of_request(*(arguments or (None,)))] = length
    worker.ngram_npu_store_merge(str(tmp_path / "store"))
    store = get_store(proposer)
    assert store.scopes == {**token_counts, scope_of_request("b"): 30}
    for arguments, scope in zip(keys, list(token_counts), strict=True):
        worker.ngram_npu_store_clear(*arguments)
        del token_counts[scope]
        assert store.scopes == {**token_counts, scope_of_request("b"): 30}
    assert worker.ngram_npu_store_statistics()["tokens_held"] == 30
    worker.ngram_npu_store_clear(all_scopes=True)
    assert worker.ngram_npu_store_statistics()["tokens_held"] == 0
    for num_kept in (4, 4, 0):
        worker.ngram_npu_store_warm([WORDS[:4]])
        worker.ngram_npu_store_mark_update(2 if num_kept else 1)
        assert worker.ngram_npu_store_statistics()["tokens_held"] == num_kept


def test_worker_warms_only_text_that_a_request_can_draft() -> None:
    worker = create_worker(SimpleNamespace(drafter=create_async_proposer(scope="private")))
    worker.ngram_npu_store_warm([WORDS], "a")
    with pytest.raises(ValueError, match="salt: expected a cache_salt or an adapter, got none: wi"):
        worker.ngram_npu_store_warm([WORDS])
    worker.ngram_npu_store_clear()  # the scope of text that was stored with scope="shared"
    assert worker.ngram_npu_store_statistics()["tokens_held"] == len(WORDS)


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


@pytest.mark.parametrize("arguments", [("salt",), (None, "adapter")])
def test_worker_of_a_runner_that_knows_no_keys_rejects_them(arguments: tuple[Any, ...]) -> None:
    worker = create_worker(SimpleNamespace(drafter=NgramProposer(make_store_config())))
    with pytest.raises(ValueError, match="salt, adapter: expected none, because this runner does"):
        worker.ngram_npu_store_clear(*arguments)
    worker.model_runner.drafter = NgramProposer(make_store_config(store=False))
    with pytest.raises(RuntimeError, match="store: this engine has none"):
        worker.ngram_npu_store_statistics()
