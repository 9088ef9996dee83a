"""Receives messages from a socket of ZeroMQ, with limits that libzmq does not have.

libzmq keeps a message in memory until its last part has arrived, however many parts there are, and
does not connect again after a message that is too large. This client of ZMTP 3.0
(https://rfc.zeromq.org/spec/23) needs only what publishers of KV events use: no authentication,
subscription to all topics, and replay requests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from typing import Literal

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum size of a message. The batch of a step with 65,536 tokens has 0.3 MB."""
MAX_PARTS = 8
HANDSHAKE_TIMEOUT_S = 10.0
RECEIVED_BYTES = 1 << 14
"""Maximum number of bytes that are received at once."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds after which a silent connection is checked, and between checks; number of checks."""

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
"""Bits of a frame's first byte: more parts follow, the size has 8 bytes, no part of a message."""


class Client:
    """A connection to one server. Never blocks.

    All methods except :meth:`close` raise OSError if the connection has ended or the server
    violates the protocol or a limit. The client then cannot be used any more.
    """

    def __init__(self, host: str, port: int, kind: Literal["SUB", "DEALER"]) -> None:
        """Begins to connect to an IP address. A ``SUB`` receives all topics."""
        self.is_ready = False
        """Whether the server has answered."""
        self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self._has_greeting = False
        self._input = bytearray()
        self._output = bytearray(_GREETING + _make_ready(kind.encode()))
        self._unsent = bytearray()
        """Messages, which must not be sent before the server has answered."""
        self._parts: list[bytes] = []
        if kind == "SUB":
            self.send(b"\1")
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        code = self._socket.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            self._socket.close()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_output(self) -> bool:
        """Whether data wait until the connection is established or can take more."""
        return bool(self._output)

    def send(self, *parts: bytes) -> None:
        """Sends a message, at the latest with the first :meth:`receive` after the handshake."""
        output = self._output if self.is_ready else self._unsent
        for i, part in enumerate(parts):
            output += bytes((_MORE if i + 1 < len(parts) else 0, len(part))) + part

    def receive(self) -> list[list[bytes]]:
        """Returns messages that have arrived, of at most :data:`RECEIVED_BYTES`, as their parts."""
        if not self.is_ready and time.monotonic() > self._deadline:
            raise TimeoutError("no answer")
        self._flush()
        try:
            data = self._socket.recv(RECEIVED_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("closed by the server")
        self._input += data
        if not self._has_greeting and not self._read_greeting():
            return []
        messages = self._read_frames()
        self._flush()
        return messages

    def _flush(self) -> None:
        if self._output:
            with contextlib.suppress(BlockingIOError):
                del self._output[: self._socket.send(self._output)]

    def _read_greeting(self) -> bool:
        data = self._input
        if data[0] != 0xFF or (len(data) > 10 and (not data[9] & 1 or data[10] < 3)):
            raise ConnectionError("the server does not speak ZMTP 3")
        if len(data) < len(_GREETING):
            return False
        if bytes(data[12:32]).rstrip(b"\0") != b"NULL":
            raise ConnectionError("the server requires authentication")
        del data[: len(_GREETING)]
        self._has_greeting = True
        return True

    def _read_frames(self) -> list[list[bytes]]:
        data, start = self._input, 0
        messages: list[list[bytes]] = []
        while len(data) - start >= 2:
            flags, header_bytes, size = data[start], 2, data[start + 1]
            if flags & _LONG:
                if len(data) - start < 9:
                    break
                header_bytes, size = 9, int.from_bytes(data[start + 1 : start + 9], "big")
            message_bytes = size + sum(map(len, self._parts))
            if message_bytes > MAX_MESSAGE_BYTES or len(self._parts) >= MAX_PARTS:
                raise ConnectionError("a message is too large")
            end = start + header_bytes + size
            if len(data) < end:
                break
            body = bytes(data[start + header_bytes : end])
            start = end
            if flags & _COMMAND:
                self._read_command(body)
                continue
            if not self.is_ready:
                raise ConnectionError("a message precedes the handshake")
            self._parts.append(body)
            if not flags & _MORE:
                messages.append(self._parts)
                self._parts = []
        del data[:start]
        return messages

    def _read_command(self, body: bytes) -> None:
        end = 1 + body[0] if body else 0
        name, content = body[1:end], body[end:]
        if name == b"READY":
            self.is_ready = True
            self._output += self._unsent
            self._unsent.clear()
        elif name == b"ERROR":
            raise ConnectionError("the server refuses the connection")
        elif name == b"PING" and len(self._output) < RECEIVED_BYTES:
            # A PING has a time of two bytes, and up to 16 bytes that are returned.
            answer = b"\4PONG" + content[2:18]
            self._output += bytes((_COMMAND, len(answer))) + answer


def _make_ready(kind: bytes) -> bytes:
    """Returns the command that ends the handshake, with its frame."""
    body = b"\5READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return bytes((_COMMAND, len(body))) + body
