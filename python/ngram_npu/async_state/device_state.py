"""Keeps the exact state on the device, which operators update without a read by the host."""

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
    """Row numbers in the tensor with the int32 arrays of a step, which precedes the input ids."""

    SCOPES, _, SLOTS, PREVIOUS_POSITIONS, NUM_COMPUTED = range(5)  # int64 scopes take two rows
    NUM_ACCEPTED, NUM_DRAFTS, CU_NUM_DRAFTS, PREVIOUS_NUM_DRAFTS = range(5, 9)
    QUERY_START_LOC, FREED_SLOTS, NUM_ROWS = range(9, 12)


def check_store(store: NgramStore | None, config: AsyncConfig, device: Device) -> None:
    """Raises ValueError if the device supports no store, or the passed store cannot be used."""
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
"""Steps between a request's end and its announcement: the next step has begun before."""


class HostLookup:
    """Lookups in host memory (``draft_on="host"``).

    The row of a request in :class:`HostDrafting` is its slot, so moves need no announcement.
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

    def announce_requests(self, changes: RowChanges) -> None:
        """Announces the requests that leave and enter before the next lookup."""
        for slot in changes.freed.tolist():
            self._drafting.end(slot)
        new_requests = zip(
            changes.admitted.tolist(), changes.admissions, changes.token_ids, strict=True
        )
        for slot, admission, token_ids in new_requests:
            self._drafting.begin(slot, token_ids, scope=admission.scope, stop=admission.stop)

    def propose(
        self, slots: Int64Array, num_sampled: torch.Tensor, sampled: torch.Tensor
    ) -> DeviceDrafts:
        """Appends the first num_sampled [B] tokens of sampled [B,M], and returns drafts."""
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
    """Slices of the buffers for B requests, cached because slicing takes host time."""

    slots: torch.Tensor
    previous_positions: torch.Tensor
    host_num_computed: torch.Tensor
    num_accepted: torch.Tensor
    num_drafts: torch.Tensor
    cu_num_drafts: torch.Tensor
    query_start_loc: torch.Tensor
    num_computed: torch.Tensor
    discard: torch.Tensor
    seq_lens: torch.Tensor


class DeviceState:
    """Owns the device tensors, and launches the operators on the main stream.

    The results of a step that the next step's corrections read (counts, newest tokens and drafts)
    have one set of buffers, so that a device graph can replay the corrections. One set suffices,
    because the main stream orders all accesses for step n as follows:

    1. begin_step waits for the downloads of step n-1, which read its results.
    2. The corrections (:meth:`correct_counts`) read the results of step n-1.
    3. end_step overwrites them with the results of step n, and starts their downloads.
    """

    def __init__(self, config: AsyncConfig, device: Device, store: NgramStore | None) -> None:
        rows, tokens, k = config.max_rows, config.max_step_tokens, config.ngram.k
        int32 = torch.int32
        self._config, self._device = config, device
        self._ops: Any = torch.ops.ngram_npu
        # These tensors are indexed by slot.
        num_packed = PackedRow.NUM_ROWS * (rows + 1)
        dims = config.position_dims if config.position_dims > 1 else 0
        end = num_packed + dims * tokens
        self.upload = make_upload(device, config, end + tokens)
        self.token_ids, self.num_tokens = self.upload.token_ids, self.upload.num_tokens
        self.block_tables = self.upload.block_tables
        # These tensors are indexed by batch position, or by token of the step.
        self._rope_offsets = self.upload.fixed[num_packed:end].view(-1, tokens)
        self.input_ids = self.upload.fixed[end:]
        self.query_start_loc = self._get_packed_row(PackedRow.QUERY_START_LOC, rows + 1)
        self._previous_drafts = self._get_packed_row(PackedRow.PREVIOUS_NUM_DRAFTS, rows)
        self._accepted = self._get_packed_row(PackedRow.NUM_ACCEPTED, rows)
        self._computed = device.tensor((rows,), int32)
        self.discard = device.tensor((rows,), torch.bool)
        self.seq_lens = device.tensor((rows,), int32)
        self.positions = device.tensor((tokens,), torch.int64)
        self.rope_positions = device.tensor((dims, tokens), torch.int64) if dims else None
        slot_dtype = getattr(torch, config.slot_dtype)
        self.slot_mappings = tuple(device.tensor((tokens,), slot_dtype) for _ in config.kv_groups)
        # The results of the last step; in the first step, no previous position refers to a result.
        # All rows are arguments of the corrections, whatever the last batch size was.
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
        # Workspaces by which the thread blocks of a launch synchronise; zero between launches.
        self._workspaces = tuple(
            device.tensor((workspace_size(op, rows),), int32)
            for op in ("correct_spec_state_", "ngram_step_")
        )
        self._views: dict[int, BatchViews] = {}
        self._vocab_size = lookup.vocab_size_or_unlimited
        if self.host is None and store is None and lookup.store is not None:
            store = make_store(lookup, rows, kind="torch")

        def copy_to_device(table: torch.Tensor) -> torch.Tensor:
            target = device.tensor(table.shape, table.dtype)
            device.copy(target, table, "main")
            return target

        # With lookups on the host, the operator on the device only appends the sampled tokens.
        append_settings = NgramConfig(k=1, vocab_size=lookup.vocab_size)
        self._drafting = Drafting(
            lookup if self.host is None else append_settings,
            kind="torch",
            index=index,
            store=store,
            workspace=self._workspaces[1],
            copy_to_device=copy_to_device,
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
                self._match_costs = copy_to_device(torch.from_numpy(table))
        if store is not None:
            self.scopes = self.upload.fixed[: 2 * (rows + 1)].view(torch.int64)

    @property
    def index(self) -> NgramIndex | None:
        return self._drafting.index if self.host is None else self.host.index

    @property
    def store(self) -> NgramStore | None:
        return self._drafting.store if self.host is None else self.host.store

    def _get_packed_row(self, index: int, length: int) -> torch.Tensor:
        start = index * (self._config.max_rows + 1)
        return self.upload.fixed[start : start + length]

    def get_views(self, batch: int) -> BatchViews:
        views = self._views.get(batch)
        if views is None:
            views = self._views[batch] = BatchViews(
                slots=self._get_packed_row(PackedRow.SLOTS, batch),
                previous_positions=self._get_packed_row(PackedRow.PREVIOUS_POSITIONS, batch),
                host_num_computed=self._get_packed_row(PackedRow.NUM_COMPUTED, batch),
                num_accepted=self._get_packed_row(PackedRow.NUM_ACCEPTED, batch),
                num_drafts=self._get_packed_row(PackedRow.NUM_DRAFTS, batch),
                cu_num_drafts=self._get_packed_row(PackedRow.CU_NUM_DRAFTS, batch),
                query_start_loc=self._get_packed_row(PackedRow.QUERY_START_LOC, batch + 1),
                num_computed=self._computed[:batch],
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
            device.copy(self._get_packed_row(PackedRow.FREED_SLOTS, rows), slots, "main")
            self.empty_slots(rows)

    def empty_slots(self, count: int) -> None:
        """Empties the first `count` uploaded slots, whose requests have left; not the store."""
        if count and self.host is None and (self.index is not None or self.store is not None):
            self._drafting.end(self._get_packed_row(PackedRow.FREED_SLOTS, count))

    def correct_counts(self, views: BatchViews) -> None:
        """Corrects the uploaded counts and completes the inputs of the forward pass.

        The arguments of the operators depend only on the batch size of the views.
        """
        config = self._config
        rank_arguments = {
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
            prev_positions=views.previous_positions,
            num_sampled_prev=self._num_sampled,
            num_draft_prev=self._previous_drafts,
            host_num_computed_tokens=views.host_num_computed,
            query_start_loc=views.query_start_loc,
            num_tokens=self.num_tokens,
            block_table=self.block_tables[0],
            row_indices=views.slots,
            block_size=first.block_size,
            blocks_per_kv_block=first.blocks_per_kv_block,
            workspace=self._workspaces[0],
            **rank_arguments,
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
                **rank_arguments,
            )
        if self.rope_positions is not None:
            torch.add(self.positions, self._rope_offsets, out=self.rope_positions)
        self._ops.prepare_input_ids_(
            self.input_ids,
            query_start_loc=views.query_start_loc,
            prev_positions=views.previous_positions,
            next_token_ids=self._next_token_ids,
            draft_token_ids=self._draft_token_ids,
            num_scheduled_drafts=views.num_drafts,
            pad_token=config.pad_token,
        )

    def accept_tokens(
        self, sampled: torch.Tensor, views: BatchViews
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the newest token and the number of new tokens of each request.

        This method runs before the slower lookup, because the host needs only these results.
        """
        results = self._ops.prepare_next_token_ids(
            sampled,
            discard=views.discard,
            token_ids=self.token_ids,
            num_tokens=self.num_tokens,
            row_indices=views.slots,
            vocab_size=self._vocab_size,
        )
        batch = sampled.shape[0]
        next_token_ids, num_sampled = self._next_token_ids[:batch], self._num_sampled[:batch]
        self._device.copy(next_token_ids, results[0], "main")
        self._device.copy(num_sampled, results[1], "main")
        return next_token_ids, num_sampled

    def store_drafts(self, outputs: StepOutputs) -> StepOutputs:
        """Copies the drafts to the buffer that the next step reads."""
        drafts = self._draft_token_ids[: outputs.draft_token_ids.shape[0]]
        self._device.copy(drafts, outputs.draft_token_ids, "main")
        return replace(outputs, draft_token_ids=drafts)

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
            views.cu_num_drafts, num_sampled, views.query_start_loc
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
            num_scheduled_drafts=views.num_drafts,
            neural_acceptance=self.upload.acceptance,
            min_match_len=merge.min_match_len,
            threshold=int(merge.min_accepted * ACCEPTANCE_UNIT),
            extend=merge.extend,
        )
        return replace(
            outputs,
            draft_token_ids=draft_token_ids,
            num_draft_tokens=num_draft_tokens,
            draft_source=draft_source,
        )
