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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kv_events
import msgspec
import numpy as np
import pytest
import yaml
import zmq
from fake_engine import STORE, V1, V2, Engine, Request, V1Async, V2Neural, make_config
from kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from ngram_npu.engines.vllm import drafter
from ngram_npu.engines.vllm.feed import insertion, reader, texts
from ngram_npu.engines.vllm.feed.insertion import ATTRIBUTE
from ngram_npu.engines.vllm.feed.publishers import Publisher, parse_publishers, resolve
from ngram_npu.engines.vllm.feed.reader import FeedReader
from ngram_npu.engines.vllm.feed.texts import TextJoiner
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.patching import RUNNER
from ngram_npu.store import scope_of_request

ROOT = Path(__file__).resolve().parents[4]
BLOCK, VOCABULARY = 16, 1000
CONTEXT, PIECE = 16, 256
HANG_S = 300.0
"""A test that waits longer has failed; a busy machine is faster."""
PROMPT = list(range(100, 100 + 3 * BLOCK))
ANSWER = list(range(300, 300 + 3 * BLOCK))
LATER = 2 * texts.PAUSE_S


def make_text(seed: int, num_blocks: int = 6) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(num_blocks * BLOCK)]


def make_event(
    tokens: Sequence[int],
    first_block: int = 0,
    *,
    name: str = "text",
    keys: Sequence[Any] | None = None,
    **fields: Any,
) -> BlockStored:
    """Returns the event about the full blocks of a text from ``first_block`` on. The hash of a
    block is made of the text's ``name`` and the block's number. ``keys`` are those of the text's
    first block."""
    hashes = [make_hash(name, i) for i in range(first_block, len(tokens) // BLOCK)]
    values: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": make_hash(name, first_block - 1) if first_block else None,
        "token_ids": list(tokens[first_block * BLOCK : len(tokens) // BLOCK * BLOCK]),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [keys if i == first_block == 0 else None for i in range(len(hashes))],
        "group_idx": 0,
    }
    return BlockStored(**{**values, **fields})


def make_hash(name: str, block: int) -> int:
    return int.from_bytes(f"{name}:{block}".encode()[-8:], "big")


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


# How blocks become texts.


class Joiner(TextJoiner):
    """A joiner whose pieces are collected."""

    def __init__(self, *, is_private: bool = False) -> None:
        self.counters: Counter[str] = Counter()
        self.pieces: list[tuple[int, list[int]]] = []
        super().__init__(VOCABULARY, is_private, self.collect, self.counters)

    def collect(self, scope: int, tokens: bytes) -> None:
        self.pieces.append((scope, np.frombuffer(tokens, np.int32).tolist()))

    def add(self, *events: BlockStored) -> None:
        for event in events:
            self.add_event(event, 0.0)

    def take_pieces(self) -> list[tuple[int, list[int]]]:
        self.deliver_paused_texts(LATER)
        pieces, self.pieces = self.pieces, []
        return pieces


@pytest.mark.parametrize("num_blocks", [1, 15, 16, 17, 31, 32, 100])
def test_blocks_of_one_text_become_pieces(num_blocks: int) -> None:
    joiner, text = Joiner(), make_text(1, num_blocks)
    joiner.add(make_event(text[:BLOCK]))
    for block in range(1, num_blocks):
        joiner.add(make_event(text[: (block + 1) * BLOCK], block))
    pieces = [tokens for _, tokens in joiner.take_pieces()]
    assert all(len(piece) == PIECE for piece in pieces[:-1])
    assert all(p[-CONTEXT:] == q[:CONTEXT] for p, q in pairwise(pieces))
    assert pieces[0] + [token for piece in pieces[1:] for token in piece[CONTEXT:]] == text
    assert joiner.counters == {"tokens": len(text)}


def test_text_is_delivered_when_it_pauses() -> None:
    joiner = Joiner()
    joiner.add(make_event(PROMPT))
    joiner.deliver_paused_texts(texts.PAUSE_S - 0.01)
    assert joiner.pieces == []
    joiner.add_event(make_event(PROMPT + ANSWER[:BLOCK], 3), 1.0)
    joiner.deliver_paused_texts(texts.PAUSE_S)
    assert joiner.pieces == []
    joiner.deliver_paused_texts(texts.PAUSE_S + 1.0)
    assert joiner.take_pieces() == [(0, PROMPT + ANSWER[:BLOCK])]
    joiner.add(make_event(PROMPT + ANSWER, 4))
    assert joiner.take_pieces() == [(0, ANSWER)]  # its first block is the context of the others


def test_context_of_short_blocks_spans_several_blocks() -> None:
    joiner, fields = Joiner(), {"block_size": 4, "extra_keys": [None] * 6}
    joiner.add(make_event([], block_hashes=[*range(6)], token_ids=PROMPT[:24], **fields))
    branch = {"block_size": 4, "token_ids": ANSWER[:4], "extra_keys": [None]}
    joiner.add(make_event([], block_hashes=[7], parent_block_hash=4, **branch))
    assert joiner.take_pieces() == [(0, PROMPT[:24]), (0, PROMPT[4:20] + ANSWER[:4])]


def test_random_texts_with_common_prefixes_are_delivered_once() -> None:
    rng, joiner = random.Random(5), Joiner()
    published = [make_text(i, rng.randrange(1, 40)) for i in range(40)]
    published += [rng.choice(published)[: BLOCK * rng.randrange(1, 5)] + t for t in published]
    pending = []
    for text in published:
        # A block's hash depends on all tokens up to its end, as in vLLM.
        ends = range(BLOCK, len(text) + 1, BLOCK)
        pending.append((text, [hash(tuple(text[:end])) & (1 << 63) - 1 for end in ends]))
    progress, pieces = [0] * len(pending), []
    while unfinished := [i for i, (_, h) in enumerate(pending) if progress[i] < len(h)]:
        i = rng.choice(unfinished)
        text, hashes = pending[i]
        start, end = progress[i], min(len(hashes), progress[i] + rng.randrange(1, 4))
        progress[i] = end
        parent = hashes[start - 1] if start else None
        event = make_event(text[: end * BLOCK], start, block_hashes=hashes[start:end])
        event.parent_block_hash = parent
        joiner.add(event)
        if rng.random() < 0.05:
            pieces += joiner.take_pieces()
    pieces += joiner.take_pieces()
    different_blocks = {block for _, hashes in pending for block in hashes}
    assert joiner.counters == {"tokens": BLOCK * len(different_blocks)}
    strings = ["".join(map(chr, text)) for text in published]
    for _, tokens in pieces:
        assert len(tokens) <= PIECE
        assert any("".join(map(chr, tokens)) in text for text in strings)
    repeated = sum(len(tokens) for _, tokens in pieces) - joiner.counters["tokens"]
    assert 0 <= repeated <= CONTEXT * len(pieces)


@pytest.mark.parametrize(
    ("adapter", "keys", "salt"),
    [
        (None, None, None),
        (None, ["tenant"], "tenant"),
        (None, ["None"], "None"),
        ("sql", ["sql"], None),
        ("sql", ["sql", "tenant"], "tenant"),
        ("sql", ["sql", "sql"], "sql"),
    ],
)
@pytest.mark.parametrize("is_private", [False, True])
def test_scope_is_read_from_first_block(
    adapter: str | None, keys: list[str] | None, salt: str | None, is_private: bool
) -> None:
    joiner = Joiner(is_private=is_private)
    fields = {"lora_name": adapter, "lora_id": 3 if adapter else None}
    following_keys = [[adapter] if adapter else None] * 3
    event = make_event(PROMPT, **fields, extra_keys=[keys, *following_keys[1:]])
    joiner.add(event, make_event(PROMPT + ANSWER, 3, **fields, extra_keys=following_keys))
    is_stored = not is_private or keys is not None
    expected = [(scope_of_request(salt, adapter), PROMPT + ANSWER)] if is_stored else []
    assert joiner.take_pieces() == expected
    # Text that is private is no error.
    assert joiner.counters["rejected"] == joiner.counters["orphans"] == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"extra_keys": None}, "a publisher without keys publishes no salts"),
        ({"extra_keys": [None]}, "not one entry per block"),
        ({"extra_keys": [["a", "b"], None, None]}, "two names and no adapter"),
        ({"extra_keys": [[["image", 3]], None, None]}, "an image"),
        ({"extra_keys": [["salt", b"digest"], None, None]}, "embeddings"),
        ({"lora_name": "sql"}, "an adapter without its key"),
        ({"lora_name": "sql", "extra_keys": [["tenant", "sql"], ["sql"], ["sql"]]}, "other order"),
        ({"lora_id": 1}, "an adapter without a name"),
        ({"token_ids": PROMPT[:-1]}, "a block that is left out"),
        ({"block_size": 0, "token_ids": []}, "no block size"),
        ({"block_size": -16}, "a negative block size"),
        ({"block_hashes": [], "token_ids": [], "extra_keys": []}, "no blocks"),
    ],
)
def test_block_of_unknown_content_is_rejected_with_what_follows(
    fields: dict[str, Any], reason: str
) -> None:
    joiner = Joiner()
    joiner.add(make_event(PROMPT, **fields))
    assert joiner.counters["rejected"] > 0, reason
    joiner.add(make_event(PROMPT + ANSWER, 3))
    assert joiner.counters["orphans"] == 3
    assert joiner.take_pieces() == []


def test_following_block_with_other_keys_is_rejected() -> None:
    joiner = Joiner()
    joiner.add(make_event(PROMPT), make_event(PROMPT + ANSWER, 3, extra_keys=[["x"], None, None]))
    assert joiner.take_pieces() == [(0, PROMPT)]
    assert joiner.counters["rejected"] == 3


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**31, 2**63 - 1, -(2**63)])
def test_text_ends_before_block_with_token_out_of_range(token: int) -> None:
    joiner, tokens = Joiner(), list(PROMPT)
    tokens[BLOCK + 3] = token
    joiner.add(make_event(tokens), make_event(PROMPT + ANSWER, 3))
    assert joiner.take_pieces() == [(0, PROMPT[:BLOCK])]
    assert (joiner.counters["rejected"], joiner.counters["orphans"]) == (2, 3)


@pytest.mark.parametrize("position", [0, 1])
def test_known_hash_in_another_scope_is_rejected(position: int) -> None:
    """The tokens before the block would otherwise become the context of another scope's text."""
    joiner, hashes = Joiner(), [7, 8, 9]
    joiner.add(make_event(PROMPT, keys=["a"]))
    hashes[position] = make_hash("text", position)
    joiner.add(make_event(ANSWER, keys=["b"], block_hashes=hashes))
    joiner.add(make_event(ANSWER + PROMPT, 3, keys=["b"], parent_block_hash=9))
    pieces = dict(joiner.take_pieces())
    assert pieces.pop(scope_of_request("a")) == PROMPT
    assert pieces == ({scope_of_request("b"): ANSWER[:BLOCK]} if position else {})
    assert joiner.counters["rejected"] == 3 - position


@pytest.mark.parametrize(
    "fields", [{"medium": "CPU"}, {"medium": "STORAGE"}, {"locality": "REMOTE"}, {"group_idx": 1}]
)
def test_event_of_other_cache_is_ignored(fields: dict[str, Any]) -> None:
    joiner = Joiner()
    joiner.add(make_event(PROMPT, **fields), make_event(ANSWER))
    assert joiner.take_pieces() == [(0, ANSWER)]
    assert joiner.counters == {"tokens": len(ANSWER)}


def test_number_of_remembered_blocks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_BLOCKS", 20)
    joiner = Joiner()
    for i in range(40):
        joiner.add(make_event(PROMPT, name=f"{i}"), make_event(PROMPT + ANSWER, 3, name="39"))
        joiner.add(make_event(ANSWER, name="used", keys=["a"]))
        assert len(joiner._blocks) <= 20
    joiner.take_pieces()
    joiner.counters.clear()
    joiner.add(make_event(PROMPT + ANSWER, 3, name="0"))
    assert joiner.counters == {"orphans": 3}
    joiner.add(make_event(ANSWER + PROMPT, 3, name="used"))  # used again and again
    assert joiner.take_pieces() == [(scope_of_request("a"), ANSWER[-CONTEXT:] + PROMPT)]


# The reader and its publishers.


class Source:
    """A publisher with vLLM's protocol, whose socket says when a reader has subscribed."""

    def __init__(self, port: int = 0) -> None:
        self.port, self.next_number = port, 0
        self._context: zmq.Context[Any] = zmq.Context()
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

    def end(self) -> None:
        self._context.destroy(linger=0)

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
    FEEDS.append(FeedReader(vllm_config, read_options(vllm_config, "v2")))
    return FEEDS[-1]


FEEDS: list[FeedReader] = []


@pytest.fixture(autouse=True)
def _end_feeds() -> Iterator[None]:
    """Closes the sockets, without which the feeds' contexts could not end."""
    yield
    while FEEDS:
        FEEDS.pop()._context.destroy(linger=0)


Start = Callable[..., Reader]
Sources = Callable[..., Source]


@pytest.fixture
def sources() -> Iterator[Sources]:
    created: list[Source] = []

    def create(port: int = 0) -> Source:
        created.append(Source(port))
        return created[-1]

    yield create
    for source in created:
        source.end()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts readers whose subscriptions have reached their sources. Their texts pause at once."""
    monkeypatch.setattr(texts, "PAUSE_S", 0.0)

    def create(*sources: Source, scope: str = "shared") -> Reader:
        subject = Reader(*(str(source.address) for source in sources), scope=scope)
        subject.run_until(lambda: all(source.has_subscriber for source in sources))
        subject.run_until(lambda: subject["publishers"] == len(sources))
        return subject

    return create


@pytest.fixture(autouse=True)
def _events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_events", kv_events)


@pytest.mark.parametrize("scope", ["private", "shared"])
def test_published_text_is_delivered_if_its_scope_is_shared(
    sources: Sources, start: Start, scope: str
) -> None:
    source = sources()
    subject = start(source, scope=scope)
    source.publish(make_event(PROMPT, name="a"), make_event(ANSWER, name="b", keys=["tenant"]))
    subject.run_until_has(ANSWER)
    assert subject.pieces == ([PROMPT, ANSWER] if scope == "shared" else [ANSWER])
    assert subject["tokens"] == sum(map(len, subject.pieces))
    metrics = "gaps", "rejected", "orphans", "age_seconds"
    assert [subject[metric] for metric in metrics] == [0, 0, 0, 0]


def test_events_without_text_are_read(sources: Sources, start: Start) -> None:
    source = sources()
    subject = start(source)
    source.publish(make_event(PROMPT), BlockRemoved([1], "GPU"))
    source.publish(AllBlocksCleared(), make_event(PROMPT + ANSWER, 3), make_event(PROMPT))
    subject.run_until(lambda: subject.pieces == [PROMPT, PROMPT])
    assert (subject["orphans"], subject["rejected"]) == (3, 0)


def test_gap_drops_open_text(
    sources: Sources, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = sources(), make_text(1, 9)
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
def test_restarted_publisher_is_read_again(
    sources: Sources, start: Start, num_missed: int, has_proxy: bool
) -> None:
    """Behind a proxy, which keeps the connection, its first batches may be missed too."""
    source = sources()
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


def test_turn_reads_one_batch_of_each_publisher(sources: Sources, start: Start) -> None:
    first, second = sources(), sources()
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
    sources: Sources,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    source, other = sources(), sources()
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


def test_random_bytes_do_not_end_the_reader(sources: Sources, start: Start) -> None:
    source, rng = sources(), random.Random(6)
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


def test_huge_message_ends_only_its_connection(sources: Sources, start: Start) -> None:
    source = sources()
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


def test_address_that_answered_in_another_protocol_is_connected_again(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "PAUSE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        subject = Reader(f"tcp://127.0.0.1:{port}")
        subject.run_until(lambda: select.select([server], [], [], 0)[0])
        connection, _ = server.accept()
        with connection:
            connection.sendall(10 * b"HTTP/1.1 400 Bad Request\r\n\r\n")
            subject.run_until(lambda: select.select([connection], [], [], 0)[0])
    source = sources(port)
    subject.run_until(lambda: source.has_subscriber and subject["publishers"])
    source.publish(make_event(ANSWER))
    subject.run_until_has(ANSWER)


def test_oldest_pieces_are_dropped_for_newer_ones(
    sources: Sources, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_READY_PIECES", 3)
    source = sources()
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
    sources: Sources,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = sources(), sources()
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
    sources: Sources,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, errors = sources(), [RuntimeError("unexpected")] * 2
    deliver = TextJoiner.deliver_paused_texts

    def fail_twice(joiner: TextJoiner, now: float) -> None:
        if errors:
            raise errors.pop()
        deliver(joiner, now)

    monkeypatch.setattr(texts, "PAUSE_S", 0.0)
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
ENGINES = V1, V1Async, V2, V2Neural


def schedule(*pieces: tuple[int, list[int]]) -> Iterator[Any]:
    """Yields the outputs of steps until all pieces are sent, as the ranks get them."""
    feed = make_feed(store_feed="tcp://10.0.0.1:5557")
    feed.ready += [(0.0, scope, np.array(tokens, np.int32).tobytes()) for scope, tokens in pieces]
    while feed.ready:
        output = SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=1)
        feed.add_texts(output)
        yield pickle.loads(pickle.dumps(output))


def run_step(engine: Engine, output: Any) -> None:
    if isinstance(engine, V2):
        engine.add_requests(output)
    else:
        insertion.insert_texts(engine.drafter, output)


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
            run_step(engine, output)
    for engine in engines:
        engine.store.check_integrity()
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
    insertion.insert_texts(None, output)
    with pytest.raises(ZeroDivisionError):
        run_step(engine, output)
    engine.drafter.has_other_ranks = True
    with pytest.raises(SystemExit):
        run_step(engine, output)


def test_v1_runner_inserts_text_even_if_subclass_overrides_execute_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class GPUModelRunner:
        def __init__(self, drafter: Any) -> None:
            self.drafter = drafter

        def execute_model(self, scheduler_output: Any) -> str:
            raise NotImplementedError

    class OtherRunner(GPUModelRunner):
        def execute_model(self, scheduler_output: Any) -> str:
            return "result"

    module: Any = ModuleType(RUNNER)
    module.GPUModelRunner = GPUModelRunner
    monkeypatch.setitem(sys.modules, RUNNER, module)
    monkeypatch.setattr(drafter, "require_request_checks", lambda: None)
    with pytest.raises(ValueError, match="ngram_npu: store_feed: expected NGRAM_NPU_VLLM=1 and a"):
        V1(**FEED)
    V1(**STORE)
    insertion.install_v1(module)
    engine = V1(**FEED)
    runner: Any = OtherRunner(engine.adapter)
    (output,) = schedule((0, PROMPT))
    assert runner.execute_model(scheduler_output=output) == "result"
    assert engine.store.statistics.tokens_held == len(PROMPT)


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
