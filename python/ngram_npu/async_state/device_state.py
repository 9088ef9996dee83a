"""The exact state on the device, and the operators that update it without a host read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ngram_npu.async_state.batch import ACCEPTANCE_UNIT, AsyncConfig, MergeConfig
from ngram_npu.async_state.device import CpuDevice, Device
from ngram_npu.async_state.host_state import RowChanges
from ngram_npu.async_state.results import (
    NeuralDrafter,
    NeuralDrafts,
    PaddedDrafterBatch,
    RaggedDrafterBatch,
    StepOutputs,
)
from ngram_npu.async_state.upload import Int64Array, make_upload
from ngram_npu.config import NgramConfig, default_match_costs
from ngram_npu.drafting import Drafting
from ngram_npu.host_drafting import DeviceDrafts, HostDrafting
from ngram_npu.index import NgramIndex, make_index
from ngram_npu.ops import workspace_size
from ngram_npu.store import NgramStore, make_store


class PackedRow:
    """Rows of the tensor with a step's int32 arrays, which precedes the input ids."""

    SCOPES, _, SLOTS, PREVIOUS, COMPUTED, ACCEPTED = range(6)  # the int64 scopes take two rows
    DRAFTS, CU_DRAFTS, PREVIOUS_DRAFTS, QUERY_START, FREED, COUNT = range(6, 12)


def check_store(store: NgramStore | None, config: AsyncConfig, device: Device) -> None:
    """Raises ValueError if the device cannot use a store, or the state not the one passed to it."""
    has_store = store is not None or config.ngram.store is not None
    if has_store and config.draft_on == "device" and not isinstance(device, CpuDevice):
        raise ValueError(
            "AsyncSpecState: store: expected None with draft_on='device' on a device other than "
            "the CPU; use draft_on='host'"
        )
    if store is None:
        return
    if config.ngram.min_draft_probability is None:
        raise ValueError("AsyncSpecState: store: expected None without min_draft_probability")
    if store.kind != "torch":
        raise ValueError(f"AsyncSpecState: store: expected kind='torch', got kind={store.kind!r}")


def check_sampled(sampled: torch.Tensor, batch: int, width: int, device: torch.device) -> None:
    """Raises ValueError if an operator of end_step would reject the sampled tokens."""
    if (
        not isinstance(sampled, torch.Tensor)
        or sampled.layout != torch.strided
        or sampled.ndim != 2
        or sampled.shape[0] != batch
        or not 1 <= sampled.shape[1] <= width
        or sampled.dtype != torch.int32
        or sampled.device != device
        or (sampled.shape[1] > 1 and sampled.stride(1) != 1)
    ):
        got = type(sampled).__name__
        if isinstance(sampled, torch.Tensor):
            got = f"{sampled.dtype} {list(sampled.shape)} on {sampled.device}"
        raise ValueError(
            f"end_step: sampled_token_ids: expected int32 [{batch}, 1 to {width}] with "
            f"contiguous rows on {device}, got {got}"
        )


def check_drafter(draft: NeuralDrafter | None, merge: MergeConfig | None) -> None:
    """Raises ValueError unless a drafter is passed exactly if ``AsyncConfig.merge`` is set."""
    if (draft is not None) != (merge is not None):
        expected = "None without AsyncConfig.merge" if merge is None else "a neural drafter"
        raise ValueError(f"end_step: draft: expected {expected}, got {draft!r}")
    if draft is not None and not callable(draft):
        raise ValueError(f"end_step: draft: expected a callable, got {type(draft).__name__}")


LAG = 1
"""Steps between the end of a request and its announcement, because the next step has begun."""


class HostLookup:
    """Lookups in host memory (``draft_on="host"``).

    The slot of a request is its row in :class:`HostDrafting`, so moves need no announcement.
    """

    def __init__(
        self,
        config: AsyncConfig,
        device: Device,
        torch_device: torch.device,
        store: NgramStore | None,
    ) -> None:
        lookup, rows = config.ngram, config.max_rows
        self.index = None
        if config.uses_index(on_cpu=True):
            self.index = make_index(lookup, rows, config.index_capacity, kind="torch")
        if store is None and lookup.store is not None:
            store = make_store(lookup, rows, kind="torch")
        self.store = store
        self._num_rows, self._max_sampled = rows, lookup.k + 1
        self._zeros = device.tensor((rows, 1 + self._max_sampled), torch.int32)
        self._drafting = HostDrafting(
            lookup,
            num_rows=rows,
            capacity=config.row_capacity,
            max_sampled=self._max_sampled,
            device=torch_device,
            lag=LAG,
            index=self.index,
            store=store,
            stream=device.host_function_stream(),
            fill=False,
        )

    def announce(self, changes: RowChanges) -> None:
        """Announces the requests that leave and join before the next lookup."""
        for slot in changes.freed.tolist():
            self._drafting.end(slot)
        joined = zip(changes.admitted.tolist(), changes.admissions, changes.token_ids, strict=True)
        for slot, admission, token_ids in joined:
            self._drafting.begin(slot, token_ids, scope=admission.scope, stop=admission.stop)

    def propose(
        self, slots: Int64Array, num_sampled: torch.Tensor, sampled: torch.Tensor
    ) -> DeviceDrafts:
        """Returns drafts that follow the first num_sampled [B] tokens of sampled [B,M]."""
        batch, width = sampled.shape
        unused = self._zeros[:batch, : self._max_sampled - width]
        counts_and_tokens = torch.cat((num_sampled.view(-1, 1), sampled, unused), dim=1)
        return self._drafting.propose(slots.astype(np.int32), counts_and_tokens)

    def clear(self) -> None:
        """Ends all requests."""
        for slot in range(self._num_rows):
            self._drafting.end(slot)
        self._drafting.propose(np.empty(0, np.int32), self._zeros[:0])


@dataclass(frozen=True)
class BatchViews:
    """Buffers sliced to B requests. They are cached per B, because slicing takes host time."""

    slots: torch.Tensor
    previous: torch.Tensor
    host_computed: torch.Tensor
    accepted: torch.Tensor
    drafts: torch.Tensor
    cu_drafts: torch.Tensor
    query_start_loc: torch.Tensor
    computed: torch.Tensor
    discard: torch.Tensor
    seq_lens: torch.Tensor


class DeviceState:
    """The device tensors, and the launches on the main stream in the order of the calls."""

    def __init__(self, config: AsyncConfig, device: Device, store: NgramStore | None) -> None:
        rows, tokens, k = config.max_rows, config.max_step_tokens, config.ngram.k
        int32 = torch.int32
        self._config = config
        self._ops: Any = torch.ops.ngram_npu
        # Indexed by slot.
        num_packed = PackedRow.COUNT * (rows + 1)
        self.upload = make_upload(device, config, num_packed + tokens)
        self.token_ids, self.num_tokens = self.upload.token_ids, self.upload.num_tokens
        self.block_tables = self.upload.block_tables
        # Indexed by batch position, or by token of the step.
        self.input_ids = self.upload.fixed[num_packed:]
        self.query_start_loc = self._packed_row(PackedRow.QUERY_START, rows + 1)
        self._previous_drafts = self._packed_row(PackedRow.PREVIOUS_DRAFTS, rows)
        self._accepted = self._packed_row(PackedRow.ACCEPTED, rows)
        self._computed = device.tensor((rows,), int32)
        self.discard = device.tensor((rows,), torch.bool)
        self.seq_lens = device.tensor((rows,), int32)
        self.positions = device.tensor((tokens,), torch.int64)
        slot_dtype = getattr(torch, config.slot_dtype)
        self.slot_mappings = tuple(device.tensor((tokens,), slot_dtype) for _ in config.kv_groups)
        # Results of the last step. In the first step, no previous position refers to them.
        self._num_sampled = device.tensor((rows,), int32)
        self._next_token_ids = device.tensor((rows,), int32)
        self._draft_token_ids = device.tensor((rows, k), int32)
        lookup = config.ngram
        on_cpu = isinstance(device, CpuDevice)
        has_store = store is not None or lookup.store is not None
        index = None
        self.host: HostLookup | None = None
        if config.drafts_on_host(on_cpu=on_cpu, has_store=has_store):
            self.host = HostLookup(config, device, self.token_ids.device, store)
            store = None
        elif config.uses_index(on_cpu=on_cpu):
            index = device.index(lookup, rows, config.index_capacity)
        # Workspaces for the synchronisation of a launch's thread blocks; zero between launches.
        self._workspaces = tuple(
            device.tensor((workspace_size(op, rows),), int32)
            for op in ("correct_spec_state_", "ngram_step_")
        )
        self._views: dict[int, BatchViews] = {}
        self._vocab_size = lookup.vocab_size_or_unlimited
        if self.host is None and store is None and lookup.store is not None:
            store = make_store(lookup, rows, kind="torch")

        def on_device(table: torch.Tensor) -> torch.Tensor:
            placed = device.tensor(table.shape, table.dtype)
            device.copy(placed, table, "main")
            return placed

        # With lookups on the host, the operator on the device only appends the sampled tokens.
        append_only = NgramConfig(k=1, vocab_size=lookup.vocab_size)
        self._drafting = Drafting(
            lookup if self.host is None else append_only,
            kind="torch",
            index=index,
            store=store,
            workspace=self._workspaces[1],
            place=on_device,
        )
        self._draft_costs: torch.Tensor | None = None
        self._returns_costs = has_store or (
            lookup.cost_limit is not None and config.merge is not None
        )
        if self._returns_costs and self.host is None:
            self._draft_costs = device.tensor((rows, k), torch.uint8)
        if config.merge is not None:
            self._match_costs: torch.Tensor | None = None
            if not self._returns_costs:
                costs = config.merge.match_costs
                table = np.array(default_match_costs() if costs is None else costs, np.uint8)
                self._match_costs = on_device(torch.from_numpy(table))
        if store is not None:
            self.scopes = self.upload.fixed[: 2 * (rows + 1)].view(torch.int64)

    @property
    def index(self) -> NgramIndex | None:
        return self._drafting.index if self.host is None else self.host.index

    @property
    def store(self) -> NgramStore | None:
        return self._drafting.store if self.host is None else self.host.store

    def _packed_row(self, index: int, length: int) -> torch.Tensor:
        start = index * (self._config.max_rows + 1)
        return self.upload.fixed[start : start + length]

    def views(self, batch: int) -> BatchViews:
        views = self._views.get(batch)
        if views is None:
            views = self._views[batch] = BatchViews(
                slots=self._packed_row(PackedRow.SLOTS, batch),
                previous=self._packed_row(PackedRow.PREVIOUS, batch),
                host_computed=self._packed_row(PackedRow.COMPUTED, batch),
                accepted=self._packed_row(PackedRow.ACCEPTED, batch),
                drafts=self._packed_row(PackedRow.DRAFTS, batch),
                cu_drafts=self._packed_row(PackedRow.CU_DRAFTS, batch),
                query_start_loc=self._packed_row(PackedRow.QUERY_START, batch + 1),
                computed=self._computed[:batch],
                discard=self.discard[:batch],
                seq_lens=self.seq_lens[:batch],
            )
        return views

    def clear(self, device: Device) -> None:
        """Zeroes the workspaces, and empties the block tables and the index."""
        self.upload.clear()
        for workspace in self._workspaces:
            device.copy(workspace, device.host_tensor(workspace.shape, torch.int32), "main")
        if self.host is not None:
            self.host.clear()
        elif self.index is not None:
            rows = self._config.max_rows
            slots = device.host_tensor((rows,), torch.int32)
            slots.copy_(torch.arange(rows, device="cpu"))
            device.copy(self._packed_row(PackedRow.FREED, rows), slots, "main")
            self.empty_slots(rows)

    def empty_slots(self, count: int) -> None:
        """Empties the first `count` uploaded index slots, those of requests that have left.

        The store keeps the text of these requests.
        """
        if count and self.host is None and (self.index is not None or self.store is not None):
            self._drafting.end(self._packed_row(PackedRow.FREED, count))

    def correct(self, views: BatchViews) -> None:
        """Corrects the uploaded counts and completes the inputs of the forward pass."""
        config = self._config
        placement = {
            "cp_world": config.cp_world,
            "cp_rank": config.cp_rank,
            "cp_interleave": config.cp_interleave,
            "pad_id": config.pad_slot,
        }
        first, *others = config.kv_groups
        self._ops.correct_spec_state_(
            num_computed_tokens=self._computed,
            num_accepted_tokens=self._accepted,
            positions=self.positions,
            seq_lens=self.seq_lens,
            slot_mapping=self.slot_mappings[0],
            discard=views.discard,
            prev_positions=views.previous,
            num_sampled_prev=self._num_sampled,
            num_draft_prev=self._previous_drafts,
            host_num_computed_tokens=views.host_computed,
            query_start_loc=views.query_start_loc,
            num_tokens=self.num_tokens,
            block_table=self.block_tables[0],
            row_indices=views.slots,
            block_size=first.block_size,
            blocks_per_kv_block=first.blocks_per_kv_block,
            workspace=self._workspaces[0],
            **placement,
        )
        for i, group in enumerate(others, 1):
            self._ops.compute_slot_mapping_(
                views.query_start_loc,
                self.positions,
                self.block_tables[i],
                self.slot_mappings[i],
                row_indices=views.slots,
                block_size=group.block_size,
                blocks_per_kv_block=group.blocks_per_kv_block,
                **placement,
            )
        self._ops.prepare_input_ids_(
            self.input_ids,
            query_start_loc=views.query_start_loc,
            prev_positions=views.previous,
            next_token_ids=self._next_token_ids,
            draft_token_ids=self._draft_token_ids,
            num_scheduled_drafts=views.drafts,
            pad_token=config.pad_token,
        )

    def accept(self, sampled: torch.Tensor, views: BatchViews) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the newest token and the number of new tokens of each request.

        This runs before the slower lookup, because the host state needs only these results.
        """
        next_token_ids, num_sampled = self._ops.prepare_next_token_ids(
            sampled,
            discard=views.discard,
            token_ids=self.token_ids,
            num_tokens=self.num_tokens,
            row_indices=views.slots,
            vocab_size=self._vocab_size,
        )
        return next_token_ids, num_sampled

    def propose(
        self,
        sampled: torch.Tensor,
        views: BatchViews,
        slots: Int64Array,
        num_step_tokens: int,
        next_token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> StepOutputs:
        """Appends the new tokens to the rows, drafts, and prepares a neural drafter's batch."""
        batch = sampled.shape[0]
        costs = None if self._draft_costs is None else self._draft_costs[:batch]
        _, _, draft_token_ids, num_draft_tokens, match_len = self._drafting.step(
            self.token_ids,
            self.num_tokens,
            sampled,
            discard=views.discard,
            row_indices=views.slots,
            slot_indices=views.slots,
            scopes=None if self._drafting.store is None else self.scopes[:batch],
            k=None if self.host is None else 0,
            draft_costs=costs,
        )
        if self.host is not None:
            drafts = self.host.propose(slots, num_sampled, sampled)
            draft_token_ids = drafts.draft_token_ids.int()
            num_draft_tokens, match_len = drafts.num_draft_tokens, drafts.match_len
            costs = drafts.draft_costs if self._returns_costs else None
        indices, num_rejected = self._ops.prepare_inputs_padded(
            views.cu_drafts, num_sampled, views.query_start_loc
        )
        drafter_batch: PaddedDrafterBatch | RaggedDrafterBatch
        if self._config.disable_padded_drafter_batch:
            drafter_batch = RaggedDrafterBatch(
                *self._ops.prepare_inputs(
                    views.query_start_loc,
                    views.seq_lens,
                    num_rejected,
                    total_tokens=num_step_tokens,
                )
            )
        else:
            drafter_batch = PaddedDrafterBatch(indices, num_rejected)
        self._num_sampled, self._next_token_ids = num_sampled, next_token_ids
        self._draft_token_ids = draft_token_ids
        return StepOutputs(
            next_token_ids,
            num_sampled,
            draft_token_ids,
            num_draft_tokens,
            match_len,
            drafter_batch,
            draft_costs=costs,
        )

    def merge(self, outputs: StepOutputs, neural: NeuralDrafts, views: BatchViews) -> StepOutputs:
        """Chooses between n-gram drafts and neural drafts for each request."""
        merge = self._config.merge
        assert merge is not None
        if not isinstance(neural, NeuralDrafts):
            raise ValueError(f"draft: expected NeuralDrafts, got {type(neural).__name__}")
        tokens = neural.token_ids
        draft_token_ids, num_draft_tokens, draft_source = self._ops.merge_drafts_(
            tokens if tokens.dtype == torch.int32 else tokens.int(),
            outputs.draft_token_ids,
            outputs.num_draft_tokens,
            outputs.match_len,
            num_neural_draft_tokens=neural.num_tokens,
            draft_costs=outputs.draft_costs,
            neural_draft_costs=neural.costs,
            match_costs=self._match_costs,
            row_indices=views.slots,
            num_sampled=outputs.num_sampled,
            num_scheduled_drafts=views.drafts,
            neural_acceptance=self.upload.acceptance,
            min_match_len=merge.min_match_len,
            threshold=int(merge.min_accepted * ACCEPTANCE_UNIT),
            extend=merge.extend,
        )
        self._draft_token_ids = draft_token_ids
        return replace(
            outputs,
            draft_token_ids=draft_token_ids,
            num_draft_tokens=num_draft_tokens,
            draft_source=draft_source,
        )
