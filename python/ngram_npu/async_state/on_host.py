"""Drafts that the host makes for the pipeline, in the order of the device's main stream."""

from __future__ import annotations

import numpy as np
import torch

from ngram_npu.async_state.batch import AsyncConfig
from ngram_npu.async_state.device import CpuDevice, Device
from ngram_npu.async_state.host_state import RowChanges
from ngram_npu.async_state.upload import Int64Array
from ngram_npu.host_drafting import HostDrafting, HostDrafts
from ngram_npu.store import NgramStore

LAG = 1
"""In steps. A request that ends in a step is in the next one too, for that has begun."""


class HostLookup:
    """An index and a store in host memory. A request's slot is its row of `HostDrafting`, so moves
    are not told."""

    def __init__(
        self,
        config: AsyncConfig,
        device: Device,
        torch_device: torch.device,
        store: NgramStore | None,
    ) -> None:
        lookup, rows, host = config.ngram, config.max_rows, CpuDevice()
        self.index = None
        if config.takes_index(on_cpu=True):
            self.index = host.index(lookup, rows, config.index_capacity)
        if store is None and lookup.store is not None:
            store = host.store(lookup, rows)
        self.store = store
        self._rows, self._most_sampled = rows, lookup.k + 1
        self._zeros = device.tensor((rows, 1 + self._most_sampled), torch.int32)
        self._drafting = HostDrafting(
            lookup,
            num_rows=rows,
            capacity=config.row_capacity,
            most_sampled=self._most_sampled,
            device=torch_device,
            lag=LAG,
            index=self.index,
            store=store,
            stream=device.jobs(),
            fill=False,
        )

    def announce(self, changes: RowChanges) -> None:
        """Requests that leave and join before the next lookup."""
        for slot in changes.freed.tolist():
            self._drafting.end(slot)
        of_slots = zip(
            changes.admitted.tolist(), changes.admissions, changes.token_ids, strict=True
        )
        for slot, admission, token_ids in of_slots:
            self._drafting.begin(slot, token_ids, scope=admission.scope, stop=admission.stop)

    def propose(
        self, slots: Int64Array, num_sampled: torch.Tensor, sampled: torch.Tensor
    ) -> HostDrafts:
        """Drafts for the requests in `slots` after num_sampled [B] of sampled [B,M]."""
        batch, width = sampled.shape
        unused = self._zeros[:batch, : self._most_sampled - width]
        told = torch.cat((num_sampled.view(-1, 1), sampled, unused), dim=1)
        return self._drafting.propose(slots.astype(np.int32), told)

    def clear(self) -> None:
        """Ends all requests."""
        for slot in range(self._rows):
            self._drafting.end(slot)
        self._drafting.propose(np.empty(0, np.int32), self._zeros[:0])
