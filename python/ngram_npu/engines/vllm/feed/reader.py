"""Reads the KV events of other engines in a thread of the engine core.

vLLM publishes at a PUB socket: a topic, the number of the batch from 0 on (8 bytes, big-endian),
and the batch (msgpack). The numbers say whether batches were lost or the publisher was restarted.

All ranks must insert the same text before the same step, since each of them embeds its own drafts.
So only the scheduler's process reads, and adds the text to the outputs of ``schedule``, which vLLM
sends to all ranks (:mod:`~ngram_npu.engines.vllm.feed.insertion`).
"""

from __future__ import annotations

import contextlib
import importlib
import math
import struct
import threading
import time
from collections import Counter, deque
from itertools import chain
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ngram_npu.engines.vllm.feed.insertion import ATTRIBUTE
from ngram_npu.engines.vllm.feed.publishers import (
    MAX_PUBLISHERS,
    Publisher,
    parse_publishers,
    resolve,
)
from ngram_npu.engines.vllm.feed.texts import TOKEN_BYTES, TextJoiner
from ngram_npu.engines.vllm.metrics import FeedMetrics
from ngram_npu.engines.vllm.options import Options, engine_index, publishes_text
from ngram_npu.engines.vllm.patching import format_error, logger

SOCKET_OPTIONS: dict[int, int | bytes] = {
    zmq.SUBSCRIBE: b"",
    zmq.RCVHWM: 64,  # batches; more wait in the publisher's process
    zmq.MAXMSGSIZE: 1 << 20,  # bytes; a larger message ends the connection
    zmq.RECONNECT_IVL_MAX: 10_000,
    zmq.HEARTBEAT_IVL: 10_000,  # finds a connection that ended without notice
}
PIECES_PER_STEP = 4
"""Bounds the tokens that a step inserts to 1024, each of which takes about 0.25 microseconds."""
MAX_READY_PIECES = 1 << 12
"""Pieces that wait for a step, with up to 1 million tokens. A new piece replaces the oldest."""
PAUSE_PER_WORK = 4
"""The thread waits this multiple of the time that it worked, since it shares Python's interpreter
lock with the scheduler."""
IDLE_S = 0.1
REOPEN_S = 1.0
RESOLVE_INTERVAL_S = 60.0


class Subscription:
    """The connection to a publisher, and the publisher's text."""

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        publisher: Publisher,
        joiner: TextJoiner,
    ) -> None:
        self._context, self._poller, self._publisher = context, poller, publisher
        self.joiner, self.is_connected = joiner, False
        self.next_number: int | None = None
        """Number of the next batch; None: any."""
        self.open()

    def open(self) -> None:
        self.reopen_at = math.inf
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.IPV6, ":" in self._publisher.host)
        for option, value in SOCKET_OPTIONS.items():
            self.socket.setsockopt(option, value)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.monitor = self.socket.get_monitor_socket(events)
        self.socket.connect(str(self._publisher))
        for socket in (self.socket, self.monitor):
            self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        for socket in (self.socket, self.monitor):
            self._poller.unregister(socket)
        self.socket.disable_monitor()
        self.socket.close(linger=0)

    def observe(self, event: int, now: float) -> None:
        """Handles an event of the monitor. ZeroMQ connects again, but not after a message that is
        too large or malformed."""
        self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self.reopen_at = math.inf if self.is_connected else now + REOPEN_S

    def count_lost(self, number: int) -> int:
        """Returns how many batches were lost before the one with this number."""
        expected, self.next_number = self.next_number, number + 1
        if expected is None or number == expected:
            return 0
        self.joiner.drop_open_texts()
        if number > expected:
            return number - expected
        self.joiner.forget_blocks()  # the publisher was restarted
        return number


class FeedReader:
    """Reads all publishers of the option ``store_feed``, except the engine's own."""

    def __init__(self, vllm_config: Any, options: Options) -> None:
        self._publishers = parse_publishers(options.store_feed)
        self._own_port = _find_own_port(vllm_config)
        self._events = importlib.import_module("vllm.distributed.kv_events")
        self._decoder = msgspec.msgpack.Decoder(self._events.KVEventBatch)
        self._counters: Counter[str] = Counter()
        self._joiner_arguments = (
            vllm_config.model_config.get_vocab_size(),
            options.scope == "private",
            self._deliver,
            self._counters,
        )
        self._metrics = FeedMetrics(vllm_config)
        self.ready: deque[tuple[float, int, bytes]] = deque(maxlen=MAX_READY_PIECES)
        """Since when each piece waits, its scope and tokens. The thread appends, and the engine
        removes."""
        self._resolved: dict[Publisher, set[Publisher]] = {}
        self._addresses: frozenset[Publisher] = frozenset()
        self._subscriptions: dict[Publisher, Subscription] = {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._logged: set[tuple[object, str]] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ngram_npu feed", daemon=True)

    def start(self) -> None:
        self._thread.start()
        threading.Thread(
            target=self._run_resolver, name="ngram_npu feed names", daemon=True
        ).start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def add_texts(self, output: Any) -> None:
        """Adds the next pieces to the output of ``schedule``. A step without tokens gets none: it
        drafts nothing, so the text of many such steps would reach the store at once."""
        if output.total_num_scheduled_tokens:
            count = min(len(self.ready), PIECES_PER_STEP)
            setattr(output, ATTRIBUTE, [self.ready.popleft()[1:] for _ in range(count)])

    def get_metrics(self) -> dict[str, float]:
        """Returns the values of the metrics ``ngram_npu_feed_*``. Any thread may call this."""
        connected = sum(s.is_connected for s in list(self._subscriptions.values()))
        age_s = 0.0
        with contextlib.suppress(IndexError):  # none waits
            age_s = time.monotonic() - self.ready[0][0]
        return {**self._counters, "publishers": connected, "age_seconds": age_s}

    def resolve_names(self) -> None:
        """Finds the present addresses of all publishers. Those of a name that cannot be resolved
        remain."""
        for publisher in self._publishers:
            try:
                self._resolved[publisher] = resolve(publisher, self._own_port)
            except (OSError, UnicodeError) as error:
                self._log(publisher, "cannot be resolved", format_error(error))
        addresses = sorted(set(chain(*self._resolved.values())))
        if len(addresses) > MAX_PUBLISHERS:
            self._log("store_feed", f"has more than {MAX_PUBLISHERS} addresses")
        self._addresses = frozenset(addresses[:MAX_PUBLISHERS])

    def read(self, timeout_s: float) -> float:
        """Waits for batches, and reads at most one of each publisher. Returns the seconds that it
        worked."""
        self._update_subscriptions()
        ready = dict(self._poller.poll(int(1000 * timeout_s)))
        started, now = time.perf_counter(), time.monotonic()
        for publisher, subscription in self._subscriptions.items():
            if subscription.monitor in ready:
                subscription.observe(recv_monitor_message(subscription.monitor)["event"], now)
                state = "connected" if subscription.is_connected else "disconnected"
                self._log(publisher, f"is {state}")
            if subscription.socket in ready:
                self._read_batch(publisher, subscription, now)
            elif now >= subscription.reopen_at:
                subscription.close()
                subscription.open()
            subscription.joiner.deliver_paused_texts(now)
        return time.perf_counter() - started

    def _read_batch(self, publisher: Publisher, subscription: Subscription, now: float) -> None:
        frames = subscription.socket.recv_multipart(zmq.NOBLOCK)
        try:
            _, number, payload = frames
            self._counters["gaps"] += subscription.count_lost(*struct.unpack(">Q", number))
            for event in self._decoder.decode(payload).events:
                if isinstance(event, self._events.BlockStored):
                    subscription.joiner.add_event(event, now)
                elif isinstance(event, self._events.AllBlocksCleared):
                    subscription.joiner.forget_blocks()
        except Exception as error:  # a publisher can send anything
            self._counters["rejected"] += 1
            self._log(publisher, "sends malformed batches", format_error(error))

    def _deliver(self, scope: int, tokens: bytes) -> None:
        if len(self.ready) == MAX_READY_PIECES:
            self._counters["dropped"] += len(tokens) // TOKEN_BYTES
            self._log("store_feed", "brings more text than this engine takes")
        self.ready.append((time.monotonic(), scope, tokens))

    def _update_subscriptions(self) -> None:
        addresses = self._addresses
        for publisher in self._subscriptions.keys() - addresses:
            self._subscriptions.pop(publisher).close()
        for publisher in addresses - self._subscriptions.keys():
            joiner = TextJoiner(*self._joiner_arguments)
            self._subscriptions[publisher] = Subscription(
                self._context, self._poller, publisher, joiner
            )

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                worked_s = self.read(IDLE_S)
                self._metrics.update(self.get_metrics())
            except Exception as error:
                self._log("store_feed", "failed and goes on", format_error(error))
                worked_s = IDLE_S
            self._closed.wait(PAUSE_PER_WORK * worked_s)
        self._context.destroy(linger=0)

    def _run_resolver(self) -> None:
        while not self._closed.is_set():  # an answer can take minutes
            self.resolve_names()
            self._closed.wait(RESOLVE_INTERVAL_S)

    def _log(self, subject: object, state: str, detail: str = "") -> None:
        """Logs each state of a publisher once, so that none can fill the log."""
        if (subject, state) not in self._logged:
            self._logged.add((subject, state))
            logger.info("ngram_npu feed: %s %s%s", subject, state, detail and f": {detail:.200}")


def _find_own_port(vllm_config: Any) -> int | None:
    """Returns the port at which this engine publishes; None: at none."""
    endpoint = vllm_config.kv_events_config.endpoint if publishes_text(vllm_config) else ""
    if not endpoint.startswith("tcp:"):
        return None
    # vLLM adds the number of the engine in a data-parallel server.
    return int(endpoint.rpartition(":")[2]) + engine_index(vllm_config.parallel_config)
