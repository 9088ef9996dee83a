"""A publisher of KV events with vLLM's protocol, which can send any bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from ngram_npu.engines.vllm.feed.addresses import Publisher as Address
from ngram_npu.engines.vllm.feed.reader import FeedReader

BLOCK = 16
VOCAB_SIZE = 1000
TIMEOUT_S = 20.0
END_OF_REPLAY = b"\xff" * 8


def make_event(
    tokens: Sequence[int],
    first_block: int = 0,
    *,
    name: str = "text",
    keys: Sequence[Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Returns vLLM's event about the full blocks of a text from ``first_block`` on, in which the
    hash of a block is made of the text's ``name`` and the block's number. ``keys`` are those of the
    first block of the text."""
    hashes = [make_hash(name, i) for i in range(first_block, len(tokens) // BLOCK)]
    event = {
        "type": "BlockStored",
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
    return event | fields


def make_hash(name: str, block: int) -> int:
    return int.from_bytes(f"{name}:{block}".encode()[-8:], "big")


def encode_batch(*events: Any, timestamp: Any = 0.0) -> bytes:
    return msgspec.msgpack.encode([timestamp, events, 0])


class Publisher:
    """Publishes batches under growing numbers, and answers replay requests like vLLM."""

    def __init__(
        self,
        *,
        has_replay: bool = True,
        answers: bool = True,
        replay_limit: int = 1 << 30,
        max_messages: int = 0,
    ) -> None:
        """
        Args:
            replay_limit: Number of batches after which an answer leaves out all others but the
                last one, and the end, as if the reader were slow.
            answers: Whether replay requests are answered.
            max_messages: Messages that wait for a slow reader; then publishing waits. 0: no limit.
        """
        self._has_replay, self._answers, self._max_messages = has_replay, answers, max_messages
        self._replay_limit = replay_limit
        self.port, self._replay_port = 0, 0
        self._start()
        self.address = Address("127.0.0.1", self.port, self._replay_port or None)

    def _start(self) -> None:
        self.batches: list[tuple[int, bytes]] = []
        """What a replay contains."""
        self.num_requests, self.next_number = 0, 0
        self._context = zmq.Context()
        self._live, self._replay = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self._live.set(zmq.SNDHWM, self._max_messages)
        self._live.set(zmq.XPUB_NODROP, 1)
        self._replay.set(zmq.SNDHWM, 0)
        self.port = self._bind(self._live, self.port)
        if self._has_replay:
            self._replay_port = self._bind(self._replay, self._replay_port)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._answer_requests, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Ends the publisher and starts another one at the same ports."""
        self.close()
        self._start()

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], port: int) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port or '*'}")
                return int(socket.get(zmq.LAST_ENDPOINT).rpartition(b":")[2])
            except zmq.ZMQError:  # the port of a publisher that has just ended
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _answer_requests(self) -> None:
        while not self._closed.is_set():
            if not self._replay.poll(10):
                continue
            identity, _, first = self._replay.recv_multipart()
            start = int.from_bytes(first, "big")
            batches = [batch for batch in list(self.batches) if batch[0] >= start]
            self.num_requests += 1
            if not self._answers:
                continue
            is_complete = len(batches) <= self._replay_limit
            for number, payload in batches[: self._replay_limit] + batches[-1:] * (not is_complete):
                header = identity, b"", b"", number.to_bytes(8, "big")
                self._replay.send_multipart((*header, payload))
            if is_complete:
                self._replay.send_multipart((identity, b"", b"", END_OF_REPLAY, b""))

    def wait_for_subscription(self) -> None:
        message = b""
        while not message.startswith(b"\1"):  # 0: the end of a subscription
            assert self._live.poll(int(TIMEOUT_S * 1000)), "no subscription"
            message = self._live.recv()

    def publish(self, *events: Any, is_lost: bool = False) -> None:
        """Publishes a batch. If ``is_lost``, only a replay contains it."""
        self.batches.append((self.next_number, encode_batch(*events)))
        if not is_lost:
            self.send(*self.batches[-1])
        self.next_number += 1

    def send(self, number: int, payload: bytes) -> None:
        self.send_frames(b"", number.to_bytes(8, "big"), payload)

    def send_frames(self, *frames: bytes) -> None:
        self._live.send_multipart(frames)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._context.destroy(linger=0)


class TextCollector:
    """Takes texts of a reader, at most ``max_tokens`` at once, and joins them by their numbers."""

    def __init__(self, reader: FeedReader, max_tokens: int) -> None:
        self._reader, self._max_tokens = reader, max_tokens
        self.tokens: dict[int, list[int]] = {}
        self.scopes: dict[int, int] = {}

    def take(self) -> bool:
        """Takes texts once, and returns whether there were any."""
        texts = self._reader.take_texts(self._max_tokens)
        assert sum(len(text.tokens) for text in texts) <= self._max_tokens
        for text in texts:
            self.tokens.setdefault(text.chain, []).extend(text.tokens.tolist())
            assert self.scopes.setdefault(text.chain, text.scope) == text.scope
        return bool(texts)

    def has(self, *expected: list[int]) -> bool:
        """Takes all texts that are ready, and returns whether these are among those taken."""
        while self.take():
            pass
        return all(text in self.tokens.values() for text in expected)

    def wait_for(self, *expected: list[int]) -> None:
        """Waits until these texts, and perhaps others, are complete."""
        wait_until(lambda: self.has(*expected))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)
