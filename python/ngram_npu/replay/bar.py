"""A progress bar for terminals, tqdm's; the command draws it, the library calls back."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from ngram_npu.replay.errors import printable

if TYPE_CHECKING:
    from ngram_npu.replay._run import Progress

__all__ = ["Bar"]


class Bar:
    """A bar for each phase of each input; ``wanted`` None: on a terminal. None without tqdm."""

    def __init__(self, stream: TextIO, wanted: bool | None = None) -> None:
        self._stream, self._of = stream, ("", "")
        self._bar: Any = None
        self.wanted = False
        if stream.isatty() if wanted is None else wanted:
            with suppress(ImportError):
                from tqdm import tqdm

                tqdm.monitor_interval = 0  # no thread: `tune` forks
                self._tqdm, self.wanted = tqdm, True

    def show(self, progress: Progress) -> None:
        """Draw, at most ten times a second."""
        if self._of != (progress.phase, progress.name):
            self.clear()
            self._of = progress.phase, progress.name
            self._bar = self._tqdm(
                desc=f"{progress.phase} {printable(progress.name)}",
                total=progress.total,
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
