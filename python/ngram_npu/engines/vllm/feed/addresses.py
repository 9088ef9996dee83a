"""Addresses of publishers: reads the option ``store_feed`` and resolves its names again and again,
because the replicas behind a name, such as a headless service of Kubernetes, come and go."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ngram_npu.engines.vllm.patching import format_error, logger

MAX_PUBLISHERS = 64
"""Maximum number of addresses. They are taken from the names in turn, so that false addresses of
one name cannot displace those of the others."""
MAX_LOG_LINES = 1000
RESOLVE_INTERVAL_S = 60.0
_NETWORK_TABLES = Path("/proc/net")
FORMAT = "tcp://HOST:PORT or tcp://HOST:PORT?replay=PORT"


@dataclass(frozen=True, order=True, slots=True)
class Publisher:
    """A publisher of KV events. In the option, a ``host`` that is a name stands for all of its
    addresses. After :func:`resolve`, ``host`` is an IP address."""

    host: str
    port: int
    replay_port: int | None = None
    """Port at which lost batches are requested; None: lost batches remain lost."""

    def __str__(self) -> str:
        return self.make_endpoint(self.port)

    def make_endpoint(self, port: int) -> str:
        return f"tcp://[{self.host}]:{port}" if ":" in self.host else f"tcp://{self.host}:{port}"


def parse_publishers(value: str | Sequence[str]) -> tuple[Publisher, ...]:
    """Reads the value of ``store_feed``: a list, or a text with commas, as in the environment.

    Raises:
        ValueError: An entry has another format, or there are no or too many entries. The message
            is one line.
    """
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not 1 <= len(entries) <= MAX_PUBLISHERS:
        raise ValueError(
            f"ngram_npu: store_feed: expected a list of 1 to {MAX_PUBLISHERS} publishers, "
            f"got {value!r:.200}"
        )
    return tuple(dict.fromkeys(_parse_publisher(entry) for entry in entries))


def _parse_publisher(entry: object) -> Publisher:
    try:
        if not isinstance(entry, str):
            raise ValueError(f"not a string but {type(entry).__name__}")
        parts = urlsplit(entry.strip())
        parameters = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        if parts.scheme != "tcp" or parts.path or parts.fragment or parts.username is not None:
            raise ValueError("not an address of this format")
        if not parts.hostname or "*" in parts.hostname or not parts.port:
            raise ValueError("host or port is missing")
        replay_ports = [int(port) for port in parameters.pop("replay", [])]
        if parameters or len(replay_ports) > 1 or not all(0 < p < 65536 for p in replay_ports):
            raise ValueError("expected no parameter or replay=1 to 65535")
    except ValueError as error:
        raise ValueError(
            f"ngram_npu: store_feed: expected {FORMAT}, got {entry!r:.200}: {error}"
        ) from None
    return Publisher(parts.hostname, parts.port, *replay_ports)


def resolve(publisher: Publisher) -> list[Publisher]:
    """Returns the publisher once for each IP address of its host. Asks no server if the host is an
    IP address.

    Raises:
        OSError: The name has no address.
    """
    try:
        hosts: Iterable[str] = [str(ipaddress.ip_address(publisher.host))]
    except ValueError:
        found = socket.getaddrinfo(publisher.host, publisher.port, type=socket.SOCK_STREAM)
        hosts = sorted({str(address[0]) for *_, address in found})
    return [Publisher(host, publisher.port, publisher.replay_port) for host in hosts]


def find_own_hosts() -> set[str]:
    """Returns the addresses of this machine's network interfaces. Binding a socket would prove
    nothing: with ``ip_nonlocal_bind``, which some hosts set, any address can be bound."""
    hosts: set[str] = set()
    with contextlib.suppress(OSError):
        table = (_NETWORK_TABLES / "fib_trie").read_text()
        hosts.update(re.findall(r"\|-- (\S+)\n +/32 host LOCAL", table))
    with contextlib.suppress(OSError):  # without IPv6, there is no file
        lines = (_NETWORK_TABLES / "if_inet6").read_text().splitlines()
        hosts.update(str(ipaddress.IPv6Address(int(line.split()[0], 16))) for line in lines)
    return hosts


def is_own(publisher: Publisher, own_endpoint: str | None, own_hosts: Collection[str]) -> bool:
    """Returns whether this engine publishes at this address.

    Args:
        own_endpoint: Where this engine binds, such as ``tcp://*:5557``; None: it publishes nothing.
        own_hosts: The result of :func:`find_own_hosts`.
    """
    if not own_endpoint or own_endpoint.rpartition(":")[2] != str(publisher.port):
        return False
    return ipaddress.ip_address(publisher.host).is_loopback or publisher.host in own_hosts


class StateLog:
    """Logs each state of each publisher once, in one line. A publisher cannot fill the log."""

    def __init__(self) -> None:
        self._logged: set[tuple[object, str]] = set()

    def log(self, subject: object, state: str, detail: str = "") -> None:
        """Logs ``subject`` and ``state``, unless this pair was logged before, with any detail."""
        if (subject, state) not in self._logged and len(self._logged) < MAX_LOG_LINES:
            self._logged.add((subject, state))
            logger.info("ngram_npu feed: %s %s%s", subject, state, " ".join(detail.split())[:200])


class AddressBook:
    """The addresses of all publishers, except this engine's own.

    Names are resolved in a thread, since an answer can take minutes. If a name cannot be resolved,
    its last addresses remain.
    """

    def __init__(
        self,
        publishers: Sequence[Publisher],
        own_endpoint: str | None,
        log: StateLog,
    ) -> None:
        self.addresses: tuple[Publisher, ...] = ()
        """Replaced by another tuple if it changes. Any thread may read it."""
        self._publishers, self._own_endpoint = publishers, own_endpoint
        self._resolved: dict[Publisher, list[Publisher]] = {}
        self._log = log
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ngram_npu feed names", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, without waiting for an answer that is due."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._resolve_all()
            except Exception as error:
                state = "failed to update its addresses and keeps the last ones"
                self._log.log("store_feed", state, f": {format_error(error)}")
            self._closed.wait(RESOLVE_INTERVAL_S)

    def _resolve_all(self) -> None:
        for publisher in self._publishers:
            try:
                self._resolved[publisher] = resolve(publisher)
            except (OSError, UnicodeError) as error:  # a name with an invalid label
                self._log.log(publisher, "cannot be resolved", f": {format_error(error)}")
        turns = chain.from_iterable(zip_longest(*self._resolved.values()))
        found = {(address.host, address.port): address for address in turns if address is not None}
        own_hosts, addresses = find_own_hosts(), []
        for address in found.values():
            if is_own(address, self._own_endpoint, own_hosts):
                self._log.log(address, "is this engine's own publisher and is left out")
            else:
                addresses.append(address)
        if len(addresses) > MAX_PUBLISHERS:
            state = f"has more than {MAX_PUBLISHERS} addresses; the rest is left out"
            self._log.log("store_feed", state)
        self.addresses = tuple(addresses[:MAX_PUBLISHERS])
