"""This process as a stand-in for a GPU, for the tests of the GPU benchmark."""

from __future__ import annotations

import time
from typing import Any

from tools.bench.gpu.runtime import Cuda


class Host(Cuda):
    """Steps take what this process takes for them."""

    device = "cpu"
    copy_bandwidth = 4e12
    read_bandwidth = 4e12
    laps = 0

    def prepare(self, works: list[Any], restore: Any, cold: bool) -> Any:
        def once() -> float:
            restore()
            self.laps += 1
            start = time.perf_counter()
            for work in works:
                work()
            return (time.perf_counter() - start) * 1e6

        return once

    def clocks(self) -> str:
        return "1980 MHz"

    def empty_node_us(self) -> float:
        return 1.5
