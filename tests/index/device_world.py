"""The rows and slots of index_world, with an index in the GPU layout and the kernels' host twin:
the library of the parity suite, or another build of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from backends import call_torch
from index_world import Int32Array, Lookup, World
from ngram_npu import _C, DeviceNgramIndex

BUCKETS_PER_PAGE = 4

# Words of core/ngram_index_device_layout.h.
HEADER, SLOT = 64, 16
SLOTS, ENTRIES = 1, 4
OPTIONS, INDEXED, HELD, GIVEN_UP = 0, 1, 2, 3
# Fields of an entry, a uint64.
TENANT, FINGERPRINT, LEVEL = 28, 52, 61


def index_of_buckets(num_slots: int, num_buckets: int, lookup: Lookup) -> DeviceNgramIndex:
    """An index with exactly this number of buckets, in host memory."""
    index = DeviceNgramIndex(num_slots, 0, min_n=lookup.min_n, max_n=lookup.max_n, device="cpu")
    index._allocate(num_slots, num_buckets, torch.device("cpu"))
    return index


class DeviceWorld(World):
    """For use while the twin replaces the CPU kernels."""

    SLOT_WORDS, GIVEN_UP = 16, 3
    HAS_LADDER = False

    def _make_index(self, num_slots: int, num_pages: int) -> DeviceNgramIndex:
        return index_of_buckets(num_slots, BUCKETS_PER_PAGE * num_pages, self.lookup)

    def _words_of_index(self) -> Int32Array:
        words: Int32Array = self.index.tensor.numpy()
        return words

    def _call(self, op: str, *args: Any) -> Any:
        return call_torch(op, args)


def some_tokens(rows: int = 3, length: int = 300, alphabet: int = 9) -> Int32Array:
    return np.random.default_rng(4).integers(0, alphabet, (rows, length), dtype=np.int32)


def indexed(tokens: Int32Array, policy: int = 0) -> DeviceNgramIndex:
    rows, length = tokens.shape
    index = DeviceNgramIndex(rows, tokens.size, min_n=2, max_n=4, device="cpu")
    lengths = torch.full((rows,), length, dtype=torch.int32)
    index.append(torch.from_numpy(tokens), lengths, match_policy=policy)
    return index


class Rows:
    """Rows with an index, and copies of them to scan."""

    def __init__(self, tokens: Int32Array, length: int, index: DeviceNgramIndex) -> None:
        self.tokens, self.index = tokens, index
        self.lengths = np.full(len(tokens), length, np.int32)

    def step(
        self,
        sampled: int = 1,
        slots: list[int] | None = None,
        span: int = 2,
        match_policy: int = 0,
        advance: bool = True,
    ) -> None:
        """Asserts that the index gives the same results as a scan."""
        new = np.full((len(self.tokens), 1), sampled, np.int32)
        options = {
            "advance": advance,
            "min_n": 2,
            "max_n": 2 + span,
            "k": 4,
            "match_policy": match_policy,
        }
        tokens, lengths = self.tokens.copy(), self.lengths.copy()
        expected = _C.ngram_step_(tokens, lengths, new, **options)
        given = None if slots is None else np.array(slots, np.int32)
        rows = [torch.from_numpy(array) for array in (self.tokens, self.lengths, new)]
        results = torch.ops.ngram_npu.ngram_index_step_(
            *rows,
            self.index.tensor,
            slot_indices=None if given is None else torch.from_numpy(given),
            **options,
        )
        found = [result.numpy() for result in results]
        assert all(map(np.array_equal, found, expected))
        assert np.array_equal(self.tokens, tokens)
        assert np.array_equal(self.lengths, lengths)


def entries_of(words: Int32Array) -> Any:
    """The places of used entries in an array of uint64, and the array."""
    num_slots = int(words[SLOTS])
    first = -(-(HEADER + num_slots * (SLOT + 1)) // 32) * 32
    entries = words[first:].view(np.uint64)
    return np.flatnonzero(entries), entries
