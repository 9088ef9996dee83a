"""Measures the correction between two forward passes: one operator, compared with eager torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tools.bench.data import SEED, Workload
from tools.bench.device import make_workspace
from tools.bench.measure import Drafts, Implementation
from tools.bench.ops.base import Make, Op
from tools.bench.ops.lookup import find_converter, find_op
from tools.bench.options import Options, Size

Arrays = dict[str, npt.NDArray[Any]]
BLOCK_SIZE = 16
PAD_ID = -1
LAYOUT = {"block_size": BLOCK_SIZE, "pad_id": PAD_ID}
COUNTS = ("num_computed_tokens", "num_accepted_tokens", "prev_positions", "num_sampled_prev",
          "num_draft_prev", "host_num_computed_tokens")  # fmt: skip
CORRECTED = (*COUNTS[:2], "positions", "seq_lens", "slot_mapping")
FUSED = (*CORRECTED, "discard", *COUNTS[2:], "query_start_loc", "num_tokens", "block_table")


def make_state(size: Size, k: int, steps: int) -> Arrays:
    """Returns a batch in which each request had k drafts and another batch position in the previous
    step. The block table has enough blocks for ``steps`` corrections in a row."""
    rng = np.random.default_rng(SEED)
    batch, tokens = size.batch, size.batch * (k + 1)
    computed = np.full(batch, size.context, np.int32)
    blocks = -(-(size.context + (steps + 1) * (k + 1)) // BLOCK_SIZE)
    return {
        "num_computed_tokens": computed,
        "num_accepted_tokens": np.ones(batch, np.int32),
        "positions": np.zeros(tokens, np.int64),
        "seq_lens": np.zeros(batch, np.int32),
        "slot_mapping": np.zeros(tokens, np.int64),
        "discard": np.zeros(batch, np.bool_),
        "prev_positions": rng.permutation(batch),
        "num_sampled_prev": rng.integers(1, k + 2, batch).astype(np.int32),
        "num_draft_prev": np.full(batch, k, np.int32),
        "host_num_computed_tokens": computed + (k + 1),
        "query_start_loc": np.arange(0, tokens + 1, k + 1, dtype=np.int32),
        "num_tokens": computed + 1,
        "block_table": rng.permutation(batch * blocks).reshape(batch, blocks).astype(np.int32),
    }


class Correction(Implementation):
    """Each step corrects the state that the previous step wrote. The harness compares all arrays
    that are corrected, in place of drafts."""

    semantics = ("corrected",)

    def __init__(self, workload: Workload, options: Options) -> None:
        arrays = make_state(workload.size, options.k, workload.steps)
        convert = find_converter(options)
        self.tensors = {name: convert(values) for name, values in arrays.items()}
        self._start = {name: convert(arrays[name].copy()) for name in CORRECTED}

    def reset(self) -> None:
        for name, start in self._start.items():
            self.tensors[name][...] = start

    def drafts(self, result: Any) -> Drafts:
        return [self.tensors[name].tolist() for name in CORRECTED]


class Fused(Correction):
    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        op, self.detail = find_op("correct_spec_state_", options)
        arguments = {name: self.tensors[name] for name in FUSED} | LAYOUT
        if options.device != "cpu":
            workspace = make_workspace("correct_spec_state_", workload.size.batch, options.device)
            arguments["workspace"] = workspace
        self.function = lambda: op(**arguments)


class Eager(Correction):
    """The correction in eager torch, with vLLM's formulas for the counts and the slots."""

    detail = "eager torch, with vLLM's formulas"

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, replace(options, frontend="torch"))
        self.function = self.run

    def run(self) -> None:
        import torch

        t = self.tensors
        computed, accepted, previous = (t[name] for name in COUNTS[:3])
        at = previous.clamp(min=0)
        sampled = t["num_sampled_prev"][at]
        had_drafts = (previous >= 0) & (t["num_draft_prev"][at] > 0)
        new = torch.where(had_drafts, computed[at] + sampled, t["host_num_computed_tokens"])
        accepted.copy_(torch.where(had_drafts, sampled, accepted))
        computed.copy_(new)
        start, positions = t["query_start_loc"], t["positions"]
        scheduled, num_tokens = start[1:] - start[:-1], len(positions)
        shift = torch.repeat_interleave(computed - start[:-1], scheduled, output_size=num_tokens)
        torch.add(torch.arange(num_tokens, device=computed.device), shift, out=positions)
        torch.add(computed, scheduled, out=t["seq_lens"])
        torch.lt(t["seq_lens"], t["num_tokens"], out=t["discard"])
        requests = torch.arange(len(previous), device=previous.device)
        request = torch.repeat_interleave(requests, scheduled, output_size=num_tokens)
        blocks = t["block_table"][request, positions // BLOCK_SIZE].to(torch.int64)
        torch.add(blocks * BLOCK_SIZE, positions % BLOCK_SIZE, out=t["slot_mapping"])


class CorrectSpecState(Op):
    name = "correct_spec_state_"
    help = "the correction between two forward passes; the context only sizes the block table"
    sizes = ("1x4k", "32x4k", "256x4k", "1024x4k")
    peers = device_peers = ("eager",)
    peer_makers: ClassVar[Mapping[str, Make]] = {"eager": Eager}

    def workload(self, size: Size, options: Options) -> Workload:
        return super().workload(size, replace(options, data_kind="periodic"))

    make = Fused
