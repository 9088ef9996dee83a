"""A runner's rows with an index, next to a copy of them that is rescanned at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramIndex

Int32Array = npt.NDArray[np.int32]

UNLIMITED = 2**63 - 1
PAD = 7
_HEADER_WORDS = 64
_OPTIONS, _LENGTH, _TAIL = 0, 1, 8
_TAIL_TOKENS = 8


@dataclass(frozen=True)
class Lookup:
    min_n: int = 2
    max_n: int = 4
    k: int = 4
    match_policy: int = 0
    overlap: bool = False
    max_len: int = UNLIMITED


def index_of_pages(num_slots: int, num_pages: int, lookup: Lookup) -> NgramIndex:
    """With that many pages exactly: too few, where a test wants the memory to run out."""
    index = NgramIndex(num_slots, 0, min_n=lookup.min_n, max_n=lookup.max_n)
    words = np.zeros(_C.index_words(num_slots, num_pages), np.int32)
    _C.index_init(words, num_slots)
    index._words = index.tensor = words
    return index


class World:
    """Rows, their slots, and what each slot must have seen.

    Attributes:
        rows, lengths: the runner's, between canaries.
        slots: [R], the slot of each row's request.
        steps: requests compared with a rescan so far; ``blind`` of them could not be.

    Slots of all layouts begin with the same words.
    """

    SLOT_WORDS, GIVEN_UP = 48, 4

    def __init__(
        self, num_rows: int, capacity: int, lookup: Lookup, num_slots: int, num_pages: int
    ) -> None:
        self.lookup = lookup
        self._buffer: Int32Array = np.full((num_rows + 2, capacity + 2 * PAD), -77, np.int32)
        self.rows = self._buffer[1:-1, PAD:-PAD]
        self.rows[:] = -5
        self.lengths: Int32Array = np.zeros(num_rows, np.int32)
        self.index = self._make_index(num_slots, num_pages)
        self.words: Int32Array = self._words_of_index()
        self.slots: Int32Array = np.arange(num_rows, dtype=np.int32)
        self.known: dict[int, Int32Array] = {}
        self.steps = self.blind = self.drafts = 0

    def _make_index(self, num_slots: int, num_pages: int) -> Any:
        return index_of_pages(num_slots, num_pages, self.lookup)

    def _words_of_index(self) -> Int32Array:
        words: Int32Array = self.index.tensor
        return words

    def _call(self, op: str, *args: Any) -> Any:
        return getattr(_C, op)(*args)

    def slot_words(self, slot: int) -> Int32Array:
        at = _HEADER_WORDS + slot * self.SLOT_WORDS
        words: Int32Array = self.words[at : at + self.SLOT_WORDS]
        return words

    def live(self, row: int) -> Int32Array:
        tokens: Int32Array = self.rows[row, : self.lengths[row]]
        return tokens

    def write(self, row: int, tokens: Sequence[int], at: int | None = None) -> None:
        """What a runner does by itself: a prompt, or a piece of one."""
        start = int(self.lengths[row]) if at is None else at
        piece = np.asarray(tokens, np.int32)[: self.rows.shape[1] - start]
        self.rows[row, start : start + len(piece)] = piece
        self.lengths[row] = start + len(piece)

    def append(self, rows: Sequence[int]) -> None:
        at = np.asarray(rows, np.int32)
        for row in at:
            self._forget(int(row), int(self.lengths[row]))
        look = self.lookup
        self._call(
            "ngram_index_append_",
            self.rows, self.lengths, self.words, at, self.slots[at], look.min_n, look.max_n,
            look.match_policy,
        )  # fmt: skip
        for row in at:
            self._note(int(row))

    def reset(self, rows: Sequence[int]) -> None:
        slots = self.slots[np.asarray(rows, np.int32)]
        self._call("ngram_index_reset_", self.words, slots)
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
        """The same step on the index and, on copies, by a rescan; returns the rescan's drafts.

        Where ``advance`` is false the lengths are grown here, as by a runner that owns them.
        ``by_row``: no indices are passed; rows must then be the first ones.
        """
        look = self.lookup
        at = np.asarray(rows, np.int32)
        blind = [self._assess(int(row), int(self.lengths[row])) for row in at]
        for row in at:
            self._forget(int(row), int(self.lengths[row]))
        buffer, lengths = self._buffer.copy(), self.lengths.copy()
        head = (discard, None if by_row else at)
        tail = (
            advance, vocab_size, look.min_n, look.max_n, look.k, look.match_policy, look.overlap,
            look.max_len, None,
        )  # fmt: skip
        truth = _C.ngram_step_(buffer[1:-1, PAD:-PAD], lengths, sampled, *head, *tail)
        given = None if by_row and np.array_equal(self.slots[at], at) else self.slots[at]
        found = self._call(
            "ngram_index_step_", self.rows, self.lengths, sampled, self.words, *head, given, *tail
        )
        np.testing.assert_array_equal(self._buffer, buffer)  # tokens, and nothing around them
        np.testing.assert_array_equal(self.lengths, lengths)
        for name, got, want in zip(("next", "num_sampled"), found[:2], truth[:2], strict=True):
            np.testing.assert_array_equal(got, want, name)
        clear = ~np.array(blind, np.bool_)
        for name, got, want in zip(("ids", "counts", "len"), found[2:], truth[2:], strict=True):
            np.testing.assert_array_equal(got[clear], want[clear], name)
        self.steps += int(clear.sum())
        self.blind += int((~clear).sum())
        self.drafts += int((found[3] > 0).sum())
        ran = truth[1]
        grown = np.minimum(self.lengths[at] + (0 if advance else ran), self.rows.shape[1])
        if not advance:
            self.lengths[at] = grown
        for i in np.flatnonzero(~clear):
            self._check_blind(int(at[i]), found[2][i].tolist(), int(found[3][i]), int(found[4][i]))
        for row in at:
            self._note(int(row))
        drafts: Int32Array = truth[2]
        return drafts

    def check(self) -> None:
        """The index against the rows, where a slot is what its row says."""
        rows = {}
        for row, slot in enumerate(self.slots.tolist()):
            if not self._assess(row, int(self.lengths[row])) and not self._will_rebuild(row):
                rows[slot] = self.live(row)
        self.index.check_integrity(rows)

    def _will_rebuild(self, row: int, length: int | None = None) -> bool:
        """Whether an operator notices that the slot holds something else."""
        words = self.slot_words(int(self.slots[row]))
        indexed = int(words[_LENGTH])
        look = self.lookup
        packed = 1 << 24 | look.match_policy << 16 | look.max_n << 8 | look.min_n
        if words[_OPTIONS] != packed or indexed > (self.lengths[row] if length is None else length):
            return True
        tail = min(indexed, _TAIL_TOKENS)
        end = _TAIL + _TAIL_TOKENS
        return not np.array_equal(words[end - tail : end], self.rows[row, indexed - tail : indexed])

    def _assess(self, row: int, length: int) -> bool:
        """Whether the slot holds other tokens than its row and nobody can notice."""
        slot = int(self.slots[row])
        if self._will_rebuild(row, length) or self.slot_words(slot)[self.GIVEN_UP]:
            return False
        known = self.known.get(slot)
        return known is not None and not np.array_equal(known, self.rows[row, : len(known)])

    def _forget(self, row: int, length: int) -> None:
        """Before an operator that takes this row: its slot may be about to be built anew."""
        slot = int(self.slots[row])
        if self._will_rebuild(row, length) or self.slot_words(slot)[self.GIVEN_UP]:
            self.known.pop(slot, None)

    def _note(self, row: int) -> None:
        slot = int(self.slots[row])
        words = self.slot_words(slot)
        if words[self.GIVEN_UP] or words[_OPTIONS] == 0:
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
        suffix = tokens[len(tokens) - match_len :]
        for end in range(match_len, len(tokens)):
            period = len(tokens) - end
            follows = [tokens[end + i % period] for i in range(count)]
            if tokens[end - match_len : end] == suffix and follows == ids[:count]:
                return
        raise AssertionError(f"a draft from nowhere: {ids} with a match of {match_len} in {tokens}")
