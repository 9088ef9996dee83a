"""Tests the feed: how text of other engines gets from their KV events into an engine's stores.

Publishers have a real ZeroMQ socket. No test depends on time: text of a publisher is awaited, and
the tests of single turns call the reader without its thread.
"""

from __future__ import annotations

import json
import pickle
import random
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_events
import msgspec
import numpy as np
import pytest
import yaml
import zmq
from fake_engine import (
    STORE,
    V1,
    V2,
    Ascend,
    GPUModelRunner,
    Request,
    V1Async,
    V2Neural,
    make_config,
    make_scheduler_output,
)
from kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch
from ngram_npu.engines.vllm.feed import reader, texts
from ngram_npu.engines.vllm.feed.insertion import ATTRIBUTE
from ngram_npu.engines.vllm.feed.publishers import Publisher, parse_publishers, resolve
from ngram_npu.engines.vllm.feed.reader import FeedReader
from ngram_npu.engines.vllm.feed.texts import TextJoiner
from ngram_npu.engines.vllm.options import read_options
from test_vllm_feed_texts import (
    ANSWER,
    BLOCK,
    CONTEXT,
    PIECE,
    PROMPT,
    VOCABULARY,
    make_event,
    make_text,
)

ROOT = Path(__file__).resolve().parents[4]
HANG_S = 300.0
"""A test that waits longer has failed; a busy machine is faster."""


# Publishers in the option, and their addresses.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("tcp://a:5557", [Publisher("a", 5557)]),
        ("tcp://a-b.c:1, tcp://10.0.0.1:65535", [Publisher("a-b.c", 1), ("10.0.0.1", 65535)]),
        (["tcp://[fd00::1]:5557"], [Publisher("fd00::1", 5557)]),
    ],
)
def test_option_is_a_list_of_addresses(value: Any, expected: Any) -> None:
    publishers = parse_publishers(value)
    assert list(publishers) == expected
    assert parse_publishers(",".join(map(str, publishers))) == publishers


@pytest.mark.parametrize(
    "value",
    [
        *("", "a:1", "tcp://a", "tcp://a:", "tcp://a:0", "tcp://a:65536", "tcp://*:1", "tcp://:1"),
        *("ipc://a:1", "tcp://a:1/path", "tcp://a:1?replay=2", "tcp://u@a:1", "tcp://fd00::1:1"),
        *(["tcp://a:1", 7], [], ["tcp://a:1"] * 65, {"tcp://a:1": 1}),
    ],
)
def test_malformed_option_raises_one_line(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^ngram_npu: store_feed: expected .*, got [^\n]*$"):
        parse_publishers(value)


def test_own_addresses_are_left_out() -> None:
    local = Publisher("127.0.0.1", 5557)
    assert resolve(local, own_port=5557) == set()
    assert resolve(local, own_port=None) == resolve(local, own_port=5558) == {local}
    other = Publisher("203.0.113.7", 5557)  # an address of documentation, which no machine has
    assert resolve(other, own_port=5557) == {other}
    with pytest.raises(OSError):
        resolve(Publisher("no-such-host.invalid", 5557), own_port=None)


@pytest.mark.parametrize(
    ("events", "port"),
    [
        (None, None),
        ({"enable_kv_cache_events": False, "endpoint": "tcp://*:5557"}, None),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}, 5559),
        ({"enable_kv_cache_events": True, "endpoint": "inproc://a"}, None),
    ],
)
def test_own_port_is_that_of_the_engine(events: dict[str, Any] | None, port: int | None) -> None:
    vllm_config = make_config()
    vllm_config.kv_events_config = None if events is None else SimpleNamespace(**events)
    vllm_config.parallel_config.data_parallel_index = 2  # vLLM adds it to the port
    assert reader._find_own_port(vllm_config) == port


# The reader and its publishers.


class Source:
    """A publisher with vLLM's protocol, whose socket says when a reader has subscribed."""

    def __init__(self, port: int = 0) -> None:
        self.port, self.next_number = port, 0
        self._context: zmq.Context[Any] = zmq.Context()
        CONTEXTS.append(self._context)
        self.open()

    def open(self) -> None:
        """Binds the socket, to the same port as before."""
        self._socket, self._num_subscribers = self._context.socket(zmq.XPUB), 0
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                self._socket.bind(f"tcp://127.0.0.1:{self.port or '*'}")
                break
            except zmq.ZMQError:  # the old socket is being closed
                assert time.monotonic() < deadline
                time.sleep(0.01)
        self.port = int(self._socket.get(zmq.LAST_ENDPOINT).rpartition(b":")[2])

    def close(self) -> None:
        self._socket.close(linger=0)

    @property
    def address(self) -> Publisher:
        return Publisher("127.0.0.1", self.port)

    @property
    def has_subscriber(self) -> bool:
        while self._socket.poll(0):
            self._num_subscribers += 1 if self._socket.recv().startswith(b"\1") else -1
        return self._num_subscribers > 0

    def publish(self, *events: Any, is_lost: bool = False) -> None:
        payload = msgspec.msgpack.encode(KVEventBatch(time.time(), list(events)))
        if not is_lost:
            self.send(b"topic", self.next_number.to_bytes(8, "big"), payload)
        self.next_number += 1

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)


class Reader:
    """A reader, of which a test runs one turn after the other, and the pieces that it delivered."""

    def __init__(self, *addresses: str, scope: str = "shared") -> None:
        self.feed = make_feed(store_feed=[*addresses], scope=scope)
        self.feed.resolve_names()
        self.pieces: list[list[int]] = []

    def run_turn(self, timeout_s: float = 0.02) -> None:
        self.feed.read(timeout_s)
        while self.feed.ready:
            self.pieces.append(np.frombuffer(self.feed.ready.popleft()[2], np.int32).tolist())

    def run_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < deadline, self.feed.get_metrics()
            self.run_turn()

    def run_until_has(self, *pieces: list[int]) -> None:
        self.run_until(lambda: all(piece in self.pieces for piece in pieces))

    def __getitem__(self, metric: str) -> float:
        return self.feed.get_metrics().get(metric, 0)


def make_feed(**options: Any) -> FeedReader:
    vllm_config = make_config(vocabulary=VOCABULARY, **{**STORE, **options})
    feed = FeedReader(vllm_config, read_options(vllm_config, "v2"))
    CONTEXTS.append(feed._context)
    return feed


CONTEXTS: list[zmq.Context[Any]] = []


@pytest.fixture(autouse=True)
def _end_contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes all texts pause at once. Closes all sockets, without which no context could end."""
    monkeypatch.setattr(texts, "PAUSE_S", 0.0)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_events", kv_events)
    yield
    while CONTEXTS:
        CONTEXTS.pop().destroy(linger=0)


def start(*sources: Source, scope: str = "shared") -> Reader:
    """Starts a reader whose subscriptions have reached their sources."""
    subject = Reader(*(str(source.address) for source in sources), scope=scope)
    subject.run_until(lambda: all(source.has_subscriber for source in sources))
    subject.run_until(lambda: subject["publishers"] == len(sources))
    return subject


@pytest.mark.parametrize("scope", ["private", "shared"])
def test_published_text_is_delivered_if_its_scope_is_shared(scope: str) -> None:
    source = Source()
    subject = start(source, scope=scope)
    source.publish(make_event(PROMPT, name="a"), make_event(ANSWER, name="b", keys=["tenant"]))
    subject.run_until_has(ANSWER)
    assert subject.pieces == ([PROMPT, ANSWER] if scope == "shared" else [ANSWER])
    assert subject["tokens"] == sum(map(len, subject.pieces))
    metrics = "gaps", "rejected", "orphans", "age_seconds"
    assert [subject[metric] for metric in metrics] == [0, 0, 0, 0]


def test_events_without_text_are_read() -> None:
    source = Source()
    subject = start(source)
    source.publish(make_event(PROMPT), BlockRemoved([1], "GPU"))
    source.publish(AllBlocksCleared(), make_event(PROMPT + ANSWER, 3), make_event(PROMPT))
    subject.run_until(lambda: subject.pieces == [PROMPT, PROMPT])
    assert (subject["orphans"], subject["rejected"]) == (3, 0)


def test_gap_drops_open_text(monkeypatch: pytest.MonkeyPatch) -> None:
    source, text = Source(), make_text(1, 9)
    subject = start(source)
    monkeypatch.setattr(texts, "PAUSE_S", 1e9)
    source.publish(make_event(text[: 3 * BLOCK]))
    source.publish(make_event(text[: 6 * BLOCK], 3), is_lost=True)
    source.publish(make_event(text, 6), make_event(ANSWER, name="other"))
    subject.run_until(lambda: subject["tokens"] == 6 * BLOCK)
    monkeypatch.setattr(texts, "PAUSE_S", 0.0)
    subject.run_until(lambda: subject.pieces)
    assert subject.pieces == [ANSWER]
    assert (subject["gaps"], subject["dropped"], subject["orphans"]) == (1, 3 * BLOCK, 3)
    # A block from before the gap still identifies the text up to its end.
    source.publish(make_event(text[: 3 * BLOCK] + PROMPT, 3))
    subject.run_until_has(text[3 * BLOCK - CONTEXT : 3 * BLOCK] + PROMPT)


@pytest.mark.parametrize("num_missed", [0, 1, 20])
@pytest.mark.parametrize("has_proxy", [False, True])
def test_restarted_publisher_is_read_again(num_missed: int, has_proxy: bool) -> None:
    """Behind a proxy, which keeps the connection, its first batches may be missed too."""
    source = Source()
    subject = start(source)
    for i in range(30):
        source.publish(make_event(make_text(i), name=f"{i}"))
    subject.run_until_has(make_text(29))
    if not has_proxy:
        source.close()
        subject.run_until(lambda: subject["publishers"] == 0)
        source.open()
        subject.run_until(lambda: source.has_subscriber)
    source.next_number = num_missed
    source.publish(make_event(make_text(29) + ANSWER, 6, name="29"))  # of the earlier process
    for i in range(30, 80):
        source.publish(make_event(make_text(i), name=f"{i}"))
    subject.run_until_has(*map(make_text, range(30, 80)))
    assert (subject["gaps"], subject["orphans"], subject["rejected"]) == (num_missed, 3, 0)


def test_turn_reads_one_batch_of_each_publisher() -> None:
    first, second = Source(), Source()
    subject = start(first, second)
    for text in (PROMPT, ANSWER):
        for source in (first, second):
            source.publish(make_event(text, name=f"{text}"))
    for turn in (1, 2):
        for subscription in subject.feed._subscriptions.values():
            assert subscription.socket.poll(int(1000 * HANG_S))
        subject.run_turn()
        assert len(subject.pieces) == 2 * turn


SAMPLE = msgspec.msgpack.encode(KVEventBatch(0.0, [make_event(PROMPT)]))
MALFORMED = {
    "one frame": [b"only"],
    "many frames": [b""] * 500,
    "a short number": [b"", b"7", SAMPLE],
    "no payload": [b"", b"NUMBER", b""],
    "not msgpack": [b"", b"NUMBER", b"\xc1\xc1"],
    "truncated": [b"", b"NUMBER", SAMPLE[:-9]],
    "a map": [b"", b"NUMBER", msgspec.msgpack.encode({"ts": 1.0, "events": []})],
    "no events": [b"", b"NUMBER", msgspec.msgpack.encode([1.0])],
    "an event that is a number": [b"", b"NUMBER", msgspec.msgpack.encode([1.0, [7]])],
    "an unknown event": [b"", b"NUMBER", msgspec.msgpack.encode([1.0, [{"type": "Other"}]])],
    "a length that is false": [b"", b"NUMBER", b"\x92\xcb" + 8 * b"\0" + b"\xdd\xff\xff\xff\xff"],
    "deep nesting": [b"", b"NUMBER", b"\x92\xcb" + 8 * b"\0" + b"\x91" * 100_000],
    "tokens that are text": [b"", b"NUMBER", SAMPLE.replace(b"\xdc\x00\x30", b"\xa1a")],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_message_is_counted_and_costs_no_other_text(
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    source, other = Source(), Source()
    subject = start(source, other)
    for _ in range(2):
        number = source.next_number.to_bytes(8, "big")
        source.send(*(number if frame == b"NUMBER" else frame for frame in MALFORMED[name]))
        source.next_number += b"NUMBER" in MALFORMED[name]
    other.publish(make_event(PROMPT))
    source.publish(make_event(ANSWER))
    subject.run_until_has(PROMPT, ANSWER)
    assert subject["rejected"] == 2
    assert subject["gaps"] == 0
    lines = [line for line in caplog.messages if "sends malformed batches" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"ngram_npu feed: {source.address} ")


def test_random_bytes_do_not_end_the_reader() -> None:
    source, rng = Source(), random.Random(6)
    subject = start(source)
    for number in range(2000):
        payload = bytearray(SAMPLE)
        for _ in range(rng.randrange(1, 6)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        source.send(b"", number.to_bytes(8, "big"), bytes(payload))
    source.next_number = 2000
    source.publish(make_event(ANSWER, name="last"))
    subject.run_until_has(ANSWER)
    assert 0 < subject["rejected"] < 2000
    assert all(0 <= min(piece) <= max(piece) < VOCABULARY for piece in subject.pieces)


def test_huge_message_ends_only_its_connection() -> None:
    source = Source()
    subject = start(source)
    (subscription,) = subject.feed._subscriptions.values()
    assert subscription.socket.get(zmq.RCVHWM) == 64, "further batches wait at the publisher"
    source.publish(make_event(PROMPT))
    subject.run_until_has(PROMPT)
    source.publish(make_event(make_text(1, 30_000), name="huge"))
    subject.run_until(lambda: not subject["publishers"])
    subject.run_until(lambda: source.has_subscriber and subject["publishers"])
    source.publish(make_event(ANSWER, name="after"))
    subject.run_until_has(ANSWER)
    assert subject["gaps"] == 1


def test_address_that_answered_in_another_protocol_is_connected_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        subject = Reader(f"tcp://127.0.0.1:{port}")
        subject.run_until(lambda: select.select([server], [], [], 0)[0])
        connection, _ = server.accept()
        with connection:
            connection.sendall(10 * b"HTTP/1.1 400 Bad Request\r\n\r\n")
            subject.run_until(lambda: select.select([connection], [], [], 0)[0])
    source = Source(port)
    subject.run_until(lambda: source.has_subscriber and subject["publishers"])
    source.publish(make_event(ANSWER))
    subject.run_until_has(ANSWER)


def test_oldest_pieces_are_dropped_for_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_READY_PIECES", 3)
    source = Source()
    subject = start(source)
    monkeypatch.setattr(Reader, "run_turn", lambda self: self.feed.read(0.02))
    for i in range(5):
        source.publish(make_event(make_text(i), name=f"{i}"))
    subject.run_until(lambda: subject["tokens"] == 5 * len(make_text(0)))
    subject.run_until(lambda: subject["dropped"] == 2 * len(make_text(0)))
    kept = [np.frombuffer(tokens, np.int32).tolist() for *_, tokens in subject.feed.ready]
    assert kept == [make_text(2), make_text(3), make_text(4)]
    assert subject["age_seconds"] > 0


def test_addresses_of_a_name_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Source(), Source()
    found = {first.address}
    monkeypatch.setattr(reader, "resolve", lambda publisher, own_port: set(found))
    subject = start(first)
    found |= {second.address}
    subject.feed.resolve_names()
    subject.run_until(lambda: second.has_subscriber and subject["publishers"] == 2)
    found -= {first.address}
    subject.feed.resolve_names()
    subject.run_turn()
    assert subject["publishers"] == 1
    second.publish(make_event(ANSWER))
    subject.run_until_has(ANSWER)

    def fail(publisher: Publisher, own_port: int | None) -> set[Publisher]:
        raise socket.gaierror("no name server")

    monkeypatch.setattr(reader, "resolve", fail)
    for _ in range(2):
        subject.feed.resolve_names()
    subject.run_turn()
    assert subject["publishers"] == 1  # the last addresses remain
    assert sum("cannot be resolved: gaierror" in line for line in caplog.messages) == 1


def test_number_of_addresses_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {Publisher(f"10.0.0.{i}", 5557) for i in range(100)}
    monkeypatch.setattr(reader, "resolve", lambda publisher, own_port: found)
    feed = make_feed(store_feed="tcp://replicas:5557")
    feed.resolve_names()
    assert len(feed._addresses) == 64
    assert feed._addresses < found


def test_thread_reads_until_it_is_closed_and_survives_errors(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, errors = Source(), [RuntimeError("unexpected")] * 2
    deliver = TextJoiner.deliver_paused_texts

    def fail_twice(joiner: TextJoiner, now: float) -> None:
        if errors:
            raise errors.pop()
        deliver(joiner, now)

    monkeypatch.setattr(TextJoiner, "deliver_paused_texts", fail_twice)
    feed = make_feed(store_feed=str(source.address))
    exported: list[Any] = []
    monkeypatch.setattr(feed._metrics, "update", exported.append)
    feed.start()
    deadline = time.monotonic() + HANG_S
    while not source.has_subscriber or errors:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    source.publish(make_event(PROMPT))
    while not feed.ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    feed.close()
    assert feed._context.closed
    assert exported[-1]["tokens"] == len(PROMPT)
    assert sum("failed and goes on: RuntimeError: unexpected" in m for m in caplog.messages) == 1


def test_thread_waits_four_times_as_long_as_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares Python's interpreter lock with the scheduler."""
    feed = make_feed(store_feed="tcp://10.0.0.1:5557")
    waits: list[float] = []

    def wait(timeout_s: float) -> None:
        waits.append(timeout_s)
        feed._closed.set()

    monkeypatch.setattr(feed, "read", lambda timeout_s: 0.25)
    monkeypatch.setattr(feed._closed, "wait", wait)
    feed._run()
    assert waits == [1.0]


# How pieces get from the scheduler into the stores of the ranks.

FEED: dict[str, Any] = {**STORE, "store_feed": "tcp://10.0.0.1:5557"}
ENGINES = V1, V1Async, Ascend, V2, V2Neural


def schedule(*pieces: tuple[int, list[int]]) -> Iterator[Any]:
    """Yields the outputs of steps until all pieces are sent, as the ranks get them."""
    feed = make_feed(store_feed="tcp://10.0.0.1:5557")
    feed.ready += [(0.0, scope, np.array(tokens, np.int32).tobytes()) for scope, tokens in pieces]
    while feed.ready:
        output = make_scheduler_output(finished=["another"])
        feed.add_texts(output)
        yield pickle.loads(pickle.dumps(output))


def test_all_runners_store_the_same_text() -> None:
    rng, engines = random.Random(1), [engine(**FEED) for engine in ENGINES]
    for engine in engines:
        engine.begin(Request("first", [1, 2]))
        engine.step({"first": [3]})
        engine.end("first")
    pieces = [
        (i % 3, [rng.randrange(40) for _ in range(rng.choice((1, 16, 48, 256)))]) for i in range(60)
    ]
    for output in schedule(*pieces):
        for engine in engines:
            engine.begin_step(output)
    for engine in engines:
        stored = [(int(scope), text.tolist()) for scope, text in engine.store.texts()]
        assert stored[-60:] == pieces


def test_step_takes_four_pieces_and_a_step_without_tokens_none() -> None:
    """It drafts nothing, so the text of many such steps would reach the store at once."""
    outputs = list(schedule(*[(0, [2] * PIECE)] * 9))
    assert [len(getattr(output, ATTRIBUTE)) for output in outputs] == [4, 4, 1]
    feed, output = make_feed(store_feed="tcp://10.0.0.1:5557"), SimpleNamespace()
    feed.ready.append((0.0, 0, b"1234"))
    output.total_num_scheduled_tokens = 0
    feed.add_texts(output)
    assert not hasattr(output, ATTRIBUTE)
    assert len(feed.ready) == 1


def test_rank_that_cannot_insert_text_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would continue with other drafts. A pipeline stage without a drafter has
    nothing to insert."""
    engine = V2(**FEED)
    monkeypatch.setattr(engine.store, "add_text", lambda *args: 1 / 0)
    (output,) = schedule((0, PROMPT))
    assert GPUModelRunner().execute_model(output) == "result"
    with pytest.raises(ZeroDivisionError):
        engine.begin_step(output)
    engine.drafter.has_other_ranks = True
    with pytest.raises(SystemExit):
        engine.begin_step(output)


# The example.


def test_replicas_of_manifest_read_the_port_that_only_they_reach() -> None:
    content = (ROOT / "examples/feed/kubernetes.yaml").read_text()
    manifests = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(content)}
    template = manifests["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    arguments = dict(a.lstrip("-").split("=", 1) for a in container["args"] if "=" in a)
    events = json.loads(arguments["kv-events-config"])
    port = int(events["endpoint"].rpartition(":")[2])
    assert events["enable_kv_cache_events"] is True
    service, policy = manifests["Service"], manifests["NetworkPolicy"]["spec"]
    publisher = Publisher(service["metadata"]["name"], port)
    section = json.loads(arguments["additional-config"])["ngram_npu"]
    assert parse_publishers(section["store_feed"]) == (publisher,)
    assert [p["port"] for p in service["spec"]["ports"]] == [port]
    assert port in {p["containerPort"] for p in container["ports"]}
    assert service["spec"]["clusterIP"] == "None"  # the name has an address per pod
    labels = {"app": "vllm"}
    assert template["metadata"]["labels"] == service["spec"]["selector"] == labels
    assert policy["podSelector"]["matchLabels"] == labels
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        for rule in policy[direction]:
            if port in {p["port"] for p in rule["ports"]}:
                assert rule[peers] == [{"podSelector": {"matchLabels": labels}}]
