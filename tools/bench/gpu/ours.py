"""Contestants on a device, whose step is calls of torch without any decision of the host; and our
operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ngram_npu import DeviceNgramIndex, NgramIndex
from ngram_npu.ops import workspace_size

from tools.bench.data import Workload
from tools.bench.ops.spec_state import FUSED, LAYOUT, state
from tools.bench.options import MATCH_POLICY_CODES, Options
from tools.bench.stats import Drafts


class GpuContestant(ABC):
    """One way of doing a workload's steps; the base class holds the rows on the device.

    The data of all steps is on the device beforehand; :meth:`step` is captured into a graph, so its
    arguments are tensors with fixed addresses. As in the harness for the CPU, the rows already hold
    the text that steps append, and only lengths say where a context ends.

    Attributes:
        name, detail, semantics: as in `Contestant`.
        is_drafter: whether its results are drafts, whose share can be reported.
        reads_tokens: whether every step must read every live token.
    """

    name: str = ""
    detail: str = ""
    semantics: tuple[Any, ...] | None = None
    is_drafter: bool = True
    reads_tokens: bool = False

    def __init__(self, workload: Workload, options: Options) -> None:
        self.options = options
        self.device = device = options.device
        self.capacity = workload.capacity
        self.batch = workload.size.batch
        self.token_ids = torch.zeros(workload.token_ids.shape, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(workload.lengths.shape, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(workload.sampled.shape, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(self.batch, dtype=torch.int32, device=device)

    def load(self, workload: Workload) -> None:
        """Copies a workload of the same shape into its tensors."""
        self.token_ids.copy_(torch.from_numpy(workload.token_ids))
        self.lengths.copy_(torch.from_numpy(workload.lengths))
        self.sampled.copy_(torch.from_numpy(workload.sampled))

    def restore(self) -> None:
        """Back to before step 0; not timed."""
        self.num_tokens.copy_(self.lengths[0])

    @abstractmethod
    def step(self, number: int) -> Any:
        """Does the work of this step; steps come in order."""

    @abstractmethod
    def drafts(self, result: Any) -> Drafts:
        """A result's contents, for comparison: drafts, each without its unused places."""


def by_count(ids: torch.Tensor, counts: torch.Tensor) -> Drafts:
    rows = zip(ids.cpu().numpy(), counts.cpu().numpy(), strict=True)
    return [np.asarray(row)[:count].tolist() for row, count in rows]


class _Lookup(GpuContestant):
    draft_result: int
    reads_tokens = True

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self._lookup = options.lookup | {"max_len": self.capacity}
        self.semantics = (options.min_n, options.max_n, options.k, options.match_policy)

    def drafts(self, result: Any) -> Drafts:
        return by_count(*result[self.draft_result : self.draft_result + 2])


class Propose(_Lookup):
    draft_result = 0
    detail = "torch.ops.ngram_npu.ngram_propose"

    def step(self, number: int) -> Any:
        lengths = self.lengths[number + 1]
        return torch.ops.ngram_npu.ngram_propose(self.token_ids, lengths, **self._lookup)


class Step(_Lookup):
    draft_result = 2
    detail = "torch.ops.ngram_npu.ngram_step_"

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.workspace = workspace("ngram_step_", self.batch, self.device)

    def rows(self, number: int) -> tuple[Any, ...]:
        return (self.token_ids, self.num_tokens, self.sampled[number])

    def step(self, number: int) -> Any:
        return torch.ops.ngram_npu.ngram_step_(
            *self.rows(number), workspace=self.workspace, **self._lookup
        )


class IndexStep(Step):
    """All rows are indexed when they are loaded; each lap begins with a copy of that index, which
    evicts all else from the L2: figures compared with other contestants' use a cold L2."""

    detail = "torch.ops.ngram_npu.ngram_index_step_"
    reads_tokens = False

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.workspace = workspace("ngram_index_step_", self.batch, self.device)
        tokens = self.batch * self.capacity
        self._index = make_index(self.batch, tokens, options.min_n, options.max_n, self.device)
        self._saved = self._index.tensor.clone()
        self._slots = torch.arange(self.batch, dtype=torch.int32, device=self.device)

    def load(self, workload: Workload) -> None:
        super().load(workload)
        self.build()
        self._saved.copy_(self._index.tensor)

    def build(self) -> None:
        """Resets the slots and indexes whole rows, as for prompts."""
        self._index.reset(self._slots)
        policy = MATCH_POLICY_CODES[self.options.match_policy]
        self._index.append(self.token_ids, self.lengths[0], match_policy=policy)

    def restore(self) -> None:
        super().restore()
        self._index.tensor.copy_(self._saved)

    def step(self, number: int) -> Any:
        return torch.ops.ngram_npu.ngram_index_step_(
            *self.rows(number), self._index.tensor, workspace=self.workspace, **self._lookup
        )


class IndexBuild(IndexStep):
    detail = "DeviceNgramIndex.reset and append, of all rows"
    is_drafter = False
    reads_tokens = True

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.semantics = None

    def step(self, number: int) -> None:
        self.build()


class Read(GpuContestant):
    """Reads as many bytes as a scan must, with the caches in the same state."""

    detail = "torch's amax over as many tokens as are live, one after the other"
    is_drafter = False

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(replace(workload, token_ids=workload.token_ids[:, :0]), options)
        live = int(workload.lengths[0].sum())
        self._tokens = torch.zeros(live, dtype=torch.int32, device=self.device)

    def load(self, workload: Workload) -> None:
        """The same for any contents of the rows."""

    def step(self, number: int) -> Any:
        return self._tokens.amax()

    def drafts(self, result: Any) -> Drafts:
        return []


class Correction(GpuContestant):
    """The state between two forward passes; `semantics` compares everything that was corrected."""

    semantics = ("corrected",)
    is_drafter = False
    _COMPARED = ("num_computed_tokens", "num_accepted_tokens", "positions", "seq_lens",
                 "slot_mapping")  # fmt: skip

    def __init__(self, workload: Workload, options: Options) -> None:
        # No rows: the correction reads none, and long rows would take gigabytes.
        empty = replace(workload, token_ids=workload.token_ids[:, :0])
        super().__init__(empty, options)
        arrays = state(workload.size, options.k, steps=workload.steps)
        self.tensors: dict[str, Any] = {
            name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()
        }
        self._start = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load(self, workload: Workload) -> None:
        """The same state for any contents of the rows."""

    def restore(self) -> None:
        for name, start in self._start.items():
            self.tensors[name].copy_(start)

    def drafts(self, result: Any) -> Drafts:
        return [self.tensors[name].tolist() for name in self._COMPARED]


class Fused(Correction):
    detail = "torch.ops.ngram_npu.correct_spec_state_"

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        space = workspace("correct_spec_state_", self.batch, self.device)
        self._arguments = {name: self.tensors[name] for name in FUSED} | LAYOUT
        self._arguments |= {"workspace": space}

    def step(self, number: int) -> Any:
        return torch.ops.ngram_npu.correct_spec_state_(**self._arguments)


def workspace(op: str, batch: int, device: str) -> torch.Tensor:
    return torch.zeros(workspace_size(op, batch), dtype=torch.int32, device=device)


def make_index(num_slots: int, token_capacity: int, min_n: int, max_n: int, device: str) -> Any:
    """An empty index on the device, large enough for any data: no step may find it full."""
    span = {"min_n": min_n, "max_n": max_n}
    if device == "cpu":
        return NgramIndex(num_slots, token_capacity, **span, kind="torch", any_data=True)
    return DeviceNgramIndex(num_slots, token_capacity, **span, device=device)
