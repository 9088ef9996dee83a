"""Tests how the option ``store_feed`` is read, and how names of publishers are resolved."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from feed_publisher import wait_until
from ngram_npu.engines.vllm.feed import addresses
from ngram_npu.engines.vllm.feed.addresses import (
    MAX_PUBLISHERS,
    AddressBook,
    Publisher,
    StateLog,
    find_own_hosts,
    is_own,
    parse_publishers,
    resolve,
)

FIB_TRIE = """Local:
  +-- 0.0.0.0/0 3 0 5
     +-- 10.0.0.0/24 2 0 2
        |-- 10.0.0.0
           /24 link UNICAST
        |-- 10.0.0.5
           /32 host LOCAL
        |-- 10.0.0.255
           /32 link BROADCAST
     |-- 127.0.0.1
        /32 host LOCAL
"""


@pytest.mark.parametrize(
    ("entry", "publisher"),
    [
        ("tcp://10.0.0.7:5557", Publisher("10.0.0.7", 5557)),
        (" tcp://vllm-0.vllm:5557?replay=5558 ", Publisher("vllm-0.vllm", 5557, 5558)),
        ("tcp://[fd00::7]:5557?replay=5558", Publisher("fd00::7", 5557, 5558)),
    ],
)
def test_publisher_is_parsed(entry: str, publisher: Publisher) -> None:
    assert parse_publishers([entry]) == (publisher,)
    assert parse_publishers(f"{entry},{entry}, tcp://b:1") == (publisher, Publisher("b", 1))


def test_endpoint_of_ipv6_address_has_brackets() -> None:
    assert Publisher("fd00::7", 5557).make_endpoint(5558) == "tcp://[fd00::7]:5558"
    assert str(Publisher("10.0.0.7", 5557, 5558)) == "tcp://10.0.0.7:5557"


@pytest.mark.parametrize(
    "value",
    [
        "",
        [],
        {},
        7,
        [7],
        [None],
        ["tcp://host"],
        ["host:5557"],
        ["http://host:5557"],
        ["tcp://*:5557"],
        ["tcp://:5557"],
        ["tcp://host:0"],
        ["tcp://host:70000"],
        ["tcp://host:port"],
        ["tcp://host:5557/path"],
        ["tcp://host:5557#5558"],
        ["tcp://user@host:5557"],
        ["tcp://host:5557?replay"],
        ["tcp://host:5557?replay=x"],
        ["tcp://host:5557?replay=0"],
        ["tcp://host:5557?replay=65536"],
        ["tcp://host:5557?replay=1&replay=2"],
        ["tcp://host:5557?other=1"],
        ["tcp://[fd00:5557"],
        ["tcp://host:5557"] * (MAX_PUBLISHERS + 1),
    ],
)
def test_malformed_option_raises(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^ngram_npu: store_feed: expected .*, got ") as error:
        parse_publishers(value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_ip_address_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses.socket, "getaddrinfo", None)
    assert resolve(Publisher("10.0.0.7", 1, 2)) == [Publisher("10.0.0.7", 1, 2)]
    assert resolve(Publisher("fd00::7", 1)) == [Publisher("fd00::7", 1)]


def test_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", (host, 1)) for host in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *args, **kwargs: found)
    publishers = [Publisher("10.0.0.1", 1, 2), Publisher("10.0.0.2", 1, 2)]
    assert resolve(Publisher("vllm", 1, 2)) == publishers


@pytest.mark.parametrize(
    ("publisher", "own_endpoint", "result"),
    [
        (Publisher("127.0.0.1", 5557), "tcp://*:5557", True),
        (Publisher("127.0.0.1", 5557), "tcp://127.0.0.1:5557", True),
        (Publisher("127.0.0.1", 5557), "tcp://*:5558", False),
        (Publisher("127.0.0.1", 5557), "ipc:///tmp/events", False),
        (Publisher("127.0.0.1", 5557), "", False),
        (Publisher("127.0.0.1", 5557), None, False),
        (Publisher("127.0.0.2", 5557), "tcp://*:5557", True),
        (Publisher("10.0.0.5", 5557), "tcp://*:5557", True),
        (Publisher("fd00::5", 5557), "tcp://*:5557", True),
        (Publisher("10.0.0.6", 5557), "tcp://*:5557", False),
        (Publisher("fd00::6", 5557), "tcp://*:5557", False),
    ],
)
def test_own_publisher_has_own_port_and_local_address(
    publisher: Publisher, own_endpoint: str | None, result: bool
) -> None:
    assert is_own(publisher, own_endpoint, {"10.0.0.5", "fd00::5"}) is result


def test_own_hosts_are_addresses_of_interfaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(addresses, "_NETWORK_TABLES", tmp_path)
    assert find_own_hosts() == set()
    (tmp_path / "fib_trie").write_text(FIB_TRIE)
    line = "fd000000000000000000000000000005 02 40 00 80     eth0\n"
    (tmp_path / "if_inet6").write_text(line)
    assert find_own_hosts() == {"10.0.0.5", "127.0.0.1", "fd00::5"}


class Names:
    """Answers for names. A test changes the answers."""

    def __init__(self, **hosts: list[str]) -> None:
        self.hosts = hosts
        self.num_calls = 0

    def __call__(self, publisher: Publisher) -> list[Publisher]:
        self.num_calls += 1
        if publisher.host not in self.hosts:
            raise OSError("unknown name")
        return [Publisher(host, publisher.port) for host in self.hosts[publisher.host]]

    def wait_for_another_answer(self) -> None:
        num_calls = self.num_calls
        wait_until(lambda: self.num_calls > num_calls + 2)


@pytest.fixture
def fake_names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Names]:
    """Creates the answers for names."""

    def create(**hosts: list[str]) -> Names:
        names = Names(**hosts)
        monkeypatch.setattr(addresses, "resolve", names)
        return names

    return create


@pytest.fixture
def _resolve_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "RESOLVE_INTERVAL_S", 0.01)


@pytest.mark.usefixtures("_resolve_often")
def test_addresses_follow_names_and_survive_failures(
    fake_names: Callable[..., Names], caplog: pytest.LogCaptureFixture
) -> None:
    names = fake_names(vllm=["10.0.0.1"])
    publishers = [Publisher("vllm", 5557), Publisher("missing", 5557)]
    book = AddressBook(publishers, None, StateLog())
    wait_until(lambda: book.addresses == (Publisher("10.0.0.1", 5557),))
    names.hosts["vllm"] = ["10.0.0.1", "10.0.0.2"]
    wait_until(lambda: len(book.addresses) == 2)
    del names.hosts["vllm"]
    names.wait_for_another_answer()
    assert len(book.addresses) == 2
    names.hosts["vllm"] = ["10.0.0.3"]
    wait_until(lambda: book.addresses == (Publisher("10.0.0.3", 5557),))
    book.close()
    failures = [text for text in caplog.messages if "cannot be resolved" in text]
    assert sorted(re.findall(r"tcp://\S+", " ".join(failures))) == [
        "tcp://missing:5557",
        "tcp://vllm:5557",
    ]


def test_own_publisher_is_left_out(
    fake_names: Callable[..., Names], caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [Publisher("127.0.0.1", 5557), Publisher("127.0.0.1", 5558), Publisher("vllm", 5557)]
    fake_names(**{"127.0.0.1": ["127.0.0.1"], "vllm": ["127.0.0.1", "10.0.0.2"]})
    book = AddressBook(hosts, "tcp://*:5557", StateLog())
    wait_until(lambda: len(book.addresses) > 0)
    book.close()
    assert book.addresses == (Publisher("127.0.0.1", 5558), Publisher("10.0.0.2", 5557))
    assert sum("own publisher" in text for text in caplog.messages) == 1


def test_name_with_many_addresses_displaces_no_other_publisher(
    fake_names: Callable[..., Names], caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [f"10.0.{i}.{j}" for i in range(4) for j in range(250)]
    fake_names(many=hosts, few=["10.1.0.1", "10.1.0.2"], last=["10.2.0.1"])
    book = AddressBook(
        [Publisher(name, 5557) for name in ("many", "few", "last")], None, StateLog()
    )
    wait_until(lambda: len(book.addresses) > 0)
    book.close()
    assert [address.host for address in book.addresses] == [
        *("10.0.0.0", "10.1.0.1", "10.2.0.1", "10.0.0.1", "10.1.0.2"),
        *hosts[2 : MAX_PUBLISHERS - 3],
    ]
    assert any("more than 64 addresses" in text for text in caplog.messages)


def test_state_is_logged_once_and_lines_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(addresses, "MAX_LOG_LINES", 3)
    log = StateLog()
    for i in range(10):
        log.log(Publisher("a", i // 2), "is connected", f"\n{i}" * 1000)
    assert len(caplog.messages) == 3
    assert all(len(text) < 300 and "\n" not in text for text in caplog.messages)
