"""Times the phases of each step: sums per phase, and spans for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

HOST, DEVICE = 0, 1


class Trace:
    """Spans on two tracks, one for the host and one for the device.

    On a CPU the host does the device's work, so both tracks have the same span. On a GPU the host's
    span is the launch, and events time the device's span. The host waits for the events only when
    the results are read.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._on_gpu = device.type == "cuda"
        self._enabled = enabled
        # Name, step, track, start and end: in seconds on the host, as events on a GPU.
        self._spans: list[tuple[str, int, int, Any, Any]] = []
        self._origin = time.perf_counter()
        self._origin_event: Any = _record_event() if self._on_gpu and enabled else None

    @contextmanager
    def span(self, name: str, step: int, *, device: bool = False) -> Iterator[None]:
        """Times the block; `device` states whether the block launches work on the device."""
        if not self._enabled:
            yield
            return
        first = _record_event() if device and self._on_gpu else None
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self._spans.append((name, step, HOST, start, end))
        if first is not None:
            self._spans.append((name, step, DEVICE, first, _record_event()))
        elif device:
            self._spans.append((name, step, DEVICE, start, end))

    def seconds(self) -> dict[str, float]:
        """Returns the time per phase: the device's if it has device work, else the host's."""
        totals: dict[tuple[int, str], float] = defaultdict(float)
        for name, _, track, start, end in self.spans():
            totals[track, name] += end - start
        names = dict.fromkeys(name for _, name in totals)
        return {name: totals.get((DEVICE, name), totals.get((HOST, name), 0.0)) for name in names}

    def write(self, path: Path) -> None:
        """Writes the spans as JSON in Chrome's trace format, with times in microseconds."""
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
        """Yields name, step, track (HOST or DEVICE), and start and end in seconds."""
        if self._on_gpu:
            torch.cuda.synchronize()
        for name, step, track, start, end in self._spans:
            if self._on_gpu and track == DEVICE:
                origin = self._origin_event
                times = origin.elapsed_time(start) / 1e3, origin.elapsed_time(end) / 1e3
            else:
                times = start - self._origin, end - self._origin
            yield name, step, track, *times


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
