"""Keeps the exact state on the device, which operators update without a read by the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ngram_npu.async_state.batch import ACCEPTANCE_UNIT, AsyncConfig, MergeConfig
from ngram_npu.async_state.device import Device
from ngram_npu.async_state.results import (
    NeuralDrafter,
    NeuralDrafts,
    PaddedDrafterBatch,
    RaggedDrafterBatch,
    StepOutputs,
)
from ngram_npu.async_state.upload import Upload
from ngram_npu.draft_costs import DraftCosts
from ngram_npu.ops import workspace_size
from ngram_npu.store import NgramStore


class PackedRow:
    """Row numbers in the tensor with the int32 arrays of a step, which precedes the input ids."""

    SCOPES, _, SLOTS, PREVIOUS_POSITIONS, NUM_COMPUTED = range(5)  # int64 scopes take two rows
    NUM_ACCEPTED, NUM_DRAFTS, CU_NUM_DRAFTS, PREVIOUS_NUM_DRAFTS = range(5, 9)
    QUERY_START_LOC, FREED_SLOTS, NUM_ROWS = range(9, 12)


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


@dataclass(frozen=True)
class BatchViews:
    """Slices of the buffers for B requests, cached because slicing takes host time."""

    slots: torch.Tensor
    num_accepted: torch.Tensor
    num_drafts: torch.Tensor
    cu_num_drafts: torch.Tensor
    query_start_loc: torch.Tensor
    num_computed: torch.Tensor
    discard: torch.Tensor
    seq_lens: torch.Tensor
    corrections: list[tuple[str, dict[str, Any]]]
    """Operators and arguments of the corrections."""


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
        self.upload = Upload(device, config, end + tokens)
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
        # Workspaces by which the thread blocks of a launch synchronise.
        self._workspaces = tuple(
            device.tensor((workspace_size(op, rows),), int32)
            for op in ("correct_spec_state_", "ngram_step_")
        )
        self._views: dict[int, BatchViews] = {}
        self._lookup_arguments = config.ngram.lookup_arguments
        self._costs = DraftCosts(config.ngram)
        self._costs.copy_tables(self.token_ids.device, self._copy_to_device)
        self.store = store
        if store is not None:
            if not isinstance(store, NgramStore):
                raise ValueError(
                    f"AsyncSpecState: store: expected an NgramStore, got {type(store).__name__}"
                )
            device_type = self.token_ids.device.type
            if store.device.partition(":")[0] != device_type:
                raise ValueError(
                    f"AsyncSpecState: store: expected a store on {device_type}, got one on "
                    f"{store.device}"
                )
            store.reserve_slots(rows)
            self.scopes = self.upload.fixed[: 2 * (rows + 1)].view(torch.int64)
            self._agreement = device.tensor((rows,), int32)

    def _copy_to_device(self, table: torch.Tensor) -> torch.Tensor:
        target = self._device.tensor(table.shape, table.dtype)
        self._device.copy(target, table, "main")
        return target

    def _get_packed_row(self, index: int, length: int) -> torch.Tensor:
        start = index * (self._config.max_rows + 1)
        return self.upload.fixed[start : start + length]

    def get_views(self, batch: int) -> BatchViews:
        views = self._views.get(batch)
        if views is None:
            views = self._views[batch] = BatchViews(
                slots=self._get_packed_row(PackedRow.SLOTS, batch),
                num_accepted=self._get_packed_row(PackedRow.NUM_ACCEPTED, batch),
                num_drafts=self._get_packed_row(PackedRow.NUM_DRAFTS, batch),
                cu_num_drafts=self._get_packed_row(PackedRow.CU_NUM_DRAFTS, batch),
                query_start_loc=self._get_packed_row(PackedRow.QUERY_START_LOC, batch + 1),
                num_computed=self._computed[:batch],
                discard=self.discard[:batch],
                seq_lens=self.seq_lens[:batch],
                corrections=self._make_corrections(batch),
            )
        return views

    def _make_corrections(self, batch: int) -> list[tuple[str, dict[str, Any]]]:
        config = self._config
        rank_arguments = {
            "cp_world": config.cp_world,
            "cp_rank": config.cp_rank,
            "cp_interleave": config.cp_interleave,
            "pad_id": config.pad_slot,
        }
        slots = self._get_packed_row(PackedRow.SLOTS, batch)
        query_start_loc = self._get_packed_row(PackedRow.QUERY_START_LOC, batch + 1)
        previous_positions = self._get_packed_row(PackedRow.PREVIOUS_POSITIONS, batch)
        correct_spec_state = {
            "num_computed_tokens": self._computed,
            "num_accepted_tokens": self._accepted,
            "positions": self.positions,
            "seq_lens": self.seq_lens,
            "discard": self.discard[:batch],
            "prev_positions": previous_positions,
            "num_sampled_prev": self._num_sampled,
            "num_draft_prev": self._previous_drafts,
            "host_num_computed_tokens": self._get_packed_row(PackedRow.NUM_COMPUTED, batch),
            "num_tokens": self.num_tokens,
            "workspace": self._workspaces[0],
        }
        corrections = []
        for i, group in enumerate(config.kv_groups):
            slot_mapping = {
                "query_start_loc": query_start_loc,
                "positions": self.positions,
                "block_table": self.block_tables[i],
                "slot_mapping": self.slot_mappings[i],
                "row_indices": slots,
                "block_size": group.block_size,
                "blocks_per_kv_block": group.blocks_per_kv_block,
                **rank_arguments,
            }
            # The first launch corrects the counts, and computes the slots of the first KV group.
            if i == 0:
                corrections.append(("correct_spec_state_", correct_spec_state | slot_mapping))
            else:
                corrections.append(("compute_slot_mapping_", slot_mapping))
        input_ids = {
            "input_ids": self.input_ids,
            "query_start_loc": query_start_loc,
            "prev_positions": previous_positions,
            "next_token_ids": self._next_token_ids,
            "draft_token_ids": self._draft_token_ids,
            "num_scheduled_drafts": self._get_packed_row(PackedRow.NUM_DRAFTS, batch),
            "pad_token": config.pad_token,
        }
        return [*corrections, ("prepare_input_ids_", input_ids)]

    def clear(self) -> None:
        """Empties the block tables and the store's slots."""
        self.upload.clear()
        if self.store is not None:
            self.store.begin_requests(slice(self._config.max_rows))

    def empty_slots(self, count: int) -> None:
        """Ends the texts of the first `count` uploaded slots, whose requests have left."""
        if count and self.store is not None:
            self.store.begin_requests(self._get_packed_row(PackedRow.FREED_SLOTS, count).long())

    def correct_counts(self, views: BatchViews) -> None:
        """Corrects the uploaded counts and completes the inputs of the forward pass.

        The arguments of the operators depend only on the batch size of the views.
        """
        for name, arguments in views.corrections:
            getattr(self._ops, name)(**arguments)
        if self.rope_positions is not None:
            torch.add(self.positions, self._rope_offsets, out=self.rope_positions)

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
            vocab_size=self._config.ngram.vocab_size_or_unlimited,
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
        num_step_tokens: int,
        next_token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> StepOutputs:
        """Appends the new tokens to the rows, drafts, and prepares a neural drafter's batch."""
        _, _, draft_token_ids, num_draft_tokens, match_len = self._ops.ngram_step_(
            self.token_ids,
            self.num_tokens,
            sampled,
            discard=views.discard,
            row_indices=views.slots,
            workspace=self._workspaces[1],
            **self._lookup_arguments,
        )
        agreement = None
        if self.store is not None:
            agreement = self._agreement[: sampled.shape[0]]
            self.store.append_and_propose(
                self.token_ids,
                self.num_tokens,
                num_sampled,
                row_indices=views.slots,
                scopes=self.scopes[: sampled.shape[0]],
                slot_indices=views.slots,
                max_new=self._config.ngram.k + 1,
                # The scheduler may have begun this step for a request that ended in the last one,
                # so the newest tokens are held back until the request's next step.
                hold_back=True,
                draft_token_ids=draft_token_ids,
                num_draft_tokens=num_draft_tokens,
                match_len=match_len,
                agreement=agreement,
                **self._config.ngram.limit_arguments,
            )
        self._costs.end_drafts(draft_token_ids, num_draft_tokens, match_len, agreement)
        costs = None
        if self._config.merge is not None:
            costs = self._costs.compute_costs(match_len, num_draft_tokens, agreement)
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
