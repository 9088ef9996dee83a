"""Our operators on a GPU."""

from __future__ import annotations

from typing import Any

import ngram_npu
import torch
from ngram_npu.config import UNLIMITED
from ngram_npu.ops import workspace_size

from tools.bench.contestant import Drafts
from tools.bench.data import Workload
from tools.bench.gpu.contestant import GpuContestant, by_count
from tools.bench.ops.spec_state import FUSED, LAYOUT, state
from tools.bench.options import MATCHES, Options, Size


class _Lookup(GpuContestant):
    draft_result: int
    reads_tokens = True

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        super().__init__(workload, options, device)
        self._lookup = (
            options.min_n, options.max_n, options.k, MATCHES[options.match], False, self.capacity,
        )  # fmt: skip
        self.semantics = (options.min_n, options.max_n, options.k, options.match)

    def drafts(self, result: Any) -> Drafts:
        return by_count(*result[self.draft_result : self.draft_result + 2])


class Propose(_Lookup):
    draft_result = 0
    detail = "torch.ops.ngram_npu.ngram_propose"

    def step(self, number: int) -> Any:
        lengths = self.lengths[number + 1]
        return torch.ops.ngram_npu.ngram_propose(self.token_ids, lengths, None, None, *self._lookup)


class Step(_Lookup):
    draft_result = 2
    detail = "torch.ops.ngram_npu.ngram_step_"

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        super().__init__(workload, options, device)
        self.workspace = workspace("ngram_step_", self.batch, device)

    def arguments(self, number: int) -> tuple[Any, ...]:
        head = (self.token_ids, self.num_tokens, self.sampled[number], None, None, True, UNLIMITED)
        return (*head, *self._lookup)

    def step(self, number: int) -> Any:
        return torch.ops.ngram_npu.ngram_step_(*self.arguments(number), self.workspace)


class IndexStep(Step):
    """All rows are indexed when they are loaded; each lap begins with a copy of that index, which
    drives all else from the L2: figures that are compared with others' are taken with it cold."""

    detail = "torch.ops.ngram_npu.ngram_index_step_"
    reads_tokens = False

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        super().__init__(workload, options, device)
        self.workspace = workspace("ngram_index_step_", self.batch, device)
        self._index = make_index(
            self.batch, self.batch * self.capacity, options.min_n, options.max_n, device
        )
        self._saved = self._index.tensor.clone()

    def load(self, workload: Workload) -> None:
        super().load(workload)
        self._index.reset(torch.arange(self.batch, dtype=torch.int32, device=self.device))
        lengths = self.lengths[0].clone()
        self._index.append(self.token_ids, lengths, match_policy=MATCHES[self.options.match])
        self._saved.copy_(self._index.tensor)

    def restore(self) -> None:
        super().restore()
        self._index.tensor.copy_(self._saved)

    def step(self, number: int) -> Any:
        return torch.ops.ngram_npu.ngram_index_step_(
            *self.arguments(number), self._index.tensor, None, self.workspace
        )


class Correction(GpuContestant):
    """The state between two forward passes; `semantics` compares all that was put right."""

    semantics = ("corrected",)
    is_drafter = False
    _COMPARED = ("num_computed_tokens", "num_accepted_tokens", "positions", "seq_lens",
                 "slot_mapping")  # fmt: skip

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        super().__init__(_only_sizes(workload), options, device)
        arrays = state(workload.size, options.k, steps=workload.steps)
        self.tensors: dict[str, Any] = {
            name: torch.from_numpy(array).to(device) for name, array in arrays.items()
        }
        self._start = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load(self, workload: Workload) -> None:
        """The same state whatever the rows hold."""

    def restore(self) -> None:
        for name, start in self._start.items():
            self.tensors[name].copy_(start)

    def drafts(self, result: Any) -> Drafts:
        return [self.tensors[name].tolist() for name in self._COMPARED]


class Fused(Correction):
    detail = "torch.ops.ngram_npu.correct_spec_state_"

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        super().__init__(workload, options, device)
        tensors = {**self.tensors, "row_indices": None}
        space = workspace("correct_spec_state_", self.batch, device)
        self._arguments = (*(tensors[name] for name in FUSED), *LAYOUT, space)

    def step(self, number: int) -> Any:
        return torch.ops.ngram_npu.correct_spec_state_(*self._arguments)


def _only_sizes(workload: Workload) -> Workload:
    """No rows: the correction reads none, and a long context's would be gigabytes."""
    empty = workload.token_ids[:, :0]
    size = Size(workload.size.batch, workload.size.context)
    return Workload(size, empty, workload.lengths, workload.sampled, workload.describes)


def workspace(op: str, batch: int, device: str) -> torch.Tensor:
    return torch.zeros(workspace_size(op, batch), dtype=torch.int32, device=device)


def make_index(num_slots: int, token_capacity: int, min_n: int, max_n: int, device: str) -> Any:
    """An empty index on the device, for whatever data: no step may find it full."""
    make = host_index if device == "cpu" else device_index
    return make(num_slots, token_capacity, min_n, max_n, device)


def host_index(num_slots: int, token_capacity: int, min_n: int, max_n: int, _: str) -> Any:
    return ngram_npu.NgramIndex(
        num_slots, token_capacity, min_n=min_n, max_n=max_n, kind="torch", any_data=True
    )


def device_index(num_slots: int, token_capacity: int, min_n: int, max_n: int, device: str) -> Any:
    return ngram_npu.DeviceNgramIndex(
        num_slots, token_capacity, min_n=min_n, max_n=max_n, device=device
    )
