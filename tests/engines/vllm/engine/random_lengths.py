"""A scheduler that chooses the draft length of each step at random, for the option
``k="auto"``."""

from __future__ import annotations

import logging
import random
from typing import Any

from ngram_npu.engines.vllm.scheduler import ATTRIBUTE
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

VERIFIED_LINE = "verified drafts of all lengths"


class RandomLengths:
    """Replaces a controller, and chooses a random draft length after each schedule."""

    def __init__(self, controller: Any) -> None:
        self.lengths, self.table = controller.lengths, controller.table
        self.acceptance = controller.acceptance
        self.verified_lengths: set[int] = set()
        self._random = random.Random(5)

    def observe_schedule(self, batch: int) -> None:
        self.table[1:] = [self._random.choice(self.lengths)] * (len(self.table) - 1)

    def observe_step(self, batch: int, length: int, seconds: float | None, **step: Any) -> None:
        if length not in self.verified_lengths:
            self.verified_lengths.add(length)
            if self.verified_lengths == {*self.lengths}:
                logging.getLogger("vllm").info(VERIFIED_LINE)


class RandomLengthScheduler(AsyncScheduler):
    """A scheduler for the option `scheduler_cls`, with `k="auto"`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        observer = getattr(self, ATTRIBUTE).observer
        observer.controller = RandomLengths(observer.controller)
