"""Contains the n-gram index: its allocation, sizes, statistics and integrity checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn, SupportsIndex

import numpy as np

import ngram_npu._C as _C
from ngram_npu.config import LADDER_MAX_N, MAX_INDEX_SPAN, MAX_NGRAM, UNLIMITED, NgramConfig
from ngram_npu.tensors import Int32Array, IntegrityError, allocate_words, operators_for


@dataclass(frozen=True)
class IndexStatistics:
    """Memory of an index, and events since its creation. Counters wrap at 2**32."""

    num_slots: int
    rows_indexed: int
    """Rows looked up in the index, summed over steps."""
    rows_scanned_full: int
    """Rows scanned because the index was full."""
    rows_scanned_catching_up: int
    """Rows scanned because the step could not index all of their tokens."""
    rows_scanned_other: int
    """Rows scanned for another reason: the row had no slot, was too long, or had no new tokens."""
    rebuilds_shorter: int
    """Slots rebuilt because their row became shorter."""
    rebuilds_rewritten: int
    """Slots rebuilt because tokens of their row changed."""
    rebuilds_options: int
    """Slots rebuilt because min_n, max_n or match_policy changed."""
    slots_disabled: int
    """Slots whose rows did not fit into the free memory. These rows are scanned."""
    num_pages: int
    """Capacity, in pages of 4 KiB."""
    pages_in_use: int
    pages_peak: int
    page_splits: int


class NgramIndex:
    """The memory of the index operators: one int32 tensor of slots and a shared arena.

    A slot belongs to a request until the request finishes, even if its row moves. All slots
    allocate pages of 4 KiB from one arena, so memory grows with the number of indexed tokens, not
    with rows times row capacity: use the KV cache's capacity in tokens as ``token_capacity``. If
    the arena is full, rows are scanned instead (same drafts, slower) and counted in
    :attr:`statistics`. The system commits memory at its first use, unless ``prefault`` is set.

    Args:
        num_slots: maximum number of requests indexed at the same time; at most 2**28.
        token_capacity: maximum number of indexed tokens in all slots together.
        min_n: the ``min_n`` of the steps; 1 for a ladder.
        max_n: the ``max_n`` of the steps; at most 64, and at most min_n + 7; 16 for a ladder.
        sizes: ``"consecutive"`` or ``"ladder"``: which n-grams the steps look up.
        outcomes: whether steps with a ladder pass costs; takes one more byte per token.
        kind: whether :attr:`tensor` is an array (``"numpy"``) or a CPU tensor over the same memory
            (``"torch"``).
        any_data: allocate enough memory for any tokens, not only for text.
        prefault: commit all memory now; otherwise a step spends about 1 us on each new page.

    Raises:
        ValueError: a size or a range is out of bounds.
    """

    def __init__(
        self,
        num_slots: int,
        token_capacity: int,
        *,
        min_n: int,
        max_n: int,
        sizes: Literal["consecutive", "ladder"] = "consecutive",
        outcomes: bool = False,
        kind: Literal["numpy", "torch"] = "numpy",
        any_data: bool = False,
        prefault: bool = False,
    ) -> None:
        if sizes not in ("consecutive", "ladder"):
            raise ValueError(
                f"NgramIndex: sizes: expected 'consecutive' or 'ladder', got {sizes!r}"
            )
        ladder = sizes == "ladder"
        if outcomes and not ladder:
            raise ValueError("NgramIndex: outcomes: expected False without sizes='ladder'")
        if not 1 <= num_slots <= _C.INDEX_MAX_SLOTS:
            raise ValueError(f"NgramIndex: num_slots: expected 1 to 2**28, got {num_slots}")
        if token_capacity < 0:
            raise ValueError(f"NgramIndex: token_capacity: expected >= 0, got {token_capacity}")
        if token_capacity > UNLIMITED:
            raise ValueError(f"NgramIndex: token_capacity: too large, got {token_capacity}")
        if ladder and (min_n, max_n) != (1, LADDER_MAX_N):
            raise ValueError(
                f"NgramIndex: min_n, max_n: expected 1, {LADDER_MAX_N} with sizes='ladder', got "
                f"{min_n}, {max_n}"
            )
        if not ladder and (not 1 <= min_n <= max_n < min_n + MAX_INDEX_SPAN or max_n > MAX_NGRAM):
            raise ValueError(
                "NgramIndex: min_n, max_n: expected 1 <= min_n <= max_n <= min_n + 7, max_n <= "
                f"{MAX_NGRAM}, got {min_n}, {max_n}"
            )
        pages = _C.index_pages(token_capacity, num_slots, min_n, max_n, any_data, ladder, outcomes)
        words = _C.index_words(num_slots, pages)
        if words == 0:
            raise ValueError(f"NgramIndex: token_capacity: too large, got {token_capacity}")
        self.num_slots = num_slots
        self.min_n, self.max_n = min_n, max_n
        self._ladder, self._outcomes = ladder, outcomes
        self._words = allocate_words(words, prefault=prefault)
        _C.index_init(self._words, num_slots)
        self.tensor: Any = self._words
        """[W] int32, the ``index`` argument of the operators."""
        if kind == "torch":
            import torch

            self.tensor = torch.from_numpy(self._words)

    @property
    def nbytes(self) -> int:
        """Size of the tensor; the system has committed only the part that has been used."""
        return self._words.nbytes

    @property
    def share_in_use(self) -> float:
        """Share of the memory for entries that is in use, 0 to 1; faster than the statistics."""
        words = self._words
        return float(words[_C.INDEX_HEADER_PAGES_IN_USE] / words[_C.INDEX_HEADER_PAGES])

    @property
    def statistics(self) -> IndexStatistics:
        """Rows looked up, rebuilds and memory since the index was created."""
        return IndexStatistics(**_C.index_statistics(self._words))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "NgramIndex: an index cannot be copied or pickled; "
            "create a new one: it is filled from the rows"
        )

    def reset(self, slot_indices: Any) -> None:
        """Empties the slots of finished requests, slot_indices [N] int32 or int64."""
        ops = operators_for("ngram_index_reset_", index=self.tensor, slot_indices=slot_indices)
        ops.ngram_index_reset_(self.tensor, slot_indices)

    def append(
        self,
        token_ids: Any,
        num_tokens: Any,
        *,
        match_policy: int = 0,
        row_indices: Any = None,
        slot_indices: Any = None,
    ) -> None:
        """Indexes the tokens of rows that are not indexed yet, such as prompts or parts of prompts.
        A ladder ignores ``match_policy``.

        Without this call, each step indexes a bounded number of tokens, and scans the row until all
        of its tokens are indexed. The shapes are those of ``ngram_index_append_``. Each slot may
        occur once.
        """
        ops = operators_for(
            "ngram_index_append_",
            index=self.tensor,
            token_ids=token_ids,
            num_tokens=num_tokens,
            row_indices=row_indices,
            slot_indices=slot_indices,
        )
        ops.ngram_index_append_(
            token_ids,
            num_tokens,
            self.tensor,
            row_indices=row_indices,
            slot_indices=slot_indices,
            min_n=self.min_n,
            max_n=self.max_n,
            match_policy=1 if self._ladder else match_policy,
            ladder=self._ladder,
            outcomes=self._outcomes,
        )

    def check_integrity(self, rows: dict[int, Int32Array] | None = None) -> None:
        """Checks the structure of the index. This takes long; it is for tests and diagnosis.

        Args:
            rows: by slot, the tokens of its row, with which the slot is compared.

        Raises:
            IntegrityError: the message names the violated rule, and the slot or page.
        """
        fault, place = _C.index_check(self._words)
        if fault:
            raise IntegrityError(f"NgramIndex: {_C.INDEX_FAULTS[fault]} (slot or page {place})")
        for slot, tokens in (rows or {}).items():
            fault = _C.index_check_row(self._words, slot, np.ascontiguousarray(tokens))
            if fault:
                raise IntegrityError(f"NgramIndex: slot {slot}: {_C.INDEX_FAULTS[fault]}")


def make_index(
    config: NgramConfig, num_slots: int, token_capacity: int, *, kind: Literal["numpy", "torch"]
) -> NgramIndex:
    """Creates the index that a config needs.

    Raises:
        ValueError: a size is out of bounds.
    """
    return NgramIndex(
        num_slots,
        token_capacity,
        min_n=config.min_n,
        max_n=config.max_n,
        sizes=config.sizes,
        outcomes=config.cost_limit is not None,
        kind=kind,
    )
