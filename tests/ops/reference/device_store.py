"""The reference of the device store's operators: docs/ops/device_store_append.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ops.reference.bookkeeping import Array, row_of
from ops.schema import Arguments, reference_operator

__all__ = [
    "device_store_append_",
    "device_store_propose_",
]

BLOCK = 256
BASE = 0x9E3779B97F4A7C15
MASK32, MASK64 = 2**32 - 1, 2**64 - 1
POWERS = [pow(BASE, j, 2**64) for j in range(16)]
SIZES = (1, 2, 3, 4, 8, 16)
SLOT_LEVEL = len(SIZES)
END_OF_BLOCK_NUMBERS = 2**23
SLOT_BLOCK, SLOT_LENGTH, SLOT_KEY = range(3)
NUMBER, PREVIOUS, NEXT, FILL, SCOPE_LOW, SCOPE_HIGH = range(6)


def signed(word: int) -> int:
    """Returns the number whose two's complement has these low 32 bits."""
    return (word + 2**31 & MASK32) - 2**31


def mix(z: int) -> int:
    """Returns a hash of a 64-bit number: the finalizer of SplitMix64."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


def key_of(gram: list[int], scope: int, level: int) -> int:
    terms = zip(reversed(gram), POWERS, strict=False)
    polynomial = sum((token & MASK32) * power for token, power in terms)
    seed = mix(scope & MASK64)
    return mix((polynomial & MASK64 ^ seed) + (level + 1) * BASE & MASK64)


def find(blocks: Array, number: int, scope: int) -> int | None:
    """Returns the row of the block with that number, if it has that scope."""
    row = number % len(blocks)
    low, high = (int(word) & MASK32 for word in blocks[row, [SCOPE_LOW, SCOPE_HIGH]])
    recorded = low | high << 32
    is_found = number > 0 and blocks[row, NUMBER] == number and recorded == scope & MASK64
    return row if is_found else None


def fill_of(blocks: Array, row: int) -> int:
    return min(max(int(blocks[row, FILL]), 0), BLOCK)


def scope_of(a: Arguments, i: int) -> int:
    return 0 if a.scopes is None else int(a.scopes[i])


def row_tokens(a: Arguments, i: int) -> list[int] | None:
    """Returns the text of request ``i``, or None if it is ignored."""
    row = row_of(a, i)
    if a.num_sampled[i] <= 0 or not 0 <= row < len(a.token_ids):
        return None
    length = int(a.num_tokens[row])
    if not 1 <= length <= a.token_ids.shape[1]:
        return None
    return [int(token) for token in a.token_ids[row, :length]]


@dataclass
class Addition:
    """What one request stores."""

    slot: int
    scope: int
    text: list[int]
    begin: int
    end: int
    block: int
    """The number of the block that it continues; 0: none."""

    @property
    def reserved(self) -> int:
        return -(-(self.end - self.begin) // BLOCK)


def addition_of(a: Arguments, i: int, next_number: int) -> Addition | None:
    text = row_tokens(a, i)
    slot = row_of(a, i) if a.slot_indices is None else int(a.slot_indices[i])
    if text is None or not 0 <= slot < len(a.slots):
        return None
    scope = scope_of(a, i)
    num_old = len(text) - min(int(a.num_sampled[i]), len(text))
    end = num_old if a.hold_back else len(text)
    number, length, key = (int(word) for word in a.slots[slot])
    stored = length - 1
    if 0 <= stored <= end and end - stored <= a.max_new:
        tail = text[max(0, stored - 16) : stored]
        if signed(key_of(tail, scope, SLOT_LEVEL)) == key:
            is_found = number < next_number and find(a.blocks, number, scope) is not None
            return Addition(slot, scope, text, stored, end, number if is_found else 0)
    return Addition(slot, scope, text, max(num_old, end - a.max_new), end, 0)


@reference_operator
def device_store_append_(a: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], num_sampled [B], row_indices, slot_indices and scopes [B];
    slots [G,3], text [N,256], blocks [N,8], table [6,E] and allocator [2] are written."""
    if len(a.num_sampled) == 0:
        return
    num_blocks = len(a.blocks)
    number = min(max(int(a.allocator[0]), 1), END_OF_BLOCK_NUMBERS)
    limit = min(num_blocks // 2, END_OF_BLOCK_NUMBERS - number)
    planned = [addition_of(a, i, number) for i in range(len(a.num_sampled))]
    additions = [addition for addition in planned if addition is not None]
    reserved = 0
    for addition in additions:
        reserved += addition.reserved
        if reserved > limit:
            addition.begin, addition.block = addition.end, 0
    sums = np.cumsum([0, *(addition.reserved for addition in additions)])
    last_replaced = number + int(sums[-1]) - 1 - num_blocks
    for addition in additions:
        if addition.block <= last_replaced:
            addition.block = 0
    for addition in additions:
        number = write(a, addition, number)
    a.allocator[:] = number


def write(a: Arguments, added: Addition, number: int) -> int:
    """Stores a request's text, and returns the next block number."""
    block, chain = added.block, 0
    if block:
        row = block % len(a.blocks)
        chain = 16 if a.blocks[row, PREVIOUS] > 0 else fill_of(a.blocks, row)
        a.blocks[row, FILL] = fill_of(a.blocks, row)
    for place in range(added.begin, added.end):
        row = block % len(a.blocks)
        if block == 0 or a.blocks[row, FILL] == BLOCK:
            if block:
                a.blocks[row, NEXT] = number
            row = number % len(a.blocks)
            low, high = signed(added.scope), signed(added.scope >> 32)
            a.blocks[row, : SCOPE_HIGH + 1] = number, block, 0, 0, low, high
            block, number = number, number + 1
        offset = int(a.blocks[row, FILL])
        a.text[row, offset] = added.text[place]
        a.blocks[row, FILL] = offset + 1
        for level, n in enumerate(SIZES):
            if n <= min(chain, place):
                key = key_of(added.text[place - n : place], added.scope, level)
                column = key % a.table.shape[1]
                a.table[level, column] = max(a.table[level, column], block * BLOCK + offset)
        chain += 1
    tail = added.text[max(0, added.end - 16) : added.end]
    key = signed(key_of(tail, added.scope, SLOT_LEVEL))
    a.slots[added.slot] = block, added.end + 1, key
    return number


@reference_operator
def device_store_propose_(a: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], num_sampled [B], row_indices and scopes [B], text [N,256],
    blocks [N,8], table [6,E]; draft_token_ids [B,k], num_draft_tokens and match_len [B] are
    written."""
    for i in range(len(a.num_sampled)):
        text = row_tokens(a, i)
        if text is None:
            continue
        budget = min(a.draft_token_ids.shape[1], a.max_len - len(text))
        if budget <= 0:
            continue
        found = ((n, follow(a, i, text, n)) for n in reversed(SIZES) if n > a.match_len[i])
        n, draft = next(((n, draft) for n, draft in found if draft), (0, []))
        if n == 0:
            continue
        draft = draft[:budget]
        a.draft_token_ids[i] = text[-1] if a.fill else -1
        a.draft_token_ids[i, : len(draft)] = draft
        a.num_draft_tokens[i], a.match_len[i] = len(draft), n


def follow(a: Arguments, i: int, text: list[int], n: int) -> list[int]:
    """Returns the text after the newest occurrence of the last n tokens, empty if there is none."""
    if n > len(text):
        return []
    scope, level = scope_of(a, i), SIZES.index(n)
    position = int(a.table[level, key_of(text[-n:], scope, level) % a.table.shape[1]])
    row = find(a.blocks, position // BLOCK, scope)
    if row is None:
        return []
    offset = position % BLOCK
    stored = [int(token) for token in a.text[row, : fill_of(a.blocks, row)]]
    before, after = stored[:offset], stored[offset:]
    if offset < n:
        previous = find(a.blocks, int(a.blocks[row, PREVIOUS]), scope)
        if previous is None or fill_of(a.blocks, previous) < BLOCK:
            return []
        before = [int(token) for token in a.text[previous]] + before
    if not after or before[-n:] != text[-n:]:
        return []
    successor = find(a.blocks, int(a.blocks[row, NEXT]), scope)
    if len(stored) == BLOCK and successor is not None:
        after += [int(token) for token in a.text[successor, : fill_of(a.blocks, successor)]]
    return after
