"""Saves an engine's store, and counts its tokens, while the engine runs.

A call of the device's runtime by another thread would invalidate a CUDA graph that vLLM captures.
So the thread of the steps launches the copies of the store, and the thread that writes the file
only reads the host's memory.
"""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.util import Finalize

from ngram_npu.engines.vllm.metrics import StoreMetrics
from ngram_npu.engines.vllm.patching import format_error, logger
from ngram_npu.store import NgramStore

BUSY_SAVE_S = 60.0
"""Longest time between two saves while text is added."""
IDLE_SAVE_S = 10.0
"""Minimum time between two saves."""
PAUSE_PER_SAVE = 20
"""Minimum time between two saves, in durations of the last one: saves take at most 5 %."""
POLL_S = 0.01


class StoreSaver:
    """Saves a store when no request runs, at an interval while requests run, and when ``owner``
    ends. vLLM may kill a worker at any time.

    Args:
        path: The file; empty: only the tokens are counted.
    """

    def __init__(
        self, owner: object, contents: NgramStore, path: str, metrics: StoreMetrics
    ) -> None:
        self._contents, self._path, self._metrics = contents, path, metrics
        self._copied_revision: object = contents.revision
        self._saved_revision: object = contents.revision
        self._next_copy = time.monotonic() + BUSY_SAVE_S
        self._is_copy_started, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        """Held while one of these is used."""
        self._changed_at = self._unsaved_since = 0.0
        """When the oldest text was added that the thread has not taken, and that is not in the
        file; 0: there is no such text."""
        metrics.tokens_held.set(contents.statistics.tokens_held)
        Finalize(owner, self._end, exitpriority=0)

    def copy_if_due(self, *, is_idle: bool = False) -> None:
        """Launches a copy of the store if its text has changed, and it is time. Called by the
        thread of the steps.

        Args:
            is_idle: Whether the engine has no requests, so that it may run no step for long.
        """
        revision = self._contents.revision
        if revision == self._copied_revision:
            return
        now = time.monotonic()
        with self._mutex:
            self._changed_at = self._changed_at or time.time()
            if not self._unsaved_since:
                self._set_unsaved_since(self._changed_at)
        if not is_idle and now < self._next_copy:
            return
        self._contents.start_copy(heads_only=not self._path)
        self._copied_revision, self._next_copy = revision, now + BUSY_SAVE_S
        if self._thread is None:  # begins after the first step with text
            self._thread = threading.Thread(
                target=self._save_copies, name="ngram_npu store", daemon=True
            )
            self._thread.start()
        self._is_copy_started.set()

    def _save_copies(self) -> None:
        while self._is_copy_started.wait() and not self._ended.is_set():
            self._is_copy_started.clear()
            started = time.monotonic()
            self._save_copy()
            pause = PAUSE_PER_SAVE * (time.monotonic() - started)
            self._ended.wait(max(IDLE_SAVE_S, pause))

    def _save_copy(self) -> None:
        """Waits for the copy, and writes it."""
        while (copy := self._contents.take_copy()) is None:
            if self._ended.wait(POLL_S):
                return
        with self._mutex:
            self._changed_at = 0.0
        self._metrics.tokens_held.set(copy.tokens_held)
        if not self._path:
            return
        try:
            # The first steps hold back their text, so there is nothing to write yet.
            has_text = copy.tokens_held > 0 or os.path.exists(self._path)
            if has_text and not self._contents.save_copy(self._path, copy):
                return  # text was cleared, and another copy is launched
        except Exception as error:
            self._log_failure(error)
            self._copied_revision = None  # the next step launches another copy
            return
        self._saved_revision = copy.revision
        with self._mutex:
            self._set_unsaved_since(self._changed_at)

    def _set_unsaved_since(self, seconds: float) -> None:
        self._unsaved_since = seconds
        self._metrics.unsaved_since.set(seconds)

    def _end(self) -> None:
        self._ended.set()
        self._is_copy_started.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
        if not self._path or self._contents.revision == self._saved_revision:
            return
        try:
            if os.path.exists(self._path) or self._contents.statistics.tokens_held:
                self._contents.save(self._path)
        except Exception as error:
            self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        logger.warning("ngram_npu: the store is not saved: %s", format_error(error))
