"""A runner's rows with an index, and a copy of them that every step scans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ladder_oracle import UInt8Array, truth_of
from ngram_npu import _C, NgramIndex

Int32Array = npt.NDArray[np.int32]

UNLIMITED = 2**63 - 1
PAD = 7
COSTS = np.random.default_rng(0).integers(0, 60, (16, 32), np.uint8)
_SHORT = 120
_HEADER_WORDS = 64
_SLOT_WORDS = 48
_OPTIONS, _LENGTH, _GIVEN_UP, _TAIL = 0, 1, 4, 8
_TAIL_TOKENS = 8
_LOST = -99
_STAT_INDEXED = 16


@dataclass(frozen=True)
class Lookup:
    min_n: int = 2
    max_n: int = 4
    k: int = 4
    match_policy: int = 0
    overlap: bool = False
    max_len: int = UNLIMITED
    ladder: bool = False
    cost_limit: int | None = None
    """For a ladder: drafts end by cost, with the table `COSTS`."""

    @property
    def costs(self) -> UInt8Array | None:
        return None if self.cost_limit is None else COSTS


def index_of_pages(num_slots: int, num_pages: int, lookup: Lookup) -> NgramIndex:
    """An index with exactly this number of pages, so that a test can let memory run out."""
    index = NgramIndex(
        num_slots,
        0,
        min_n=lookup.min_n,
        max_n=lookup.max_n,
        sizes="ladder" if lookup.ladder else "consecutive",
        outcomes=lookup.costs is not None,
    )
    index._words = index.tensor = _words_of(num_slots, num_pages)
    return index


def _words_of(num_slots: int, num_pages: int) -> Int32Array:
    words = np.zeros(_C.index_words(num_slots, num_pages), np.int32)
    _C.index_init(words, num_slots)
    return words


def ladder_draft(tokens: Int32Array, lookup: Lookup) -> tuple[Any, ...]:
    """(ids, count, match length, costs) of a row: by brute force if it is short, otherwise from an
    index built at once."""
    costs, limit, k = lookup.costs, lookup.cost_limit or 0, lookup.k
    if len(tokens) <= _SHORT:
        draft = truth_of(tokens).draft(len(tokens), k, costs, limit, lookup.overlap, lookup.max_len)
        return draft.ids, draft.count, draft.match_len, draft.costs
    row, length = tokens[None], np.array([len(tokens)], np.int32)
    words = _words_of(1, _C.index_pages(len(tokens), 1, 1, 16, True, True, True))
    ladder: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "ladder": True}
    paid = np.full((1, k), 255, np.uint8)
    _C.ngram_index_append_(row, length, words, outcomes=costs is not None, **ladder)
    found = _C.ngram_index_propose_(
        row, length, words, k=k, overlap=lookup.overlap, max_len=lookup.max_len, costs=costs,
        cost_limit=limit, draft_costs=None if costs is None else paid, **ladder,
    )  # fmt: skip
    assert words[_STAT_INDEXED] == 1
    return found[0][0], found[1][0], found[2][0], paid[0]


class World:
    """Rows, their slots, and the tokens that each slot must have indexed.

    Attributes:
        rows, lengths: the runner's, between canaries.
        slots: [R], the slot of each row's request.
        steps: requests compared with a scan so far; ``blind`` of them could not be compared.
    """

    def __init__(
        self, num_rows: int, capacity: int, lookup: Lookup, num_slots: int, num_pages: int
    ) -> None:
        self.lookup = lookup
        self._buffer: Int32Array = np.full((num_rows + 2, capacity + 2 * PAD), -77, np.int32)
        self.rows = self._buffer[1:-1, PAD:-PAD]
        self.rows[:] = -5
        self.lengths: Int32Array = np.zeros(num_rows, np.int32)
        self.index = index_of_pages(num_slots, num_pages, self.lookup)
        self.words: Int32Array = self.index.tensor
        self.slots: Int32Array = np.arange(num_rows, dtype=np.int32)
        self.known: dict[int, Int32Array] = {}
        self.steps = self.blind = self.drafts = 0

    def slot_words(self, slot: int) -> Int32Array:
        at = _HEADER_WORDS + slot * _SLOT_WORDS
        words: Int32Array = self.words[at : at + _SLOT_WORDS]
        return words

    def live(self, row: int) -> Int32Array:
        tokens: Int32Array = self.rows[row, : self.lengths[row]]
        return tokens

    def write(self, row: int, tokens: Sequence[int], at: int | None = None) -> None:
        """Writes a prompt or a piece of one, as a runner does."""
        start = int(self.lengths[row]) if at is None else at
        piece = np.asarray(tokens, np.int32)[: self.rows.shape[1] - start]
        self.rows[row, start : start + len(piece)] = piece
        self.lengths[row] = start + len(piece)

    def append(self, rows: Sequence[int]) -> None:
        at = np.asarray(rows, np.int32)
        for row in at:
            self._forget(int(row), int(self.lengths[row]))
        look = self.lookup
        _C.ngram_index_append_(
            self.rows, self.lengths, self.words, at, self.slots[at], look.min_n, look.max_n,
            look.match_policy, look.ladder, look.costs is not None,
        )  # fmt: skip
        for row in at:
            self._note(int(row))

    def reset(self, rows: Sequence[int]) -> None:
        slots = self.slots[np.asarray(rows, np.int32)]
        _C.ngram_index_reset_(self.words, slots)
        for slot in slots:
            self.known.pop(int(slot), None)

    def step(
        self,
        rows: Sequence[int],
        sampled: Int32Array,
        discard: npt.NDArray[np.bool_] | None = None,
        advance: bool = True,
        vocab_size: int = UNLIMITED,
        by_row: bool = False,
    ) -> Int32Array:
        """Makes the step with the index and, on copies, with a scan; returns the scan's drafts.

        If ``advance`` is false the lengths grow here, as in a runner that owns them. ``by_row``: no
        indices are passed; the rows must then be the first ones.
        """
        look = self.lookup
        at = np.asarray(rows, np.int32)
        blind = [self._assess(int(row), int(self.lengths[row])) for row in at]
        buffer, lengths = self._buffer.copy(), self.lengths.copy()
        head = (discard, None if by_row else at)
        tail = (
            advance, vocab_size, look.min_n, look.max_n, look.k, look.match_policy, look.overlap,
            look.max_len,
        )  # fmt: skip
        truth = [*_C.ngram_step_(buffer[1:-1, PAD:-PAD], lengths, sampled, *head, *tail)]
        asked = at[truth[1] > 0]  # the slots of the others are left as they are
        for row in asked:
            self._forget(int(row), int(self.lengths[row]))
        paid = None if look.costs is None else np.zeros((len(at), look.k), np.uint8)
        ladder = (look.ladder, look.costs, look.cost_limit or 0, paid)
        given = None if by_row and np.array_equal(self.slots[at], at) else self.slots[at]
        found = _C.ngram_index_step_(
            self.rows, self.lengths, sampled, self.words, *head, given, *tail, *ladder
        )
        np.testing.assert_array_equal(self._buffer, buffer)  # tokens, and nothing around them
        np.testing.assert_array_equal(self.lengths, lengths)
        for name, got, want in zip(("next", "num_sampled"), found[:2], truth[:2], strict=True):
            np.testing.assert_array_equal(got, want, name)
        clear = ~np.array(blind, np.bool_)
        ran = truth[1]
        grown = np.minimum(self.lengths[at] + (0 if advance else ran), self.rows.shape[1])
        if look.ladder:
            truth[2:], costs = self._ladder_drafts(at, np.where(ran > 0, grown, 0))
            if paid is not None:
                np.testing.assert_array_equal(paid[clear], costs[clear], "costs")
        for name, got, want in zip(("ids", "counts", "len"), found[2:], truth[2:], strict=True):
            np.testing.assert_array_equal(got[clear], want[clear], name)
        self.steps += int(clear.sum())
        self.blind += int((~clear).sum())
        self.drafts += int((found[3] > 0).sum())
        if not advance:
            self.lengths[at] = grown
        for i in np.flatnonzero(~clear):
            self._check_blind(int(at[i]), found[2][i].tolist(), int(found[3][i]), int(found[4][i]))
        for row in asked:
            self._note(int(row))
        drafts: Int32Array = truth[2]
        return drafts

    def _ladder_drafts(self, rows: Int32Array, lengths: Int32Array) -> tuple[list[Any], Any]:
        """Ids, counts and match lengths of a step that has been, and the costs; of rows with these
        lengths, 0 where nothing is drafted."""
        drafts = [
            ladder_draft(self.rows[row, :length], self.lookup)
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        ids, counts, matches, costs = map(np.array, zip(*drafts, strict=True))
        return [ids, counts, matches], costs

    def check(self) -> None:
        """Checks the index against the rows, for slots that have indexed their row."""
        rows = {}
        for row, slot in enumerate(self.slots.tolist()):
            if not self._assess(row, int(self.lengths[row])) and not self._will_rebuild(row):
                rows[slot] = self.live(row)
        self.index.check_integrity(rows)

    def _will_rebuild(self, row: int, length: int | None = None) -> bool:
        """Whether an operator notices that the slot has indexed other tokens."""
        words = self.slot_words(int(self.slots[row]))
        indexed = int(words[_LENGTH])
        look = self.lookup
        packed = 1 << 24 | look.match_policy << 16 | look.max_n << 8 | look.min_n
        packed |= look.ladder << 17 | (look.costs is not None) << 18
        if words[_OPTIONS] != packed or indexed > (self.lengths[row] if length is None else length):
            return True
        tail = min(indexed, _TAIL_TOKENS)
        end = _TAIL + _TAIL_TOKENS
        return not np.array_equal(words[end - tail : end], self.rows[row, indexed - tail : indexed])

    def _assess(self, row: int, length: int) -> bool:
        """Whether the slot holds other tokens than its row and cannot notice it."""
        slot = int(self.slots[row])
        if self._will_rebuild(row, length) or self.slot_words(slot)[_GIVEN_UP]:
            return False
        known = self.known.get(slot)
        if known is None or np.array_equal(known, self.rows[row, : len(known)]):
            return False
        known[:] = _LOST  # what a row is walked with meanwhile stays, also where it turns back
        return True

    def _forget(self, row: int, length: int) -> None:
        """Called before an operator that uses this row, which may rebuild its slot."""
        slot = int(self.slots[row])
        if self._will_rebuild(row, length) or self.slot_words(slot)[_GIVEN_UP]:
            self.known.pop(slot, None)

    def _note(self, row: int) -> None:
        slot = int(self.slots[row])
        words = self.slot_words(slot)
        if words[_GIVEN_UP] or words[_OPTIONS] == 0:
            self.known.pop(slot, None)
            return
        known = self.known.get(slot)
        before = 0 if known is None else len(known)
        new = self.rows[row, before : words[_LENGTH]].copy()
        all_known = new if known is None else np.concatenate([known, new])
        self.known[slot] = all_known[: words[_LENGTH]]

    def _check_blind(self, row: int, ids: list[int], count: int, match_len: int) -> None:
        """A draft that need not be the rescan's is still what followed an occurrence, in this row,
        of the row's last ``match_len`` tokens."""
        tokens = self.live(row).tolist()
        assert 0 <= count <= self.lookup.k
        assert ids[count:] == [-1] * (self.lookup.k - count)
        if count == 0:
            assert match_len == 0
            return
        assert self.lookup.min_n <= match_len <= self.lookup.max_n
        if self.lookup.ladder:  # a candidate that a slot has kept is not looked up again
            assert set(ids[:count]) <= set(tokens)
            return
        suffix = tokens[len(tokens) - match_len :]
        for end in range(match_len, len(tokens)):
            period = len(tokens) - end
            follows = [tokens[end + i % period] for i in range(count)]
            if tokens[end - match_len : end] == suffix and follows == ids[:count]:
                return
        raise AssertionError(f"a draft from nowhere: {ids} with a match of {match_len} in {tokens}")
