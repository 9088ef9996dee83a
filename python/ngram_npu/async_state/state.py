"""Runs asynchronous steps: the host schedules with upper bounds, which the device corrects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from ngram_npu.async_state.batch import Admission, AsyncConfig, Batch, check_sequence, check_types
from ngram_npu.async_state.blocks import BlockChanges, BlockTable, check_block_ids
from ngram_npu.async_state.device import Device, Download, make_device
from ngram_npu.async_state.device_state import (
    DeviceState,
    PackedRow,
    check_drafter,
    check_sampled,
)
from ngram_npu.async_state.host_state import HostState, RowChanges, Step, is_integer
from ngram_npu.async_state.results import (
    HostDrafts,
    NeuralDrafter,
    Reconciled,
    StepInputs,
    StepOutputs,
)
from ngram_npu.async_state.rope import RopeOffsets
from ngram_npu.async_state.upload import NO_ROWS, Int32Array, Rows
from ngram_npu.store import NgramStore


class _Plan(NamedTuple):
    """All changes of a batch, computed before any of them is applied."""

    changes: RowChanges
    step: Step
    block_changes: list[BlockChanges]
    rope_offsets: list[Int32Array]
    rows: Rows
    """Chunks of the admitted requests' tokens and blocks."""


class AsyncSpecState:
    """Keeps the state of speculative decoding between steps, on the device and on the host.

    The runner calls, for each step n::

        inputs = state.begin_step(batch)      # before the forward pass
        ...                                   # forward pass, rejection sampling
        outputs = state.end_step(sampled)     # drafts of step n+1, on the device
        result = state.reconcile()            # of step n or n-1, at any time

    Neither begin_step nor end_step waits for the device or reads from it. The host may run one step
    ahead: step n must be reconciled before step n+2 begins. Until then, the host assumes that all
    drafts of step n are accepted. The device knows the exact counts and corrects these upper bounds
    (``correct_spec_state_``).

    Requests are in rows 0 to R-1 of the runner's numbering. Internally, each request keeps one slot
    (`StepInputs.slot_indices`), so that moving rows copies no data. The class is not thread-safe.
    Work on the device is enqueued on the current stream, downloads on a separate stream.

    With pipeline parallelism, each stage has an AsyncSpecState and calls its methods in the same
    order with the same batches. Only the last stage samples; the other stages pass the tokens that
    they receive from it to end_step (docs/guides/own-runner.md#pipeline-parallelism).

    If a device call or a wait for the device fails (for example out of memory), host and device may
    be inconsistent. Until :meth:`rebuild`, every method raises RuntimeError with that error as its
    cause, and the counts on the host are None.
    """

    def __init__(
        self,
        config: AsyncConfig,
        device: str | torch.device = "cpu",
        *,
        runtime: Device | None = None,
        store: NgramStore | None = None,
    ) -> None:
        """Allocates all memory.

        Args:
            device: cpu, cuda or npu.
            runtime: Implementation of memory, copies and streams (default: the implementation for
                ``device``).
            store: A store on the device, from which requests also draft. Its first ``max_rows``
                slots are used.

        Raises:
            ValueError: The device is not cpu, cuda or npu, or its backend cannot run; or `store` is
                not a store on the device.
        """
        self.config = config
        self._device = make_device(device) if runtime is None else runtime
        self._device_state = DeviceState(config, self._device, store)
        rows, k = config.max_rows, config.ngram.k
        self._host_state, self._block_tables, self._rope = self._make_host_state()
        self._packed = np.zeros((PackedRow.NUM_ROWS, rows + 1), np.int32)
        self._scopes = self._packed[PackedRow.SCOPES : PackedRow.SLOTS].reshape(-1).view(np.int64)
        # The counts of step n are read before step n+2 begins, so two buffers suffice. The drafts
        # of step n are read until step n+3 begins, so drafts need three buffers.
        self._count_downloads = [Download(self._device, (rows, rows * (k + 1))) for _ in range(2)]
        sizes = (rows, rows * k) if config.merge is None else (rows, rows * k, rows)
        self._draft_downloads = [Download(self._device, sizes) for _ in range(3)]
        self._step_count = 0
        self._begun_step: Step | None = None
        self._pending_steps: list[Step] = []
        self._last_step: Step | None = None
        self._failure: BaseException | None = None

    def _make_host_state(self) -> tuple[HostState, list[BlockTable], RopeOffsets]:
        config = self.config
        host_state = HostState(config)
        first = self._device_state.upload.first_blocks
        tables = [BlockTable(config, i, first[i]) for i in range(len(first))]
        return host_state, tables, RopeOffsets(config)

    # The exact state on the device, indexed by slot, for use in work on the main stream:

    @property
    def token_ids(self) -> torch.Tensor:
        """[R,S] int32 on the device: all tokens of each request."""
        return self._device_state.token_ids

    @property
    def num_tokens_on_device(self) -> torch.Tensor:
        """[R] int32 on the device: number of tokens of each request."""
        return self._device_state.num_tokens

    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]:
        """[R,NB] int32 on the device for each KV group, -1 where unused. The row stride may exceed
        NB."""
        return self._device_state.block_tables

    @property
    def store(self) -> NgramStore | None:
        """The store that the requests share, if any."""
        return self._device_state.store

    # The state on the host:

    @property
    def is_exact(self) -> bool:
        """Whether every step is reconciled, and no device call has failed."""
        return self._begun_step is None and not self._pending_steps and not self._has_failed

    @property
    def num_computed_tokens(self) -> Int32Array | None:
        """[R], indexed by row, 0 in free rows; None unless :attr:`is_exact`."""
        return self.upper_num_computed_tokens if self.is_exact else None

    @property
    def num_tokens(self) -> Int32Array | None:
        """[R], indexed by row, 0 in free rows; None unless :attr:`is_exact`."""
        return self.upper_num_tokens if self.is_exact else None

    @property
    def upper_num_computed_tokens(self) -> Int32Array | None:
        """[R], indexed by row: upper bounds with all drafts in flight. None after a failed device
        call."""
        upper = self._host_state.upper_computed
        return None if self._has_failed else self._host_state.copy_by_row(upper)

    @property
    def upper_num_tokens(self) -> Int32Array | None:
        """[R], indexed by row: upper bounds. None after a failed device call."""
        upper = self._host_state.upper_tokens
        return None if self._has_failed else self._host_state.copy_by_row(upper)

    def known_token_ids(self, row: int) -> Int32Array | None:
        """Returns a copy of a row's tokens, or None while a step is not reconciled.

        Raises:
            ValueError: The row is free or out of range.
            RuntimeError: A device call has failed.
        """
        self._require_usable("known_token_ids")
        if not is_integer(row) or not 0 <= row < self.config.max_rows:
            raise ValueError(
                f"known_token_ids: row: expected 0 to {self.config.max_rows - 1}, got {row!r}"
            )
        slot = int(self._host_state.slot_of[row])
        if slot < 0:
            raise ValueError(f"known_token_ids: row: expected a live row, got {row}")
        if not self.is_exact:
            return None
        return np.array(self._host_state.token_ids[slot, : self._host_state.exact_tokens[slot]])

    @property
    def _has_failed(self) -> bool:
        return self._failure is not None

    def _require_usable(self, method: str) -> None:
        if self._has_failed:
            raise RuntimeError(
                f"{method}: a device call has failed, so host and device may be inconsistent; call "
                "rebuild with all live requests"
            ) from self._failure

    @contextmanager
    def _record_failure(self) -> Iterator[None]:
        """Makes the state unusable if a change of host and device fails half-way."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            raise

    # Steps.

    def begin_step(self, batch: Batch, *, correct: bool = True) -> StepInputs:
        """Prepares the inputs of one forward pass on the device.

        Args:
            batch: The step. The arrays are only read, and may be reused after the call.
            correct: Whether the corrections are launched. Otherwise the runner must launch them
                before the forward pass: with :meth:`correct_inputs`, or by replaying a device graph
                that contains them.

        Raises:
            ValueError: The batch is inconsistent, contradicts the state of its requests, or a
                request has too few blocks for its tokens and drafts. Nothing has changed.
            RuntimeError: The last step has not ended, the step before it is not reconciled, or a
                device call has failed.
        """
        self._require_usable("begin_step")
        if self._begun_step is not None:
            raise RuntimeError("begin_step: end_step has not been called for the last step")
        if len(self._pending_steps) > 1:
            raise RuntimeError(
                f"begin_step: step {self._pending_steps[0].number} must be reconciled first"
            )
        host = self._host_state, self._block_tables, self._rope
        plan = self._plan("begin_step", batch, self._step_count, *host)
        changes, step, device_state = plan.changes, plan.step, self._device_state
        with self._record_failure():
            if self._last_step is not None:
                # The last step's results may be in buffers of the runner or of a device graph. This
                # step may overwrite them only after they have been copied to the host.
                self._device.wait("main", self._draft_downloads[self._last_step.number % 3].event)
            self._commit(plan)
            if not correct:
                self._pad_inputs(len(step.rows))
            self._upload(plan, self._pack_inputs(changes, step))
            device_state.empty_slots(len(changes.freed))
            views = device_state.get_views(len(step.rows))
            if correct:
                device_state.correct_counts(views)
            self._begun_step = step
            self._step_count += 1
        ends = step.query_start_loc[1:]
        upper_seq_lens = step.host_num_computed + step.num_scheduled_tokens
        return StepInputs(
            num_step_tokens=step.num_step_tokens,
            input_ids=device_state.input_ids,
            positions=device_state.positions,
            rope_positions=device_state.rope_positions,
            slot_mappings=device_state.slot_mappings,
            query_start_loc=device_state.query_start_loc,
            seq_lens=device_state.seq_lens,
            num_computed_tokens=views.num_computed,
            num_accepted_tokens=views.num_accepted,
            discard=views.discard,
            slot_indices=views.slots,
            num_scheduled_drafts=views.num_drafts,
            cu_num_scheduled_drafts=views.cu_num_drafts,
            draft_spans=np.array((ends - step.num_scheduled_drafts, ends)).T,
            upper_seq_lens=upper_seq_lens,
            max_seq_len=int(upper_seq_lens.max(initial=0)),
        )

    def correct_inputs(self, num_requests: int) -> None:
        """Launches the corrections of a step that has begun with ``correct=False``.

        The launches depend only on `num_requests`, read and write only tensors that this object
        owns, and allocate nothing. A device graph may therefore contain them, followed by the
        forward pass. Each step must run them exactly once. To warm up or capture a graph, call the
        method before the first request enters.

        Args:
            num_requests: The step's number of requests or more, up to `max_rows`. The additional
                requests have no tokens.

        Raises:
            ValueError: `num_requests` is out of range.
            RuntimeError: A device call has failed.
        """
        self._require_usable("correct_inputs")
        if not is_integer(num_requests) or not 0 <= num_requests <= self.config.max_rows:
            raise ValueError(
                f"correct_inputs: num_requests: expected 0 to {self.config.max_rows}, "
                f"got {num_requests!r}"
            )
        with self._record_failure():
            self._device_state.correct_counts(self._device_state.get_views(num_requests))

    def _plan(
        self,
        method: str,
        batch: Batch,
        number: int,
        host_state: HostState,
        tables: list[BlockTable],
        rope: RopeOffsets,
    ) -> _Plan:
        """Returns the batch's changes to the host state; changes nothing."""
        try:
            check_types(batch, len(tables))
            changes = host_state.plan_rows(batch)
            step = host_state.plan_step(batch, changes, number)
            block_changes = [table.plan(batch, changes, step) for table in tables]
            rows, rope_offsets = NO_ROWS, []
            if changes.admissions:
                tokens = changes.token_ids, np.zeros(len(changes.admissions), np.int64)
                blocks = [table.admitted for table in block_changes]
                rows = self._device_state.upload.pack_rows(changes.admitted, [tokens, *blocks])
                check_block_ids(rows.min_block_id, "new/resumed")
                rope_offsets = rope.plan(changes)
            return _Plan(changes, step, block_changes, rope_offsets, rows)
        except ValueError as error:
            raise ValueError(f"{method}: {error}") from None

    def _commit(self, plan: _Plan) -> None:
        self._host_state.commit(plan.changes, plan.step, plan.rows)
        for table, changes in zip(self._block_tables, plan.block_changes, strict=True):
            table.commit(changes)
        if plan.rope_offsets:
            self._rope.commit(plan.changes, plan.rope_offsets)

    def _upload(self, plan: _Plan, fixed: list[Int32Array]) -> None:
        upload, slots = self._device_state.upload, plan.changes.admitted
        cells = [table.appended for table in plan.block_changes]
        if len(slots):
            cells += upload.make_length_writes(slots, self._host_state.exact_tokens[slots])
        upload.send(plan.step.number, plan.rows, cells, fixed)

    def _pad_inputs(self, batch: int) -> None:
        """Describes requests without tokens, slot or result of the last step, from `batch` on."""
        self._packed[PackedRow.SLOTS : PackedRow.CU_NUM_DRAFTS, batch:] = 0
        self._packed[PackedRow.PREVIOUS_POSITIONS, batch:] = -1

    def _pack_inputs(self, changes: RowChanges, step: Step) -> list[Int32Array]:
        batch, freed, packed = len(step.rows), changes.freed, self._packed
        if self.store is not None:
            self._scopes[:batch] = self._host_state.scopes[step.slots]
        packed[PackedRow.SLOTS, :batch] = step.slots
        packed[PackedRow.PREVIOUS_POSITIONS, :batch] = step.prev_positions
        packed[PackedRow.NUM_COMPUTED, :batch] = step.host_num_computed
        packed[PackedRow.NUM_ACCEPTED, :batch] = 1
        packed[PackedRow.NUM_DRAFTS, :batch] = step.num_scheduled_drafts
        np.add.accumulate(step.num_scheduled_drafts, out=packed[PackedRow.CU_NUM_DRAFTS, :batch])
        if self._last_step is not None:
            drafts = self._last_step.num_scheduled_drafts
            packed[PackedRow.PREVIOUS_NUM_DRAFTS, : len(drafts)] = drafts
        packed[PackedRow.QUERY_START_LOC, : batch + 1] = step.query_start_loc
        packed[PackedRow.QUERY_START_LOC, batch + 1 :] = step.num_step_tokens
        packed[PackedRow.FREED_SLOTS, : len(freed)] = freed
        fixed = [packed.reshape(-1)]
        if self.config.position_dims > 1:
            fixed.append(self._rope.collect(step))
        known = self._host_state.collect_known_input_ids(step)
        return fixed if known is None else [*fixed, known]

    def end_step(
        self, sampled_token_ids: torch.Tensor, draft: NeuralDrafter | None = None
    ) -> StepOutputs:
        """Accepts the sampled tokens, drafts for the next step, and starts their download.

        Args:
            sampled_token_ids: [B,M] int32 on the device, M at most k+1: the accepted drafts of each
                request and the token after them, padded with -1. It may be overwritten by work that
                is launched after the next begin_step.
            draft: The neural drafter, required with `AsyncConfig.merge`. It is called with the
                outputs of the n-gram lookup after the lookup is launched, and must not wait for the
                device. An exception or drafts of another shape count as a failed device call.

        Raises:
            ValueError: The shape, dtype, layout or device is wrong, or a drafter is missing or
                unexpected. Nothing has changed.
            RuntimeError: No step has begun, or a device call has failed.
        """
        self._require_usable("end_step")
        step = self._begun_step
        if step is None:
            raise RuntimeError("end_step: no step has begun")
        batch = len(step.rows)
        device_state = self._device_state
        width, device = self.config.ngram.k + 1, device_state.token_ids.device
        check_sampled(sampled_token_ids, batch, width, device)
        check_drafter(draft, self.config.merge)
        with self._record_failure():
            views = device_state.get_views(batch)
            next_token_ids, num_sampled = device_state.accept_tokens(sampled_token_ids, views)
            self._count_downloads[step.number % 2].start((num_sampled, sampled_token_ids))
            outputs = device_state.propose(
                sampled_token_ids,
                views,
                step.num_step_tokens,
                next_token_ids,
                num_sampled,
            )
            if draft is not None:
                outputs = device_state.merge(outputs, draft(outputs), views)
            outputs = device_state.store_drafts(outputs)
            results = (outputs.num_draft_tokens, outputs.draft_token_ids, outputs.draft_source)
            sources = [result for result in results if result is not None]
            self._draft_downloads[step.number % 3].start(sources)
            self._begun_step, self._last_step = None, step
            self._pending_steps.append(step)
        return outputs

    def wait_drafts(self) -> HostDrafts:
        """Waits for the drafts of the last ended step and returns them.

        With this method, a scheduler can schedule only existing drafts instead of padding.

        Raises:
            RuntimeError: No step has ended, the next step has begun, or a device call has failed.
        """
        self._require_usable("wait_drafts")
        if self._last_step is None or self._begun_step is not None:
            raise RuntimeError("wait_drafts: expected a call between end_step and begin_step")
        with self._record_failure():
            download = self._draft_downloads[self._last_step.number % 3]
            parts = [part.copy() for part in download.finish()]
        counts, drafts, *source = parts
        return HostDrafts(drafts, counts, *source)

    def reconcile(self) -> Reconciled:
        """Waits for the counts of the oldest pending step and applies them to the host state.

        `Reconciled.faults` contains the requests for which the sampler returned no valid token, or
        more than the step's drafts plus one. The other requests continue.

        Raises:
            RuntimeError: No step is pending, or a device call has failed.
        """
        self._require_usable("reconcile")
        if not self._pending_steps:
            begun = self._begun_step
            raise RuntimeError(
                "reconcile: all ended steps are already reconciled"
                if begun is None
                else f"reconcile: step {begun.number} has not ended; call end_step first"
            )
        step = self._pending_steps[0]
        with self._record_failure():
            counts, tokens = self._count_downloads[step.number % 2].finish()
            num_sampled, sampled = counts.copy(), tokens.copy()
            num_valid, *source = self._read_scheduled_drafts(step)
            alive, computed, num_tokens, faults = self._host_state.reconcile(
                step, num_sampled, sampled
            )
            num_valid[list(faults)] = 0
            self._pending_steps.pop(0)
        drafted = step.num_scheduled_drafts > 0
        accepted = np.where(drafted, np.maximum(num_sampled - 1, 0), 0)
        return Reconciled(
            step=step.number,
            rows=step.rows,
            alive=alive,
            sampled_token_ids=sampled,
            num_sampled=num_sampled,
            num_scheduled_drafts=step.num_scheduled_drafts,
            num_valid_drafts=num_valid,
            num_accepted_drafts=np.minimum(accepted, num_valid),
            num_computed_tokens=computed,
            num_tokens=num_tokens,
            faults=faults,
            draft_source=source[0] if source else None,
        )

    def _read_scheduled_drafts(self, step: Step) -> list[Int32Array]:
        """Returns the number of scheduled drafts without padding, and their source if merged.

        The drafts come from the previous step. They were copied to the host before this step's
        counts, so this does not wait.
        """
        scheduled = step.num_scheduled_drafts
        if not scheduled.any():
            return [np.zeros_like(scheduled) for _ in range(1 + (self.config.merge is not None))]
        counts, _, *source = self._draft_downloads[(step.number - 1) % 3].finish()
        parts = [np.minimum(scheduled, counts[step.prev_positions])]
        parts += [part[step.prev_positions] for part in source]
        return [np.where(scheduled > 0, part, 0).astype(np.int32) for part in parts]

    def rebuild(self, requests: Sequence[Admission]) -> None:
        """Resets the state to these requests and waits for the device.

        The runner calls it after a device call or the forward pass has failed, if the device is
        still usable. Steps in flight are dropped. Device buffers keep their addresses, but requests
        may be assigned other slots.

        Args:
            requests: All live requests, with the tokens, counts and blocks of the last
                :meth:`reconcile`. Later tokens are computed again.

        Raises:
            ValueError: The requests are inconsistent. Nothing has changed.
        """
        if self._failure is not None:  # the traceback keeps the failed call's memory alive
            self._failure = self._failure.with_traceback(None)
        try:
            check_sequence("requests", requests, Admission)
        except ValueError as error:
            raise ValueError(f"rebuild: {error}") from None
        no_rows = np.zeros(0, np.int32)
        host = self._make_host_state()
        # The plan gets the number of the last step, because a rebuild is no step.
        batch = Batch(no_rows, no_rows, no_rows, new=requests)
        plan = self._plan("rebuild", batch, self._step_count - 1, *host)
        with self._record_failure():
            self._wait_for_device()  # copies in flight may use the staging buffers
            self._host_state, self._block_tables, self._rope = host
            self._begun_step, self._last_step = None, None
            self._pending_steps.clear()
            self._device_state.clear()
            self._commit(plan)
            self._upload(plan, [])
            self._wait_for_device()  # so that the next step may use either staging buffer
            self._failure = None

    def _wait_for_device(self) -> None:
        for stream in ("main", "side"):
            self._device.synchronize(self._device.record(stream))
