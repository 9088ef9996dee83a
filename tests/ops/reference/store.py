"""The reference of the store's operators: docs/ops/store_append.md and store_propose.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from ops.reference.bookkeeping import Array, row_of
from ops.reference.drafting import padding_after
from ops.schema import Arguments, reference_operator

__all__ = [
    "store_append_",
    "store_propose_",
]

MASK32, MASK64 = 2**32 - 1, 2**64 - 1
BASE = 0x9E3779B97F4A7C15
POWERS = [pow(BASE, j, 2**64) for j in range(16)]
BLOCK = 256
SIZES = (1, 2, 3, 4, 8, 16)
SLOT_LEVEL = len(SIZES)
END_OF_BLOCK_NUMBERS = 2**23
PRIVATE_SCOPE = -1
OWN_DRAFT, SINGLE_OCCURRENCE = -2, -1
NEWEST, SECOND = range(2)
NUMBER, PREVIOUS, NEXT, FILL, SCOPE_LOW, SCOPE_HIGH = range(6)
"""Words of a block's head. PREVIOUS and NEXT are numbers of blocks of the same request."""


def signed(word: int) -> int:
    """Returns the number whose two's complement has these low 32 bits."""
    return (word + 2**31 & MASK32) - 2**31


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


@lru_cache(1 << 16)  # the samples' texts have most n-grams in common
def key_of(gram: tuple[int, ...], scope: int, level: int) -> int:
    terms = zip(reversed(gram), POWERS, strict=False)
    polynomial = sum((token & MASK32) * power for token, power in terms)
    return mix((polynomial & MASK64 ^ mix(scope & MASK64)) + (level + 1) * BASE & MASK64)


def entry_of(table: Array, gram: list[int], scope: int) -> Array:
    """Returns the entry of an n-gram, as a view: the newest and the second newest position."""
    level = SIZES.index(len(gram))
    column = key_of(tuple(gram), scope, level) % (table.shape[1] // 2)
    return table[level, 2 * column : 2 * column + 2]


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
    is_ignored = a.num_sampled[i] <= 0 or scope_of(a, i) == PRIVATE_SCOPE
    if is_ignored or not 0 <= row < len(a.token_ids):
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


def slot_key(text: list[int], scope: int) -> int:
    return signed(key_of(tuple(text[-16:]), scope, SLOT_LEVEL))


def addition_of(a: Arguments, i: int, next_number: int) -> Addition | None:
    text = row_tokens(a, i)
    slot = row_of(a, i) if a.slot_indices is None else int(a.slot_indices[i])
    if text is None or not 0 <= slot < len(a.slots):
        return None
    scope = scope_of(a, i)
    num_old = len(text) - min(int(a.num_sampled[i]), len(text))
    end = num_old if a.hold_back else len(text)
    number, length, key, row_length = (int(word) for word in a.slots[slot, :4])
    stored = length - 1
    is_possible = row_length == num_old and 0 <= stored <= end and end - stored <= a.max_new
    if is_possible and slot_key(text[:num_old], scope) == key:
        is_found = number < next_number and find(a.blocks, number, scope) is not None
        return Addition(slot, scope, text, stored, end, number if is_found else 0)
    return Addition(slot, scope, text, max(num_old, end - a.max_new), end, 0)


@reference_operator
def store_append_(a: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], num_sampled [B], row_indices, slot_indices and scopes [B];
    slots [G,8], text [N,256], blocks [N,8], table [6,2E] and allocator [2] are written."""
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
    inserted: list[tuple[Array, int]] = []
    for addition in additions:
        number = write(a, addition, number, inserted)
    newest_before = [int(entry[NEWEST]) for entry, _ in inserted]
    for (entry, position), newest in zip(inserted, newest_before, strict=True):
        entry[SECOND] = max(entry[SECOND], min(newest, position))
    for entry, position in inserted:
        entry[NEWEST] = max(entry[NEWEST], position)
    a.allocator[:] = number


def write(a: Arguments, added: Addition, number: int, inserted: list[tuple[Array, int]]) -> int:
    """Stores a request's text, lists the entries and positions of its n-grams in ``inserted``, and
    returns the next block number."""
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
            a.text[row] = 0
            block, number = number, number + 1
        offset = int(a.blocks[row, FILL])
        a.text[row, offset] = added.text[place]
        a.blocks[row, FILL] = offset + 1
        for n in SIZES:
            if n <= min(chain, place):
                entry = entry_of(a.table, added.text[place - n : place], added.scope)
                inserted.append((entry, block * BLOCK + offset))
        chain += 1
    key = slot_key(added.text, added.scope)
    a.slots[added.slot, :4] = block, added.end + 1, key, len(added.text)
    return number


@reference_operator
def store_propose_(a: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], num_sampled [B], row_indices and scopes [B], text [N,256],
    blocks [N,8], table [6,2E]; draft_token_ids [B,k], num_draft_tokens, match_len and agreement [B]
    are written."""
    for i in range(len(a.num_sampled)):
        a.agreement[i] = OWN_DRAFT
        text = row_tokens(a, i)
        if text is None:
            continue
        budget = min(a.draft_token_ids.shape[1], a.max_len - len(text))
        n, newest, second = choose(a, i, text) if budget > 0 else (0, [], [])
        if n == 0:
            continue
        draft = newest[:budget]
        num_valid = next((j for j, token in enumerate(draft) if not is_valid(a, token)), len(draft))
        draft = draft[:num_valid]
        a.draft_token_ids[i] = padding_after(a, text[-1])
        a.draft_token_ids[i, : len(draft)] = draft
        a.num_draft_tokens[i], a.match_len[i] = len(draft), n
        pairs = zip(draft, second, strict=False)
        num_compared = min(len(draft), len(second))
        num_equal = next((j for j, (x, y) in enumerate(pairs) if x != y), num_compared)
        a.agreement[i] = num_equal if second else SINGLE_OCCURRENCE


def is_valid(a: Arguments, token: int) -> bool:
    return 0 <= token < a.vocab_size


def choose(a: Arguments, i: int, text: list[int]) -> tuple[int, list[int], list[int]]:
    """Returns n and the text after the two newest occurrences of the row's last n tokens. The
    second text is empty if that occurrence is not valid. n is 0 if the request keeps its draft."""
    own = int(a.match_len[i])
    untrusted: tuple[int, list[int], list[int]] = 0, [], []
    for n in reversed(SIZES):
        if not own < n <= len(text):
            continue
        entry = entry_of(a.table, text[-n:], scope_of(a, i))
        newest, second = (follow(a, i, text, n, int(position)) for position in entry)
        if not newest:
            continue
        if newest[0] == second[0] if second else own < 2 or n >= 8:
            return n, newest, second
        if untrusted[0] == 0 and own == 0:
            untrusted = n, newest, second
    return untrusted


def follow(a: Arguments, i: int, text: list[int], n: int, position: int) -> list[int]:
    """Returns the stored text from a position on, empty if the n tokens before it are not the
    row's last ones or its first token is not a valid id."""
    scope = scope_of(a, i)
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
    if not after or before[-n:] != text[-n:] or not is_valid(a, after[0]):
        return []
    successor = find(a.blocks, int(a.blocks[row, NEXT]), scope)
    if len(stored) == BLOCK and successor is not None:
        after += [int(token) for token in a.text[successor, : fill_of(a.blocks, successor)]]
    return after
