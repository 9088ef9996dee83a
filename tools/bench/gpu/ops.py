"""What can be measured on a GPU, by name."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from ngram_npu import _library

from tools.bench.data import Workload, make_workload
from tools.bench.gpu.contestant import GpuContestant
from tools.bench.gpu.measure import compare, left_out_if_it_fails
from tools.bench.gpu.ours import Fused, IndexStep, Propose, Step
from tools.bench.gpu.runtime import Cuda, Runtime
from tools.bench.gpu.vllm_peers import V1, V2, V1Kernel, VllmCorrection
from tools.bench.ops.base import Skipped
from tools.bench.options import BenchError, Options, Size

Result = dict[str, Any]
Make = Callable[[Workload, Options, str], GpuContestant]

LATEST = "ours:match=latest"
SCAN = "ours:engine=scan"


@dataclass(frozen=True)
class GpuOp:
    """An operator of ours and who else does its job; the form of `tools.bench.ops.base.Op`."""

    name: str
    makers: dict[str, Make]
    """Engine -> ours; the first is the default."""
    sizes: tuple[str, ...]
    peers: tuple[str, ...]
    peer_makers: dict[str, Make] = field(default_factory=dict)
    unused_settings: ClassVar[frozenset[str]] = frozenset()
    assumptions: ClassVar[dict[str, Any]] = {}
    """Of `Op`; nothing is modelled here."""

    def run(
        self,
        options: Options,
        report: Callable[[Result], None],
        runtime: Runtime | None = None,
    ) -> tuple[list[Result], dict[str, str]]:
        """As `Op.run`; for tests with another runtime than the GPU's."""
        runtime = runtime or cuda(self.name)
        options = replace(options, engine=options.engine or next(iter(self.makers)))
        sizes = options.sizes or tuple(Size.parse(text) for text in self.sizes)
        peers = self.peers if options.peers is None else options.peers
        makers = {name: self._maker(name, options) for name in ("ours", *peers)}
        results: list[Result] = []
        skipped: Skipped = {}
        for size in sizes:
            timed = make_workload(size, options)
            contestants = []
            for name, make in makers.items():
                if name not in skipped:  # who failed at one size is not asked again
                    with left_out_if_it_fails(name, skipped):
                        contestants.append(make(timed, runtime.device))
                        contestants[-1].name = name
            checked = drafting(make_workload(size, replace(options, data_kind="random")))
            results.append(compare(contestants, checked, timed, runtime, options, skipped))
            report(results[-1])
            del contestants
            gc.collect()
            if runtime.device == "cuda":
                torch.cuda.empty_cache()
        return results, skipped

    def _maker(self, name: str, options: Options) -> Callable[[Workload, str], GpuContestant]:
        if name.partition(":")[0] == "ours":
            changed = options if name == "ours" else options.changed(name.removeprefix("ours:"))
            if changed.engine not in self.makers:
                raise BenchError(f"{self.name}: engine: one of {', '.join(self.makers)}")
            make = self.makers[changed.engine]
        elif name in self.peer_makers:
            # A peer that knows one policy takes part with that one.
            match = "latest" if name == "vllm-v2" else options.match
            changed, make = replace(options, match=match), self.peer_makers[name]
        else:
            known = ", ".join([*self.peer_makers, "ours:key=value"])
            raise BenchError(f"{self.name}: peer {name!r}: expected one of {known}")
        return lambda workload, device: make(workload, changed, device)


def drafting(workload: Workload) -> Workload:
    """The same lengths over so few different ids that most pairs occur again: requests draft."""
    few = max(8, math.isqrt(workload.size.context) // 2)
    workload.token_ids %= few
    workload.sampled = np.where(workload.sampled >= 0, workload.sampled % few, -1)
    return workload


def cuda(op: str) -> Runtime:
    """
    Raises:
        BenchError: no GPU, or no kernel of the operator for it; it says why.
    """
    if not torch.cuda.is_available():
        raise BenchError("device cuda: torch sees no GPU here (torch.cuda.is_available() is false)")
    if not _library.has_kernel(op, "cuda"):
        raise BenchError(f"device cuda: no kernel of {op}: {_library.backends()['cuda'].reason}")
    return Cuda()


_LOOKUP_SIZES = ("128x4k", "128x32k", "256x128k")

GPU_OPS: dict[str, GpuOp] = {
    op.name: op
    for op in (
        GpuOp(
            "ngram_propose", {"scan": Propose}, _LOOKUP_SIZES, (LATEST, "vllm-v2"),
            {"vllm-v1-kernel": V1Kernel, "vllm-v2": V2},
        ),
        GpuOp(
            "ngram_step_", {"scan": Step}, _LOOKUP_SIZES, (LATEST, "vllm-v2"),
            {"vllm-v1": V1, "vllm-v1-kernel": V1Kernel, "vllm-v2": V2},
        ),
        GpuOp(
            "ngram_index_step_", {"index": IndexStep, "scan": Step},
            ("128x1k", "128x4k", "128x16k", "128x32k", "128x128k", "128x1m"), (SCAN,),
            {"vllm-v1": V1, "vllm-v2": V2},
        ),
        GpuOp(
            "correct_spec_state_", {"fused": Fused}, ("128x4k", "1024x4k"), ("vllm-correction",),
            {"vllm-correction": VllmCorrection},
        ),
    )
}  # fmt: skip
