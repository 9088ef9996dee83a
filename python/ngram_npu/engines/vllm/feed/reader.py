"""Reads the KV events of other engines in a thread of the engine core.

The thread shares Python's interpreter lock with the scheduler. It works for a fraction of a
millisecond, or for one event, and then waits several times as long, so even a publisher that sends
without end takes only a small share of the time of a step. All memory is bounded: what arrives too
fast waits in its publisher's process, and the reader drops the oldest waiting text for newer text.
Nothing that a publisher sends ends the thread or raises an error in the scheduler.
"""

from __future__ import annotations

import functools
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from multiprocessing.util import Finalize

from ngram_npu.engines.vllm.feed.addresses import AddressBook, Publisher, StateLog
from ngram_npu.engines.vllm.feed.connection import Connection
from ngram_npu.engines.vllm.feed.events import Blocks, TextJoiner
from ngram_npu.engines.vllm.feed.texts import MAX_TEXTS, FedText, FeedCounters
from ngram_npu.engines.vllm.patching import format_error

KNOWN_BLOCKS = 1 << 20
"""Number of blocks of all publishers that are remembered, so that later blocks can be joined to
them: 230 MB."""
WAITING_TOKENS = 1 << 20
"""Tokens of all publishers that can wait for the engine; a text counts as 64 tokens more."""
READY_TOKENS = 1 << 15
"""Maximum number of tokens in ``ready``, in addition to ``WAITING_TOKENS``."""
TEXT_TOKENS = 1 << 12
"""Maximum length of a text that is made ready. Publishers take turns, text by text."""
WORK_S = 0.0002
PAUSE_PER_WORK = 4
"""The reader waits this multiple of the time that it worked."""
IDLE_S = 0.05
"""How often the reader looks for timeouts, new addresses and room for ready texts."""
RETRY_S = 60.0
"""How long a publisher is left out after an unexpected error."""
CLOSE_TIMEOUT_S = 2.0


class FeedReader:
    """Reads all publishers of the option ``store_feed``. One other thread takes the text."""

    def __init__(
        self, publishers: Sequence[Publisher], *, vocab_size: int, own_endpoint: str | None = None
    ) -> None:
        """
        Args:
            vocab_size: Number of the model's token ids. Text with other ids is rejected.
            own_endpoint: Where this engine publishes, which is not read; None: nowhere.
        """
        self._vocab_size, self._text_numbers, self._log = vocab_size, count(), StateLog()
        self._book = AddressBook(publishers, own_endpoint, self._log)
        self._addresses: tuple[Publisher, ...] = ()
        self._connections: dict[Publisher, Connection] = {}
        self._retry_at: dict[Publisher, float] = {}
        # The thread appends and the engine removes. A deque needs no lock for this, and each of the
        # two counts is changed by one of them.
        self.ready: deque[tuple[float, FedText]] = deque()
        self._num_made_ready = self._num_taken = 0
        self._counted: tuple[FeedCounters, tuple[Connection, ...]] = FeedCounters(), ()
        """Counters of removed publishers, and connections of the others. Replaced as a whole,
        because another thread reads them."""
        self._unused_blocks: list[Blocks] = []
        """Blocks of removed publishers. Each turn frees a part, because freeing all takes long."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ngram_npu feed", daemon=True)
        self._thread.start()
        end = self._closed, self._book, self._thread
        self._finalize = Finalize(self, _close, end, exitpriority=0)

    def take_texts(self, max_tokens: int) -> list[FedText]:
        """Removes and returns at most ``MAX_TEXTS`` texts, with ``max_tokens`` tokens or fewer."""
        texts: list[FedText] = []
        while self.ready and max_tokens > 0 and len(texts) < MAX_TEXTS:
            since, text = self.ready.popleft()
            if len(text.tokens) > max_tokens:
                rest = FedText(text.chain, text.scope, text.tokens[max_tokens:])
                self.ready.appendleft((since, rest))
                text = FedText(text.chain, text.scope, text.tokens[:max_tokens])
            max_tokens -= len(text.tokens)
            self._num_taken += len(text.tokens)
            texts.append(text)
        return texts

    def get_counters(self) -> FeedCounters:
        """Returns the counters of all publishers, including those that are gone. Any thread may
        call this."""
        counters, connections = self._counted
        for connection in connections:
            counters = _add_counters(counters, connection)
        try:
            age_seconds = time.monotonic() - self.ready[0][0]
        except IndexError:  # none waits, or the engine has just taken it
            age_seconds = 0.0
        connected = sum(connection.is_connected for connection in connections)
        return replace(counters, publishers=connected, age_seconds=age_seconds)

    def close(self) -> None:
        """Ends the thread, which takes less than a tenth of a second."""
        self._finalize()

    def _run(self) -> None:
        turns = count()
        while not self._closed.is_set():
            started = time.perf_counter()
            try:
                self._wait_for_messages()
                started = time.perf_counter()
                self._work(started, next(turns))
            except Exception as error:
                self._log.log("the reader", "failed and goes on", f": {format_error(error)}")
                self._closed.wait(IDLE_S)
            self._closed.wait(PAUSE_PER_WORK * (time.perf_counter() - started))
        for connection in self._connections.values():
            connection.close()

    def _wait_for_messages(self) -> None:
        poller = select.poll()
        for connection in self._connections.values():
            for client in connection.get_clients():
                poller.register(client, select.POLLIN | select.POLLOUT * client.has_output)
        connections = self._connections.values()
        is_busy = any(c.has_backlog or c.has_messages for c in connections)
        poller.poll(0 if is_busy else int(IDLE_S * 1000))

    def _work(self, started: float, turn: int) -> None:
        """Receives from all publishers, and decodes batches of one of them."""
        if self._unused_blocks:
            self._unused_blocks.pop()
        self._update_connections()
        connections = list(self._connections.values())
        for connection in connections:
            self._call(connection.publisher, connection.receive)
        busy = [connection for connection in connections if connection.has_backlog]
        if busy:
            connection = busy[turn % len(busy)]
            decode = functools.partial(connection.decode, started + WORK_S)
            self._call(connection.publisher, decode)
        self._make_ready()

    def _call(self, publisher: Publisher, call: Callable[[], None]) -> None:
        """Calls a function of this publisher's connection. An error concerns no other publisher."""
        try:
            call()
        except Exception as error:
            self._log.log(publisher, "is left out", f": {format_error(error)}")
            self._retry_at[publisher] = time.monotonic() + RETRY_S
            self._remove(publisher)

    def _update_connections(self) -> None:
        addresses = self._book.addresses
        if addresses is not self._addresses or self._retry_at:
            now = time.monotonic()
            for publisher in self._connections.keys() - set(addresses):
                self._remove(publisher)
            self._retry_at = {p: at for p, at in self._retry_at.items() if at > now}
            for publisher in addresses:
                if publisher not in self._connections and publisher not in self._retry_at:
                    self._call(publisher, functools.partial(self._connect, publisher))
            self._addresses = addresses

    def _connect(self, publisher: Publisher) -> None:
        joiner = TextJoiner(self._vocab_size, self._text_numbers)
        self._connections[publisher] = Connection(publisher, joiner, self._log)
        self._counted = self._counted[0], tuple(self._connections.values())
        for connection in self._connections.values():
            connection.joiner.set_capacity(KNOWN_BLOCKS // len(self._connections))
            connection.max_waiting = WAITING_TOKENS // len(self._connections)

    def _remove(self, publisher: Publisher) -> None:
        connection = self._connections.pop(publisher, None)
        if connection is not None:
            connection.num_dropped += connection.joiner.num_waiting
            past = _add_counters(self._counted[0], connection)
            self._counted = past, tuple(self._connections.values())
            self._unused_blocks += connection.joiner.remove_blocks()
            connection.close()

    def _make_ready(self) -> None:
        """Makes texts ready to be taken, one per publisher in turn."""
        joiners = [c.joiner for c in self._connections.values() if c.joiner.waiting]
        room = READY_TOKENS - (self._num_made_ready - self._num_taken)
        while joiners and room > 0:
            for joiner in joiners:
                since, text = joiner.take(min(TEXT_TOKENS, max(1, room)))
                self._num_made_ready += len(text.tokens)
                room -= len(text.tokens)
                self.ready.append((since, text))
            joiners = [joiner for joiner in joiners if joiner.waiting]


def _add_counters(counters: FeedCounters, connection: Connection) -> FeedCounters:
    joiner = connection.joiner
    return replace(
        counters,
        texts=counters.texts + joiner.num_texts,
        tokens=counters.tokens + joiner.num_tokens,
        gaps=counters.gaps + connection.num_gaps,
        orphans=counters.orphans + joiner.num_orphans,
        dropped=counters.dropped + connection.num_dropped,
        rejected=counters.rejected + joiner.num_rejected + connection.num_rejected,
    )


def _close(closed: threading.Event, book: AddressBook, thread: threading.Thread) -> None:
    closed.set()
    book.close()
    thread.join(CLOSE_TIMEOUT_S)
