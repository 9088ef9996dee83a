"""What can be measured on a GPU, by name."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from ngram_npu import _library

from tools.bench.data import Workload, make_workload
from tools.bench.gpu.contestant import GpuContestant
from tools.bench.gpu.measure import compare
from tools.bench.gpu.ours import Fused, IndexStep, Propose, Step
from tools.bench.gpu.runtime import Cuda, Runtime
from tools.bench.gpu.vllm_peers import V1, V2, V1Kernel, VllmCorrection
from tools.bench.options import BenchError, Options, Size, UnavailableError

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
        results: list[Result] = []
        skipped: dict[str, str] = {}
        for size in sizes:
            timed = make_workload(size, options)
            contestants = [self._make("", timed, options, runtime.device)]
            for peer in self.peers if options.peers is None else options.peers:
                try:
                    contestants.append(self._make(peer, timed, options, runtime.device))
                except UnavailableError as error:
                    skipped[peer] = str(error)
            checked = drafting(make_workload(size, replace(options, data_kind="random")))
            results.append(compare(contestants, checked, timed, runtime, options))
            report(results[-1])
            del contestants
            gc.collect()
            if runtime.device == "cuda":
                torch.cuda.empty_cache()
        return results, skipped

    def _make(self, peer: str, workload: Workload, options: Options, device: str) -> GpuContestant:
        if peer.startswith("ours:") or not peer:
            changed = options.changed(peer.removeprefix("ours:")) if peer else options
            if changed.engine not in self.makers:
                raise BenchError(f"{self.name}: engine: one of {', '.join(self.makers)}")
            contestant = self.makers[changed.engine](workload, changed, device)
        elif peer in self.peer_makers:
            # A peer that knows one policy takes part with that one.
            match = "latest" if peer == "vllm-v2" else options.match
            contestant = self.peer_makers[peer](workload, replace(options, match=match), device)
        else:
            known = ", ".join([*self.peer_makers, "ours:key=value"])
            raise BenchError(f"{self.name}: peer {peer!r}: expected one of {known}")
        contestant.name = peer or "ours"
        return contestant


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
