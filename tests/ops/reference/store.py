"""References of the operators of a store, defined in docs/ops/ngram_store_step.md."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

import numpy as np
from ops.reference.bookkeeping import Array, row_of
from ops.reference.drafting import NO_TOKEN, Drafts, LookupResult, count_affordable_tokens
from ops.reference.ladder import MAX_MATCH, SIZES, compute_cost
from ops.schema import Arguments, reference_operator

__all__ = [
    "ngram_store_finish_",
    "ngram_store_step_",
]

MAGIC, NUM_SLOTS, NUM_BLOCKS, LINE_BITS, VISIBILITY, NEXT_SERIAL, BUSY = range(7)
LOOKUPS, HITS, DRAFTS, DRAFT_TOKENS, INSERTED, EVICTED, LOST_BLOCKS, RENUMBERED = range(7, 15)
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
"""Token ids as unsigned 32-bit numbers."""


def mix(z: int) -> int:
    """Returns a hash of a 64-bit number: the finalizer of SplitMix64."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


@lru_cache
def seed_of(scope: int) -> int:
    return mix(scope)


def compute_key(ngram: Tokens, scope: int) -> int:
    polynomial = sum(map(mul, reversed(ngram), POWERS))
    level = len(ngram).bit_length() - 1
    return mix((polynomial & MASK64 ^ seed_of(scope)) + (level + 1) * BASE & MASK64)


def update_counts(right: int, wrong: int, is_expected: bool) -> tuple[int, int, bool]:
    """Returns an entry's counts after a token, which was the expected token or not, and whether the
    position of that token replaces the entry's position."""
    if is_expected:
        return (8, wrong // 2, True) if right == 15 else (right + 1, wrong, True)
    if wrong + 1 > right + 1:
        return 0, 1, True
    return (right // 2, 8, False) if wrong == 15 else (right, wrong + 1, False)


class LookupKey(NamedTuple):
    """Where the store has the entry of an n-gram."""

    n: int
    scope: int
    entries: range
    """The words at which the entries of the n-gram's line begin."""
    tag: int


class Hit(NamedTuple):
    entry: int
    """The word at which the entry begins."""
    right: int
    wrong: int
    position: int
    match_len: int
    """The number of tokens before the position that agree with the text, at most 16."""


class Store:
    """A store's tensor as unsigned words, read and written in place. The parts of the tensor
    (``heads``, ``lines``, ``tokens``, ``bytes``) are given by the words at which they begin."""

    def __init__(self, tensor: Array) -> None:
        self.words = tensor.view(np.uint32).data
        self.all_bytes = tensor.view(np.uint8).data
        self.num_slots = self.words[NUM_SLOTS]
        self.num_blocks = self.words[NUM_BLOCKS]
        self.line_bits = self.words[LINE_BITS]
        self.heads = HEADER_WORDS + self.num_slots * SLOT_WORDS
        self.lines = -(-(self.heads + self.num_blocks * HEAD_WORDS) // 16) * 16
        self.tokens = self.lines + (LINE_ENTRIES * ENTRY_WORDS << self.line_bits)
        self.bytes = self.tokens + self.num_blocks * BLOCK

    def add_to_statistic(self, statistic: int, count: int = 1) -> None:
        self.words[statistic] = self.words[statistic] + count & MASK32

    # Slots.

    def slot(self, slot: int) -> tuple[int, int]:
        """Returns the serial number of the slot's block, 0 for none, and L, the number of tokens
        of the row that are stored or were skipped."""
        first = HEADER_WORDS + slot * SLOT_WORDS
        return self.words[first + SLOT_SERIAL], self.words[first + SLOT_LENGTH]

    def set_slot(self, slot: int, serial: int, length: int) -> None:
        first = HEADER_WORDS + slot * SLOT_WORDS
        self.words[first + SLOT_SERIAL] = serial
        self.words[first + SLOT_LENGTH] = length

    # Blocks.

    def head(self, serial: int) -> int:
        """Returns the word at which the head of the block with that serial number begins."""
        return self.heads + serial % self.num_blocks * HEAD_WORDS

    def is_alive(self, serial: int) -> bool:
        return serial > 0 and self.words[self.head(serial) + HEAD_SERIAL] == serial

    def num_tokens(self, serial: int) -> int:
        return min(BLOCK, self.words[self.head(serial) + HEAD_FILL])

    def scope(self, serial: int) -> int:
        low_word = self.head(serial) + HEAD_SCOPE
        return self.words[low_word] | self.words[low_word + 1] << 32

    def text(self, serial: int, begin: int, end: int) -> list[int]:
        first = self.tokens + serial % self.num_blocks * BLOCK
        return list(self.words[first + begin : first + end])

    def token(self, position: int) -> int:
        return self.words[self.tokens + position % (self.num_blocks * BLOCK)]

    def outcome_byte(self, position: int) -> int:
        return self.all_bytes[self.bytes * 4 + position % (self.num_blocks * BLOCK)]

    def set_outcome_byte(self, position: int, byte: int) -> None:
        self.all_bytes[self.bytes * 4 + position % (self.num_blocks * BLOCK)] = byte

    def allocate_block(self, previous: int, scope: int) -> int:
        """Returns the serial number of a new block, which follows block ``previous`` of the same
        request (0: the new block is the first)."""
        if self.words[NEXT_SERIAL] == END_OF_SERIALS:
            difference = self.renumber()
            previous = max(0, previous - difference)
        if not 0 < self.words[NEXT_SERIAL] < END_OF_SERIALS:
            self.restart()
            previous = 0
        overlap = self.text(previous, BLOCK - OVERLAP, BLOCK) if previous else []
        serial = self.words[NEXT_SERIAL]
        self.words[NEXT_SERIAL] = serial + 1
        head = [serial, 0, len(overlap), previous, 0, scope & MASK32, scope >> 32]
        for i, word in enumerate(head):
            self.words[self.head(serial) + i] = word
        for i in range(BLOCK):
            self.set_outcome_byte(serial * BLOCK + i, 0)
            self.words[self.tokens + serial % self.num_blocks * BLOCK + i] = 0
        for token in overlap:
            self.append(serial, token)
        return serial

    def append(self, serial: int, token: int) -> int:
        """Appends a token to a block and returns the token's position."""
        fill = self.num_tokens(serial)
        position = serial * BLOCK + fill
        self.words[self.tokens + position % (self.num_blocks * BLOCK)] = token
        self.words[self.head(serial) + HEAD_FILL] = fill + 1
        return position

    def renumber(self) -> int:
        """Subtracts a number from all serial numbers, when all were used, and returns it."""
        blocks = self.num_blocks
        difference: int = (END_OF_SERIALS - blocks - 1) // blocks * blocks
        slots = range(HEADER_WORDS + SLOT_SERIAL, self.heads, SLOT_WORDS)
        heads = range(self.heads, self.heads + blocks * HEAD_WORDS, HEAD_WORDS)
        links = [head + word for head in heads for word in (HEAD_SERIAL, HEAD_PREVIOUS, HEAD_NEXT)]
        for word in (*slots, *links):
            self.words[word] = max(0, self.words[word] - difference)
        for entry in range(self.lines, self.tokens, ENTRY_WORDS):
            position = self.words[entry + 1]
            if position // BLOCK > difference:
                self.words[entry + 1] = position - difference * BLOCK
            else:
                self.words[entry] = self.words[entry + 1] = 0
        self.words[NEXT_SERIAL] -= difference
        self.add_to_statistic(EPOCH)
        self.add_to_statistic(RENUMBERED)
        return difference

    def restart(self) -> None:
        """Empties a store whose next serial number is invalid."""
        for i in range(HEADER_WORDS, self.tokens):
            self.words[i] = 0
        self.words[NEXT_SERIAL] = 1
        self.add_to_statistic(EPOCH)

    # Entries.

    def make_key(self, text: Tokens, n: int, scope: int) -> LookupKey:
        """Returns where the store has the entry for a text's last n tokens."""
        key = compute_key(text[-n:], scope)
        line = self.lines + (key >> 64 - self.line_bits) * LINE_ENTRIES * ENTRY_WORDS
        entries = range(line, line + LINE_ENTRIES * ENTRY_WORDS, ENTRY_WORDS)
        return LookupKey(n, scope, entries, key & 0xFFFFFF)

    def compute_match_len(self, position: int, text: Tokens) -> int:
        """Returns how many tokens before the position agree with the text's end, at most 16."""
        serial, max_length = position // BLOCK, min(position % BLOCK, len(text), MAX_MATCH)
        context = self.text(serial, position % BLOCK - max_length, position % BLOCK)
        length = 0
        while length < max_length and context[-1 - length] == text[-1 - length]:
            length += 1
        return length

    def look_up(self, key: LookupKey, text: Tokens) -> Hit | None:
        """Returns the entry of the n-gram at the text's end, or None if no entry matches."""
        for entry in key.entries:
            state, position = self.words[entry], self.words[entry + 1]
            serial = position // BLOCK
            if state >> 8 == key.tag and self.is_alive(serial) and self.scope(serial) == key.scope:
                match_len = self.compute_match_len(position, text)
                if match_len >= key.n:
                    return Hit(entry, state >> 4 & 15, state & 15, position, match_len)
        return None

    def set_entry(self, entry: int, tag: int, right: int, wrong: int, position: int) -> None:
        self.words[entry] = tag << 8 | right << 4 | wrong
        self.words[entry + 1] = position

    def select_replaced_entry(self, entries: range) -> int:
        """Returns the entry of a line that a new entry replaces."""
        for entry in entries:
            if not self.is_alive(self.words[entry + 1] // BLOCK):
                return entry
        self.add_to_statistic(EVICTED)
        return min(entries, key=lambda entry: self.words[entry + 1])

    def insert(self, position: int) -> None:
        """Inserts the token at this position as the continuation of the tokens before it."""
        serial, offset = position // BLOCK, position % BLOCK
        scope = self.scope(serial)
        text = self.text(serial, max(0, offset - MAX_MATCH), offset)
        token = self.token(position)
        byte = None
        for n in SIZES:
            if n > len(text):
                continue
            key = self.make_key(text, n, scope)
            hit = self.look_up(key, text)
            if hit is None:
                self.set_entry(self.select_replaced_entry(key.entries), key.tag, 0, 0, position)
                continue
            is_expected = self.token(hit.position) == token
            if byte is None:
                byte = min(hit.match_len, 15) * 2 + is_expected
            right, wrong, is_replaced = update_counts(hit.right, hit.wrong, is_expected)
            new_position = position if is_replaced else hit.position
            self.set_entry(hit.entry, key.tag, right, wrong, new_position)
        self.set_outcome_byte(position, byte or 0)
        self.add_to_statistic(INSERTED)

    # Requests.

    def close_slot(self, slot: int) -> None:
        """Inserts the tokens of a slot that were not visible yet, and frees the slot."""
        serial, _ = self.slot(slot)
        if serial and not self.is_alive(serial):
            self.add_to_statistic(LOST_BLOCKS)
        if self.words[VISIBILITY] == FINISH and self.is_alive(serial):
            for block in self.link_blocks(serial):
                first = self.words[self.head(block) + HEAD_FIRST]
                for i in range(first, self.num_tokens(block)):
                    self.insert(block * BLOCK + i)
        self.set_slot(slot, 0, 0)

    def link_blocks(self, newest: int) -> list[int]:
        """Returns a request's blocks, from the oldest alive one to ``newest``, and links each
        block to the next one."""
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
        fill = self.num_tokens(serial)
        last_tokens = self.text(serial, max(0, fill - OVERLAP), fill)
        begin = length - len(last_tokens)
        return begin >= 0 and list(row[begin:length]) == last_tokens

    def append_to_slot(self, slot: int, tokens: Tokens, scope: int) -> None:
        """Appends the next tokens of a slot's row to its text."""
        for token in tokens:
            serial, length = self.slot(slot)
            if not serial or self.num_tokens(serial) == BLOCK:
                serial = self.allocate_block(serial, scope)
            position = self.append(serial, token)
            self.set_slot(slot, serial, length + 1)
            if self.words[VISIBILITY] != FINISH:
                self.insert(position)


def open_store(tensor: Array) -> Store | None:
    """Returns the store. Returns None if the tensor does not contain a store, or if another call
    uses the store, which is then counted as a refused call."""
    if len(tensor) < HEADER_WORDS or int(tensor[MAGIC]) != 0x31534E47:
        return None
    slots, blocks, bits = (int(word) for word in tensor[NUM_SLOTS : LINE_BITS + 1])
    if not (1 <= slots <= blocks // 4 and blocks <= 2**20 and 1 <= bits <= 24):
        return None
    store = Store(tensor)
    if store.bytes + blocks * BLOCK // 4 > len(tensor):
        return None
    if store.words[BUSY]:
        store.add_to_statistic(REFUSED)
        return None
    return store


BACKLOG = 4096
FIRST_RIGHT = (1, 2, 3, 5, 9)
FIRST_WRONG = (1, 2, 4)

CHANCES = [65536]
while len(CHANCES) < 256:
    CHANCES.append(CHANCES[-1] * 62757 // 65536)


def compute_promise(costs: list[int]) -> int:
    return sum(CHANCES[c] for c in accumulate(costs) if c < 256)


def find_longest_hit(store: Store, row: Tokens, scope: int) -> Hit | None:
    for n in SIZES:
        if n <= len(row) and (hit := store.look_up(store.make_key(row, n, scope), row)):
            return hit
    return None


def compute_costs(
    store: Store, hit: Hit, text: Tokens, costs: Array, token_logits: Array | None
) -> list[int]:
    """Returns the costs of a draft's tokens. ``text`` is the row's last token and the draft."""
    columns = [32 + 4 * bisect_right(FIRST_RIGHT, hit.right) + bisect_right(FIRST_WRONG, hit.wrong)]
    columns += [store.outcome_byte(hit.position + j) % 32 for j in range(1, len(text) - 1)]
    values = (int(costs[min(hit.match_len + j, 15), column]) for j, column in enumerate(columns))
    return [compute_cost(*token) for token in zip(values, repeat(token_logits), text, text[1:])]


def to_int32(token: int) -> int:
    return token - (token >> 31 << 32)


@reference_operator
def ngram_store_step_(args: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], num_sampled, row_indices, slot_indices and scopes [B], costs
    [16,56] uint8; store [W], draft_token_ids [B,k], num_draft_tokens and match_len [B] and
    draft_costs [B,k] uint8 are written; no results."""
    store = open_store(args.store) if len(args.num_sampled) else None
    if store is None:
        return
    num_rows, capacity = args.token_ids.shape
    k = args.draft_token_ids.shape[1]
    drafts = Drafts(args.draft_token_ids, args.num_draft_tokens, args.match_len, args.draft_costs)

    requests = []
    for i, sampled in enumerate(map(int, args.num_sampled)):
        index = row_of(args, i)
        if not 0 <= index < num_rows or sampled <= 0:
            continue
        if not 1 <= args.num_tokens[index] <= capacity:
            continue
        row = [int(token) & MASK32 for token in args.token_ids[index, : args.num_tokens[index]]]
        slot = index if args.slot_indices is None else int(args.slot_indices[i])
        scope = 0 if args.scopes is None else int(args.scopes[i]) & MASK64
        requests.append((i, row, sampled, slot, scope))

    for i, row, _, _, scope in requests:
        store.add_to_statistic(LOOKUPS)
        hit = find_longest_hit(store, row, scope)
        if hit is None:
            continue
        store.add_to_statistic(HITS)
        num_left = store.num_tokens(hit.position // BLOCK) - hit.position % BLOCK
        text = [to_int32(store.token(hit.position + j)) for j in range(min(k, num_left))]
        draft = text[: max(0, args.max_len - len(row))]
        token_costs = compute_costs(store, hit, [row[-1], *draft], args.costs, args.token_logits)
        count = count_affordable_tokens(token_costs, args.cost_limit)
        num_drafts = max(0, args.num_draft_tokens[i])
        index_costs = [int(cost) for cost in args.draft_costs[i, :num_drafts]]
        if compute_promise(token_costs[:count]) <= compute_promise(index_costs):
            continue
        store.add_to_statistic(DRAFTS)
        store.add_to_statistic(DRAFT_TOKENS, count)
        output = text if args.fill else text[:count]
        result = LookupResult(output, count, token_costs[:count], hit.match_len)
        drafts.write(i, result, to_int32(row[-1]) if args.fill else NO_TOKEN)

    backlog = BACKLOG
    for _, row, sampled, slot, scope in requests:
        if not 0 <= slot < store.num_slots:
            continue
        if not store.slot_matches(slot, row, scope):
            store.close_slot(slot)
            store.set_slot(slot, 0, max(0, len(row) - sampled))
        _, length = store.slot(slot)
        num_waiting = min(max(0, len(row) - sampled - length), backlog)
        backlog -= num_waiting
        num_new = min(sampled, len(row) - length)
        store.append_to_slot(slot, row[length : length + num_waiting + num_new], scope)


@reference_operator
def ngram_store_finish_(args: Arguments) -> None:
    """store [W] is written; slot_indices [N]; no results."""
    store = open_store(args.store) if len(args.slot_indices) else None
    if store is None:
        return
    for slot in map(int, args.slot_indices):
        if 0 <= slot < store.num_slots:
            store.close_slot(slot)
