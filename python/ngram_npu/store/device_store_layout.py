"""The layout of a device store's tensors (csrc/core/device_store.h), read on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ngram_npu.tensors import Int32Array

BLOCK_TOKENS = 256
SIZES = (1, 2, 3, 4, 8, 16)
"""The lengths of n-grams in the table."""
SLOT_WORDS, HEAD_WORDS = 3, 8
HEAD_NUMBER, HEAD_PREVIOUS, HEAD_NEXT, HEAD_FILL, SCOPE_LOW, SCOPE_HIGH = range(6)
"""The words of a block's head."""
SLOT_BLOCK, SLOT_LENGTH = 0, 1
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


def is_in_ring(
    blocks: npt.NDArray[np.integer], numbers: npt.NDArray[np.integer]
) -> npt.NDArray[np.bool_]:
    """Returns for each block number whether the block is still stored. The blocks are a ring: a
    block replaces the one whose number is smaller by the number of blocks."""
    in_ring: npt.NDArray[np.bool_] = blocks[numbers % len(blocks), HEAD_NUMBER] == numbers
    return in_ring & (numbers > 0)


def read_texts(text: Int32Array, blocks: Int32Array) -> list[tuple[int, Int32Array]]:
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
        (int(scopes[chain[0]]), np.concatenate([text[row, : fills[row]] for row in chain]))
        for chain in chains
    ]
