"""Which request is in which row, where vLLM does not say.

A custom class gets no request ids, and the runner moves rows: they are swapped and condensed when
requests finish, leave when they are preempted, and come back elsewhere. An engine that keeps
something per request (an index, which need not be rebuilt while it follows its request) has to find
the request again. A row is taken for the request a slot has seen where

- without the tokens just sampled it is at least as long as the slot's, and
- the tokens at up to 14 positions below the slot's length are the slot's: the last six, and those
  at the powers of four up to 16384.

It may have grown by more than was sampled, since vLLM leaves the drafter out of steps (where any
request is within k tokens of ``max_model_len``) in which rows grow all the same. So the next turn
of a conversation goes on with the slot of the turn before, while there is one.

What slips through: a request that has the tokens of another at all of these positions, and differs
from it elsewhere, may get the other's slot: where they change places, or where the other is gone.
An index then describes another request's tokens; since hits are verified against the row that is
drafted for, and drafts by the model, the price is a missed or a worse draft, never a wrong token.
Requests that are equal as far as the slot goes (n samples of one prompt) may change places at no
price at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_TAIL = np.arange(6, dtype=np.int64)
_POWERS = 4 ** np.arange(8, dtype=np.int64)
_WIDTH = len(_TAIL) + len(_POWERS)
_FREE = -1


class Assignment(NamedTuple):
    """What :meth:`RowRecognizer.assign` finds."""

    slots: Int32Array
    """[B], the slot of each row; no two rows share one."""
    new: npt.NDArray[np.bool_]
    """[B], rows that are no request seen before: what their slot holds is to be forgotten."""
    last: Int32Array
    """[B, 1], the last token of each row (the first of its buffer where the row is empty)."""


class RowRecognizer:
    """Gives each row of a step the slot of its request.

    A request that is absent keeps its slot until the slot is needed; the one absent longest gives
    way first. With more slots than rows in a step, preempted requests are found when they return.
    """

    def __init__(self, num_slots: int) -> None:
        self._lengths = np.full(num_slots, _FREE, np.int64)
        self._prints = np.zeros((num_slots, _WIDTH), np.int32)
        self._last_seen = np.zeros(num_slots, np.int64)  # 0: never, or forgotten
        self._step = 0
        # Of the previous step, by row: what the slots above do not have yet. Where no row has
        # moved, which is the usual step, that is all there is to compare and to keep.
        self._row_slots = np.zeros(0, np.int32)
        self._row_lengths = np.zeros(0, np.int64)
        self._row_prints = np.zeros((0, _WIDTH), np.int32)

    def assign(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array
    ) -> Assignment:
        """The slots of a step's rows.

        Args:
            token_ids: [B, S], the rows, the sampled tokens already in them.
            num_tokens: [B], their lengths, 0 to S.
            num_sampled: [B], how many of their last tokens this step sampled.

        Raises:
            ValueError: more rows than slots.
        """
        batch = len(num_tokens)
        if batch > len(self._lengths):
            raise ValueError(f"RowRecognizer: {batch} rows, {len(self._lengths)} slots")
        lengths = np.empty((2, batch), np.int64)
        lengths[1] = num_tokens
        before, after = np.subtract(lengths[1], num_sampled, out=lengths[0]), lengths[1]
        found, prints = _fingerprints(token_ids, np.arange(batch), lengths)
        self._step += 1
        if (
            np.array_equal(before, self._row_lengths)
            and np.array_equal(found, self._row_prints)
            and before.all()
        ):
            slots, new = self._row_slots, np.zeros(batch, np.bool_)
        else:
            self._remember()
            slots, new = self._search(token_ids, found, before)
        self._row_slots, self._row_lengths, self._row_prints = slots, after, prints
        return Assignment(slots, new, prints[:, :1])

    def _remember(self) -> None:
        self._lengths[self._row_slots] = self._row_lengths
        self._prints[self._row_slots] = self._row_prints
        self._last_seen[self._row_slots] = self._step - 1

    def _search(
        self, token_ids: Int32Array, found: Int32Array, before: Int64Array
    ) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        slots = self._unmoved(token_ids, before)
        self._find_moved(slots, found, before)
        self._find_grown(slots, token_ids, before)
        new = slots == _FREE
        self._last_seen[slots[~new]] = self._step
        if new.any():
            slots[new] = self._oldest(int(new.sum()))
            self._last_seen[slots[new]] = self._step
        return slots.astype(np.int32), new

    def forget_absent(self, steps: int) -> Int32Array:
        """Frees the slots of requests that more than the last ``steps`` steps did not have, at
        least the last one, and returns them."""
        self._last_seen[self._row_slots] = self._step
        absent = np.flatnonzero((self._last_seen < self._step - steps) & (self._last_seen > 0))
        self._lengths[absent] = _FREE
        self._last_seen[absent] = 0
        return absent.astype(np.int32)

    def _unmoved(self, token_ids: Int32Array, before: Int64Array) -> Int64Array:
        """The previous step's slot of each row where it still fits."""
        batch = len(before)
        slots = np.full(batch, _FREE, np.int64)
        known = min(batch, len(self._row_slots))
        candidates = self._row_slots[:known]
        fits = self._fits(token_ids, np.arange(known), candidates, before[:known])
        slots[:known][fits] = candidates[fits]
        return slots

    def _fits(
        self, token_ids: Int32Array, rows: Int64Array, slots: npt.NDArray[Any], before: Int64Array
    ) -> npt.NDArray[np.bool_]:
        """[N], for pairs of a row and a slot: whether the row may be the slot's request, grown."""
        lengths = self._lengths[slots]
        prints = _fingerprints(token_ids, rows, lengths[None])[0]
        fits: npt.NDArray[np.bool_] = (lengths > 0) & (lengths <= before)
        fits &= (self._prints[slots] == prints).all(axis=1)
        return fits

    def _unmatched(self, slots: Int64Array, before: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Rows that have tokens and no slot yet, and slots whose requests no row has yet."""
        absent = self._lengths > 0
        absent[slots[slots != _FREE]] = False
        return np.flatnonzero((slots == _FREE) & (before > 0)), np.flatnonzero(absent)

    def _find_moved(self, slots: Int64Array, found: Int32Array, before: Int64Array) -> None:
        """Rows that grew by what was sampled, at a cost that does not multiply rows by slots."""
        missing, absent = self._unmatched(slots, before)
        if not len(missing):
            return
        by_print: dict[tuple[int, bytes], list[int]] = {}
        for slot in absent[np.isin(self._lengths[absent], before[missing])].tolist():
            key = int(self._lengths[slot]), self._prints[slot].tobytes()
            by_print.setdefault(key, []).append(slot)
        for row in missing.tolist():
            candidates = by_print.get((int(before[row]), found[row].tobytes()))
            if candidates:
                slots[row] = candidates.pop()

    def _find_grown(self, slots: Int64Array, token_ids: Int32Array, before: Int64Array) -> None:
        """Rows that moved and grew while nobody looked, or begin with what another row held."""
        missing, absent = self._unmatched(slots, before)
        if not len(missing) or not len(absent):
            return
        # One token decides nearly all pairs.
        last = np.minimum(self._lengths[absent], token_ids.shape[1]) - 1
        pairs = np.nonzero(token_ids[missing[:, None], last] == self._prints[absent, 0])
        rows, candidates = missing[pairs[0]], absent[pairs[1]]
        fits = self._fits(token_ids, rows, candidates, before[rows])
        rows, candidates = rows[fits], candidates[fits]
        left = set(candidates.tolist())
        for i in np.argsort(-self._lengths[candidates], kind="stable").tolist():
            row, slot = int(rows[i]), int(candidates[i])
            if slots[row] == _FREE and slot in left:
                slots[row] = slot
                left.remove(slot)

    def _oldest(self, count: int) -> Int64Array:
        """``count`` slots that no row of this step has; free ones, then those unseen longest."""
        order = np.argsort(self._last_seen, kind="stable")
        return order[self._last_seen[order] < self._step][:count]


def _fingerprints(token_ids: Int32Array, rows: Int64Array, lengths: Int64Array) -> Int32Array:
    """[L, N, 14]: tokens of the rows [N] of token_ids [B, S] at positions that a length alone
    decides, for lengths [L, N]. The powers stay where they are while a row grows, and so in the
    cache."""
    capacity = token_ids.shape[1]
    last = np.minimum(lengths, capacity)[:, :, None] - 1
    positions = np.empty((*lengths.shape, _WIDTH), np.int64)
    np.subtract(last, _TAIL, out=positions[:, :, : len(_TAIL)])
    np.minimum(_POWERS, last, out=positions[:, :, len(_TAIL) :])
    np.maximum(positions, 0, out=positions)
    if not token_ids.flags.c_contiguous:
        gathered: Int32Array = token_ids[rows[:, None], positions]
        return gathered
    # The runner's buffer; the same by one flat index, in a fraction of the time.
    positions += (rows * capacity)[:, None]
    return token_ids.reshape(-1).take(positions, mode="clip")
