"""The rows and slots of index_world, with an index of a GPU's layout that the kernels' host twin
works on. Library of the twin: the one the parity suite takes, or another build of it."""

from __future__ import annotations

from typing import Any

import torch
from backends import call_torch
from index_world import Int32Array, Lookup, World
from ngram_npu import DeviceNgramIndex

BUCKETS_PER_PAGE = 4


def index_of_buckets(num_slots: int, num_buckets: int, lookup: Lookup) -> DeviceNgramIndex:
    """With that many buckets exactly, in host memory."""
    index = DeviceNgramIndex(num_slots, 0, min_n=lookup.min_n, max_n=lookup.max_n, device="cpu")
    index._allocate(num_slots, num_buckets, torch.device("cpu"))
    return index


class DeviceWorld(World):
    """To be used while the twin stands in the CPU's place."""

    SLOT_WORDS, GIVEN_UP = 16, 3

    def _make_index(self, num_slots: int, num_pages: int) -> DeviceNgramIndex:
        return index_of_buckets(num_slots, BUCKETS_PER_PAGE * num_pages, self.lookup)

    def _words_of_index(self) -> Int32Array:
        words: Int32Array = self.index.tensor.numpy()
        return words

    def _call(self, op: str, *args: Any) -> Any:
        return call_torch(op, args)
