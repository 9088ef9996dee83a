"""The ops that can be measured on a device, by name, and how each is measured."""

from __future__ import annotations

import gc
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tools.bench import stats
from tools.bench.data import Workload, make_workload
from tools.bench.gpu.ours import Fused, GpuContestant, IndexBuild, IndexStep, Propose, Read, Step
from tools.bench.gpu.peers import V1, V2, V1Kernel, VllmAscend, VllmCorrection
from tools.bench.gpu.runtime import Cuda, Npu, Work, runtime_of
from tools.bench.ops.base import Make, Op, Result, Skipped
from tools.bench.options import Options, Size

STEPS = 12
"""Steps of the workload in one graph; each replay starts from the first one."""
LATEST = "ours:match_policy=latest"
SCAN = "ours:engine=scan"
_CHECKED_STEPS = 4
_WARM_UP_ROUNDS = 2
_REASON_CHARACTERS = 300


class GpuOp(Op):
    """An operator of ours and its peers."""

    runtime: Cuda | Npu

    def __init__(
        self,
        name: str,
        makers: Mapping[str, Make],
        sizes: tuple[str, ...],
        peers: tuple[str, ...],
        peer_makers: Mapping[str, Make],
        kernel: str = "",
    ) -> None:
        """
        Args:
            makers: engine -> ours; the first is the default.
            kernel: the operator that is called; empty: the operator with the op's name.
        """
        self.kernel = kernel or name
        self.name, self.sizes, self.peers, self.peer_makers = name, sizes, peers, peer_makers
        self.makers, self.engines = makers, tuple(makers)

    def run(
        self, options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        self.runtime = runtime_of(self.kernel, options.device)
        there = replace(options, device=self.runtime.device, frontend="torch", idle_ms=0.0)
        return super().run(there, report)

    def workload(self, size: Size, options: Options) -> Workload:
        gc.collect()
        torch.cuda.empty_cache()
        return super().workload(size, options)

    def make(self, workload: Workload, options: Options) -> GpuContestant:
        contestant: GpuContestant = self.makers[options.engine](workload, options)
        return contestant

    @contextmanager
    def left_out(self, name: str, skipped: Skipped) -> Iterator[None]:
        """An exception of a peer only skips that peer; an exception of ours is raised."""
        try:
            with super().left_out(name, skipped):
                yield
        except Exception as error:
            if name.partition(":")[0] == "ours":
                raise
            traceback.print_exc()
            text = " ".join(f"{type(error).__name__}: {error}".split())
            skipped[name] = re.sub(r"/\S*/", "", text)[:_REASON_CHARACTERS]  # no machine's folders

    def compare(
        self, contestants: list[Any], workload: Workload, options: Options, skipped: Skipped
    ) -> Result:
        """In each round every contestant replays its graph of STEPS steps once; the order changes
        from round to round. Clock changes and other disturbances affect all contestants alike."""
        runtime = self.runtime
        checked = drafting(make_workload(workload.size, replace(options, data_kind="random")))
        share, same = self._check(contestants, checked, skipped)
        steps = min(STEPS, workload.steps)
        replays: dict[str, Callable[[], float]] = {}
        for contestant in contestants:
            if contestant.name not in skipped:
                with self.left_out(contestant.name, skipped):
                    contestant.load(workload)
                    works: list[Work] = [partial(contestant.step, n) for n in range(steps)]
                    contestant.restore()
                    cold = options.cache != "hot"
                    replays[contestant.name] = runtime.prepare(works, contestant.restore, cold)
        rounds_us: dict[str, list[float]] = {name: [] for name in replays}
        host_us: dict[str, list[float]] = {name: [] for name in replays}
        names = list(replays)
        clocks = [runtime.clocks()]
        for number in range(-_WARM_UP_ROUNDS, options.rounds):
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                us = replays[name]() / steps
                if number >= 0:
                    rounds_us[name].append(us)
                    host_us[name].append(runtime.host_us / steps)
        result = stats.comparison(
            workload,
            options,
            {c.name: c.detail for c in contestants if c.name in replays},
            rounds_us,
            steps_per_round=steps,
            drafted_share=share,
            same_drafts=same,
        )
        clocks.append(runtime.clocks())
        if any(clocks):
            result["clocks_before_and_after"] = clocks
        live_bytes = workload.lengths[0].sum().item() * workload.token_ids.itemsize
        reads = contestants[0].reads_tokens
        if floors := runtime.floors(result["ours"]["median_us"], live_bytes if reads else None):
            result["floors"] = floors
        if any(map(any, host_us.values())):
            result["host_us"] = {name: stats.spread(us) for name, us in host_us.items()}
        return result

    def _check(
        self, contestants: list[GpuContestant], checked: Workload, skipped: Skipped
    ) -> tuple[float | None, bool | None]:
        """Runs a few steps of all on data that yields drafts, and compares their results before
        anything is timed.

        Returns:
            The share of requests for which ours drafted, and whether anything was compared.
        """
        agreement = stats.Agreement()
        share = None
        for contestant in contestants:
            if contestant.semantics is None:
                continue
            with self.left_out(contestant.name, skipped):
                contestant.load(checked)
                contestant.restore()
                made = [
                    contestant.drafts(contestant.step(number))
                    for number in range(min(_CHECKED_STEPS, checked.steps))
                ]
                if contestant is contestants[0] and contestant.is_drafter:
                    share = stats.drafted_share(made)
                agreement.add(contestant.name, contestant.semantics, made)
        return share, agreement.same


def drafting(workload: Workload) -> Workload:
    """The same lengths over so few different ids that most pairs recur, so that requests draft."""
    few = max(8, math.isqrt(workload.size.context) // 2)
    workload.token_ids %= few
    workload.sampled = np.where(workload.sampled >= 0, workload.sampled % few, -1)
    return workload


_LOOKUP_SIZES = ("128x4k", "128x32k", "256x128k")

GPU_OPS: dict[str, GpuOp] = {
    op.name: op
    for op in (
        GpuOp(
            "ngram_propose", {"scan": Propose}, _LOOKUP_SIZES, (LATEST, "vllm-v2"),
            {"read": Read, "vllm-v1-kernel": V1Kernel, "vllm-v2": V2},
        ),
        GpuOp(
            "ngram_step_", {"scan": Step}, _LOOKUP_SIZES, (LATEST, "read", "vllm-v2"),
            {"read": Read, "vllm-v1": V1, "vllm-v1-kernel": V1Kernel, "vllm-v2": V2,
             "vllm-ascend": VllmAscend},
        ),
        GpuOp(
            "ngram_index_step_", {"index": IndexStep, "scan": Step},
            ("128x1k", "128x4k", "128x16k", "128x32k", "128x128k", "128x1m"), (SCAN,),
            {"vllm-v1": V1, "vllm-v2": V2},
        ),
        GpuOp(
            "index-build", {"index": IndexBuild}, ("1x128k", "128x4k", "1024x4k", "128x32k"), (),
            {}, kernel="ngram_index_append_",
        ),
        GpuOp(
            "correct_spec_state_", {"fused": Fused}, ("128x4k", "1024x4k"), ("vllm-correction",),
            {"vllm-correction": VllmCorrection},
        ),
    )
}  # fmt: skip
