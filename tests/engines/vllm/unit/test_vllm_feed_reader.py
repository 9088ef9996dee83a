"""Tests the reader of KV events against publishers that work, that fail, and that are hostile.

A failing publisher may lose its own text. It must not end the reader, exceed the limits of what is
taken and kept, or delay other publishers' text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from feed_faults import FAULTS, disappear, lose_batches, make_text, send_without_end
from feed_publisher import (
    BLOCK,
    VOCAB_SIZE,
    Publisher,
    TextCollector,
    encode_batch,
    make_event,
    wait_until,
)
from ngram_npu.engines.vllm.feed import addresses, connection, reader
from ngram_npu.engines.vllm.feed.addresses import Publisher as Address
from ngram_npu.engines.vllm.feed.events import TEXT_OVERHEAD
from ngram_npu.engines.vllm.feed.reader import FeedReader
from ngram_npu.engines.vllm.feed.texts import MAX_TEXTS, FeedCounters

MAX_TOKENS = 4 * BLOCK
"""Tokens that the tests take at once."""
Start = Callable[..., tuple[FeedReader, TextCollector]]


@pytest.fixture(autouse=True)
def _shorten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_PAUSE_S", (0.02, 0.1))
    monkeypatch.setattr(connection, "REPLAY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connection, "REPLAY_PAUSE_S", (0.1, 0.2))
    monkeypatch.setattr(reader, "IDLE_S", 0.01)


@pytest.fixture
def publishers() -> Iterator[Callable[..., Publisher]]:
    """Creates publishers, which end with the test."""
    created: list[Publisher] = []

    def create(**options: Any) -> Publisher:
        created.append(Publisher(**options))
        return created[-1]

    yield create
    for publisher in created:
        publisher.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Creates a reader of some publishers and waits for its subscriptions."""
    readers: list[FeedReader] = []

    def create(*publishers: Publisher) -> tuple[FeedReader, TextCollector]:
        listed = [publisher.address for publisher in publishers]
        readers.append(FeedReader(listed, vocab_size=VOCAB_SIZE))
        for publisher in publishers:
            publisher.wait_for_subscription()
        wait_until(lambda: readers[-1].get_counters().publishers == len(publishers))
        return readers[-1], TextCollector(readers[-1], MAX_TOKENS)

    yield create
    for feed_reader in readers:
        feed_reader.close()
        assert not feed_reader._thread.is_alive()


@pytest.mark.parametrize("has_replay", [True, False])
def test_text_of_several_publishers_arrives(
    publishers: Callable[..., Publisher], start: Start, has_replay: bool
) -> None:
    sources = [publishers(has_replay=has_replay) for _ in range(3)]
    feed_reader, collector = start(*sources)
    texts = [make_text(i) for i in range(30)]
    for i, text in enumerate(texts):
        for first in range(0, len(text), 2 * BLOCK):
            event = make_event(text[: first + 2 * BLOCK], first // BLOCK, name=str(i))
            sources[i % 3].publish(event)
    collector.wait_for(*texts)
    assert sorted(collector.tokens) == list(range(30))
    num_tokens = sum(map(len, texts))
    assert feed_reader.get_counters() == FeedCounters(texts=30, tokens=num_tokens, publishers=3)


def test_reader_that_starts_late_requests_what_it_missed(
    publishers: Callable[..., Publisher], start: Start
) -> None:
    source, texts = publishers(), [make_text(i) for i in range(20)]
    for i, text in enumerate(texts[:19]):
        source.publish(make_event(text, name=str(i)))
    feed_reader, collector = start(source)
    collector.wait_for(*texts[:19])  # without any new batch
    source.publish(make_event(texts[19], name="19"))
    collector.wait_for(*texts)
    assert feed_reader.get_counters().rejected == 0


def test_lost_batch_is_requested_once(publishers: Callable[..., Publisher], start: Start) -> None:
    source, text = publishers(), make_text(1)
    feed_reader, collector = start(source)
    wait_until(lambda: source.num_requests == 1)
    source.publish(make_event(text[: 2 * BLOCK]))
    source.publish(make_event(text[: 4 * BLOCK], 2), is_lost=True)
    source.publish(make_event(text, 4))
    source.publish(make_event(make_text(2), name="following"))
    collector.wait_for(text, make_text(2))
    assert source.num_requests == 2
    assert feed_reader.get_counters().gaps == 0


def test_long_replay_is_interrupted_and_completed(
    publishers: Callable[..., Publisher], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BACKLOG_BYTES", 2_000)
    source, texts = publishers(), [make_text(i) for i in range(150)]
    for i, text in enumerate(texts):
        source.publish(make_event(text, name=str(i)))
    feed_reader, collector = start(source)
    collector.wait_for(*texts)
    assert source.num_requests > 2
    assert feed_reader.get_counters().gaps == 0


def test_replay_with_left_out_batches_is_requested_again(
    publishers: Callable[..., Publisher], start: Start
) -> None:
    source, texts = publishers(replay_limit=30), [make_text(i) for i in range(100)]
    for i, text in enumerate(texts):
        source.publish(make_event(text, name=str(i)))
    feed_reader, collector = start(source)
    collector.wait_for(*texts)
    assert source.num_requests == 4
    assert feed_reader.get_counters().gaps == 0


def test_replay_without_oldest_batches_is_complete(
    publishers: Callable[..., Publisher], start: Start
) -> None:
    source, texts = publishers(), [make_text(i) for i in range(30)]
    for i, text in enumerate(texts):
        source.publish(make_event(text, name=str(i)))
    del source.batches[:10]  # as if the publisher kept only the newest ones
    feed_reader, collector = start(source)
    collector.wait_for(*texts[10:])
    assert source.num_requests == 1
    assert feed_reader.get_counters().gaps == 0


def test_lost_batches_without_replay_are_counted(
    publishers: Callable[..., Publisher], start: Start
) -> None:
    """A batch with a false number counts as a limited gap."""
    source = publishers(has_replay=False)
    feed_reader, collector = start(source)
    source.publish(make_event(make_text(1), name="first"))
    source.publish(make_event(make_text(2), name="lost"), is_lost=True)
    source.publish(make_event(make_text(3), name="last"))
    collector.wait_for(make_text(1), make_text(3))
    assert feed_reader.get_counters().gaps == 1
    source.send(2**60, encode_batch(make_event(make_text(4), name="false number")))
    collector.wait_for(make_text(1), make_text(3), make_text(4))
    assert feed_reader.get_counters().gaps == 1 + 2**20


def test_taken_texts_have_at_most_max_tokens(
    publishers: Callable[..., Publisher], start: Start
) -> None:
    source, text = publishers(), make_text(1, num_blocks=40)
    feed_reader, _ = start(source)
    source.publish(make_event(text))
    wait_until(lambda: feed_reader.get_counters().tokens == len(text))
    assert feed_reader.take_texts(0) == feed_reader.take_texts(-1) == []
    collector = TextCollector(feed_reader, 7)
    collector.wait_for(text)
    assert list(collector.tokens) == [0]


def test_number_of_taken_texts_is_limited(
    publishers: Callable[..., Publisher], start: Start
) -> None:
    source = publishers()
    feed_reader, _ = start(source)
    for seed in range(MAX_TEXTS + 1):
        source.publish(make_event(make_text(seed), name=f"{seed}"))
    wait_until(lambda: len(feed_reader.ready) == MAX_TEXTS + 1)
    assert len(feed_reader.take_texts(1 << 20)) == MAX_TEXTS
    assert len(feed_reader.take_texts(1 << 20)) == 1


def test_own_publisher_is_not_read(
    publishers: Callable[..., Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    own, other = publishers(), publishers()
    listed = [own.address, other.address]
    endpoint = f"tcp://*:{own.port}"
    feed_reader = FeedReader(listed, vocab_size=VOCAB_SIZE, own_endpoint=endpoint)
    other.wait_for_subscription()
    wait_until(lambda: feed_reader.get_counters().publishers == 1)
    own.publish(make_event(make_text(1)))
    other.publish(make_event(make_text(2)))
    collector = TextCollector(feed_reader, MAX_TOKENS)
    collector.wait_for(make_text(2))
    feed_reader.close()
    assert list(collector.tokens.values()) == [make_text(2)]
    assert sum("own publisher" in text for text in caplog.messages) == 1


def test_publisher_that_disappears_from_its_name_is_disconnected(
    publishers: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publishers(), publishers()
    found = [first.address, second.address]
    monkeypatch.setattr(addresses, "RESOLVE_INTERVAL_S", 0.01)
    monkeypatch.setattr(addresses, "resolve", lambda _: list(found))
    feed_reader = FeedReader([Address("vllm", first.port)], vocab_size=VOCAB_SIZE)
    wait_until(lambda: feed_reader.get_counters().publishers == 2)
    first.publish(make_event(make_text(1)))
    collector = TextCollector(feed_reader, MAX_TOKENS)
    collector.wait_for(make_text(1))
    found.remove(first.address)
    wait_until(lambda: feed_reader.get_counters().publishers == 1)
    second.publish(make_event(make_text(2)))
    collector.wait_for(make_text(2))
    assert feed_reader.get_counters().texts == 2
    feed_reader.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_publisher_with_fault_is_counted_and_harms_no_other(
    publishers: Callable[..., Publisher],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    monkeypatch.setattr(reader, "WAITING_TOKENS", 4_000)
    monkeypatch.setattr(reader, "READY_TOKENS", 2_000)
    cause, is_counted = FAULTS[fault].cause, FAULTS[fault].is_counted
    healthy, faulty = publishers(), publishers(answers=cause is not lose_batches)
    feed_reader, collector = start(healthy, faulty)
    text = make_text(1)
    healthy.publish(make_event(text[: 2 * BLOCK]))
    collector.wait_for(text[: 2 * BLOCK])
    # A later replay would contain the batches of `cause`, and repeated batches would be expected.
    wait_until(lambda: cause is lose_batches or faulty.num_requests == 1)
    before = feed_reader.get_counters()

    cause(faulty)
    wait_until(lambda: is_counted(before, feed_reader.get_counters()))
    wait_until(lambda: f"{faulty.address} {FAULTS[fault].state}" in caplog.text)
    healthy.publish(make_event(text, 2))
    collector.wait_for(text)

    if cause is not disappear:  # a fault that has passed costs no later text
        faulty.publish(make_event(make_text(2), name="later"))
        collector.wait_for(make_text(2))
    if cause is not send_without_end:
        assert feed_reader.get_counters().dropped == 0
    assert len(caplog.messages) == len(set(caplog.messages)) < 12


def test_text_that_is_not_taken_stays_within_limits(
    publishers: Callable[..., Publisher], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "WAITING_TOKENS", 4_000)
    monkeypatch.setattr(reader, "READY_TOKENS", 2_000)
    healthy, flooding = publishers(), publishers()
    feed_reader, collector = start(healthy, flooding)
    send_without_end(flooding)
    healthy.publish(make_event(make_text(1)))
    num_published = 300 * 40 * 4 * BLOCK + len(make_text(1))
    wait_until(lambda: feed_reader.get_counters().tokens == num_published)
    collector.wait_for(make_text(1))
    num_kept = num_published - feed_reader.get_counters().dropped
    assert num_kept <= 4_000 + 2_000
    wait_until(lambda: collector.has() and sum(map(len, collector.tokens.values())) == num_kept)


def test_number_of_short_texts_that_wait_is_limited(
    publishers: Callable[..., Publisher], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "WAITING_TOKENS", 4_000)
    monkeypatch.setattr(reader, "READY_TOKENS", 1)
    source = publishers()
    feed_reader, _ = start(source)
    fields = {"block_size": 1, "token_ids": [5], "extra_keys": [None]}
    for first in range(0, 5_000, 100):
        numbers = range(first, first + 100)
        source.publish(*(make_event([], **fields, block_hashes=[i]) for i in numbers))
    wait_until(lambda: feed_reader.get_counters().tokens == 5_000)
    assert feed_reader.get_counters().dropped >= 5_000 - 1 - 4_000 // TEXT_OVERHEAD


def test_errors_of_one_connection_are_contained(
    publishers: Callable[..., Publisher],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reader, "RETRY_S", 0.1)
    healthy, failing = publishers(), publishers()
    _, collector = start(healthy, failing)
    decode = connection.Connection.decode

    def decode_or_fail(self: connection.Connection, deadline: float) -> None:
        if self.publisher == failing.address:
            raise RuntimeError("unexpected")
        decode(self, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(connection.Connection, "decode", decode_or_fail)
        failing.publish(make_event(make_text(1)))
        wait_until(lambda: any("is left out" in text for text in caplog.messages))
        healthy.publish(make_event(make_text(2)))
        collector.wait_for(make_text(2))
    collector.wait_for(make_text(1))  # requested again by a new connection
