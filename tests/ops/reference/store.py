"""The reference of the store that requests share: docs/ops, docs/design/store.md."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from typing import NamedTuple

import numpy as np
from ops.reference.bookkeeping import Array, row_of
from ops.reference.drafting import NO_TOKEN, Drafts, LookupResult, affordable
from ops.reference.ladder import MAX_MATCH, SIZES, cost_of
from ops.schema import Arguments, reference_operator

__all__ = [
    "ngram_store_finish_",
    "ngram_store_step_",
]

MAGIC, NUM_SLOTS, NUM_BLOCKS, LINE_BITS, VISIBILITY, NEXT_SERIAL, BUSY = range(7)
LOOKUPS, HITS, DRAFTS, DRAFT_TOKENS, ENTERED, EVICTED, LOST_BLOCKS, RENUMBERED = range(7, 15)
REFUSED, EPOCH = 15, 16
HEADER_WORDS = 64
SLOT_WORDS, SLOT_SERIAL, SLOT_LENGTH = 4, 0, 1
HEAD_WORDS, HEAD_SERIAL, HEAD_FILL, HEAD_FIRST, HEAD_PREVIOUS, HEAD_NEXT, HEAD_SCOPE = 8, *range(6)
LINE_ENTRIES, ENTRY_WORDS = 8, 2
BLOCK = 256
OVERLAP = 16
END_OF_SERIALS = 2**24
FINISH = 1

BASE = 0x9E3779B97F4A7C15
MASK32, MASK64 = 2**32 - 1, 2**64 - 1
POWERS = [pow(BASE, j, 2**64) for j in range(MAX_MATCH)]

Tokens = Sequence[int]
"""As unsigned 32-bit numbers."""


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


@lru_cache
def seed_of(scope: int) -> int:
    return mix(scope)


def key_of(gram: Tokens, scope: int) -> int:
    polynomial = sum(token * power for token, power in zip(reversed(gram), POWERS, strict=False))
    level = len(gram).bit_length() - 1
    return mix((polynomial & MASK64 ^ seed_of(scope)) + (level + 1) * BASE & MASK64)


def updated(right: int, wrong: int, same: bool) -> tuple[int, int, bool]:
    """Returns an entry's counts after a token that was the expected one or not, and whether the
    entry moves to that token's place."""
    if same:
        return (8, wrong // 2, True) if right == 15 else (right + 1, wrong, True)
    if wrong + 1 > right + 1:
        return 0, 1, True
    return (right // 2, 8, False) if wrong == 15 else (right, wrong + 1, False)


class Gram(NamedTuple):
    n: int
    scope: int
    entries: range
    """The words at which the entries of its line begin."""
    tag: int


class Hit(NamedTuple):
    entry: int
    """The word at which the entry begins."""
    right: int
    wrong: int
    place: int
    m: int
    """The number of tokens before the place that agree with the text, at most 16."""


class Store:
    """A store's tensor as unsigned words, read and written in place."""

    def __init__(self, tensor: Array) -> None:
        self.words = tensor.view(np.uint32).data
        self.octets = tensor.view(np.uint8).data
        self.num_slots = self.words[NUM_SLOTS]
        self.num_blocks = self.words[NUM_BLOCKS]
        self.line_bits = self.words[LINE_BITS]
        self.heads = HEADER_WORDS + self.num_slots * SLOT_WORDS
        self.lines = -(-(self.heads + self.num_blocks * HEAD_WORDS) // 16) * 16
        self.tokens = self.lines + (LINE_ENTRIES * ENTRY_WORDS << self.line_bits)
        self.bytes = self.tokens + self.num_blocks * BLOCK

    def count(self, statistic: int, by: int = 1) -> None:
        self.words[statistic] = self.words[statistic] + by & MASK32

    # Slots.

    def slot(self, slot: int) -> tuple[int, int]:
        """Returns the serial number of the slot's block, 0 for none, and the length L of its
        row."""
        at = HEADER_WORDS + slot * SLOT_WORDS
        return self.words[at + SLOT_SERIAL], self.words[at + SLOT_LENGTH]

    def set_slot(self, slot: int, serial: int, length: int) -> None:
        at = HEADER_WORDS + slot * SLOT_WORDS
        self.words[at + SLOT_SERIAL] = serial
        self.words[at + SLOT_LENGTH] = length

    # Blocks.

    def head(self, serial: int) -> int:
        """Returns the word at which the head of the block with that serial number begins."""
        return self.heads + serial % self.num_blocks * HEAD_WORDS

    def is_alive(self, serial: int) -> bool:
        return serial > 0 and self.words[self.head(serial) + HEAD_SERIAL] == serial

    def fill(self, serial: int) -> int:
        return min(BLOCK, self.words[self.head(serial) + HEAD_FILL])

    def scope(self, serial: int) -> int:
        at = self.head(serial) + HEAD_SCOPE
        return self.words[at] | self.words[at + 1] << 32

    def text(self, serial: int, begin: int, end: int) -> list[int]:
        at = self.tokens + serial % self.num_blocks * BLOCK
        return list(self.words[at + begin : at + end])

    def token(self, place: int) -> int:
        return self.words[self.tokens + place % (self.num_blocks * BLOCK)]

    def byte(self, place: int) -> int:
        return self.octets[self.bytes * 4 + place % (self.num_blocks * BLOCK)]

    def set_byte(self, place: int, byte: int) -> None:
        self.octets[self.bytes * 4 + place % (self.num_blocks * BLOCK)] = byte

    def allocate_block(self, previous: int, scope: int) -> int:
        """Returns the serial number of a new block, which follows block ``previous`` of its
        request (0: it is the first)."""
        if self.words[NEXT_SERIAL] == END_OF_SERIALS:
            by = self.renumber()
            previous = max(0, previous - by)
        if not 0 < self.words[NEXT_SERIAL] < END_OF_SERIALS:
            self.restart()
            previous = 0
        repeated = self.text(previous, BLOCK - OVERLAP, BLOCK) if previous else []
        serial = self.words[NEXT_SERIAL]
        self.words[NEXT_SERIAL] = serial + 1
        head = [serial, 0, len(repeated), previous, 0, scope & MASK32, scope >> 32]
        for i, word in enumerate(head):
            self.words[self.head(serial) + i] = word
        for i in range(BLOCK):
            self.set_byte(serial * BLOCK + i, 0)
            self.words[self.tokens + serial % self.num_blocks * BLOCK + i] = 0
        for token in repeated:
            self.append(serial, token)
        return serial

    def append(self, serial: int, token: int) -> int:
        """Writes a token to a block and returns its place."""
        fill = self.fill(serial)
        place = serial * BLOCK + fill
        self.words[self.tokens + place % (self.num_blocks * BLOCK)] = token
        self.words[self.head(serial) + HEAD_FILL] = fill + 1
        return place

    def renumber(self) -> int:
        """Subtracts the same number from all serial numbers, after the last one was used."""
        blocks = self.num_blocks
        by: int = (END_OF_SERIALS - blocks - 1) // blocks * blocks
        slots = range(HEADER_WORDS + SLOT_SERIAL, self.heads, SLOT_WORDS)
        heads = range(self.heads, self.heads + blocks * HEAD_WORDS, HEAD_WORDS)
        links = [at + word for at in heads for word in (HEAD_SERIAL, HEAD_PREVIOUS, HEAD_NEXT)]
        for at in (*slots, *links):
            self.words[at] = max(0, self.words[at] - by)
        for entry in range(self.lines, self.tokens, ENTRY_WORDS):
            place = self.words[entry + 1]
            if place // BLOCK > by:
                self.words[entry + 1] = place - by * BLOCK
            else:
                self.words[entry] = self.words[entry + 1] = 0
        self.words[NEXT_SERIAL] -= by
        self.count(EPOCH)
        self.count(RENUMBERED)
        return by

    def restart(self) -> None:
        """Empties a store with an invalid header."""
        for i in range(HEADER_WORDS, self.tokens):
            self.words[i] = 0
        self.words[NEXT_SERIAL] = 1
        self.count(EPOCH)

    # Entries.

    def gram(self, text: Tokens, n: int, scope: int) -> Gram:
        """Returns the place of the entry for a text's last n tokens."""
        key = key_of(text[-n:], scope)
        line = self.lines + (key >> 64 - self.line_bits) * LINE_ENTRIES * ENTRY_WORDS
        entries = range(line, line + LINE_ENTRIES * ENTRY_WORDS, ENTRY_WORDS)
        return Gram(n, scope, entries, key & 0xFFFFFF)

    def agreement(self, place: int, text: Tokens) -> int:
        """Returns the number of tokens before the place that agree with the text's end, at most
        16."""
        serial, most = place // BLOCK, min(place % BLOCK, len(text), MAX_MATCH)
        before = self.text(serial, place % BLOCK - most, place % BLOCK)
        m = 0
        while m < most and before[-1 - m] == text[-1 - m]:
            m += 1
        return m

    def look_up(self, gram: Gram, text: Tokens) -> Hit | None:
        """Returns the entry of the gram at the text's end, if it matches."""
        for entry in gram.entries:
            state, place = self.words[entry], self.words[entry + 1]
            serial = place // BLOCK
            if (
                state >> 8 == gram.tag
                and self.is_alive(serial)
                and self.scope(serial) == gram.scope
            ):
                m = self.agreement(place, text)
                if m >= gram.n:
                    return Hit(entry, state >> 4 & 15, state & 15, place, m)
        return None

    def set_entry(self, entry: int, tag: int, right: int, wrong: int, place: int) -> None:
        self.words[entry] = tag << 8 | right << 4 | wrong
        self.words[entry + 1] = place

    def victim(self, entries: range) -> int:
        """Returns the entry of a line that a new entry replaces."""
        for entry in entries:
            if not self.is_alive(self.words[entry + 1] // BLOCK):
                return entry
        self.count(EVICTED)
        return min(entries, key=lambda entry: self.words[entry + 1])

    def insert(self, place: int) -> None:
        """Inserts the token at that place as the continuation of the tokens before it."""
        serial, before = place // BLOCK, place % BLOCK
        scope = self.scope(serial)
        text = self.text(serial, max(0, before - MAX_MATCH), before)
        token = self.token(place)
        byte = None
        for n in SIZES:
            if n > len(text):
                continue
            gram = self.gram(text, n, scope)
            hit = self.look_up(gram, text)
            if hit is None:
                self.set_entry(self.victim(gram.entries), gram.tag, 0, 0, place)
                continue
            same = self.token(hit.place) == token
            if byte is None:
                byte = min(hit.m, 15) * 2 + same
            right, wrong, moved = updated(hit.right, hit.wrong, same)
            self.set_entry(hit.entry, gram.tag, right, wrong, place if moved else hit.place)
        self.set_byte(place, byte or 0)
        self.count(ENTERED)

    # Requests.

    def close(self, slot: int) -> None:
        """Inserts the tokens of a slot that were not visible yet, and frees the slot."""
        serial, _ = self.slot(slot)
        if serial and not self.is_alive(serial):
            self.count(LOST_BLOCKS)
        if self.words[VISIBILITY] == FINISH and self.is_alive(serial):
            for block in self.chain(serial):
                first = self.words[self.head(block) + HEAD_FIRST]
                for i in range(first, self.fill(block)):
                    self.insert(block * BLOCK + i)
        self.set_slot(slot, 0, 0)

    def chain(self, newest: int) -> list[int]:
        """Returns a request's linked blocks, from the oldest to ``newest``, and links each
        forward to the next one."""
        serials = [newest]
        self.words[self.head(newest) + HEAD_NEXT] = 0
        while True:
            previous = self.words[self.head(serials[0]) + HEAD_PREVIOUS]
            if not self.is_alive(previous) or previous >= serials[0]:
                return serials
            self.words[self.head(previous) + HEAD_NEXT] = serials[0]
            serials.insert(0, previous)

    def slot_matches(self, slot: int, row: Tokens, scope: int) -> bool:
        """Returns whether the slot belongs to the request of the row."""
        serial, length = self.slot(slot)
        if not self.is_alive(serial) or self.scope(serial) != scope or length > len(row):
            return False
        fill = self.fill(serial)
        last = self.text(serial, max(0, fill - OVERLAP), fill)
        return len(last) <= length and list(row[length - len(last) : length]) == last

    def write(self, slot: int, tokens: Tokens, scope: int) -> None:
        """Appends the next tokens of a slot's row to its text."""
        for token in tokens:
            serial, length = self.slot(slot)
            if not serial or self.fill(serial) == BLOCK:
                serial = self.allocate_block(serial, scope)
            place = self.append(serial, token)
            self.set_slot(slot, serial, length + 1)
            if self.words[VISIBILITY] != FINISH:
                self.insert(place)


def open_store(tensor: Array) -> Store | None:
    """Returns the store, or None if the tensor contains none or another call uses it (which is
    counted)."""
    if len(tensor) < HEADER_WORDS or int(tensor[MAGIC]) != 0x31534E47:
        return None
    slots, blocks, bits = (int(word) for word in tensor[NUM_SLOTS : LINE_BITS + 1])
    if not (1 <= slots <= blocks // 4 and blocks <= 2**20 and 1 <= bits <= 24):
        return None
    store = Store(tensor)
    if store.bytes + blocks * BLOCK // 4 > len(tensor):
        return None
    if store.words[BUSY]:
        store.count(REFUSED)
        return None
    return store


BACKLOG = 4096
FIRST_RIGHT = (1, 2, 3, 5, 9)
FIRST_WRONG = (1, 2, 4)

CHANCES = [65536]
while len(CHANCES) < 256:
    CHANCES.append(CHANCES[-1] * 62757 // 65536)


def promise(costs: list[int]) -> int:
    return sum(CHANCES[c] for c in accumulate(costs) if c < 256)


def longest_hit(store: Store, row: Tokens, scope: int) -> Hit | None:
    for n in SIZES:
        if n <= len(row) and (hit := store.look_up(store.gram(row, n, scope), row)):
            return hit
    return None


def costs_of(
    store: Store, hit: Hit, text: Tokens, costs: Array, token_logits: Array | None
) -> list[int]:
    """Returns the costs of a draft's tokens. ``text`` is the row's last token and the draft."""
    first = 32 + 4 * bisect_right(FIRST_RIGHT, hit.right) + bisect_right(FIRST_WRONG, hit.wrong)
    columns = [store.byte(hit.place + j) % 32 if j else first for j in range(len(text) - 1)]
    cells = [int(costs[min(hit.m + j, 15), column]) for j, column in enumerate(columns)]
    return [cost_of(*args) for args in zip(cells, repeat(token_logits), text, text[1:])]


def signed(token: int) -> int:
    return token - (token >> 31 << 32)


@reference_operator
def ngram_store_step_(a: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], num_sampled, row_indices, slot_indices and scopes [B], costs
    [16,56] uint8; store [W], draft_token_ids [B,k], num_draft_tokens and match_len [B] and
    draft_costs [B,k] uint8 are written; no results."""
    store = open_store(a.store) if len(a.num_sampled) else None
    if store is None:
        return
    num_rows, capacity = a.token_ids.shape
    k = a.draft_token_ids.shape[1]
    drafts = Drafts(a.draft_token_ids, a.num_draft_tokens, a.match_len, a.draft_costs)

    requests = []
    for i, sampled in enumerate(map(int, a.num_sampled)):
        at = row_of(a, i)
        if not 0 <= at < num_rows or sampled <= 0 or not 1 <= a.num_tokens[at] <= capacity:
            continue
        row = [int(token) & MASK32 for token in a.token_ids[at, : a.num_tokens[at]]]
        slot = at if a.slot_indices is None else int(a.slot_indices[i])
        scope = 0 if a.scopes is None else int(a.scopes[i]) & MASK64
        requests.append((i, row, sampled, slot, scope))

    for i, row, _, _, scope in requests:
        store.count(LOOKUPS)
        hit = longest_hit(store, row, scope)
        if hit is None:
            continue
        store.count(HITS)
        place, left = hit.place, store.fill(hit.place // BLOCK) - hit.place % BLOCK
        text = [signed(store.token(place + j)) for j in range(min(k, left))]
        most = max(0, min(len(text), a.max_len - len(row)))
        token_costs = costs_of(store, hit, [row[-1], *text[:most]], a.costs, a.token_logits)
        count = affordable(token_costs, a.cost_limit)
        index_costs = [int(cost) for cost in a.draft_costs[i, : max(0, a.num_draft_tokens[i])]]
        if promise(token_costs[:count]) <= promise(index_costs):
            continue
        store.count(DRAFTS)
        store.count(DRAFT_TOKENS, count)
        result = LookupResult(text if a.fill else text[:count], count, token_costs[:count], hit.m)
        drafts.write(i, result, signed(row[-1]) if a.fill else NO_TOKEN)

    backlog = BACKLOG
    for _, row, sampled, slot, scope in requests:
        if not 0 <= slot < store.num_slots:
            continue
        if not store.slot_matches(slot, row, scope):
            store.close(slot)
            store.set_slot(slot, 0, max(0, len(row) - sampled))
        _, length = store.slot(slot)
        waiting = max(0, len(row) - sampled - length)
        taken = min(waiting, backlog)
        backlog -= taken
        new = min(sampled, len(row) - length)
        store.write(slot, row[length : length + taken + new], scope)


@reference_operator
def ngram_store_finish_(a: Arguments) -> None:
    """store [W] is written; slot_indices [N]; no results."""
    store = open_store(a.store) if len(a.slot_indices) else None
    if store is None:
        return
    for slot in map(int, a.slot_indices):
        if 0 <= slot < store.num_slots:
            store.close(slot)
