"""The ops that can be measured, by name. A new op is a class here (README.md, "Adding an op")."""

from __future__ import annotations

from tools.bench.ops.acceptance import Acceptance
from tools.bench.ops.acceptance_padded import AcceptancePadded
from tools.bench.ops.acceptance_store import AcceptanceStore
from tools.bench.ops.ascendc_model import AscendcModel
from tools.bench.ops.async_host import AsyncHost
from tools.bench.ops.base import Op
from tools.bench.ops.call_overhead import CallOverhead
from tools.bench.ops.costs import CostsFromLogs
from tools.bench.ops.crossover import Crossover
from tools.bench.ops.generate import GenerateOp
from tools.bench.ops.host_drafting import HostDraftingStep
from tools.bench.ops.host_latency import HostLatency
from tools.bench.ops.index import IndexBuild, IndexMemory, NgramIndexStep
from tools.bench.ops.learn import Learn
from tools.bench.ops.lookup import NgramPropose, NgramStep
from tools.bench.ops.merge import MergeDrafts
from tools.bench.ops.spec_state import CorrectSpecState
from tools.bench.ops.store import StoreStep
from tools.bench.ops.store_size import StoreSize
from tools.bench.ops.tune_recorded import TuneRecorded
from tools.bench.ops.vllm_async import VllmAsync
from tools.bench.ops.vllm_end_to_end import VllmEndToEnd
from tools.bench.ops.vllm_predicted import VllmPredicted
from tools.bench.ops.vllm_propose import VllmCatchUp, VllmPropose

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        NgramPropose(),
        NgramStep(),
        VllmPropose(),
        VllmCatchUp(),
        VllmAsync(),
        VllmEndToEnd(),
        VllmPredicted(),
        NgramIndexStep(),
        IndexBuild(),
        IndexMemory(),
        CallOverhead(),
        Crossover(),
        CorrectSpecState(),
        MergeDrafts(),
        AsyncHost(),
        GenerateOp(),
        AscendcModel(),
        Acceptance(),
        AcceptanceStore(),
        AcceptancePadded(),
        CostsFromLogs(),
        StoreStep(),
        StoreSize(),
        HostDraftingStep(),
        HostLatency(),
        TuneRecorded(),
        Learn(),
    )
}

__all__ = ["OPS", "Op"]
