"""Tests how fed text gets from the scheduler into the stores of the ranks."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import FakeVLLM
from fake_engine import STORE, V1, V2, Engine, Request, V1Async, V2Neural, make_config
from ngram_npu.engines.vllm import drafter
from ngram_npu.engines.vllm.feed import delivery, insertion
from ngram_npu.engines.vllm.feed.addresses import Publisher
from ngram_npu.engines.vllm.feed.delivery import (
    ATTRIBUTE,
    CONTEXT_TOKENS,
    TOKENS_PER_STEP,
    TextDelivery,
    TextRows,
)
from ngram_npu.engines.vllm.feed.texts import MAX_TEXTS, FedText, FeedCounters
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.patching import RUNNER, SCHEDULER

FEED: dict[str, Any] = {"store_feed": "tcp://10.0.0.1:5557", "store_tokens": 20480}
WITH_FEED: dict[str, Any] = {**STORE, **FEED}
ENGINES: dict[str, Callable[[], Engine]] = {
    "V1": lambda: V1(**WITH_FEED),
    "V1 async": lambda: V1Async(**WITH_FEED),
    "V2": lambda: V2(**WITH_FEED),
    "V2 neural": lambda: V2Neural(**WITH_FEED),
}
TEXT = list(range(50, 60))


class Source:
    """A reader that returns texts of a test."""

    def __init__(self, *texts: FedText) -> None:
        self.ready = list(texts)
        self.is_closed = False
        self.error: Exception | None = None

    def take_texts(self, max_tokens: int) -> list[FedText]:
        if self.error is not None:
            raise self.error
        taken: list[FedText] = []
        while self.ready and len(self.ready[0].tokens) <= max_tokens and len(taken) < MAX_TEXTS:
            taken.append(self.ready.pop(0))
            max_tokens -= len(taken[-1].tokens)
        return taken

    def get_counters(self) -> FeedCounters:
        return FeedCounters()

    def close(self) -> None:
        self.is_closed = True


class Scheduler:
    """A scheduler that adds text to its outputs."""

    delivery: TextDelivery

    def __init__(self) -> None:
        self.num_tokens = 1

    def schedule(self) -> Any:
        output = SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=self.num_tokens)
        self.delivery.add_texts(output)
        return output


class Feed:
    """A scheduler with a feed, and the engines whose ranks get its outputs."""

    def __init__(self, *engines: Engine, num_rows: int | None = None) -> None:
        if num_rows is None:
            num_rows = count_rows(engines[0])
        self.engines, self.source, self.scheduler = engines, Source(), Scheduler()
        self.delivery = TextDelivery(self.source, num_rows)
        self.scheduler.delivery = self.delivery

    def send(self, *texts: FedText) -> None:
        """Runs steps without requests until all texts are sent."""
        self.source.ready += texts
        while hasattr(output := self.scheduler.schedule(), ATTRIBUTE):
            for engine in self.engines:
                run_step(engine, pickle.loads(pickle.dumps(output)))


def count_rows(engine: Engine) -> int:
    return engine.drafter.options.num_text_rows


def run_step(engine: Engine, output: Any) -> None:
    if not isinstance(engine, V2):
        insertion.insert_texts(engine.drafter, output)
        return
    engine.add_requests(output)


def make_text(tokens: list[int], *, chain: int = 0, scope: int = 0) -> FedText:
    return FedText(chain, scope, np.array(tokens, np.int32))


def make_random_texts(seed: int, count: int) -> Iterator[FedText]:
    """Yields texts of three scopes, which are continued in turn."""
    rng = random.Random(seed)
    for _ in range(count):
        chain, length = rng.randrange(12), rng.choice((1, 16, 48, 600))
        yield make_text([rng.randrange(40) for _ in range(length)], chain=chain, scope=chain % 3)


def start_engine(name: str) -> Engine:
    """Starts an engine that has run a step."""
    engine = ENGINES[name]()
    engine.begin(Request("first", [1, 2]))
    engine.step({"first": [3]})
    engine.end("first")
    return engine


@pytest.mark.parametrize("name", ["V1", "V1 async", "V2"])
def test_request_drafts_fed_text_of_its_scope_only(name: str) -> None:
    engine = start_engine(name)
    Feed(engine).send(make_text(TEXT), make_text([token + 11 for token in TEXT], chain=1, scope=7))
    engine.begin(Request("a", [1]))
    draft = engine.step({"a": TEXT[:3]})["a"]
    assert draft
    assert draft == TEXT[3:7][: len(draft)]
    assert engine.step({"a": [61, 62, 63]})["a"][:1] != [64]


@pytest.mark.parametrize("name", ENGINES)
def test_continued_text_is_one_text_in_the_store(name: str) -> None:
    engine = start_engine(name)
    feed = Feed(engine)
    for half in TEXT[:4], TEXT[4:]:
        feed.send(make_text(half, chain=3), make_text(half, chain=4, scope=1))
    texts = [(scope, text.tolist()) for scope, text in engine.store.texts()]
    assert sorted(texts)[-2:] == [(0, TEXT), (1, TEXT)]
    engine.store.check_integrity()


def test_all_runners_store_the_same_text() -> None:
    """There are fewer text rows than texts, so texts replace each other."""
    engines = [start_engine(name) for name in ENGINES]
    Feed(*engines).send(*make_random_texts(1, 60))
    contents = []
    for engine in engines:
        engine.store.check_integrity()
        pairs = ((scope, text.tobytes()) for scope, text in engine.store.texts())
        contents.append(sorted(pairs))
    assert len(contents[0]) > 20
    for other in contents[1:]:
        assert set(other) == set(contents[0])


@pytest.mark.parametrize("num_rows", [1, 3, 12])
def test_pieces_contain_all_tokens_and_fit_into_rows(num_rows: int) -> None:
    capacity = 50
    rows = TextRows(num_rows, capacity)
    contents: list[list[int]] = [[] for _ in range(num_rows)]
    chains = [-1] * num_rows
    for text in make_random_texts(num_rows, 300):
        sent: list[int] = []
        for row, begins_text, scope, tokens in rows.split(text):
            assert scope == text.scope
            repeated = 0
            if begins_text:
                # A text that continues beyond its row repeats its last tokens.
                continues = chains[row] == text.chain
                if continues:
                    repeated = CONTEXT_TOKENS
                    assert contents[row][-repeated:] == tokens[:repeated].tolist()
                contents[row] = []
            chains[row] = text.chain
            contents[row] += tokens.tolist()
            assert len(contents[row]) <= capacity
            sent += tokens[repeated:].tolist()
        assert sent == text.tokens.tolist()


def test_new_text_replaces_the_one_continued_least_recently() -> None:
    rows = TextRows(2)
    first, second = (rows.split(make_text([1], chain=chain))[0][0] for chain in (1, 2))
    rows.split(make_text([2], chain=1))
    assert rows.split(make_text([1], chain=3))[0][:2] == (second, True)
    assert rows.split(make_text([3], chain=1))[0][:2] == (first, False)
    assert rows.split(make_text([2], chain=2))[0][:2] == (second, True)


def test_step_has_a_limited_number_of_tokens() -> None:
    feed = Feed(num_rows=4)
    feed.source.ready[:] = [make_text([2] * 600, chain=i) for i in range(5)]
    tokens = []
    while (step := getattr(feed.scheduler.schedule(), ATTRIBUTE, None)) is not None:
        assert len(step.tokens) == step.counts.sum() <= TOKENS_PER_STEP
        tokens.append(len(step.tokens))
    assert tokens == [600] * 5


def test_step_without_tokens_takes_no_text() -> None:
    """It drafts nothing, so text of many such steps would reach the store at once."""
    feed = Feed(num_rows=1)
    feed.source.ready[:] = [make_text(TEXT)]
    feed.scheduler.num_tokens = 0
    assert not hasattr(feed.scheduler.schedule(), ATTRIBUTE)
    feed.scheduler.num_tokens = 1
    assert hasattr(feed.scheduler.schedule(), ATTRIBUTE)


def test_error_of_the_reader_ends_the_feed_but_no_step(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed(num_rows=1)
    feed.source.ready[:] = [make_text(TEXT)]
    feed.source.error = OSError("no more files")
    for _ in range(3):
        assert not hasattr(feed.scheduler.schedule(), ATTRIBUTE)
    assert feed.source.is_closed
    assert caplog.messages == ["ngram_npu: store_feed is off: OSError: no more files"]


def read_own_feed(engine: Engine) -> None:
    """Makes a rank insert the same text, which its own reader has received before the step."""
    own_source = Source(make_text(TEXT))
    output = SimpleNamespace(total_num_scheduled_tokens=1)
    TextDelivery(own_source, count_rows(engine)).add_texts(output)
    inserter: Any = engine.drafter.text_inserter
    inserter.insert(getattr(output, ATTRIBUTE))


def read_other_feed(engine: Engine) -> None:
    """Makes a rank insert other text than the scheduler sends."""
    inserter: Any = engine.drafter.text_inserter
    insert = inserter.insert
    inserter.insert = lambda step: insert(replace(step, tokens=step.tokens + 1))


def lose_step(engine: Engine) -> None:
    """Makes a rank miss the text of a step."""
    inserter: Any = engine.drafter.text_inserter
    insert = inserter.insert
    inserter.insert = lambda step: setattr(inserter, "insert", insert)


@pytest.mark.parametrize("name", ["V1 async", "V2", "V2 neural"])
@pytest.mark.parametrize("break_rank", [read_own_feed, read_other_feed, lose_step])
def test_worker_of_rank_with_other_text_ends(
    caplog: pytest.LogCaptureFixture, name: str, break_rank: Callable[[Engine], None]
) -> None:
    engine = start_engine(name)
    feed = Feed(engine)
    engine.drafter.has_other_ranks = True
    feed.send(make_text(TEXT, chain=1))
    break_rank(engine)
    with pytest.raises(SystemExit):
        feed.send(make_text(TEXT))
    assert "expected text with digest" in caplog.text


@pytest.mark.parametrize("name", ["V1 async", "V2", "V2 neural"])
def test_worker_of_rank_that_inserts_text_too_early_ends(name: str) -> None:
    """Its drafts may differ already in the step before the one with the text."""
    engine = start_engine(name)
    engine.drafter.has_other_ranks = True
    run_step(engine, SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=1))
    read_own_feed(engine)
    with pytest.raises(SystemExit):
        run_step(engine, SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=1))


@pytest.mark.parametrize("name", ENGINES)
def test_engine_with_one_rank_survives_other_text(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    engine = start_engine(name)
    read_other_feed(engine)
    Feed(engine).send(make_text(TEXT), make_text(TEXT, chain=1))
    assert [line for line in caplog.messages if "store_feed is off" in line] == caplog.messages[-1:]
    engine.begin(Request("a", [1]))
    assert len(engine.step({"a": TEXT[:3]})) == 1


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 0),
        (FEED, 5),
        ({**FEED, "store_tokens": 1 << 24}, 1024),
    ],
)
def test_text_rows_take_at_most_a_quarter_of_the_slots(options: dict[str, Any], rows: int) -> None:
    assert read_options(make_config(**{**STORE, **options}), "v2").num_text_rows == rows


def test_store_with_too_few_tokens_for_text_rows_raises() -> None:
    with pytest.raises(ValueError, match=r"store_tokens: expected at least 7168, .* 7 slots"):
        V2(**{**WITH_FEED, "store_tokens": 7167})


def test_text_without_a_store_on_the_rank_is_ignored() -> None:
    engine = V2()
    output = SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=1)
    setattr(output, ATTRIBUTE, "not read")
    engine.add_requests(output)


def test_v1_runner_inserts_text_even_if_subclass_overrides_execute_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class GPUModelRunner:
        def __init__(self, drafter: Any = None) -> None:
            self.drafter = drafter

        def execute_model(self, scheduler_output: Any) -> str:
            return "result"

    class OtherRunner(GPUModelRunner):
        def execute_model(self, scheduler_output: Any) -> str:
            return "other result"

    class ExtendedRunner(GPUModelRunner):
        def execute_model(self, scheduler_output: Any) -> str:
            return "extended " + super().execute_model(scheduler_output)

    module: Any = ModuleType(RUNNER)
    module.GPUModelRunner = GPUModelRunner
    monkeypatch.setitem(sys.modules, RUNNER, module)
    monkeypatch.setattr(drafter, "require_request_checks", lambda: None)
    with pytest.raises(ValueError, match="ngram_npu: store_feed: expected NGRAM_NPU_VLLM=1 and a"):
        V1(**WITH_FEED)
    V1(**STORE)
    insertion.install_v1(module)
    for runner_class, result in (
        (GPUModelRunner, "result"),
        (OtherRunner, "other result"),
        (ExtendedRunner, "extended result"),
    ):
        engine = V1(**WITH_FEED)
        runner: Any = runner_class(engine.adapter)
        feed = Feed(engine)
        feed.source.ready[:] = [make_text(TEXT)]
        assert runner.execute_model(scheduler_output=feed.scheduler.schedule()) == result
        assert engine.store.statistics.tokens_held == len(TEXT)


@pytest.mark.parametrize(
    ("events", "endpoint"),
    [
        (None, None),
        ({"enable_kv_cache_events": False, "endpoint": "tcp://*:5557"}, None),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}, "tcp://*:5559"),
        ({"enable_kv_cache_events": True, "endpoint": "inproc://a"}, None),
    ],
)
def test_reader_gets_options_and_own_endpoint(
    monkeypatch: pytest.MonkeyPatch, events: dict[str, Any] | None, endpoint: str | None
) -> None:
    arguments: list[Any] = []
    module = SimpleNamespace(FeedReader=lambda *args, **kwargs: arguments.extend([args, kwargs]))
    monkeypatch.setitem(sys.modules, "ngram_npu.engines.vllm.feed.reader", module)
    vllm_config = make_config(**{**WITH_FEED, "store_feed": ["tcp://a:1?replay=2", "tcp://b:3"]})
    vllm_config.kv_events_config = None if events is None else SimpleNamespace(**events)
    vllm_config.parallel_config.data_parallel_index = 2  # vLLM adds it to the port
    delivery.make_source(vllm_config, read_options(vllm_config, "v2"))
    publishers = Publisher("a", 1, 2), Publisher("b", 3)
    assert arguments == [(publishers,), {"vocab_size": 100, "own_endpoint": endpoint}]


SCHEDULER_SOURCE = """
class Scheduler:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
    def schedule(self):
        return type("SchedulerOutput", (), {"total_num_scheduled_tokens": 1})()
    def shutdown(self):
        pass
"""


@pytest.mark.parametrize("options", [{}, FEED, {**FEED, "fails": True}])
def test_plugin_attaches_feed_to_schedulers_with_the_option(
    vllm: FakeVLLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    source, options = Source(make_text(TEXT)), dict(options)

    def make_source(vllm_config: Any, options: Any) -> Source:
        if fails:
            raise ImportError("No module named 'zmq'")
        return source

    fails = options.pop("fails", False)
    monkeypatch.setattr(delivery, "make_source", make_source)
    vllm.write_module("vllm.v1.core.__init__", "")
    vllm.write_module("vllm.v1.core.sched.__init__", "")
    vllm.write_module(SCHEDULER, SCHEDULER_SOURCE)
    module = vllm.install_and_import(SCHEDULER)
    scheduler = module.Scheduler(make_config(**{**STORE, **options}))
    has_texts = bool(options) and not fails
    assert hasattr(scheduler.schedule(), ATTRIBUTE) == has_texts
    scheduler.shutdown()
    assert source.is_closed == has_texts
    source.ready[:] = [make_text(TEXT)]
    assert not hasattr(scheduler.schedule(), ATTRIBUTE)
