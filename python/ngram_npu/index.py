"""An index over growing rows of tokens: allocation, sizes, statistics, integrity."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ngram_npu import _C, _library
from ngram_npu.config import MAX_INDEX_SPAN

_TORCH_ABSENCE = _library.torch_absence()
_HUGE_PAGE_BYTES = 2 << 20
_WORD_BYTES = 4

_FAULTS = {
    1: "the tensor is no index of its size",
    2: "a slot's directory is deeper than can be",
    3: "a page does not fill its part of the directory evenly",
    4: "a page is not its slot's, or named twice",
    5: "a slot holds another number of pages than it says",
    6: "the pages in use are not as many as the header says",
    7: "the list of freed pages is broken",
    8: "a line has a gap",
    9: "an entry stands where its key does not lead",
    10: "an entry lies outside the row",
    11: "an entry does not record the occurrence it should",
    12: "an entry is there, or is marked, against the rule",
    13: "an entry is missing",
    14: "the slot has indexed more tokens than the row holds",
}


class IntegrityError(RuntimeError):
    """An index is not what its operators leave behind."""


@dataclass(frozen=True)
class IndexStatistics:
    """What an index has done since it was made; counters wrap at 2**32."""

    num_slots: int
    num_pages: int
    """Capacity, in pages of 4 KiB."""
    pages_in_use: int
    pages_peak: int
    rows_indexed: int
    """Rows of all steps that were answered from the index."""
    rows_scanned_full: int
    """Rows that were scanned because memory had run out."""
    rows_scanned_catching_up: int
    """Rows that were scanned because too much was left to index within the step."""
    rows_scanned_other: int
    """Rows that were scanned for another reason: no such slot, too long, nothing new."""
    rebuilds_shorter: int
    """Slots built anew because their row had become shorter."""
    rebuilds_rewritten: int
    """Slots built anew because their row held other tokens than before."""
    rebuilds_options: int
    """Slots built anew because min_n, max_n or the policy had changed."""
    page_splits: int
    slots_given_up: int

    @property
    def bytes_in_use(self) -> int:
        return self.pages_in_use * _C.INDEX_PAGE_WORDS * _WORD_BYTES


class NgramIndex:
    """The memory behind ``ngram_index_step_``: one int32 tensor of slots and a shared arena.

    A slot belongs to a request for as long as it lives and follows it when rows move. All slots
    draw pages of 4 KiB from one arena, so memory goes with the tokens held and not with rows times
    capacity: size it by the KV cache's capacity in tokens. Where it runs out, a row is scanned
    instead (exact, slower) and counted in :attr:`statistics`. Untouched memory is not committed by
    the system until it is used, unless ``prefault`` asks for it.

    Args:
        num_slots: requests that may be indexed at once.
        token_capacity: tokens they may hold together.
        min_n, max_n: the range the steps will ask for; max_n - min_n is at most 7.
        kind: ``"numpy"`` or ``"torch"`` (a CPU tensor over the same memory).
        any_data: size for the worst data there is instead of for text.
        prefault: touch all memory now; a first touch later costs a step about a microsecond a page.

    Raises:
        ValueError: a size or range out of bounds.
    """

    def __init__(
        self,
        num_slots: int,
        token_capacity: int,
        *,
        min_n: int,
        max_n: int,
        kind: Literal["numpy", "torch"] = "numpy",
        any_data: bool = False,
        prefault: bool = False,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"NgramIndex: num_slots: expected at least 1, got {num_slots}")
        if token_capacity < 0:
            raise ValueError(f"NgramIndex: token_capacity: expected >= 0, got {token_capacity}")
        if not 1 <= min_n <= max_n < min_n + MAX_INDEX_SPAN:
            raise ValueError(
                "NgramIndex: min_n, max_n: expected 1 <= min_n <= max_n <= min_n + 7, "
                f"got {min_n}, {max_n}"
            )
        pages = _C.index_pages(token_capacity, num_slots, min_n, max_n, any_data)
        words = _C.index_words(num_slots, pages)
        if words == 0:
            raise ValueError(f"NgramIndex: token_capacity: too large, got {token_capacity}")
        self.num_slots = num_slots
        self.min_n, self.max_n = min_n, max_n
        self._words, self._mapping = _allocate(words, prefault)
        _C.index_init(self._words, num_slots)
        self.tensor: Any = self._words
        """[W] int32, what the operators take as ``index``."""
        if kind == "torch":
            import torch

            self.tensor = torch.from_numpy(self._words)

    @property
    def nbytes(self) -> int:
        """Size of the tensor; what is committed of it is what has been used."""
        return self._words.nbytes

    @property
    def statistics(self) -> IndexStatistics:
        return IndexStatistics(**_C.index_statistics(self._words))

    def reset(self, slot_indices: Any) -> None:
        """Empties the slots of finished requests: slot_indices [N] int32 or int64."""
        operators_for(self.tensor).ngram_index_reset_(self.tensor, slot_indices)

    def append(
        self,
        token_ids: Any,
        num_tokens: Any,
        *,
        match_policy: int = 0,
        row_indices: Any = None,
        slot_indices: Any = None,
    ) -> None:
        """Indexes what rows hold and their slots do not yet: prompts, in one piece or in several.

        Without it a step does the same, a bounded number of tokens at a time, and scans meanwhile.
        Shapes as in ``ngram_index_append_``; no slot twice.
        """
        operators_for(self.tensor).ngram_index_append_(
            token_ids,
            num_tokens,
            row_indices,
            self.tensor,
            slot_indices,
            self.min_n,
            self.max_n,
            match_policy,
        )

    def check_integrity(self, rows: dict[int, npt.NDArray[np.int32]] | None = None) -> None:
        """Checks the structure, and each slot of ``rows`` (slot -> its row's live tokens) against
        the tokens it indexes. Slow: for tests and for diagnosis.

        Raises:
            IntegrityError: it names the broken rule, and the slot or page.
        """
        fault, where = _C.index_check(self._words)
        if fault:
            raise IntegrityError(f"NgramIndex: {_FAULTS[fault]} (slot or page {where})")
        for slot, tokens in (rows or {}).items():
            fault = _C.index_check_row(self._words, slot, np.ascontiguousarray(tokens))
            if fault:
                raise IntegrityError(f"NgramIndex: slot {slot}: {_FAULTS[fault]}")


def operators_for(tensor: object) -> Any:
    """torch's operators for a tensor, else numpy's: a tensor cannot exist without torch loaded.

    Raises:
        RuntimeError: a tensor where the operators are not registered; it says why.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if _TORCH_ABSENCE:
            raise RuntimeError(f"torch.ops.ngram_npu is not available: {_TORCH_ABSENCE}")
        return torch.ops.ngram_npu
    return _C


def _allocate(words: int, prefault: bool) -> tuple[npt.NDArray[np.int32], mmap.mmap]:
    """Zeroed words from the system, at a huge page's boundary and in huge pages where it has them:
    lookups jump about, and with small pages every jump misses the TLB as well."""
    # Private: a shared mapping gets no huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, words * _WORD_BYTES + _HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES
    array = whole[start : start + words * _WORD_BYTES].view(np.int32)
    if prefault:
        array[:: mmap.PAGESIZE // _WORD_BYTES] = 0
    return array, mapping
