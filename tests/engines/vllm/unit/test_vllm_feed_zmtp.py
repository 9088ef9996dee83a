"""Tests the limits of the client of ZeroMQ's protocol against servers that violate it.

``test_vllm_feed_reader.py`` and the engine tests use servers of libzmq."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from feed_publisher import TIMEOUT_S
from ngram_npu.engines.vllm.feed import zmtp
from ngram_npu.engines.vllm.feed.zmtp import MAX_MESSAGE_BYTES, MAX_PARTS, Client

GREETING = b"\xff" + bytes(7) + b"\1\x7f\3\1" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\4\x19\5READY\x0bSocket-Type\0\0\0\3PUB"
Serve = Callable[[bytes], Client]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Connects a client to a server that sends these bytes and keeps the connection open."""
    sockets: list[socket.socket] = []
    clients: list[Client] = []

    def connect(data: bytes) -> Client:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            clients.append(Client(*listener.getsockname(), "SUB"))
            sockets.append(listener.accept()[0])
        sockets[-1].settimeout(TIMEOUT_S)
        sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        sockets[-1].setblocking(False)
        sockets[-1].send(data)
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    for server in sockets:
        server.close()


def make_frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body


def receive_until(client: Client, is_complete: Callable[[list[list[bytes]]], bool]) -> None:
    messages: list[list[bytes]] = []
    deadline = time.monotonic() + TIMEOUT_S
    while not is_complete(messages):
        assert time.monotonic() < deadline
        messages += client.receive()
        time.sleep(0.001)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
def test_parts_of_any_size_are_received(serve: Serve, size: int) -> None:
    message = [b"", b"12345678", b"x" * size]
    frames = make_frame(message[0], 1) + make_frame(message[1], 1) + make_frame(message[2])
    receive_until(serve(GREETING + READY + 3 * frames), lambda messages: messages == [message] * 3)


VIOLATIONS = {
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n" + bytes(64), "does not speak ZMTP"),
    "an old version": (b"\xff" + bytes(7) + b"\1\x7f\1" + bytes(64), "does not speak ZMTP"),
    "authentication": (GREETING.replace(b"NULL\0", b"CURVE"), "requires authentication"),
    "a message without a handshake": (GREETING + make_frame(b"x"), "precedes the handshake"),
    "a refusal": (GREETING + make_frame(b"\5ERROR\0", 4), "refuses the connection"),
    "a large part": (
        GREETING + READY + b"\2" + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big"),
        "too large",
    ),
    "a large command": (GREETING + READY + b"\6" + b"\xff" * 8, "too large"),
    "a large message": (
        GREETING + READY + 5 * make_frame(bytes(MAX_MESSAGE_BYTES // 4), 1),
        "too large",
    ),
    "endless parts": (GREETING + READY + (MAX_PARTS + 1) * make_frame(b"", 1), "too large"),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_server_that_violates_protocol_raises(serve: Serve, violation: str) -> None:
    data, message = VIOLATIONS[violation]
    with pytest.raises(ConnectionError, match=message):
        receive_until(serve(data), lambda messages: False)


def test_input_that_is_kept_is_limited(serve: Serve) -> None:
    client = serve(GREETING + READY + b"\2" + MAX_MESSAGE_BYTES.to_bytes(8, "big") + bytes(1 << 19))
    receive_until(client, lambda _: len(client._input) >= 1 << 19)
    assert len(client._input) <= MAX_MESSAGE_BYTES + zmtp.RECEIVED_BYTES


@pytest.mark.parametrize("body", [b"", b"\xff", b"\4PING", b"\4PING\0\0context", b"\7UNKNOWN"])
def test_other_commands_are_accepted(serve: Serve, body: bytes) -> None:
    data = GREETING + READY + make_frame(body, 4) + make_frame(b"message")
    receive_until(serve(data), lambda messages: messages == [[b"message"]])


def test_pings_that_are_not_read_do_not_fill_memory(serve: Serve) -> None:
    pings = 100_000 * make_frame(b"\4PING\0\0" + b"c" * 16, 4)
    client = serve(GREETING + READY + pings)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        client.receive()
        assert len(client._output) < 2 * zmtp.RECEIVED_BYTES


def test_silent_server_raises_after_timeout(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp, "HANDSHAKE_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError, match="no answer"):
        receive_until(serve(GREETING), lambda messages: False)


def test_missing_server_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(OSError, match="refused"):
        receive_until(Client(*address, "SUB"), lambda messages: False)
