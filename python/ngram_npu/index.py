"""Allocation, sizes, statistics and integrity checks of the n-gram index."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, SupportsIndex

import numpy as np

import ngram_npu._C as _C
from ngram_npu import _library
from ngram_npu.config import LADDER_MAX_N, MAX_INDEX_SPAN, MAX_NGRAM, UNLIMITED, NgramConfig
from ngram_npu.memory import WORD_BYTES, Int32Array, zeroed_words

_TORCH_ABSENCE = _library.torch_absence()


class IntegrityError(RuntimeError):
    """The memory of an index or a store is corrupt: no operator leaves it in this state."""


@dataclass(frozen=True)
class IndexStatistics:
    """Memory of an index, and events since it was made; counters wrap at 2**32."""

    num_slots: int
    rows_indexed: int
    """Rows answered from the index, summed over steps."""
    rows_scanned_full: int
    """Rows scanned because the index was full."""
    rows_scanned_catching_up: int
    """Rows scanned because the step could not index all of their tokens."""
    rows_scanned_other: int
    """Rows scanned for another reason: no such slot, row too long, no new tokens."""
    rebuilds_shorter: int
    """Slots rebuilt because their row had become shorter."""
    rebuilds_rewritten: int
    """Slots rebuilt because tokens of their row had changed."""
    rebuilds_options: int
    """Slots rebuilt because min_n, max_n or match_policy had changed."""
    slots_given_up: int
    num_pages: int
    """Capacity, in pages of 4 KiB."""
    pages_in_use: int
    pages_peak: int
    page_splits: int

    @property
    def bytes_in_use(self) -> int:
        return self.pages_in_use * _C.INDEX_PAGE_WORDS * WORD_BYTES


class NgramIndex:
    """The memory behind the index operators: one int32 tensor of slots and a shared arena.

    A slot belongs to a request until the request finishes, also when its row moves. All slots take
    pages of 4 KiB from one arena, so memory grows with the tokens held, not with rows times row
    capacity: use the KV cache's capacity in tokens as ``token_capacity``. If the arena is full,
    rows are scanned instead (same drafts, slower) and counted in :attr:`statistics`. The system
    commits memory when it is first used, unless ``prefault`` is set.

    Args:
        num_slots: requests that may be indexed at once; at most 2**28.
        token_capacity: tokens that all slots may hold together.
        min_n: the shortest n-gram that the steps will pass; 1 for a ladder.
        max_n: the longest; at most 64, and at most min_n + 7. 16 for a ladder.
        sizes: ``"consecutive"`` or ``"ladder"``, as the steps will pass it.
        outcomes: for a ladder, whether the steps will pass costs; takes one more byte per token.
        kind: ``"numpy"`` or ``"torch"`` (a CPU tensor over the same memory).
        any_data: allocate enough for any tokens instead of for text.
        prefault: commit all memory now; otherwise a step spends about 1 us on each new page.

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
        self._words = zeroed_words(words, prefault=prefault)
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
            "make a new one: it fills itself from the rows"
        )

    def reset(self, slot_indices: Any) -> None:
        """Empties the slots of finished requests: slot_indices [N] int32 or int64."""
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
        """Indexes the tokens that rows hold and their slots do not yet: prompts, whole or in
        pieces. A ladder ignores ``match_policy``.

        Without this call the steps index a bounded number of tokens each, and scan until they have
        caught up. Shapes as in ``ngram_index_append_``; no slot twice.
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
        """Checks the structure, and each slot of ``rows`` (slot -> its row's live tokens) against
        the tokens it indexes. Slow: for tests and diagnosis.

        Raises:
            IntegrityError: it names the broken rule, and the slot or page.
        """
        fault, where = _C.index_check(self._words)
        if fault:
            said = _C.INDEX_FAULTS[fault]
            raise IntegrityError(f"NgramIndex: {said} (slot or page {where})")
        for slot, tokens in (rows or {}).items():
            fault = _C.index_check_row(self._words, slot, np.ascontiguousarray(tokens))
            if fault:
                raise IntegrityError(f"NgramIndex: slot {slot}: {_C.INDEX_FAULTS[fault]}")


def make_index(
    config: NgramConfig, num_slots: int, token_capacity: int, *, kind: Literal["numpy", "torch"]
) -> NgramIndex:
    """The index that ``config`` asks for.

    Raises:
        ValueError: a size out of bounds.
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


def operators_for(op: str, /, **arguments: Any) -> Any:
    """torch's operators if the first argument is a tensor, otherwise numpy's, which check that
    their arguments are arrays.

    Raises:
        ValueError: the first argument is a tensor and another is not: torch's own message would
            have many lines.
        RuntimeError: the argument is a tensor and the operators are not registered.
    """
    first = next(iter(arguments))
    if not is_tensor(arguments[first]):
        return _C
    if _TORCH_ABSENCE:
        raise RuntimeError(f"torch.ops.ngram_npu is not available: {_TORCH_ABSENCE}")
    for name, value in arguments.items():
        if value is not None and not is_tensor(value):
            raise ValueError(
                f"{op}: {name}: expected a torch.Tensor as {first}, got {type(value).__name__}"
            ) from None
    return sys.modules["torch"].ops.ngram_npu


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a torch tensor. Does not import torch: without it there are none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
