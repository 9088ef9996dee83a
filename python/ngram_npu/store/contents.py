"""The layout of a store's arrays (csrc/core/store.h), read on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ngram_npu.store.identifiers import Scope
from ngram_npu.tensors import Int32Array

BLOCK_TOKENS = 256
SIZES = (1, 2, 3, 4, 8, 16)
"""The lengths of n-grams in the table."""
OCCURRENCES = 2
"""Entries of each column of the table: the newest and the second newest occurrence."""
SLOT_WORDS, HEAD_WORDS = 8, 8
HEAD_NUMBER, HEAD_PREVIOUS, HEAD_NEXT, HEAD_FILL, SCOPE_LOW, SCOPE_HIGH = range(6)
"""The words of a block's head."""
SLOT_BLOCK = 0
"""The word of a slot with its block's number."""
MAX_BLOCKS = 2**20
END_OF_BLOCK_NUMBERS = 2**23

Int64Array = npt.NDArray[np.int64]


def split_scope(scope: int) -> tuple[int, int]:
    """Returns the low and the high 32 bits of a scope, as int32."""
    low, high = np.array([scope], np.int64).view(np.int32)
    return int(low), int(high)


def read_scopes(blocks: npt.NDArray[np.integer]) -> Int64Array:
    """Returns the scope of each block."""
    halves = blocks[:, SCOPE_LOW : SCOPE_HIGH + 1].astype(np.int32)
    return np.ascontiguousarray(halves).view(np.int64)[:, 0]


def read_texts(blocks: Int32Array, text: Int32Array) -> list[tuple[Scope, Int32Array]]:
    """Returns scope and tokens of each chain of blocks, in the order of their oldest blocks."""
    scopes = read_scopes(blocks)
    chains: list[list[int]] = []
    # By the numbers of the block that continues the chain and of the chain's last block.
    chain_by_next: dict[tuple[int, int], list[int]] = {}
    for row in np.argsort(blocks[:, HEAD_NUMBER]).tolist():
        number, previous, after = blocks[row, : HEAD_NEXT + 1].tolist()
        if number == 0:
            continue
        chain = chain_by_next.pop((number, previous), None)
        if chain is None or scopes[chain[0]] != scopes[row]:
            chain = []
            chains.append(chain)
        chain.append(row)
        chain_by_next[after, number] = chain
    fills = blocks[:, HEAD_FILL]
    return [
        (Scope(scopes[chain[0]]), np.concatenate([text[row, : fills[row]] for row in chain]))
        for chain in chains
    ]


def count_tokens_by_scope(blocks: Int32Array) -> dict[Scope, int]:
    """Returns the number of tokens of each scope."""
    blocks = blocks[blocks[:, HEAD_NUMBER] != 0]
    unique_scopes, scope_of_block = np.unique(read_scopes(blocks), return_inverse=True)
    sums = np.bincount(scope_of_block, weights=blocks[:, HEAD_FILL])
    return dict(zip(map(Scope, unique_scopes.tolist()), map(int, sums), strict=True))
