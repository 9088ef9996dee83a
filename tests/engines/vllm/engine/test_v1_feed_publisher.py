"""Tests the reader of KV events against vLLM's own block pool and publisher."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from feed_publisher import TextCollector, wait_until
from ngram_npu.engines.vllm.feed import connection
from ngram_npu.engines.vllm.feed.addresses import parse_publishers
from ngram_npu.engines.vllm.feed.reader import FeedReader
from ngram_npu.engines.vllm.scopes import compute_scope, fold_scope
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

BLOCK = 16
VOCAB_SIZE = 5000
NUM_BLOCKS = 4000
HASH = sha256_cbor


def make_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Replica:
    """The block pool of a scheduler and its publisher. A test generates the requests' text."""

    def __init__(self, *, has_replay: bool = True, buffer_steps: int = 10_000) -> None:
        self.port, replay_port = find_free_port(), find_free_port()
        replay = f"?replay={replay_port}" if has_replay else ""
        self.option = f"tcp://127.0.0.1:{self.port}{replay}"
        self._replay_endpoint = f"tcp://*:{replay_port}" if has_replay else None
        self._buffer_steps = buffer_steps
        self.start()

    def start(self) -> None:
        kv_cache_utils.init_none_hash(HASH)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, HASH)
        self._pool = BlockPool(NUM_BLOCKS, True, BLOCK, enable_kv_cache_events=True)
        self.publisher = ZmqEventPublisher(
            0, f"tcp://*:{self.port}", self._replay_endpoint, self._buffer_steps
        )
        self.num_requests = 0

    def add_request(
        self, prompt: list[int], *, salt: str | None = None, adapter: str | None = None
    ) -> Request:
        self.num_requests += 1
        lora = LoRARequest(adapter, self.num_requests, "/adapter") if adapter else None
        parameters = SamplingParams(max_tokens=1000)
        request = Request(
            f"request {self.num_requests}",
            prompt,
            parameters,
            None,
            lora_request=lora,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        request.pool_blocks = []
        self.cache_blocks(request)
        return request

    def cache_blocks(self, request: Request) -> None:
        """Makes the request's full blocks part of the prefix cache, as the scheduler does."""
        num_cached, num_full = len(request.pool_blocks), request.num_tokens // BLOCK
        if num_full > num_cached:
            request.pool_blocks += self._pool.get_new_blocks(num_full - num_cached)
            self._pool.cache_full_blocks(
                request, request.pool_blocks, num_cached, num_full, BLOCK, 0
            )

    def generate(self, request: Request, answer: list[int], tokens_per_step: int = 5) -> None:
        """Appends the answer in several steps, and publishes the events of each."""
        for first in range(0, len(answer), tokens_per_step):
            request.append_output_token_ids(answer[first : first + tokens_per_step])
            self.cache_blocks(request)
            self.publish()

    def publish(self) -> None:
        if events := self._pool.take_events():
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def reset_prefix_cache(self) -> None:
        self._pool.free_blocks(block for block in self._pool.blocks if block.ref_cnt)
        assert self._pool.reset_prefix_cache()

    def wait_until_published(self) -> None:
        wait_until(lambda: self.publisher._event_queue.empty())

    def close(self) -> None:
        self.publisher.shutdown()
        # The context is the process's own, so the port is free only when libzmq has closed it.
        time.sleep(0.2)


class LossySocket:
    """Replaces the publisher's socket with a function that may lose messages."""

    def __init__(self, send: Callable[[tuple[bytes, ...]], None]) -> None:
        self.send_multipart = send


@pytest.fixture(autouse=True)
def _shorten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_PAUSE_S", (0.02, 0.1))


@pytest.fixture
def replicas() -> Iterator[Callable[..., Replica]]:
    created: list[Replica] = []

    def create(**options: object) -> Replica:
        created.append(Replica(**options))
        return created[-1]

    yield create
    for replica in created:
        replica.close()


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[FeedReader, TextCollector]]]:
    readers: list[FeedReader] = []

    def create(*listed: Replica) -> tuple[FeedReader, TextCollector]:
        publishers = parse_publishers([replica.option for replica in listed])
        readers.append(FeedReader(publishers, vocab_size=VOCAB_SIZE))
        wait_until(lambda: readers[-1].get_counters().publishers == len(listed))
        time.sleep(0.3)  # until the subscription has reached the publisher
        return readers[-1], TextCollector(readers[-1], 4096)

    yield create
    for reader in readers:
        reader.close()


Replicas = Callable[..., Replica]
Start = Callable[..., tuple[FeedReader, TextCollector]]


def test_generated_text_arrives_up_to_the_last_full_block(replicas: Replicas, start: Start) -> None:
    replica = replicas()
    reader, collector = start(replica)
    prompt, answer = make_tokens(1, 100), make_tokens(2, 333)
    replica.generate(replica.add_request(prompt), answer)
    collector.wait_for((prompt + answer)[: 433 // BLOCK * BLOCK])
    assert list(collector.tokens) == [0]
    assert reader.get_counters().rejected == reader.get_counters().orphans == 0


@pytest.mark.parametrize(
    ("adapter", "salt"),
    [
        (None, None),
        (None, "None"),
        (None, "sql"),
        ("sql", None),
        ("sql", "sql"),
        ("sql", "tenant"),
        (None, fold_scope("docs", None)),
        (None, fold_scope("docs", "tenant")),
        ("sql", fold_scope("7", "tenant")),
    ],
)
def test_scope_is_that_of_adapter_and_salt(
    replicas: Replicas, start: Start, adapter: str | None, salt: str | None
) -> None:
    replica = replicas()
    _, collector = start(replica)
    prompt, answer = make_tokens(1, 40), make_tokens(2, 40)
    replica.generate(replica.add_request(prompt, adapter=adapter, salt=salt), answer)
    collector.wait_for(prompt + answer)
    assert set(collector.scopes.values()) == {compute_scope(adapter, salt)}


def test_requests_with_common_prefix_repeat_only_its_end(replicas: Replicas, start: Start) -> None:
    replica = replicas()
    reader, collector = start(replica)
    prefix = make_tokens(1, 4 * BLOCK)
    answers = [make_tokens(i, 2 * BLOCK) for i in range(2, 5)]
    for answer in answers:
        replica.generate(replica.add_request(prefix), answer)
    collector.wait_for(prefix + answers[0], *(prefix[-BLOCK:] + answer for answer in answers[1:]))
    assert reader.get_counters().tokens == len(prefix) + 3 * len(answers[0])


def test_late_reader_gets_all_that_the_publisher_keeps(replicas: Replicas, start: Start) -> None:
    replica = replicas(buffer_steps=3000)
    texts = []
    for i in range(300):
        prompt, answer = make_tokens(i, 2 * BLOCK), make_tokens(1000 + i, 8 * BLOCK)
        replica.generate(replica.add_request(prompt), answer, BLOCK)
        replica.reset_prefix_cache()  # the pool is smaller than the text
        texts.append(prompt + answer)
    replica.wait_until_published()
    reader, collector = start(replica)
    collector.wait_for(*texts)
    assert reader.get_counters().gaps == 0
    replica.generate(replica.add_request(texts[0][:BLOCK]), make_tokens(5000, BLOCK))
    collector.wait_for(texts[0][:BLOCK] + make_tokens(5000, BLOCK))


def test_lost_batches_are_replayed(
    replicas: Replicas, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = replicas()
    reader, collector = start(replica)
    rng, live = random.Random(3), replica.publisher._pub
    send = live.send_multipart
    monkeypatch.setattr(
        replica.publisher, "_pub", LossySocket(lambda f: None if rng.random() < 0.2 else send(f))
    )
    texts = []
    for i in range(20):
        prompt, answer = make_tokens(i, 40), make_tokens(100 + i, 200)
        replica.generate(replica.add_request(prompt), answer)
        texts.append((prompt + answer)[: 240 // BLOCK * BLOCK])
    replica.wait_until_published()
    monkeypatch.setattr(replica.publisher, "_pub", live)
    last = make_tokens(999, 2 * BLOCK)
    replica.add_request(last)
    replica.publish()
    collector.wait_for(*texts, last)
    assert reader.get_counters().gaps == 0


@pytest.mark.parametrize("has_replay", [True, False])
def test_restarted_publisher_is_read_again(
    replicas: Replicas, start: Start, has_replay: bool
) -> None:
    replica = replicas(has_replay=has_replay)
    reader, collector = start(replica)
    texts = [make_tokens(i, 6 * BLOCK) for i in range(3)]
    for _ in range(3):  # the new process has smaller numbers than the old one
        replica.generate(replica.add_request(texts[0][:BLOCK]), texts[0][BLOCK:])
    collector.wait_for(texts[0])
    replica.close()
    wait_until(lambda: reader.get_counters().publishers == 0)
    replica.start()
    if has_replay:  # published before the reader is connected again
        replica.generate(replica.add_request(texts[1][:BLOCK]), texts[1][BLOCK:])
    wait_until(lambda: reader.get_counters().publishers == 1)
    time.sleep(0.3)
    replica.generate(replica.add_request(texts[2][:BLOCK]), texts[2][BLOCK:])
    collector.wait_for(texts[0], *texts[1 if has_replay else 2 :])
