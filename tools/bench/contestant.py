"""What is measured: one way of doing a step's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Drafts = list[list[int]]


class Contestant:
    """One way of doing what a step asks for; the base does nothing and counts as ready.

    The harness times ``function(*arguments(step))`` alone, the call and not the making of its
    arguments. Steps of a lap come in order and each once: a contestant may keep state from one to
    the next. The results of calls are dropped, except in the warm-up.

    Attributes:
        name: short, the key in results.
        detail: what exactly it is, for the record.
        function: what is timed.
        calls: how often one timed call does the work, for work too short to time once.
        semantics: contestants with equal semantics must draft the same; None: drafts nothing.
    """

    name: str = ""
    detail: str = ""
    function: Callable[..., Any]
    calls: int = 1
    semantics: tuple[Any, ...] | None = None

    def activate(self) -> None:
        """Called before its turn in a round: settings that others change too."""

    def reset(self) -> None:
        """Back to the workload's base lengths, before step 0 of a lap."""

    def arguments(self, step: int) -> tuple[Any, ...]:
        """What ``function`` is to be called with in this step."""
        return ()

    def drafts(self, result: Any) -> Drafts:
        """The drafts that a result holds, each without its unused slots."""
        return []
