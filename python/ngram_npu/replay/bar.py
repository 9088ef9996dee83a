"""A progress bar for terminals; the command draws it, the library calls back."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TextIO

from ngram_npu.replay.errors import printable

if TYPE_CHECKING:
    from ngram_npu.replay._run import Progress

__all__ = ["Bar"]


class Bar:
    """A progress line; ``wanted`` None: shown only on a terminal."""

    WIDTH = 24
    INTERVAL_S = 0.1

    def __init__(self, stream: TextIO, wanted: bool | None = None) -> None:
        self.wanted = stream.isatty() if wanted is None else wanted
        self._stream = stream
        self._next_at = 0.0
        self._length = 0

    def show(self, progress: Progress) -> None:
        """Draw, at most ten times a second."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + self.INTERVAL_S
        share = progress.done / progress.total if progress.total else 1.0
        filled = "#" * round(share * self.WIDTH)
        name = printable(progress.name)
        line = f"{progress.phase:8} [{filled:<{self.WIDTH}}] {share:4.0%} {name}"
        # A wrapped line could not be overwritten.
        line = line[: max(20, _terminal_columns(self._stream) - 1)]
        self._write(line)
        self._length = len(line)

    def clear(self) -> None:
        """Remove the bar, so that later output starts on an empty line."""
        if self._length:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()
            self._length = 0

    def _write(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._length))
        self._stream.flush()


def _terminal_columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
