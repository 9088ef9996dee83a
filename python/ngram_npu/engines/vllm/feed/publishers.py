"""The publishers in the option ``store_feed``, and the addresses behind their names."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

MAX_PUBLISHERS = 64
_PATTERN = re.compile(r"tcp://(?:\[([\da-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})")


class Publisher(NamedTuple):
    """A publisher of KV events. A ``host`` that is a name stands for all of its addresses."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


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
    return tuple(map(_parse_publisher, entries))


def _parse_publisher(entry: object) -> Publisher:
    match = _PATTERN.fullmatch(entry.strip()) if isinstance(entry, str) else None
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ValueError(f"ngram_npu: store_feed: expected tcp://HOST:PORT, got {entry!r:.200}")
    return Publisher(match[1] or match[2], int(match[3]))


def resolve(publisher: Publisher, own_port: int | None) -> set[Publisher]:
    """Returns the publisher once for each IP address of its host, except those of this engine,
    which publishes at ``own_port`` (None: nowhere).

    Raises:
        OSError: The name has no address.
        UnicodeError: The name is not valid.
    """
    found = socket.getaddrinfo(*publisher, type=socket.SOCK_DGRAM)
    return {
        Publisher(str(address[0]), publisher.port)
        for family, *_, address in found
        if publisher.port != own_port or not _is_local(family, str(address[0]))
    }


def _is_local(family: int, host: str) -> bool:
    """Returns whether an address belongs to this machine: only then, it is also the source of what
    is sent to it. Nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # there is no route
            return False
        return bool(probe.getsockname()[0] == host)
