"""What the store behind vLLM's methods begins with, when it is saved, and what it can be told."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import GPUModelRunner
from ngram_npu import NgramStore
from ngram_npu.engines.vllm import NgramProposer, sharing, v1_device
from ngram_npu.engines.vllm.extension import StoreExtension
from ngram_npu.engines.vllm.sharing import scope_of_request
from test_vllm_store import WORDS, R, Rows, config_of


def test_ranks_have_equal_stores_and_one_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.ngram_npu")
    path = tmp_path / "store"
    ranks: list[Any] = [
        NgramProposer(config_of(rank, ranks=2, store_file=str(path))) for rank in (0, 1)
    ]
    lines = [r.getMessage() for r in caplog.records if "store=" in r.getMessage()]
    assert len(lines) == 1
    assert "store=live is on: all requests of this engine draft from each other's text" in lines[0]
    rows, rng = Rows(), np.random.default_rng(4)
    for at in range(60):
        for row in rng.permutation(R)[:1] if at % 5 == 0 else ():
            rows.begin(int(row), *rng.integers(0, 9, 5).tolist())
        rows.step(ranks, {row: rng.integers(0, 9, 2).tolist() for row in range(at % R)})
    held = [rank.engine.store.contents for rank in ranks]
    assert np.array_equal(held[0].tensor, held[1].tensor)
    assert held[0].statistics.drafts > 10
    tokens = held[0].statistics.tokens_held
    assert not path.exists()
    second = ranks.pop()
    del second, held
    gc.collect()
    assert not path.exists(), "the other rank does not write"
    del ranks
    gc.collect()
    assert NgramStore.load(path).statistics.tokens_held == tokens

    again: list[Any] = [
        NgramProposer(config_of(rank, ranks=2, store_file=str(path))) for rank in (0, 1)
    ]
    held = [rank.engine.store.contents for rank in again]
    assert held[0].statistics.tokens_held == tokens
    assert np.array_equal(held[0].tensor, held[1].tensor)
    assert f"{tokens} of them from {path}" in caplog.text
    other: Any = NgramProposer(
        config_of(1, ranks=2, store="finish", store_tokens=20000, store_file=str(path))
    )
    merged = other.engine.store.contents
    assert (merged.visibility, merged.statistics.tokens_held) == ("finish", tokens)


def test_a_store_begins_with_a_seed_and_keeps_its_own_file(tmp_path: Path) -> None:
    """A seed is read and never written. The own file has it already, unless it is a new seed."""
    own, tokens, fresh = tmp_path / "own", {}, itertools.count()
    for name, first in (("monday", 100), ("tuesday", 200)):
        learned = NgramStore(1, 8192)
        learned.warm([range(first, first + 30)])
        learned.save(tmp_path / name)
        tokens[name] = (tmp_path / name).read_bytes()

    def held(seed: str) -> set[int]:
        given = {"store_seed": str(tmp_path / seed)} if seed else {}
        made = NgramProposer(config_of(store_tokens=16384, store_file=str(own), **given))
        assert made.shared_store is not None
        store = made.shared_store.contents
        store.warm([[next(fresh)]])
        texts = store._texts()
        del made, store
        gc.collect()
        found = [token for _, text in texts for token in text.tolist()]
        assert len(found) == len(set(found)), "nothing is held twice"
        return {token // 100 for token in found} - {0}

    said: list[set[int]] = []
    for seed in ("monday", "monday", "", "tuesday"):
        said.append(held(seed))
    assert said == [{1}, {1}, {1}, {1, 2}]
    assert all((tmp_path / name).read_bytes() == data for name, data in tokens.items())
    assert held("monday") == {1, 2}
    assert held("tuesday") == {1, 2}
    for message, options in (
        ("store_seed: expected another file", {"store_seed": str(own), "store_file": str(own)}),
        ("store_seed: .*No such file", {"store_seed": str(tmp_path / "wednesday")}),
        ("store_seed: .*not a store file", {"store_seed": __file__}),
    ):
        with pytest.raises(ValueError, match=f"ngram_npu: {message}"):
            NgramProposer(config_of(**options))


def test_a_store_is_of_the_models_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.ngram_npu")
    path = str(tmp_path / "store")
    NgramStore(1, 4096, tokenizer="0f" * 16).save(path)
    NgramProposer(config_of(store_file=path))
    assert "files are not compared with the tokenizer: ModuleNotFoundError" in caplog.text
    module: Any = ModuleType("vllm.tokenizers")
    module.cached_tokenizer_from_config = lambda model_config: SimpleNamespace(
        get_vocab=lambda: {"a": 0}
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)
    with pytest.raises(ValueError, match=r"store_seed: .*of another tokenizer"):
        NgramProposer(config_of(store_seed=path))


def test_a_store_is_saved_while_its_engine_runs(tmp_path: Path) -> None:
    path = tmp_path / "store"
    made = NgramProposer(config_of(store_file=str(path), store_save_minutes=0.001))
    assert made.shared_store is not None
    time.sleep(0.2)
    assert not path.exists(), "nothing came in"
    made.shared_store.contents.warm([WORDS])
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert NgramStore.load(path).statistics.tokens_held == len(WORDS)
    del made
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "ngram_npu store"]


def _wait_for_tokens(path: Path, count: int) -> None:
    until = time.monotonic() + 60
    while not path.exists() or NgramStore.load(path).statistics.tokens_held != count:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_store_is_saved_when_text_stops_coming_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default interval of a minute. Text that comes in soon after waits for the pause."""
    path = tmp_path / "store"
    monkeypatch.setattr(sharing, "IDLE_S", 0.02)
    made = NgramProposer(config_of(store_file=str(path)))
    assert made.shared_store is not None
    held = made.shared_store.contents
    held.warm([WORDS])
    _wait_for_tokens(path, len(WORDS))
    held.warm([WORDS])
    time.sleep(0.3)
    assert NgramStore.load(path).statistics.tokens_held == len(WORDS)
    del made, held
    gc.collect()
    _wait_for_tokens(path, 2 * len(WORDS))  # at the end


def test_store_is_saved_at_the_interval_while_text_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fresh = tmp_path / "store", itertools.count()
    monkeypatch.setattr(sharing, "IDLE_S", 0.02)
    made = NgramProposer(config_of(store_file=str(path), store_save_minutes=0.3 / 60))
    assert made.shared_store is not None
    words, started = made.shared_store._read_words, time.monotonic()
    changing = lambda *names: (*words(*names), next(fresh))  # noqa: E731
    monkeypatch.setattr(made.shared_store, "_read_words", changing)
    made.shared_store.contents.warm([WORDS])
    _wait_for_tokens(path, len(WORDS))
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize(
    ("timeout", "minutes", "lost"),
    [
        (0, 1, "text since the last save is lost"),
        (0, 0, "all text is lost"),
        (5, 1, ""),
        (5, 0, ""),
    ],
)
def test_startup_says_when_the_file_is_written_and_what_a_stop_loses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, timeout: int, minutes: int, lost: str
) -> None:
    caplog.set_level(logging.INFO, "vllm.ngram_npu")
    path = tmp_path / "store"
    given = config_of(store_file=str(path), store_save_minutes=float(minutes))
    given.shutdown_timeout = timeout
    NgramProposer(given)
    (line,) = [m for m in caplog.messages if f"store_file={path} is written" in m]
    assert ("at least every 1 min while it comes in" in line) == bool(minutes)
    assert line.endswith("when the engine ends")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == bool(lost)
    assert all(f"and {lost}; --shutdown-timeout 10" in warning for warning in warnings)


def test_text_that_arrives_during_a_save_is_saved_at_the_next_interval(tmp_path: Path) -> None:
    path = tmp_path / "store"
    made = NgramProposer(config_of(store_file=str(path), store_save_minutes=0.001))
    assert made.shared_store is not None
    held, saved = made.shared_store.contents, []
    save = held.save

    def save_while_text_arrives(path: str) -> None:
        save(path)
        saved.append(path)
        if len(saved) == 1:
            held.warm([WORDS])

    held.save = save_while_text_arrives  # type: ignore[method-assign]
    held.warm([WORDS[:9]])
    until = time.monotonic() + 60
    while len(saved) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert NgramStore.load(path).statistics.tokens_held == 9 + len(WORDS)
    time.sleep(0.2)
    assert len(saved) == 2, "nothing more came in"


def test_what_a_running_store_can_be_told(tmp_path: Path) -> None:
    proposer = v1_device.AsyncNgramProposer(config_of(), torch.device("cpu"), GPUModelRunner())
    runners = (
        SimpleNamespace(drafter=proposer),
        SimpleNamespace(speculator=proposer),
        SimpleNamespace(speculator=SimpleNamespace(ngram_npu=proposer)),
    )
    learned = NgramStore(1, 4096)
    learned.warm([range(30)], scope="b")
    learned.save(tmp_path / "store")
    worker: Any = StoreExtension()

    def held() -> int:
        found: dict[str, int] = worker.ngram_npu_store_statistics()
        return found["tokens_held"]

    for runner in runners:
        worker.model_runner = runner
        worker.ngram_npu_store_warm([WORDS], "a")
        worker.ngram_npu_store_warm([WORDS[:9]], "a", (1, "adapter"))
        worker.ngram_npu_store_warm([WORDS[:5]], "a", (1, "adapter"), "salt")
        worker.ngram_npu_store_warm([WORDS[:4]], salt="a")
        worker.ngram_npu_store_warm([WORDS[:7]])
        worker.ngram_npu_store_merge(str(tmp_path / "store"))
        assert held() == len(WORDS) + 9 + 5 + 4 + 7 + 30
        for arguments, left in (
            (("a",), 9 + 5 + 4 + 7 + 30),
            (("a", (1, "adapter")), 5 + 4 + 7 + 30),
            (("a", (1, "adapter"), "salt"), 4 + 7 + 30),
            ((None, None, "a"), 7 + 30),
            ((), 30),
        ):
            worker.ngram_npu_store_clear(*arguments)
            assert held() == left
        worker.ngram_npu_store_clear(all_scopes=True)
        assert held() == 0
    worker.ngram_npu_store_warm([[1, 2]], "a")
    worker.ngram_npu_store_warm([[1, 2, 3]], "a", salt="b")
    named = SimpleNamespace(extra_args={"ngram_npu_scope": "a"})
    as_requests = [scope_of_request(None, named, salt) for salt in (None, "b")]
    assert proposer.shared_store is not None
    assert proposer.shared_store.contents.scopes == dict(zip(as_requests, (2, 3), strict=True))
    with pytest.raises(FileNotFoundError):
        worker.ngram_npu_store_merge(str(tmp_path / "none"))
    proposer.has_other_ranks = True
    with pytest.raises(ValueError, match="expected a vector of token ids"):
        worker.ngram_npu_store_warm([["a"]])
    with pytest.raises(SystemExit):
        worker.ngram_npu_store_merge(str(tmp_path / "none"))
    worker.model_runner = SimpleNamespace(drafter=NgramProposer(config_of()))
    for arguments in (("a",), (None, (1, "adapter")), (None, None, "salt")):
        with pytest.raises(ValueError, match="scope: expected none, this runner has one for all"):
            worker.ngram_npu_store_clear(*arguments)
    worker.model_runner = SimpleNamespace(drafter=NgramProposer(config_of(store=None)))
    with pytest.raises(RuntimeError, match="store: this engine has none"):
        worker.ngram_npu_store_statistics()
