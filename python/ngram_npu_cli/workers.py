"""Applies a function to many items in several processes, with results in the order of the items."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_READ_AHEAD = 2
"""Number of items per process that are read before their results are needed."""
_MANAGER_TIMEOUT_S = 5.0
"""How long the pool may take to notice that its workers have ended."""


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int
) -> Generator[Result, None, None]:
    """Yields the result of each item. Close the generator to end the processes early.

    With one job, or with one item, the function is called in this process. Otherwise it is pickled
    once for each process. A script that uses processes must have ``if __name__ == "__main__"``.

    Raises:
        ChildProcessError: A process was killed.
    """
    iterator = iter(items)
    first = [] if jobs == 1 else list(islice(iterator, 2))
    if len(first) < 2:
        yield from map(function, chain(first, iterator))
        return
    pending: deque[Future[Result]] = deque()
    with _start_workers(function, jobs) as pool:
        for item in chain(first, iterator):
            pending.append(pool.submit(_call_function, item))
            if len(pending) > _READ_AHEAD * jobs:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextmanager
def _start_workers(function: Callable[[Any], Any], jobs: int) -> Iterator[ProcessPoolExecutor]:
    # A fork of this process, whose threads may hold locks, could deadlock. The fork server only
    # imports modules, once for all processes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ngram_npu_cli.logs.reader"])
    # Workers exit when the sender is closed. The system closes it if this process is killed.
    receiver, sender = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_initialize_worker, initargs=(function, receiver)
    )
    try:
        yield pool
        pool.shutdown()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker process ended unexpectedly; was it killed because the memory was full? "
            "Use fewer jobs"
        ) from error
    finally:
        sender.close()
        if sys.version_info < (3, 12):
            _stop_sending(pool)
        pool.shutdown(cancel_futures=True)
        receiver.close()


def _stop_sending(pool: Any) -> None:
    """Ends the thread that sends items to worker processes. In older versions of Python, it waits
    forever after they have ended (https://github.com/python/cpython/issues/94777)."""
    manager = pool._executor_manager_thread
    if manager is None:  # shut down
        return
    # Newer versions close the reader in this thread. Closing it here at the same time would end the
    # thread by an error, before it has waited for the workers.
    manager.join(_MANAGER_TIMEOUT_S)
    if manager.is_alive():
        pool._call_queue._reader.close()


_function: Callable[[Any], Any]
"""The function that a worker process calls."""


def _initialize_worker(function: Callable[[Any], Any], receiver: Connection) -> None:
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_exit_at_end_of_file, args=(receiver,), daemon=True).start()
    _function = function


def _exit_at_end_of_file(receiver: Connection) -> None:
    receiver.poll(None)
    os._exit(1)


def _call_function(item: Any) -> Any:
    return _function(item)
