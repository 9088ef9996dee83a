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
from tools.bench.ops.base import Maker, Op
from tools.bench.ops.lookup import find_converter, find_op
from tools.bench.options import Options, Size

Arrays = dict[str, npt.NDArray[Any]]
BLOCK_SIZE = 16
PAD_ID = -1
LAYOUT = {"block_size": BLOCK_SIZE, "pad_id": PAD_ID}
COUNT_NAMES = (
    "num_computed_tokens", "num_accepted_tokens", "prev_positions", "num_sampled_prev",
    "num_draft_prev", "host_num_computed_tokens",
)  # fmt: skip
CORRECTED_NAMES = (*COUNT_NAMES[:2], "positions", "seq_lens", "slot_mapping")
ARGUMENT_NAMES = (
    *CORRECTED_NAMES, "discard", *COUNT_NAMES[2:], "query_start_loc", "num_tokens", "block_table",
)  # fmt: skip


def make_state(size: Size, k: int, steps: int) -> Arrays:
    """Returns a batch in which each request had k drafts and another batch position in the previous
    step. The block table has enough blocks for ``steps`` corrections in a row."""
    rng = np.random.default_rng(SEED)
    batch, num_tokens = size.batch, size.batch * (k + 1)
    computed = np.full(batch, size.context, np.int32)
    width = -(-(size.context + (steps + 1) * (k + 1)) // BLOCK_SIZE)
    return {
        "num_computed_tokens": computed,
        "num_accepted_tokens": np.ones(batch, np.int32),
        "positions": np.zeros(num_tokens, np.int64),
        "seq_lens": np.zeros(batch, np.int32),
        "slot_mapping": np.zeros(num_tokens, np.int64),
        "discard": np.zeros(batch, np.bool_),
        "prev_positions": rng.permutation(batch),
        "num_sampled_prev": rng.integers(1, k + 2, batch).astype(np.int32),
        "num_draft_prev": np.full(batch, k, np.int32),
        "host_num_computed_tokens": computed + (k + 1),
        "query_start_loc": np.arange(0, num_tokens + 1, k + 1, dtype=np.int32),
        "num_tokens": computed + 1,
        "block_table": rng.permutation(batch * width).reshape(batch, width).astype(np.int32),
    }


class Correction(Implementation):
    """Each step corrects the state that the previous step wrote. Instead of drafts, the harness
    compares all corrected arrays."""

    semantics = ("corrected",)

    def __init__(self, workload: Workload, options: Options) -> None:
        arrays = make_state(workload.size, options.k, workload.steps)
        convert = find_converter(options)
        self.tensors = {name: convert(values) for name, values in arrays.items()}
        self._initial_values = {name: convert(arrays[name].copy()) for name in CORRECTED_NAMES}

    def reset(self) -> None:
        for name, values in self._initial_values.items():
            self.tensors[name][...] = values

    def get_drafts(self, result: Any) -> Drafts:
        return [self.tensors[name].tolist() for name in CORRECTED_NAMES]


class FusedOperator(Correction):
    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        op, self.detail = find_op("correct_spec_state_", options)
        arguments = {name: self.tensors[name] for name in ARGUMENT_NAMES} | LAYOUT
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

        state = self.tensors
        num_computed, num_accepted, positions_before = (state[name] for name in COUNT_NAMES[:3])
        rows = positions_before.clamp(min=0)
        num_sampled = state["num_sampled_prev"][rows]
        had_drafts = (positions_before >= 0) & (state["num_draft_prev"][rows] > 0)
        counts = torch.where(
            had_drafts, num_computed[rows] + num_sampled, state["host_num_computed_tokens"]
        )
        num_accepted.copy_(torch.where(had_drafts, num_sampled, num_accepted))
        num_computed.copy_(counts)
        starts, positions = state["query_start_loc"], state["positions"]
        num_scheduled, num_tokens = starts[1:] - starts[:-1], len(positions)
        shift = torch.repeat_interleave(
            num_computed - starts[:-1], num_scheduled, output_size=num_tokens
        )
        torch.add(torch.arange(num_tokens, device=num_computed.device), shift, out=positions)
        torch.add(num_computed, num_scheduled, out=state["seq_lens"])
        torch.lt(state["seq_lens"], state["num_tokens"], out=state["discard"])
        requests = torch.arange(len(positions_before), device=positions_before.device)
        request = torch.repeat_interleave(requests, num_scheduled, output_size=num_tokens)
        blocks = state["block_table"][request, positions // BLOCK_SIZE].to(torch.int64)
        torch.add(blocks * BLOCK_SIZE, positions % BLOCK_SIZE, out=state["slot_mapping"])


class CorrectSpecState(Op):
    name = "correct_spec_state_"
    help = "the correction between two forward passes; the context only sizes the block table"
    sizes = ("1x4k", "32x4k", "256x4k", "1024x4k")
    peers = device_peers = ("eager",)
    peer_makers: ClassVar[Mapping[str, Maker]] = {"eager": Eager}

    def prepare_workload(self, size: Size, options: Options) -> Workload:
        return super().prepare_workload(size, replace(options, data_kind="periodic"))

    make = FusedOperator
