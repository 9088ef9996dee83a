"""The asynchronous pipeline: the host schedules on assumptions, the device corrects them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ngram_npu.async_state.batch import Admission, AsyncConfig, Batch, check_sequence, check_types
from ngram_npu.async_state.blocks import BlockTable, Planned, check_used
from ngram_npu.async_state.device import Device, device_for
from ngram_npu.async_state.device_state import (
    ACCEPTED,
    COMPUTED,
    CU_DRAFTS,
    DRAFTS,
    FREED,
    NUM_PACKED,
    PREVIOUS,
    PREVIOUS_DRAFTS,
    QUERY_START,
    SCOPES,
    SLOTS,
    DeviceTruth,
    check_sampled,
    check_store,
)
from ngram_npu.async_state.host_state import Mirrors, RowChanges, Step, is_integer
from ngram_npu.async_state.neural import NeuralDrafter, check_drafter
from ngram_npu.async_state.results import HostDrafts, Reconciled, StepInputs, StepOutputs
from ngram_npu.async_state.staging import Download
from ngram_npu.async_state.upload import NO_ROWS, Int32Array, Rows
from ngram_npu.index import NgramIndex
from ngram_npu.store import NgramStore


class _Plan(NamedTuple):
    """What a batch changes."""

    changes: RowChanges
    step: Step
    tables: list[Planned]
    rows: Rows
    """The chunks of the tokens and blocks of the requests that join."""


class _BreaksOnError:
    """Context manager for changes of both host and device: an error in it breaks the state."""

    def __init__(self, state: AsyncSpecState) -> None:
        self._state = state

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._state._failure is None:
            self._state._failure = error


class AsyncSpecState:
    """Owns the state of speculative decoding between steps, on the device and on the host.

    The runner calls, for each step n::

        inputs = state.begin_step(batch)      # before the forward pass
        ...                                   # forward pass, rejection sampling
        outputs = state.end_step(sampled)     # drafts of step n+1, on the device
        truth = state.reconcile()             # of step n, or n-1; whenever it likes

    Neither begin_step nor end_step waits for the device or reads from it. The host may run one step
    ahead: step n must be reconciled before step n+2 begins. Until then its drafts count as accepted
    on the host; the device knows better and corrects itself (``correct_spec_state_``).

    Requests are in rows 0 to R-1 of the runner's numbering. Internally each keeps one slot
    (`StepInputs.slot_indices`), so that moving rows copies nothing. Not thread-safe; device work
    goes to the current stream, downloads to a separate stream.

    If a device call or a wait for the device fails (for example out of memory), host and device no
    longer agree. Every method then raises RuntimeError with that error as its cause, and the
    mirrors are None, until :meth:`rebuild`.
    """

    def __init__(
        self,
        config: AsyncConfig,
        device: str | torch.device = "cpu",
        *,
        runtime: Device | None = None,
        store: NgramStore | None = None,
    ) -> None:
        """Allocates everything.

        Args:
            device: cpu, cuda or npu.
            runtime: another implementation of memory, copies and streams instead.
            store: a store of ``kind="torch"`` to use instead of its own; its first ``max_rows``
                slots are used. Needs a ``min_draft_probability``.

        Raises:
            ValueError: an unknown device, or an index or a store that it cannot have.
            RuntimeError: drafts on the host, and the device cannot run jobs there.
        """
        self.config = config
        self._device = device_for(device) if runtime is None else runtime
        check_store(store, config, self._device)
        self._truth = DeviceTruth(config, self._device, store)
        rows, k = config.max_rows, config.ngram.k
        self._mirrors, self._block_tables = self._empty_host_state()
        self._packed = np.zeros((NUM_PACKED, rows + 1), np.int32)
        self._scopes = self._packed[SCOPES : SCOPES + 2].reshape(-1).view(np.int64)
        # The counts of a step are read before the second next step begins: two buffers. Its drafts
        # are read when the next step is reconciled; two more steps may have ended then: three.
        self._counts = [Download(self._device, (rows, rows * (k + 1))) for _ in range(2)]
        sizes = (rows, rows * k) if config.merge is None else (rows, rows * k, rows)
        self._drafts = [Download(self._device, sizes) for _ in range(3)]
        self._step_count = 0
        self._begun: Step | None = None
        self._pending: list[Step] = []
        self._last: Step | None = None
        self._failure: BaseException | None = None
        self._breaking = _BreaksOnError(self)

    def _empty_host_state(self) -> tuple[Mirrors, list[BlockTable]]:
        config = self.config
        mirrors = Mirrors(
            config.max_rows, config.row_capacity, config.ngram.k, config.max_step_tokens
        )
        first = self._truth.upload.first_blocks
        return mirrors, [BlockTable(config, i, first[i]) for i in range(len(first))]

    # The exact state on the device, by slot, for work on the main stream.

    @property
    def token_ids(self) -> torch.Tensor:
        """[R,S] int32 on the device: all tokens of each request."""
        return self._truth.token_ids

    @property
    def num_tokens_on_device(self) -> torch.Tensor:
        """[R] int32 on the device."""
        return self._truth.num_tokens

    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]:
        """[R,NB] int32 on the device for each KV group, -1 where unused. Rows are contiguous, but
        may lie further apart than they are long."""
        return self._truth.block_tables

    @property
    def index(self) -> NgramIndex | None:
        """The index of the slots' tokens, for its statistics; None if rows are scanned."""
        return self._truth.index

    @property
    def store(self) -> NgramStore | None:
        """The store that the requests share, if any."""
        return self._truth.store

    # The host's mirrors, by row.

    @property
    def is_exact(self) -> bool:
        """Whether every step is reconciled, and no device call has failed."""
        return self._begun is None and not self._pending and not self._is_broken

    @property
    def num_computed_tokens(self) -> Int32Array | None:
        """[R] by row, 0 in free ones; None unless :attr:`is_exact`."""
        return self._mirrors.by_row(self._mirrors.upper_computed) if self.is_exact else None

    @property
    def num_tokens(self) -> Int32Array | None:
        """[R] by row, 0 in free ones; None unless :attr:`is_exact`."""
        return self._mirrors.by_row(self._mirrors.upper_tokens) if self.is_exact else None

    @property
    def upper_num_computed_tokens(self) -> Int32Array | None:
        """[R] by row: upper bounds, too large by the rejected drafts in flight. None after a device
        call has failed."""
        upper = self._mirrors.upper_computed
        return None if self._is_broken else self._mirrors.by_row(upper)

    @property
    def upper_num_tokens(self) -> Int32Array | None:
        """[R] by row: upper bounds. None after a device call has failed."""
        upper = self._mirrors.upper_tokens
        return None if self._is_broken else self._mirrors.by_row(upper)

    def known_token_ids(self, row: int) -> Int32Array | None:
        """A copy of a row's tokens; None while a step is not reconciled.

        Raises:
            ValueError: the row is free or out of range.
            RuntimeError: a device call has failed.
        """
        self._require_sound("known_token_ids")
        if not is_integer(row) or not 0 <= row < self.config.max_rows:
            raise ValueError(
                f"known_token_ids: row: expected 0 to {self.config.max_rows - 1}, got {row!r}"
            )
        slot = int(self._mirrors.slot_of[row])
        if slot < 0:
            raise ValueError(f"known_token_ids: row: expected a live row, got {row}")
        if not self.is_exact:
            return None
        return np.array(self._mirrors.token_ids[slot, : self._mirrors.exact_tokens[slot]])

    @property
    def _is_broken(self) -> bool:
        return self._failure is not None

    def _require_sound(self, method: str) -> None:
        if self._is_broken:
            raise RuntimeError(
                f"{method}: a device call has failed and the state no longer agrees with the "
                "device; call rebuild with the requests as the runner knows them"
            ) from self._failure

    # The pipeline.

    def begin_step(self, batch: Batch) -> StepInputs:
        """Prepares the inputs of one forward pass on the device.

        Args:
            batch: the step; not written to, and free for reuse when this returns.

        Raises:
            ValueError: the batch contradicts itself or what is known of its requests, or a request
                has too few blocks for all its tokens and drafts; nothing has changed then.
            RuntimeError: the last step has not ended, or the one before it is not reconciled, or a
                device call has failed.
        """
        self._require_sound("begin_step")
        if self._begun is not None:
            raise RuntimeError("begin_step: end_step has not been called for the last step")
        if len(self._pending) > 1:
            raise RuntimeError(
                f"begin_step: step {self._pending[0].number} must be reconciled first"
            )
        plan = self._plan("begin_step", batch, self._step_count, self._mirrors, self._block_tables)
        changes, step = plan.changes, plan.step
        with self._breaking:
            if self._last is not None:
                # The results of the last step may be in buffers of the runner or of a device graph,
                # which this step may overwrite only after they have been copied to the host.
                self._device.wait("main", self._drafts[self._last.number % 3].event)
            self._commit(plan)
            self._upload(plan, self._inputs(changes, step))
            self._truth.forget(len(changes.freed))
            if self._truth.host is not None:
                self._truth.host.announce(changes)
            views = self._truth.views(len(step.rows))
            self._truth.correct(views)
            self._begun = step
            self._step_count += 1
        ends = step.query_start_loc[1:]
        return StepInputs(
            num_step_tokens=step.num_step_tokens,
            input_ids=self._truth.input_ids,
            positions=self._truth.positions,
            slot_mappings=self._truth.slot_mappings,
            query_start_loc=self._truth.query_start_loc,
            seq_lens=self._truth.seq_lens,
            num_computed_tokens=views.computed,
            num_accepted_tokens=views.accepted,
            discard=views.discard,
            slot_indices=views.slots,
            num_scheduled_drafts=views.drafts,
            cu_num_scheduled_drafts=views.cu_drafts,
            draft_spans=np.array((ends - step.num_scheduled_drafts, ends)).T,
        )

    def _plan(
        self, method: str, batch: Batch, number: int, mirrors: Mirrors, tables: list[BlockTable]
    ) -> _Plan:
        """Computes the batch's changes of rows, lengths and blocks; changes nothing."""
        try:
            check_types(batch, len(tables))
            changes = mirrors.plan_rows(batch)
            step = mirrors.plan_step(batch, changes, number)
            planned = [table.plan(batch, changes, step) for table in tables]
            rows = NO_ROWS
            if changes.admissions:
                tokens = changes.token_ids, np.zeros(len(changes.admissions), np.int64)
                tables_too = [table.admitted for table in planned]
                rows = self._truth.upload.rows(changes.admitted, [tokens, *tables_too])
                check_used(rows.smallest_block, "new/resumed")
            return _Plan(changes, step, planned, rows)
        except ValueError as error:
            raise ValueError(f"{method}: {error}") from None

    def _commit(self, plan: _Plan) -> None:
        self._mirrors.commit(plan.changes, plan.step, plan.rows)
        for table, planned in zip(self._block_tables, plan.tables, strict=True):
            table.commit(planned)

    def _upload(self, plan: _Plan, fixed: list[Int32Array]) -> None:
        upload, slots = self._truth.upload, plan.changes.admitted
        cells = [table.appended for table in plan.tables]
        if len(slots):
            cells += upload.lengths(slots, self._mirrors.exact_tokens[slots])
        upload.send(plan.step.number, plan.rows, cells, fixed)

    def _inputs(self, changes: RowChanges, step: Step) -> list[Int32Array]:
        batch, freed, packed = len(step.rows), changes.freed, self._packed
        if self.store is not None:
            self._scopes[:batch] = self._mirrors.scopes[step.slots]
        packed[SLOTS, :batch] = step.slots
        packed[PREVIOUS, :batch] = step.prev_positions
        packed[COMPUTED, :batch] = step.host_num_computed
        packed[ACCEPTED, :batch] = 1
        packed[DRAFTS, :batch] = step.num_scheduled_drafts
        np.add.accumulate(step.num_scheduled_drafts, out=packed[CU_DRAFTS, :batch])
        if self._last is not None:
            drafts = self._last.num_scheduled_drafts
            packed[PREVIOUS_DRAFTS, : len(drafts)] = drafts
        packed[QUERY_START, : batch + 1] = step.query_start_loc
        packed[QUERY_START, batch + 1 :] = step.num_step_tokens
        packed[FREED, : len(freed)] = freed
        known = self._mirrors.known_input_ids(step)
        return [packed.reshape(-1)] if known is None else [packed.reshape(-1), known]

    def end_step(
        self, sampled_token_ids: torch.Tensor, draft: NeuralDrafter | None = None
    ) -> StepOutputs:
        """Accepts the sampled tokens, drafts for the next step, and starts copying both to host.

        Args:
            sampled_token_ids: [B,M] int32 on the device, M at most k+1: the accepted drafts of each
                request and the token after them, -1 beyond. The next begin_step may be followed by
                overwriting it.
            draft: with `AsyncConfig.merge`, the neural drafter: called once the n-gram drafts are
                launched, with the outputs so far. It must not wait for the device. What it raises,
                or drafts of another shape, count as a device call that has failed.

        Raises:
            ValueError: another shape, dtype, layout or device, or no drafter where one is needed;
                nothing has changed then.
            RuntimeError: no step has begun, or a device call has failed.
        """
        self._require_sound("end_step")
        step = self._begun
        if step is None:
            raise RuntimeError("end_step: no step has begun")
        batch = len(step.rows)
        width, device = self.config.ngram.k + 1, self._truth.token_ids.device
        check_sampled(sampled_token_ids, batch, width, device)
        check_drafter(draft, self.config.merge)
        with self._breaking:
            views = self._truth.views(batch)
            next_token_ids, num_sampled = self._truth.accept(sampled_token_ids, views)
            self._counts[step.number % 2].start((num_sampled, sampled_token_ids))
            outputs = self._truth.propose(
                sampled_token_ids,
                views,
                step.slots,
                step.num_step_tokens,
                next_token_ids,
                num_sampled,
            )
            if draft is not None:
                outputs = self._truth.merge(outputs, draft(outputs), views)
            results = (outputs.num_draft_tokens, outputs.draft_token_ids, outputs.draft_source)
            self._drafts[step.number % 3].start([part for part in results if part is not None])
            self._begun, self._last = None, step
            self._pending.append(step)
        return outputs

    def wait_drafts(self) -> HostDrafts:
        """Waits for the drafts of the last ended step: for a scheduler that reads them, or that
        schedules only the drafts that were found instead of padding them.

        Raises:
            RuntimeError: no step has ended, or the next one has begun, or a device call has failed.
        """
        self._require_sound("wait_drafts")
        if self._last is None or self._begun is not None:
            raise RuntimeError("wait_drafts: to be called between end_step and begin_step")
        with self._breaking:
            parts = [part.copy() for part in self._drafts[self._last.number % 3].finish()]
        counts, drafts, *source = parts
        return HostDrafts(drafts, counts, *source)

    def reconcile(self) -> Reconciled:
        """Waits for the counts of the oldest pending step and corrects the mirrors with them.

        A request whose sampler gave no valid token, or more than the step's drafts and one, is
        named in `Reconciled.faults`; the others go on.

        Raises:
            RuntimeError: no step is pending, or a device call has failed.
        """
        self._require_sound("reconcile")
        if not self._pending:
            raise RuntimeError("reconcile: every step that has ended is reconciled already")
        step = self._pending[0]
        with self._breaking:
            counts, tokens = self._counts[step.number % 2].finish()
            num_sampled, sampled = counts.copy(), tokens.copy()
            valid, *source = self._scheduled_drafts(step)
            alive, computed, known, faults = self._mirrors.reconcile(step, num_sampled, sampled)
            valid[list(faults)] = 0
            self._pending.pop(0)
        drafted = step.num_scheduled_drafts > 0
        accepted = np.where(drafted, np.maximum(num_sampled - 1, 0), 0)
        return Reconciled(
            step=step.number,
            rows=step.rows,
            alive=alive,
            sampled_token_ids=sampled,
            num_sampled=num_sampled,
            num_scheduled_drafts=step.num_scheduled_drafts,
            num_valid_drafts=valid,
            num_accepted_drafts=np.minimum(accepted, valid),
            num_computed_tokens=computed,
            num_tokens=known,
            faults=faults,
            draft_source=source[0] if source else None,
        )

    def _scheduled_drafts(self, step: Step) -> list[Int32Array]:
        """The number of scheduled drafts that the drafter had found in the previous step, and their
        source if merged. They were copied to the host before this step's counts, so nothing has to
        wait."""
        scheduled = step.num_scheduled_drafts
        if not scheduled.any():
            return [np.zeros_like(scheduled) for _ in range(1 + (self.config.merge is not None))]
        counts, _, *source = self._drafts[(step.number - 1) % 3].finish()
        found = [np.minimum(scheduled, counts[step.prev_positions])]
        found += [part[step.prev_positions] for part in source]
        return [np.where(scheduled > 0, part, 0).astype(np.int32) for part in found]

    def rebuild(self, requests: Sequence[Admission]) -> None:
        """Resets the state to these requests, after a device call of this object or the forward
        pass has failed and left the device usable. Steps in flight are dropped. Waits for the
        device. Device buffers keep their addresses, but requests may get other slots.

        Args:
            requests: all live requests, with the tokens, counts and blocks of the last
                :meth:`reconcile`. Tokens of later steps are beyond these counts and are computed
                again.

        Raises:
            ValueError: requests that contradict each other; nothing has changed then.
        """
        if self._failure is not None:  # its traceback keeps the failed call's memory alive
            self._failure = self._failure.with_traceback(None)
        try:
            check_sequence("requests", requests, Admission)
        except ValueError as error:
            raise ValueError(f"rebuild: {error}") from None
        nothing = np.zeros(0, np.int32)
        mirrors, tables = self._empty_host_state()
        # Counts as the step before the next one.
        plan = self._plan(
            "rebuild",
            Batch(nothing, nothing, nothing, new=requests),
            self._step_count - 1,
            mirrors,
            tables,
        )
        with self._breaking:
            self._wait_for_device()  # copies in flight use the old staging buffers
            self._mirrors, self._block_tables = mirrors, tables
            self._begun, self._last = None, None
            self._pending.clear()
            self._truth.clear(self._device)
            self._commit(plan)
            self._upload(plan, [])
            if self._truth.host is not None:
                self._truth.host.announce(plan.changes)
            self._wait_for_device()  # so that either staging buffer is free for the next step
            self._failure = None

    def _wait_for_device(self) -> None:
        for stream in ("main", "side"):
            self._device.synchronize(self._device.record(stream))
