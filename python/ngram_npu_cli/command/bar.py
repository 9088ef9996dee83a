"""Progress on stderr; the command draws it, the library calls back."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from ngram_npu.errors import printable

if TYPE_CHECKING:
    from ngram_npu_cli.logs.log_files import Progress

SILENCE_S = 10.0


class Bar:
    """A bar of tqdm for each phase of each input; ``wanted`` None: on a terminal.

    Otherwise, or without tqdm, a line after each ten seconds.
    """

    def __init__(self, stream: TextIO, wanted: bool | None = None) -> None:
        self._stream, self._of = stream, ("", "")
        self._bar: Any = None
        self._tqdm: Any = None
        self._said = time.monotonic()
        if stream.isatty() if wanted is None else wanted:
            with suppress(ImportError):
                from tqdm import tqdm

                tqdm.monitor_interval = 0  # no thread: `tune` forks
                self._tqdm = tqdm

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, progress: Progress) -> None:
        """Draw, at most ten times a second, or print a line."""
        name = printable(progress.name)
        if self._tqdm is None:
            if time.monotonic() - self._said >= SILENCE_S:
                self._said = time.monotonic()
                done = f"{progress.done} of {progress.total}" if progress.total else progress.done
                print(f"{progress.phase} {name}: {done}", file=self._stream, flush=True)
            return
        if self._of != (progress.phase, progress.name):
            self.clear()
            self._of = progress.phase, progress.name
            self._bar = self._tqdm(
                desc=f"{progress.phase} {name}",
                total=progress.total or None,
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
                ascii=True,
                unit_scale=True,
            )
        self._bar.update(progress.done - self._bar.n)

    def clear(self) -> None:
        """Remove the bar, so that later output starts on an empty line."""
        if self._bar is not None:
            self._bar.close()
