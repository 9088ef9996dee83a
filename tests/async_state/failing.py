"""Device calls that fail: out of memory, a launch error."""

from __future__ import annotations

from typing import Any

from ngram_npu.async_state import AsyncSpecState


class DeviceError(RuntimeError):
    pass


class Countdown:
    """Lets one device call of a state fail: the `left`-th from now; none while that is 0."""

    def __init__(self, state: AsyncSpecState) -> None:
        self.left = 0
        device: Any = state._device
        for name in ("copy", "scatter", "record", "wait", "synchronize"):
            if hasattr(device, name):  # a late device scatters
                setattr(device, name, self.through(getattr(device, name)))
        if state._truth.host is not None:
            stream: Any = state._truth.host._drafting._stream
            for name in ("copy", "run"):
                setattr(stream, name, self.through(getattr(stream, name)))
        state._truth._ops = _Operators(state._truth._ops, self)

    def through(self, call: Any) -> Any:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                if not self.left:
                    raise DeviceError("out of memory")
            return call(*arguments, **keywords)

        return counted


class _Operators:
    def __init__(self, operators: Any, countdown: Countdown) -> None:
        self._operators = operators
        self._countdown = countdown

    def __getattr__(self, name: str) -> Any:
        return self._countdown.through(getattr(self._operators, name))
