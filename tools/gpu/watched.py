"""GPU work to run under compute-sanitizer or ncu, which slow it down.

    compute-sanitizer --tool memcheck python -m tools.gpu.watched parity
    ncu --profile-from-start off ... python -m tools.gpu.watched lookups

``parity``: samples of all operators in turn, in an order that a seed decides, until the time is
over. Without torch's memory pool (PYTORCH_NO_CUDA_MEMORY_CACHING=1) each tensor has its own
allocation, and the memory beyond its guards belongs to no tensor. ``lookups``: one call of
ngram_step_ and ngram_index_step_ at each size.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.bench.data import make_workload
from tools.bench.gpu.ours import GpuContestant, IndexStep, Step
from tools.bench.options import Options, Size

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests")]

from without_hypothesis import install_where_missing  # noqa: E402

install_where_missing()

from backends import DEVICE_BACKENDS, Backend  # noqa: E402
from ops.parity import check_parity  # noqa: E402
from opspecs import OPSPECS, OpSpec, Sample  # noqa: E402

SECONDS = 25
SIZES = ("128x4k", "128x32k", "256x128k")
KINDS: tuple[type[GpuContestant], ...] = (Step, IndexStep)


def parity(
    specs: Sequence[OpSpec], backend: Backend, seconds: float, seed: int = 1
) -> dict[str, int]:
    """
    Returns:
        The number of samples compared per operator; at least one.

    Raises:
        MismatchError: a sample differs; describes the first one.
    """
    rng = np.random.default_rng(seed)
    end = time.monotonic() + seconds
    with backend.drawing():
        left: dict[str, list[Sample]] = {}
        for spec in specs:
            samples = list(spec.samples(np.random.default_rng(seed)))
            left[spec.name] = [samples[i] for i in rng.permutation(len(samples))]
    done = dict.fromkeys(left, 0)
    while any(left.values()):
        for spec in specs:
            if not left[spec.name]:
                continue
            if time.monotonic() > end and done[spec.name] > 0:
                return done
            check_parity(spec, backend, left[spec.name].pop())
            done[spec.name] += 1
    return done


def lookups(sizes: Sequence[str], device: str, profiled: Callable[[Callable[[], Any]], Any]) -> int:
    """Calls each operator once, then passes a second call to ``profiled``.

    Returns:
        The number of profiled calls.
    """
    options = Options(data_kind="nomatch", device=device)
    count = 0
    for size in sizes:
        workload = make_workload(Size.parse(size), options)
        for kind in KINDS:
            contestant = kind(workload, options)
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
    if sys.argv[1:] == ["lookups"]:
        lookups(SIZES, "cuda", _profiled)
    else:
        (cuda,) = (backend for backend in DEVICE_BACKENDS if backend.device == "cuda")
        specs = [spec for spec in OPSPECS.values() if "cuda" not in spec.no_kernel]
        print("RESULT", json.dumps(parity(specs, cuda, SECONDS)))
