"""Keeps the host's copy of each request's lengths and tokens, with vectorised arithmetic.

A request keeps one *slot* until it leaves. The runner's row numbers are labels of slots, so moving
a row changes only its label, and neither token rows nor pending steps are affected. When a slot is
given to another request, the slot's *generation* changes. By the generation, results of a step that
ran with the previous request are recognised and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu.async_state.batch import Admission, AsyncConfig, Batch, IntArray
from ngram_npu.async_state.upload import CHUNK_ITEMS, Int32Array, Int64Array, Rows, count_chunks
from ngram_npu.store import PRIVATE_SCOPE

BoolArray = npt.NDArray[np.bool_]

_INT32 = np.dtype(np.int32)
_NO_SLOTS = np.zeros(0, np.int64)


class RowChanges(NamedTuple):
    """The host state after a batch's removals, moves and admissions."""

    slot_of: Int64Array
    """The slot of each row, -1 for a free row."""
    upper_computed: Int32Array
    upper_tokens: Int32Array
    last_position: Int32Array
    freed: Int64Array
    """The slots of requests that leave."""
    admissions: Sequence[Admission] = ()
    admitted: Int64Array = _NO_SLOTS
    """The slot of each admission."""
    token_ids: Sequence[Int32Array] = ()
    """The tokens of each admission."""


@dataclass(frozen=True)
class Step:
    """What the host knows of a step between begin_step and reconcile. The arrays are [B]."""

    number: int
    rows: Int32Array
    slots: Int64Array
    generation: Int64Array
    num_scheduled_tokens: Int32Array
    num_scheduled_drafts: Int32Array
    prev_positions: Int32Array
    """Batch position in the previous step if the request sampled in that step, otherwise -1."""
    host_num_computed: Int32Array
    """Upper bound of the computed tokens before the step, with all drafts in flight accepted."""
    sampled_up_to: Int32Array
    """Number of new tokens if all drafts are accepted; 0 for a discarded request."""
    query_start_loc: Int32Array
    """[B+1], first token of each request in the step, then the number of tokens."""
    num_step_tokens: int


class HostState:
    """Keeps lengths, tokens and rows of all requests, in arrays [R] indexed by slot.

    The ``upper_*`` counts assume that all drafts in flight are accepted. The ``exact_*`` counts are
    exact as of the last reconciled step.
    """

    def __init__(self, config: AsyncConfig) -> None:
        self.max_rows = max_rows = config.max_rows
        self.capacity = capacity = config.row_capacity
        self._max_drafts = max_drafts = config.ngram.k
        self._max_step_tokens = config.max_step_tokens
        self._vocab_size = config.ngram.vocab_size_or_unlimited
        self.slot_of = np.full(max_rows, -1, np.int64)
        self.upper_computed = np.zeros(max_rows, np.int32)
        self.upper_tokens = np.zeros(max_rows, np.int32)
        self.exact_computed = np.zeros(max_rows, np.int32)
        self.exact_tokens = np.zeros(max_rows, np.int32)
        self.scopes = np.zeros(max_rows, np.int64)
        self._row_length = count_chunks(capacity) * CHUNK_ITEMS
        self.token_ids = np.zeros((max_rows, self._row_length), np.int32)
        self._flat_token_ids = self.token_ids.reshape(-1)
        self._chunks = self.token_ids.reshape(-1, CHUNK_ITEMS)
        self._generation = np.zeros(max_rows, np.int64)
        self._faults: dict[tuple[int, int], str] = {}
        """The reason for each request with an invalid sampler result, by slot and generation. An
        entry is kept until the last step of its request is reconciled."""
        self._last_position = np.full(max_rows, -1, np.int32)
        self._free_slots = list(range(max_rows))[::-1]
        self._columns = np.arange(max_drafts + 1)

    def plan_rows(self, batch: Batch) -> RowChanges:
        """Returns the effect of the batch's removals, moves and admissions; changes nothing.

        Raises ValueError if a row is out of range, or is free or live where it must not be.
        """
        removed, moves = to_int32_vector(batch.removed, "removed"), np.asarray(batch.moves)
        if not (len(removed) or moves.size or batch.new or batch.resumed):
            return RowChanges(
                self.slot_of,
                self.upper_computed,
                self.upper_tokens,
                self._last_position,
                _NO_SLOTS,
            )
        slot_of = self.slot_of.copy()
        last_position = self._last_position.copy()
        freed = _release_rows(slot_of, removed, "removed")
        last_position[freed] = -1
        if moves.size:
            if moves.ndim != 2 or moves.shape[1] != 2:
                raise ValueError(f"moves: expected [N,2], got {list(moves.shape)}")
            moved_slots = _release_rows(slot_of, to_int32_vector(moves[:, 0], "moves"), "moves")
            _assign_rows(slot_of, to_int32_vector(moves[:, 1], "moves"), moved_slots)
        changes = RowChanges(slot_of, self.upper_computed, self.upper_tokens, last_position, freed)
        admissions = (*batch.new, *batch.resumed)
        return self._plan_admissions(admissions, changes) if admissions else changes

    def _plan_admissions(self, admissions: Sequence[Admission], changes: RowChanges) -> RowChanges:
        # For few admissions, a loop is faster than calls of numpy.
        free_slots, slot_of = self._free_slots + changes.freed.tolist(), changes.slot_of
        upper_computed, upper_tokens = self.upper_computed.copy(), self.upper_tokens.copy()
        tokens, slots = [], []
        for admission in admissions:
            row, computed = admission.row, admission.num_computed_tokens
            ids = to_int32_vector(admission.token_ids, "new/resumed: token_ids")
            length = len(ids)
            self._check_admission(admission, length, slot_of)
            slot_of[row] = slot = free_slots.pop()
            upper_computed[slot], upper_tokens[slot] = computed, length
            tokens.append(ids)
            slots.append(slot)
        admitted = np.array(slots)
        changes.last_position[admitted] = -1
        lengths = upper_computed, upper_tokens, changes.last_position
        return RowChanges(slot_of, *lengths, changes.freed, admissions, admitted, tokens)

    def _check_admission(self, admission: Admission, length: int, slot_of: Int64Array) -> None:
        """Raises ValueError if the request cannot enter its row."""
        row, computed, scope = admission.row, admission.num_computed_tokens, admission.scope
        if not is_integer(row) or not 0 <= row < self.max_rows or slot_of[row] >= 0:
            raise ValueError(f"new/resumed: row: expected a free row, got {row!r}")
        if not 1 <= length <= self.capacity:
            raise ValueError(
                f"new/resumed: token_ids: expected 1 to {self.capacity} tokens, got {length}"
            )
        if not is_integer(computed) or not 0 <= computed < length:
            raise ValueError(
                f"new/resumed: num_computed_tokens: expected 0 to {length - 1}, got {computed!r}"
            )
        if not is_integer(scope) or not PRIVATE_SCOPE <= scope < 1 << 63:
            raise ValueError(f"new/resumed: scope: expected -1 to 2**63 - 1, got {scope!r}")

    def plan_step(self, batch: Batch, changes: RowChanges, number: int) -> Step:
        """Returns the step; changes nothing.

        Raises ValueError if the lengths of the requests do not allow the step.
        """
        rows = _copy_int32(batch.rows, "rows")
        scheduled = _copy_int32(batch.num_scheduled_tokens, "num_scheduled_tokens")
        drafts = _copy_int32(batch.num_scheduled_drafts, "num_scheduled_drafts")
        if not len(rows) == len(scheduled) == len(drafts):
            raise ValueError(
                "rows, num_scheduled_tokens, num_scheduled_drafts: expected equal "
                f"lengths, got {len(rows)}, {len(scheduled)}, {len(drafts)}"
            )
        slots = find_live_slots(changes.slot_of, rows, "rows")
        if np.count_nonzero(np.bincount(rows)) != len(rows):
            raise ValueError(f"rows: expected each row once, got {rows}")
        if self._faults:
            self._check_no_faults(slots, changes.freed)
        computed, tokens = changes.upper_computed.take(slots), changes.upper_tokens.take(slots)
        previous = changes.last_position.take(slots)
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.add.accumulate(scheduled, out=query_start_loc[1:])
        computed_after = computed + scheduled
        sampled_up_to = drafts + 1
        sampled_up_to[computed_after < tokens] = 0
        self._check_step(scheduled, drafts, previous, tokens - computed, computed_after)
        total = int(query_start_loc[-1])
        if total > self._max_step_tokens:
            raise ValueError(
                f"num_scheduled_tokens: expected at most {self._max_step_tokens} "
                f"together, got {total}"
            )
        return Step(
            number,
            rows,
            slots,
            self._generation.take(slots),
            scheduled,
            drafts,
            previous,
            computed,
            sampled_up_to,
            query_start_loc,
            total,
        )

    def _check_no_faults(self, slots: Int64Array, freed: Int64Array) -> None:
        for i, slot in enumerate(slots.tolist()):
            reason = self._faults.get((slot, int(self._generation[slot])))
            if reason is not None and slot not in freed:
                raise ValueError(
                    f"rows: the request at batch position {i} cannot continue; remove it. Reason: "
                    f"{reason}"
                )

    def _check_step(
        self,
        scheduled: Int32Array,
        drafts: Int32Array,
        previous: Int32Array,
        num_known: Int32Array,
        computed_after: Int32Array,
    ) -> None:
        """Checks all rules together, and searches for the violated rule only on failure.

        ``num_known`` counts known tokens without KV, ``computed_after`` the tokens with KV after
        the step.
        """
        uncomputed = scheduled - drafts
        # Viewed as unsigned, negative numbers exceed the limit too.
        has_bad_drafts = (drafts.view(np.uint32) > self._max_drafts) | (
            (drafts != 0) & ((previous < 0) | (uncomputed != num_known))
        )
        # The row must have space for the token that is sampled after the last scheduled one.
        is_too_long = (uncomputed - 1).view(np.uint32) >= num_known
        is_too_long |= computed_after >= self.capacity
        if not np.count_nonzero(has_bad_drafts | is_too_long):
            return
        if has_bad_drafts.any():
            i = int(has_bad_drafts.argmax())
            if not 0 <= drafts[i] <= self._max_drafts:
                raise ValueError(
                    f"num_scheduled_drafts: expected 0 to {self._max_drafts}, got {drafts[i]} at "
                    f"batch position {i}"
                )
            if previous[i] < 0:
                raise ValueError(
                    f"num_scheduled_drafts: expected 0, got {drafts[i]} at batch position {i}: "
                    "the request did not sample in the last step"
                )
            raise ValueError(
                f"num_scheduled_tokens: expected {num_known[i] + drafts[i]} (the uncomputed token "
                f"and {drafts[i]} drafts), got {scheduled[i]} at batch position {i}"
            )
        i = int(is_too_long.argmax())
        if not 1 <= uncomputed[i] <= num_known[i]:
            raise ValueError(
                f"num_scheduled_tokens: expected 1 to {num_known[i]} (known tokens that are not "
                f"computed), got {scheduled[i]} at batch position {i}"
            )
        raise ValueError(
            f"num_scheduled_tokens: expected at most {self.capacity - 1} computed tokens after the "
            f"step (AsyncConfig.row_capacity - 1), got {computed_after[i]} at batch position {i}"
        )

    def commit(self, changes: RowChanges, step: Step, rows: Rows) -> None:
        """Applies the planned changes. The upper bounds then include the step's drafts."""
        slots = step.slots
        if changes.slot_of is not self.slot_of:
            self.slot_of = changes.slot_of
            self.upper_computed, self.upper_tokens = changes.upper_computed, changes.upper_tokens
            self._generation[changes.freed] += 1
            self._free_slots += changes.freed.tolist()
            admitted = changes.admitted
            del self._free_slots[len(self._free_slots) - len(admitted) :]
            self.exact_computed[admitted] = self.upper_computed[admitted]
            self.exact_tokens[admitted] = self.upper_tokens[admitted]
            self._chunks[rows.indices[: rows.num_token_chunks]] = rows.chunks[
                : rows.num_token_chunks
            ]
            self.scopes[admitted] = [admission.scope for admission in changes.admissions]
        self.upper_computed[slots] = step.host_num_computed + step.num_scheduled_tokens
        self.upper_tokens[slots] += step.sampled_up_to
        self._last_position.fill(-1)
        sampled = step.sampled_up_to.nonzero()[0]
        self._last_position[slots[sampled]] = sampled
        self._generation.take(slots, out=step.generation)

    def collect_known_input_ids(self, step: Step) -> Int32Array | None:
        """Returns the step's input ids, or None if all requests sampled in the previous step.

        The ids of requests that sampled are overwritten by ``prepare_input_ids_``.
        """
        if not len(step.rows) or not np.count_nonzero(step.prev_positions < 0):
            return None
        begins = step.slots * self._row_length + step.host_num_computed
        return _C.join_spans(self._flat_token_ids, begins, step.num_scheduled_tokens)

    def reconcile(
        self, step: Step, num_sampled: Int32Array, sampled: Int32Array
    ) -> tuple[BoolArray, Int32Array, Int32Array, dict[int, str]]:
        """Applies the results of a step.

        A request with an invalid sampler result keeps its state from before the step, and its
        ``num_sampled`` is set to 0.

        Args:
            num_sampled: [B], modified.
            sampled: [B,M].

        Returns:
            alive [B], whether the request still has its slot; the numbers of computed and of known
            tokens after the step [B], 0 for requests that left; and, by batch position, the reason
            for each live request with an invalid result.
        """
        alive = self._generation[step.slots] == step.generation
        faults = self._record_faults(step, num_sampled)
        num_newly_computed = np.where(
            step.num_scheduled_drafts > 0, num_sampled, step.num_scheduled_tokens
        ).astype(np.int32)
        if faults:
            num_newly_computed[list(faults)] = num_sampled[list(faults)] = 0
            faults = {i: reason for i, reason in faults.items() if alive[i]}
        slots = step.slots
        excess_computed = step.num_scheduled_tokens - num_newly_computed
        excess_tokens = step.sampled_up_to - num_sampled
        num_new_tokens = num_sampled
        if not alive.all():
            slots, num_newly_computed = slots[alive], num_newly_computed[alive]
            num_new_tokens, sampled = num_sampled[alive], sampled[alive]
            excess_computed, excess_tokens = excess_computed[alive], excess_tokens[alive]
        self.upper_computed[slots] -= excess_computed
        self.upper_tokens[slots] -= excess_tokens
        self.exact_computed[slots] += num_newly_computed
        start = slots * self._row_length + self.exact_tokens[slots]
        self.exact_tokens[slots] += num_new_tokens
        columns = self._columns[: sampled.shape[1]]
        has_token = columns < num_new_tokens[:, None]
        self._flat_token_ids[(start[:, None] + columns)[has_token]] = sampled[has_token]
        computed, tokens = np.zeros_like(num_sampled), np.zeros_like(num_sampled)
        computed[alive] = self.exact_computed[slots]
        tokens[alive] = self.exact_tokens[slots]
        return alive, computed, tokens, faults

    def _record_faults(self, step: Step, num_sampled: Int32Array) -> dict[int, str]:
        """Returns the reasons, by batch position of requests with an invalid sampler result."""
        # Too many tokens may not fit into the row. Without any token, the next step has already
        # run on a token that was never sampled.
        is_bad = (num_sampled < 1) & (step.sampled_up_to > 0)
        is_bad |= num_sampled > step.sampled_up_to
        if not self._faults and not is_bad.any():
            return {}
        reasons = {}
        for i, key in enumerate(zip(step.slots.tolist(), step.generation.tolist(), strict=True)):
            if is_bad[i] and key not in self._faults:
                limit = int(step.sampled_up_to[i])
                self._faults[key] = (
                    f"sampled_token_ids: expected {min(1, limit)} to {limit} valid tokens (ids 0 "
                    f"to {self._vocab_size - 1}) of step {step.number} at batch position {i}, got "
                    f"{num_sampled[i]}"
                )
            if key in self._faults:
                reasons[i] = self._faults[key]
        # Of a request that has left, this was the last step: it left when the next step began, and
        # by then, all earlier steps were reconciled.
        self._faults = {
            (slot, generation): reason
            for (slot, generation), reason in self._faults.items()
            if generation == self._generation[slot]
        }
        return reasons

    def copy_by_row(self, values_by_slot: Int32Array) -> Int32Array:
        """Returns a copy of an array by slot, indexed by row [R]; 0 for free rows."""
        return np.where(self.slot_of >= 0, values_by_slot[self.slot_of], 0).astype(np.int32)


def is_integer(value: object) -> bool:
    """Returns whether a value is an integer other than a bool."""
    # The first comparison is faster, and suffices for most values.
    return type(value) is int or (
        isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    )


def to_int32_vector(values: IntArray, field: str) -> Int32Array:
    """Returns the values as an int32 vector, without a copy if they already are an int32 vector.

    Raises ValueError if the values have another rank, are not integers, or exceed 32 bits.
    """
    array: npt.NDArray[Any] = values if type(values) is np.ndarray else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{field}: expected one dimension, got shape {list(array.shape)}")
    if array.dtype is _INT32 or array.dtype == _INT32:
        return array
    if not array.size:  # numpy converts an empty list to floats
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{field}: expected integers, got {array.dtype}")
    converted: Int32Array = array.astype(np.int32)
    if (converted != array).any():
        raise ValueError(f"{field}: expected 32 bits, got {array}")
    return converted


def _copy_int32(values: IntArray, field: str) -> Int32Array:
    """Copies the values, because a runner may reuse its arrays while the step is pending."""
    return np.array(to_int32_vector(values, field))


def find_live_slots(slot_of: Int64Array, rows: Int32Array, field: str) -> Int64Array:
    """Returns the slots of ``rows``; raises ValueError if a row is free or out of range."""
    try:
        slots: Int64Array = slot_of.take(rows.view(np.uint32))
    except IndexError:
        raise ValueError(f"{field}: expected 0 to {len(slot_of) - 1}, got {rows}") from None
    if np.count_nonzero(slots < 0):
        raise ValueError(
            f"{field}: expected live rows, got {rows[int(slots.argmin())]}, which is free"
        )
    return slots


def _release_rows(slot_of: Int64Array, rows: Int32Array, field: str) -> Int64Array:
    """Frees the rows and returns their slots."""
    slots = find_live_slots(slot_of, rows, field)
    if len({*slots.tolist()}) != len(slots):
        raise ValueError(f"{field}: expected each row once, got {rows}")
    slot_of.put(rows, -1)
    return slots


def _assign_rows(slot_of: Int64Array, rows: IntArray, slots: Int64Array) -> None:
    if not 0 <= int(np.min(rows)) <= int(np.max(rows)) < len(slot_of):
        raise ValueError(f"moves: expected 0 to {len(slot_of) - 1}, got {rows}")
    if len(np.unique(rows)) != len(rows) or (slot_of[rows] >= 0).any():
        raise ValueError(f"moves: expected distinct free target rows, got {rows}")
    slot_of[rows] = slots
