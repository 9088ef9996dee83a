"""The host's mirrors of each request's lengths, as vectorised arithmetic.

A request keeps one *slot* until it leaves; the runner's row numbers are labels of slots. So a move
changes only a label: token rows and pending steps are not affected. A slot that is given to another
request gets a new *generation*, so that results of a step with the former request are not taken for
the new one's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu.async_state.batch import Admission, Batch, IntArray
from ngram_npu.async_state.upload import CHUNK, Int32Array, Int64Array, Rows, chunks_of

BoolArray = npt.NDArray[np.bool_]

_INT32 = np.dtype(np.int32)
_NO_SLOTS = np.zeros(0, np.int64)


class RowChanges(NamedTuple):
    """The mirrors after a batch's changes of rows."""

    slot_of: Int64Array
    upper_computed: Int32Array
    upper_tokens: Int32Array
    last_position: Int32Array
    freed: Int64Array
    admissions: Sequence[Admission] = ()
    admitted: Int64Array = _NO_SLOTS
    """The slot of each admission."""
    token_ids: Sequence[Int32Array] = ()
    """The tokens of each admission."""


@dataclass(frozen=True)
class Step:
    """One step as the host sees it, from begin_step to reconcile; all arrays [B]."""

    number: int
    rows: Int32Array
    slots: Int64Array
    generation: Int64Array
    num_scheduled_tokens: Int32Array
    num_scheduled_drafts: Int32Array
    prev_positions: Int32Array
    """Position in the previous step if the request sampled there, otherwise -1."""
    host_num_computed: Int32Array
    """Computed tokens before the step, if all drafts in flight are accepted."""
    sampled_up_to: Int32Array
    """Tokens this step adds if all its drafts are accepted; 0 for a discarded request."""
    query_start_loc: Int32Array
    """[B+1]."""
    num_step_tokens: int


@dataclass
class _Fault:
    reason: str
    last_step: float = math.inf
    """The last step that the request is in, once it is removed."""


class Mirrors:
    """Arrays [R] by slot. *upper* counts all drafts in flight as accepted, *exact* is exact as of
    the last reconciled step."""

    def __init__(self, max_rows: int, capacity: int, max_drafts: int, max_step_tokens: int) -> None:
        self.max_rows = max_rows
        self.capacity = capacity
        self._max_drafts = max_drafts
        self._max_step_tokens = max_step_tokens
        self.slot_of = np.full(max_rows, -1, np.int64)
        self.upper_computed = np.zeros(max_rows, np.int32)
        self.upper_tokens = np.zeros(max_rows, np.int32)
        self.exact_computed = np.zeros(max_rows, np.int32)
        self.exact_tokens = np.zeros(max_rows, np.int32)
        self.scopes = np.zeros(max_rows, np.int64)
        self._row_length = chunks_of(capacity) * CHUNK
        self.token_ids = np.zeros((max_rows, self._row_length), np.int32)
        self._flat_token_ids = self.token_ids.reshape(-1)
        self._chunks = self.token_ids.reshape(-1, CHUNK)
        self._generation = np.zeros(max_rows, np.int64)
        self._faults: dict[tuple[int, int], _Fault] = {}
        """By slot and generation: requests with an invalid sampler result. Kept until their last
        step is reconciled."""
        self._committed = 0
        """The newest step's number."""
        self._last_position = np.full(max_rows, -1, np.int32)
        self._free = list(range(max_rows))[::-1]
        self._columns = np.arange(max_drafts + 1)

    def plan_rows(self, batch: Batch) -> RowChanges:
        """Computes the effect of the batch's removals, moves and admissions; changes nothing.

        Raises:
            ValueError: a row that is not live, not free, or out of range.
        """
        removed, moves = int32_vector(batch.removed, "removed"), np.asarray(batch.moves)
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
        freed = _take(slot_of, removed, "removed")
        last_position[freed] = -1
        if moves.size:
            if moves.ndim != 2 or moves.shape[1] != 2:
                raise ValueError(f"moves: expected [N,2], got {list(moves.shape)}")
            moving = _take(slot_of, int32_vector(moves[:, 0], "moves"), "moves")
            _put(slot_of, int32_vector(moves[:, 1], "moves"), moving, "moves")
        changes = RowChanges(slot_of, self.upper_computed, self.upper_tokens, last_position, freed)
        admissions = (*batch.new, *batch.resumed)
        return self._plan_admissions(admissions, changes) if admissions else changes

    def _plan_admissions(self, admissions: Sequence[Admission], changes: RowChanges) -> RowChanges:
        # A plain loop: for a few admissions it takes less time than numpy's calls.
        free, slot_of = self._free + changes.freed.tolist(), changes.slot_of
        upper_computed, upper_tokens = self.upper_computed.copy(), self.upper_tokens.copy()
        tokens, slots = [], []
        for admission in admissions:
            row, computed, scope = admission.row, admission.num_computed_tokens, admission.scope
            ids = int32_vector(admission.token_ids, "new/resumed: token_ids")
            length = len(ids)
            if not (
                type(row) is type(computed) is type(scope) is int
                and 0 <= row < self.max_rows
                and slot_of[row] < 0
                and 0 <= computed < length <= self.capacity
                and 0 <= scope < 1 << 63
            ):
                self._check_admission(admission, length, slot_of)
            slot_of[row] = slot = free.pop()
            upper_computed[slot], upper_tokens[slot] = computed, length
            tokens.append(ids)
            slots.append(slot)
        admitted = np.array(slots)
        changes.last_position[admitted] = -1
        lengths = upper_computed, upper_tokens, changes.last_position
        return RowChanges(slot_of, *lengths, changes.freed, admissions, admitted, tokens)

    def _check_admission(self, admission: Admission, length: int, slot_of: Int64Array) -> None:
        """Finds the broken rule, if one is broken."""
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
        if not is_integer(scope) or not 0 <= scope < 1 << 63:
            raise ValueError(f"new/resumed: scope: expected 0 to 2**63 - 1, got {scope!r}")

    def plan_step(self, batch: Batch, changes: RowChanges, number: int) -> Step:
        """Computes the step of each of its requests; changes nothing.

        Raises:
            ValueError: the requests' lengths do not allow the step.
        """
        rows = _int32(batch.rows, "rows")
        scheduled = _int32(batch.num_scheduled_tokens, "num_scheduled_tokens")
        drafts = _int32(batch.num_scheduled_drafts, "num_scheduled_drafts")
        if not len(rows) == len(scheduled) == len(drafts):
            raise ValueError(
                "rows, num_scheduled_tokens, num_scheduled_drafts: expected equal "
                f"lengths, got {len(rows)}, {len(scheduled)}, {len(drafts)}"
            )
        slots = live_slots(changes.slot_of, rows, "rows")
        if np.count_nonzero(np.bincount(rows)) != len(rows):
            raise ValueError(f"rows: expected each row once, got {rows}")
        if self._faults:
            self._check_sound(slots, changes.freed)
        computed, tokens = changes.upper_computed.take(slots), changes.upper_tokens.take(slots)
        previous = changes.last_position.take(slots)
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.add.accumulate(scheduled, out=query_start_loc[1:])
        after = computed + scheduled
        sampled_up_to = drafts + 1
        sampled_up_to[after < tokens] = 0
        self._check_step(scheduled, drafts, previous, tokens - computed, after)
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

    def _check_sound(self, slots: Int64Array, freed: Int64Array) -> None:
        for i, slot in enumerate(slots.tolist()):
            fault = self._faults.get((slot, int(self._generation[slot])))
            if fault is not None and slot not in freed:
                raise ValueError(
                    f"rows: the request at batch position {i} cannot go on, remove it: "
                    f"{fault.reason}"
                )

    def _check_step(
        self,
        scheduled: Int32Array,
        drafts: Int32Array,
        previous: Int32Array,
        known: Int32Array,
        after: Int32Array,
    ) -> None:
        """Checks valid steps in one pass; finds the broken rule only after that has failed."""
        without = scheduled - drafts
        # Unsigned: negative numbers are too large.
        bad_drafts = (drafts.view(np.uint32) > self._max_drafts) | (
            (drafts != 0) & ((previous < 0) | (without != known))
        )
        # The last token is followed by a sampled one.
        bad_length = ((without - 1).view(np.uint32) >= known) | (after >= self.capacity)
        if not np.count_nonzero(bad_drafts | bad_length):
            return
        if bad_drafts.any():
            i = int(bad_drafts.argmax())
            raise ValueError(
                f"num_scheduled_drafts: expected 0 to {self._max_drafts} behind the "
                "request's one uncomputed token, and 0 unless it sampled in the last step, "
                f"got {drafts[i]} of {scheduled[i]} scheduled tokens at batch position {i}"
            )
        i = int(bad_length.argmax())
        raise ValueError(
            f"num_scheduled_tokens: expected 1 to {known[i]} tokens and drafts that "
            f"lead to at most {self.capacity} tokens, got {scheduled[i]} with {drafts[i]} drafts "
            f"at batch position {i}"
        )

    def commit(self, changes: RowChanges, step: Step, rows: Rows) -> None:
        """Applies the planned changes; from now on the step's drafts count as accepted.

        Args:
            rows: those of the admissions.
        """
        slots = step.slots
        if changes.slot_of is not self.slot_of:
            self.slot_of = changes.slot_of
            self.upper_computed, self.upper_tokens = changes.upper_computed, changes.upper_tokens
            for slot in changes.freed.tolist() if self._faults else ():
                fault = self._faults.get((slot, int(self._generation[slot])))
                if fault is not None:
                    fault.last_step = step.number - 1
            self._generation[changes.freed] += 1
            self._free += changes.freed.tolist()
            admitted = changes.admitted
            del self._free[len(self._free) - len(admitted) :]
            self.exact_computed[admitted] = self.upper_computed[admitted]
            self.exact_tokens[admitted] = self.upper_tokens[admitted]
            self._chunks[rows.places[: rows.of_tokens]] = rows.chunks[: rows.of_tokens]
            self.scopes[admitted] = [admission.scope for admission in changes.admissions]
        self.upper_computed[slots] = step.host_num_computed + step.num_scheduled_tokens
        self.upper_tokens[slots] += step.sampled_up_to
        self._last_position.fill(-1)
        sampled = step.sampled_up_to.nonzero()[0]
        self._last_position[slots[sampled]] = sampled
        self._generation.take(slots, out=step.generation)
        self._committed = step.number

    def known_input_ids(self, step: Step) -> Int32Array | None:
        """The step's input ids, true for requests without a previous step; None if there are none.
        ``prepare_input_ids_`` writes the others."""
        if not len(step.rows) or not np.count_nonzero(step.prev_positions < 0):
            return None
        begins = step.slots * self._row_length + step.host_num_computed
        return _C.join_spans(self._flat_token_ids, begins, step.num_scheduled_tokens)

    def reconcile(
        self, step: Step, num_sampled: Int32Array, sampled: Int32Array
    ) -> tuple[BoolArray, Int32Array, Int32Array, dict[int, str]]:
        """Applies the results of `step`: num_sampled [B], sampled [B,M].

        A request with an invalid sampler result stays as it was before the step, and its
        `num_sampled` becomes 0.

        Returns:
            alive [B]; the exact computed and known tokens after the step [B], 0 if the request is
            gone; and the reason for each live request whose result cannot be used.
        """
        alive = self._generation[step.slots] == step.generation
        faults = self._new_faults(step, num_sampled)
        gained = np.where(
            step.num_scheduled_drafts > 0, num_sampled, step.num_scheduled_tokens
        ).astype(np.int32)
        if faults:
            gained[list(faults)] = num_sampled[list(faults)] = 0
            faults = {i: reason for i, reason in faults.items() if alive[i]}
        slots = step.slots
        over_computed = step.num_scheduled_tokens - gained
        over_tokens = step.sampled_up_to - num_sampled
        known = num_sampled
        if not alive.all():
            slots, gained, known = slots[alive], gained[alive], num_sampled[alive]
            over_computed, over_tokens = over_computed[alive], over_tokens[alive]
            sampled = sampled[alive]
        self.upper_computed[slots] -= over_computed
        self.upper_tokens[slots] -= over_tokens
        self.exact_computed[slots] += gained
        start = slots * self._row_length + self.exact_tokens[slots]
        self.exact_tokens[slots] += known
        columns = self._columns[: sampled.shape[1]]
        valid = columns < known[:, None]
        self._flat_token_ids[(start[:, None] + columns)[valid]] = sampled[valid]
        computed, tokens = np.zeros_like(num_sampled), np.zeros_like(num_sampled)
        computed[alive] = self.exact_computed[slots]
        tokens[alive] = self.exact_tokens[slots]
        return alive, computed, tokens, faults

    def _new_faults(self, step: Step, num_sampled: Int32Array) -> dict[int, str]:
        """The reason for each batch position whose result cannot be used."""
        # Too many tokens would not fit into the request's row, and without a token the next step
        # has run on one that was never sampled.
        bad = (num_sampled > step.sampled_up_to) | ((num_sampled < 1) & (step.sampled_up_to > 0))
        if not self._faults and not bad.any():
            return {}
        found = {}
        for i, key in enumerate(zip(step.slots.tolist(), step.generation.tolist(), strict=True)):
            if bad[i] and key not in self._faults:
                limit, gone = int(step.sampled_up_to[i]), key[1] != self._generation[key[0]]
                self._faults[key] = _Fault(
                    f"sampled_token_ids: expected {min(1, limit)} to {limit} valid tokens of step "
                    f"{step.number} at batch position {i}, got {num_sampled[i]}",
                    self._committed - 1 if gone else math.inf,
                )
            if key in self._faults:
                found[i] = self._faults[key].reason
        self._faults = {k: f for k, f in self._faults.items() if f.last_step > step.number}
        return found

    def by_row(self, by_slot: Int32Array) -> Int32Array:
        """A copy [R] by row; 0 in free rows."""
        return np.where(self.slot_of >= 0, by_slot[self.slot_of], 0).astype(np.int32)


def is_integer(value: object) -> bool:
    """Whether a value is an integer; a bool does not count as one."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def int32_vector(values: IntArray, field: str) -> Int32Array:
    """As a vector of int32; the same array if it already is one.

    Raises:
        ValueError: another number of dimensions, not integers, or beyond 32 bits.
    """
    array: npt.NDArray[Any] = values if type(values) is np.ndarray else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{field}: expected one dimension, got shape {list(array.shape)}")
    if array.dtype is _INT32 or array.dtype == _INT32:
        return array
    if not array.size:  # an empty list becomes an array of floats
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{field}: expected integers, got {array.dtype}")
    converted: Int32Array = array.astype(np.int32)
    if (converted != array).any():
        raise ValueError(f"{field}: expected 32 bits, got {array}")
    return converted


def _int32(values: IntArray, field: str) -> Int32Array:
    """A copy as int32: a runner may reuse its arrays while the step is pending."""
    return np.array(int32_vector(values, field))


def live_slots(slot_of: Int64Array, rows: Int32Array, field: str) -> Int64Array:
    """The slots of `rows`.

    Raises:
        ValueError: a row that is free or out of range.
    """
    try:
        slots: Int64Array = slot_of.take(rows.view(np.uint32))
    except IndexError:
        raise ValueError(f"{field}: expected 0 to {len(slot_of) - 1}, got {rows}") from None
    if np.count_nonzero(slots < 0):
        raise ValueError(
            f"{field}: expected live rows, got {rows[int(slots.argmin())]}: it is free"
        )
    return slots


def _take(slot_of: Int64Array, rows: Int32Array, field: str) -> Int64Array:
    """Returns the slots of `rows` and frees the rows."""
    slots = live_slots(slot_of, rows, field)
    if len({*slots.tolist()}) != len(slots):
        raise ValueError(f"{field}: expected each row once, got {rows}")
    slot_of.put(rows, -1)
    return slots


def _put(slot_of: Int64Array, rows: IntArray, slots: Int64Array, field: str) -> None:
    if not 0 <= int(np.min(rows)) <= int(np.max(rows)) < len(slot_of):
        raise ValueError(f"{field}: expected 0 to {len(slot_of) - 1}, got {rows}")
    if len(np.unique(rows)) != len(rows) or (slot_of[rows] >= 0).any():
        raise ValueError(f"{field}: expected different free rows, got {rows}")
    slot_of[rows] = slots
