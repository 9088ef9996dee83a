"""One call of ngram_step_ and ngram_index_step_ at each size, for a profiler to look at.

ncu --profile-from-start off ... python -m tools.gpu.lookups
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tools.bench.data import make_workload
from tools.bench.gpu.ours import IndexStep, Step
from tools.bench.options import Options, Size

SIZES = ("128x4k", "128x32k", "256x128k")
KINDS: tuple[Callable[..., Any], ...] = (Step, IndexStep)


def run(sizes: Sequence[str], device: str, profiled: Callable[[Callable[[], Any]], Any]) -> int:
    """``profiled`` gets the call that is to be seen, after one that is not.

    Returns:
        How many calls there were.
    """
    options = Options(data_kind="nomatch")
    count = 0
    for size in sizes:
        workload = make_workload(Size.parse(size), options)
        for kind in KINDS:
            contestant = kind(workload, options, device)
            contestant.load(workload)
            contestant.restore()
            contestant.step(0)
            profiled(lambda contestant=contestant: contestant.step(1))
            count += 1
    return count


def _profiled(call: Callable[[], Any]) -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    run(SIZES, "cuda", _profiled)
    sys.exit(0)
