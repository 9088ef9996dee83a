"""Receives the batches of one publisher in order, including those that the reader must request.

A publisher numbers its batches from 0 when it starts. The numbers say what is missing: what was
published before the connection, or what was lost because the reader was slow. vLLM's replay socket
answers a number with all batches from this number on that the publisher still has. While a replay
is read, new batches wait in the socket of the live stream, so batches are processed in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import msgspec

from ngram_npu.engines.vllm.feed.addresses import Publisher, StateLog
from ngram_npu.engines.vllm.feed.events import EventError, TextJoiner, decode_event, split_batch
from ngram_npu.engines.vllm.feed.zmtp import Client
from ngram_npu.engines.vllm.patching import format_error

BACKLOG_BYTES = 1 << 24
"""Received batches of a publisher that are not decoded yet. A longer replay is interrupted."""
LIVE_BACKLOG_BYTES = 1 << 16
"""With more than this, new batches wait in the publisher."""
CONNECT_PAUSE_S = 1.0, 30.0
"""Time until the next attempt to connect: it doubles up to the maximum."""
REPLAY_TIMEOUT_S = 2.0
"""How long the answer to a request may pause."""
REPLAY_PAUSE_S = 5.0, 600.0
"""Time after an unanswered request in which there is no other one: it doubles up to the maximum."""
_ANSWERED_PAUSE_S = 0.5
"""Time after a request whose answer lacks the lost batches. Each request opens a connection."""
_REPLAY_READS = 16
"""Number of times that a replay is received from in a turn of the reader."""
_MESSAGES_AT_ONCE = 64
"""Number of live messages that are added to the backlog in a turn of the reader."""
_MESSAGE_OVERHEAD = 128
"""Bytes that a message takes in the backlog in addition to its payload, which may be empty."""
_MAX_SEQUENCE = 1 << 62
_MAX_COUNTED_GAP = 1 << 20
"""A false number must not make the counter of lost batches useless."""
_SEQUENCE_BYTES = 8
_END_OF_REPLAY = b"\xff" * _SEQUENCE_BYTES


class Connection:
    """The connection to one publisher, and its text. Only the reader's thread uses it."""

    def __init__(self, publisher: Publisher, joiner: TextJoiner, log: StateLog) -> None:
        self.publisher, self.joiner = publisher, joiner
        self.max_waiting = 0
        """Maximum of the joiner's ``waiting_size``; the oldest text is dropped for newer text."""
        self.is_connected = False
        self.num_gaps = self.num_dropped = self.num_rejected = 0
        self._log = log
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._events: Iterator[msgspec.Raw] | None = None
        """Remaining events of the batch that is being decoded."""
        self._next: int | None = None
        """Number of the next batch; None: unknown, since the publisher may have been restarted."""
        self._last_next: int | None = None
        """The same number when the last connection ended."""
        self._replay_end = 0
        """The live stream repeats batches below this number, because a replay contained them."""
        self._held: tuple[int, bytes] | None = None
        """A live batch that waits for the replay of those before it."""
        self._live: Client | None = None
        self._received: deque[list[bytes]] = deque()
        """Messages of the live stream that wait until a replay ends or the backlog is shorter."""
        self._connect_at, self._connect_pause_s = 0.0, CONNECT_PAUSE_S[0]
        self._replay: Client | None = None
        self._is_interrupted = False
        """Whether the replay goes on when the backlog is shorter."""
        self._has_progress = self._is_torn = False
        """Whether the replay has contained new batches, and whether it lacks some after those."""
        self._replay_deadline = self._replay_allowed_at = 0.0
        self._replay_pause_s = REPLAY_PAUSE_S[0]

    def close(self) -> None:
        self._end_replay()
        if self._live is not None:
            self._live.close()
            self._live = None

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog) or self._events is not None

    @property
    def has_messages(self) -> bool:
        """Whether messages of the live stream can be added to the backlog now."""
        return bool(self._received) and self._can_read_live()

    def get_clients(self) -> list[Client]:
        """Returns the clients from which messages can be received now."""
        clients = [self._replay, self._live if self._can_read_live() else None]
        return [client for client in clients if client is not None]

    def _can_read_live(self) -> bool:
        is_replaying = self._replay is not None or self._is_interrupted
        return not is_replaying and self._backlog_bytes < LIVE_BACKLOG_BYTES

    def receive(self) -> None:
        """Receives messages that have arrived, without waiting."""
        if self._live is None and time.monotonic() >= self._connect_at:
            self._connect()
        if self._is_interrupted and self._backlog_bytes < BACKLOG_BYTES // 2:
            self._is_interrupted = False
            if not self._request_replay(self._next or 0):
                self._release_held()
        if self._replay is not None:
            self._receive_replay()
        if self._live is not None and not self._received and self._can_read_live():
            self._receive_live(self._live)
        for _ in range(_MESSAGES_AT_ONCE):
            if not self.has_messages:
                break
            self._add_live(self._received.popleft())

    def _connect(self) -> None:
        try:
            self._live = Client(self.publisher.host, self.publisher.port, "SUB")
        except OSError as error:
            self._end_stream(error)

    def _receive_live(self, client: Client) -> None:
        try:
            self._received += client.receive()
        except OSError as error:
            self._end_stream(error)
            return
        if client.is_ready and not self.is_connected:
            self._start_stream()

    def _start_stream(self) -> None:
        self.is_connected = True
        self._log.log(self.publisher, "is connected")
        self._request_replay(0)

    def _end_stream(self, error: OSError) -> None:
        state = "is disconnected" if self.is_connected else "cannot be reached"
        self._log.log(self.publisher, state, f": {format_error(error)}")
        if self.is_connected:
            self._connect_pause_s = CONNECT_PAUSE_S[0]
        self._connect_at = time.monotonic() + self._connect_pause_s
        self._connect_pause_s = min(2 * self._connect_pause_s, CONNECT_PAUSE_S[1])
        self.is_connected = False
        self.close()
        self._release_held()
        while self._received:
            self._add_live(self._received.popleft(), may_replay=False)
        self._last_next = self._last_next if self._next is None else self._next
        self._next, self._replay_end = None, 0

    def _add_live(self, frames: list[bytes], *, may_replay: bool = True) -> None:
        if len(frames) != 3 or not _is_sequence(frames[1]):
            self._reject("sends messages that are no batches")
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        if self._next is not None and sequence < self._next:
            if sequence < self._replay_end:
                return
            if sequence > 0:
                self._reject("repeats or reorders batches")
                return
            self._next = 0  # restarted behind a proxy, which keeps the connection
        self._replay_end = 0
        self._held = sequence, payload
        is_gap = self._next is not None and sequence > self._next
        if not (may_replay and is_gap and self._request_replay(self._next or 0)):
            self._release_held()

    def _release_held(self) -> None:
        """Adds the live batch that waited, whether or not those before it have arrived."""
        if self._held is None:
            return
        (sequence, payload), self._held = self._held, None
        if self._next is None or sequence >= self._next:
            self._add_batch(sequence, payload)

    def _add_batch(self, sequence: int, payload: bytes) -> None:
        first = self._last_next if self._next is None else self._next
        if first is not None:
            self.num_gaps += min(max(0, sequence - first), _MAX_COUNTED_GAP)
        self._next, self._last_next = sequence + 1, None
        self._backlog.append(payload)
        self._backlog_bytes += len(payload) + _MESSAGE_OVERHEAD

    def _request_replay(self, first: int) -> bool:
        """Requests the batches from this number on. Returns whether a request was sent."""
        if self.publisher.replay_port is None or time.monotonic() < self._replay_allowed_at:
            return False
        self._end_replay()
        try:
            self._replay = Client(self.publisher.host, self.publisher.replay_port, "DEALER")
        except OSError:
            return False
        self._replay.send(b"", first.to_bytes(_SEQUENCE_BYTES, "big"))
        self._has_progress = self._is_torn = False
        self._replay_deadline = time.monotonic() + REPLAY_TIMEOUT_S
        return True

    def _receive_replay(self) -> None:
        for _ in range(_REPLAY_READS):
            if self._replay is None:
                return
            if self._backlog_bytes >= BACKLOG_BYTES:
                self._end_replay()
                self._is_interrupted = True
                return
            try:
                messages = self._replay.receive()
            except OSError:
                self._replay_deadline = 0.0
                messages = []
            for frames in messages:
                if self._replay is not None:
                    self._add_replayed(frames)
            if not messages:
                break
        if self._replay is None or time.monotonic() < self._replay_deadline:
            return
        if self._has_progress:
            self._continue_replay()
        else:
            self._log.log(self.publisher, "does not answer replay requests")
            self._delay_replay(self._replay_pause_s)
            self._replay_pause_s = min(2 * self._replay_pause_s, REPLAY_PAUSE_S[1])
            self._finish_replay()

    def _add_replayed(self, frames: list[bytes]) -> None:
        if len(frames) < 2 or frames[-2] == _END_OF_REPLAY:
            self._replay_pause_s = REPLAY_PAUSE_S[0]
            if self._is_torn:
                self._continue_replay()
            else:
                if self._next is not None and not self._has_progress:
                    self._delay_replay(_ANSWERED_PAUSE_S)
                self._finish_replay()
            return
        if not _is_sequence(frames[-2]):
            self._reject("sends messages that are no batches")
            self._delay_replay(self._replay_pause_s)
            self._finish_replay()
            return
        sequence = int.from_bytes(frames[-2], "big")
        if self._next is not None and sequence < self._next:
            return
        self._replay_deadline = time.monotonic() + REPLAY_TIMEOUT_S
        # vLLM's socket leaves out what a slow reader does not receive at once. The batches at the
        # start of an answer are missing only if the publisher does not have them any more.
        self._is_torn = self._has_progress and sequence != self._next
        if not self._is_torn:
            self._has_progress = True
            self._add_batch(sequence, frames[-1])

    def _continue_replay(self) -> None:
        if not self._request_replay(self._next or 0):
            self._finish_replay()

    def _delay_replay(self, pause_s: float) -> None:
        self._replay_allowed_at = time.monotonic() + pause_s

    def _finish_replay(self) -> None:
        self._end_replay()
        self._replay_end = self._next or 0
        self._release_held()

    def _end_replay(self) -> None:
        self._is_interrupted = False
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _reject(self, state: str, detail: str = "") -> None:
        self.num_rejected += 1
        self._log.log(self.publisher, state, detail)

    def decode(self, deadline: float) -> None:
        """Decodes batches until ``deadline``, a time of ``time.perf_counter()``, or until there are
        none. Processes at least one event."""
        while self.has_backlog:
            try:
                if self._events is None:
                    payload = self._backlog.popleft()
                    self._backlog_bytes -= len(payload) + _MESSAGE_OVERHEAD
                    self._events = split_batch(payload)
                raw = next(self._events, None)
                if raw is None:
                    self._events = None
                else:
                    self.joiner.add_event(decode_event(raw), time.monotonic())
            except EventError as error:
                self._reject("sends malformed events", f": {error}")
            while self.joiner.waiting_size > self.max_waiting:
                self._log.log(self.publisher, "sends more text than this engine takes")
                self.num_dropped += self.joiner.drop_oldest()
            if time.perf_counter() >= deadline:
                return


def _is_sequence(frame: bytes) -> bool:
    return len(frame) == _SEQUENCE_BYTES and int.from_bytes(frame, "big") < _MAX_SEQUENCE
