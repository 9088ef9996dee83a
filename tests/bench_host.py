"""This process in a GPU's place, for the tests of the comparison on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Work = Callable[[], Any]


class Host:
    """A Runtime whose steps take what this process takes for them."""

    device = "cpu"

    def __init__(self) -> None:
        self.laps = 0

    def prepare(self, works: list[Work], restore: Work, cold: bool) -> Callable[[], float]:
        def once() -> float:
            restore()
            self.laps += 1
            start = time.perf_counter()
            for work in works:
                work()
            return (time.perf_counter() - start) * 1e6

        return once

    def copy_bandwidth(self) -> float:
        return 4e12

    def empty_node_us(self) -> float:
        return 1.5

    def describe(self) -> dict[str, Any]:
        return {}
