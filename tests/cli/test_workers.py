"""Tests that several processes compute the same results as one, and that none of them remains."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat

import pytest
from ngram_npu_cli.workers import map_in_order

BIG_ITEM = bytes(1 << 20)
"""An item that fills the pipe to the worker processes."""


def kill_itself(item: bytes) -> int:
    """Returns the length of an item; an empty item kills the process."""
    if not item:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(item)


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_results_have_the_order_of_the_items(jobs: int) -> None:
    # The first items take much longer than the others.
    items = [range(10**6 if i < 2 else i) for i in range(40)]
    assert list(map_in_order(sum, items, jobs)) == [sum(item) for item in items]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("items", [[], [range(3)]])
def test_single_item_starts_no_process(items: list[range], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngram_npu_cli.workers._start_workers", None)
    assert list(map_in_order(sum, items, 2)) == [sum(item) for item in items]


def test_items_are_read_only_slightly_ahead() -> None:
    num_read = 0

    def read_items() -> Iterator[range]:
        nonlocal num_read
        for _ in range(100):
            num_read += 1
            yield range(3)

    results = map_in_order(sum, read_items(), 2)
    next(results)
    assert num_read <= 6
    results.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_error_of_an_item_follows_the_results_before_it(jobs: int) -> None:
    results = map_in_order(int, ["1", "2", "x", *repeat("3", 20)], jobs)
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(ValueError, match="invalid literal"):
        next(results)
    assert multiprocessing.active_children() == []


def test_killed_process_is_an_error() -> None:
    items = [BIG_ITEM] * 5 + [b""] + [BIG_ITEM] * 20
    with pytest.raises(ChildProcessError, match="a worker process ended unexpectedly"):
        list(map_in_order(kill_itself, items, 2))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("sent_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(sent_signal: signal.Signals, no_torch: str) -> None:
    code = """
import contextlib, itertools, multiprocessing, signal, time
from ngram_npu_cli.workers import map_in_order
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored in background jobs
items = itertools.chain([0, 0, 0], itertools.repeat(60))
with contextlib.closing(map_in_order(time.sleep, items, 2)) as results:
    next(results)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    next(results), next(results), next(results)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.send_signal(sent_signal)
        assert parent.wait(30) != 0
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
