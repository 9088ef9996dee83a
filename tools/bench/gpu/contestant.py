"""What is measured on a GPU: a step's work as calls of torch, without any decision of the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from tools.bench.contestant import Drafts
from tools.bench.data import Workload
from tools.bench.options import Options


class GpuContestant(ABC):
    """One way of doing the steps of a workload; the base holds the rows on the device.

    All data of all steps is on the device before; :meth:`step` is captured into a graph, so its
    arguments are tensors of fixed addresses. As in the harness for the CPU the rows hold the text
    that steps append already, and only lengths say how far a context goes.

    Attributes:
        name: short, the key in results.
        detail: what exactly it is, for the record.
        semantics: contestants with equal semantics must give the same; None: nothing to compare.
        is_drafter: whether what it gives are drafts, of which a share can be told.
        reads_tokens: whether no step can do without reading every live token.
    """

    name: str = ""
    detail: str = ""
    semantics: tuple[Any, ...] | None = None
    is_drafter: bool = True
    reads_tokens: bool = False

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        self.options = options
        self.device = device
        self.capacity = workload.capacity
        self.batch = workload.size.batch
        self.token_ids = torch.zeros(workload.token_ids.shape, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(workload.lengths.shape, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(workload.sampled.shape, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(self.batch, dtype=torch.int32, device=device)

    def load(self, workload: Workload) -> None:
        """Puts a workload of the same shape into its tensors."""
        self.token_ids.copy_(torch.from_numpy(workload.token_ids))
        self.lengths.copy_(torch.from_numpy(workload.lengths))
        self.sampled.copy_(torch.from_numpy(workload.sampled))

    def restore(self) -> None:
        """Back to before step 0; not timed."""
        self.num_tokens.copy_(self.lengths[0])

    @abstractmethod
    def step(self, number: int) -> Any:
        """The work of that step; steps come in order."""

    @abstractmethod
    def drafts(self, result: Any) -> Drafts:
        """What a result holds, to be compared: drafts, each without its unused slots."""


def by_count(ids: torch.Tensor, counts: torch.Tensor) -> Drafts:
    rows = zip(ids.cpu().numpy(), counts.cpu().numpy(), strict=True)
    return [np.asarray(row)[:count].tolist() for row, count in rows]
