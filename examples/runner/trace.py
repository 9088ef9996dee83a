"""Times of a step's phases: sums by phase, and spans for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HOST, DEVICE = 0, 1


@dataclass
class _Span:
    name: str
    step: int
    track: int
    start: Any
    """Seconds on the host; an event on a GPU."""
    end: Any


class Trace:
    """Spans on two tracks, one for the host and one for the device.

    On a CPU the host itself does the device's work, so both tracks have the same span. On a GPU the
    host's span is the launch, and device events time the device's; nothing waits for them until the
    results are read.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._on_gpu = device.type == "cuda"
        self._enabled = enabled
        self.clear()

    def clear(self) -> None:
        self._spans: list[_Span] = []
        self._origin = time.perf_counter()
        self._origin_event: Any = self._event() if self._on_gpu and self._enabled else None

    @contextmanager
    def span(self, name: str, step: int, *, device: bool = False) -> Iterator[None]:
        """Times the block; `device`: whether the block launches work on the device."""
        if not self._enabled:
            yield
            return
        first = self._event() if device and self._on_gpu else None
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self._spans.append(_Span(name, step, HOST, start, end))
        if first is not None:
            self._spans.append(_Span(name, step, DEVICE, first, self._event()))
        elif device:
            self._spans.append(_Span(name, step, DEVICE, start, end))

    def seconds(self) -> dict[str, float]:
        """Time by phase: the device's if the phase has device work, otherwise the host's."""
        found: dict[tuple[int, str], float] = defaultdict(float)
        for name, _, track, start, end in self.spans():
            found[track, name] += end - start
        names = dict.fromkeys(name for _, name in found)
        return {name: found.get((DEVICE, name), found.get((HOST, name), 0.0)) for name in names}

    def write(self, path: Path) -> None:
        """Writes the spans as JSON in Chrome's trace format; times in microseconds."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}}
            for track, name in ((HOST, "host"), (DEVICE, "device"))
        ]
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": track,
                "name": name,
                "ts": round(start * 1e6, 1),
                "dur": round((end - start) * 1e6, 1),
                "args": {"step": step},
            }
            for name, step, track, start, end in self.spans()
        ]
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")

    def spans(self) -> Iterator[tuple[str, int, int, float, float]]:
        """Name, step, track (HOST or DEVICE), start and end in seconds since the trace began."""
        if self._on_gpu:
            torch.cuda.synchronize()
        for span in self._spans:
            if self._on_gpu and span.track == DEVICE:
                times = [self._origin_event.elapsed_time(e) / 1e3 for e in (span.start, span.end)]
            else:
                times = [span.start - self._origin, span.end - self._origin]
            yield span.name, span.step, span.track, times[0], times[1]

    @staticmethod
    def _event() -> Any:
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        return event
