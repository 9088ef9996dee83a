"""Input of :class:`AsyncSpecState`: contains the configuration and the :class:`Batch` of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ngram_npu.config import NgramConfig

IntArray = npt.NDArray[np.integer[Any]]
"""Integers of any dtype, one-dimensional unless stated otherwise; int32 needs no conversion."""

_INT32_MAX = 2**31 - 1
ACCEPTANCE_UNIT = 65536
"""One accepted token in the fixed-point numbers of ``merge_drafts_``."""
_MAX_ACCEPTED = _INT32_MAX // ACCEPTANCE_UNIT
_EMPTY = np.zeros(0, np.int32)
_EMPTY.flags.writeable = False
_EMPTY_PAIRS = _EMPTY.reshape(0, 2)


@dataclass(frozen=True)
class KVGroup:
    """One group of KV caches that share a block table."""

    block_size: int
    """Number of tokens per block of the attention kernel."""
    max_blocks: int
    """Maximum number of blocks per row: the width NB of the block table."""
    blocks_per_kv_block: int = 1
    """Kernel blocks per block of the block manager; `block_ids` are ids of kernel blocks."""


@dataclass(frozen=True)
class MergeConfig:
    """Decides per request between n-gram drafts and neural drafts (docs/ops/merge_drafts.md).

    N-gram drafts are used where their expected number of accepted tokens exceeds the number that
    the neural drafter has achieved on the request.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """

    min_match_len: int = 1
    """Minimum match length in tokens; n-gram drafts of a shorter match are not used."""
    min_accepted: float = 0.0
    """Minimum expected number of accepted tokens of an n-gram draft, 0 to 32767."""
    extend: bool = False
    """Whether n-gram drafts that begin with the neural draft may extend it."""

    def __post_init__(self) -> None:
        length = self.min_match_len
        if not isinstance(length, Integral) or not 0 <= length < 2**31:
            raise ValueError(f"MergeConfig: min_match_len: expected 0 to 2**31 - 1, got {length!r}")
        if not 0 <= self.min_accepted <= _MAX_ACCEPTED:
            raise ValueError(
                f"MergeConfig: min_accepted: expected 0 to {_MAX_ACCEPTED}, "
                f"got {self.min_accepted!r}"
            )


@dataclass(frozen=True)
class AsyncConfig:
    """Sizes and modes of an :class:`AsyncSpecState`, which allocates all memory once.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """

    ngram: NgramConfig
    max_rows: int
    """R, maximum number of concurrent requests."""
    row_capacity: int
    """S, maximum number of tokens per request. No step may exceed it."""
    max_step_tokens: int
    """Maximum number of tokens per step, over all its requests."""
    kv_groups: tuple[KVGroup, ...]
    """At least one."""
    merge: MergeConfig | None = None
    """How n-gram drafts are merged with neural drafts. Each end_step then requires a neural drafter
    (default: no merging)."""
    disable_padded_drafter_batch: bool = False
    """Whether the rejected tokens are removed from the neural drafter's batch (``prepare_inputs``)
    instead of being kept and skipped (``prepare_inputs_padded``). The option has vLLM's name."""
    pad_token: int = 0
    """Input token for a scheduled draft that the lookup did not find; verified like any draft."""
    pad_slot: int = -1
    """KV slot of a token that this rank does not store; a value of `slot_dtype`."""
    slot_dtype: Literal["int32", "int64"] = "int64"
    position_dims: int = 1
    """D, number of dimensions of rotary positions: 3 for models with M-RoPE."""
    cp_world: int = 1
    """Number of context-parallel ranks (``compute_slot_mapping_``)."""
    cp_rank: int = 0
    """Context-parallel rank of this process, 0 to cp_world-1."""
    cp_interleave: int = 1
    """Number of consecutive positions on the same rank. With several ranks, it must divide each KV
    group's block_size * blocks_per_kv_block."""

    def __post_init__(self) -> None:
        names = "max_rows", "row_capacity", "max_step_tokens", "position_dims"
        for name in (*names, "cp_world", "cp_interleave"):
            self._check_range(name, 1, _INT32_MAX)
        self._check_range("pad_token", -_INT32_MAX - 1, _INT32_MAX)
        if not self.kv_groups:
            raise ValueError("AsyncConfig: kv_groups: expected at least one, got none")
        for group in self.kv_groups:
            sizes = (group.block_size, group.max_blocks, group.blocks_per_kv_block)
            if not all(isinstance(size, Integral) for size in sizes) or min(sizes) < 1:
                raise ValueError(f"AsyncConfig: kv_groups: expected integers >= 1, got {group}")
        if self.slot_dtype not in ("int32", "int64"):
            raise ValueError(
                f"AsyncConfig: slot_dtype: expected 'int32' or 'int64', got {self.slot_dtype!r}"
            )
        self._check_layout()

    def _check_layout(self) -> None:
        """Checks the requirements of the operators that compute KV slots.

        The operators would reject the sizes only in begin_step, after the host state has changed.
        """
        limit = 2 ** (31 if self.slot_dtype == "int32" else 63)
        self._check_range("pad_slot", -limit, limit - 1)
        self._check_range("cp_rank", 0, self.cp_world - 1)
        self._check_range("cp_interleave", 1, _INT32_MAX // self.cp_world)
        for group in self.kv_groups:
            kv_block = group.block_size * group.blocks_per_kv_block
            if kv_block * self.cp_world > _INT32_MAX:
                raise ValueError(
                    "AsyncConfig: kv_groups: expected block_size * blocks_per_kv_block * cp_world "
                    f"below 2**31, got {kv_block * self.cp_world}"
                )
            if self.cp_world > 1 and kv_block % self.cp_interleave:
                raise ValueError(
                    f"AsyncConfig: cp_interleave: expected a divisor of {kv_block} (block_size * "
                    f"blocks_per_kv_block), got {self.cp_interleave}"
                )

    def _check_range(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, Integral) or not low <= int(value) <= high:
            raise ValueError(f"AsyncConfig: {name}: expected {low} to {high}, got {value!r}")


@dataclass(frozen=True)
class Admission:
    """A request that enters a row: a new request, or one that resumes after preemption."""

    row: int
    """0 to R-1; must be free after the batch's `removed` and `moves`."""
    token_ids: IntArray
    """[T], the tokens known to the host: the prompt and the tokens generated so far."""
    block_ids: tuple[IntArray, ...]
    """The request's blocks in each KV group."""
    num_computed_tokens: int = 0
    """Number of tokens with keys and values in these blocks (prefix cache), below T."""
    scope: int = 0
    """With a store: requests share text only within a scope (:func:`ngram_npu.scope_of`). -1
    (``PRIVATE_SCOPE``): the request shares with nobody."""
    rope_positions: IntArray | None = None
    """[D,L], L at most T: rotary positions of the first L tokens, those of a prompt with images.
    Requires ``AsyncConfig.position_dims`` above 1 (default: L = 0)."""
    rope_delta: int = 0
    """Rotary position minus index, for all tokens from index L on (`mrope_position_delta`)."""


@dataclass(frozen=True)
class NewBlocks:
    """Blocks appended to rows of one KV group: row `rows[j]` gets `block_ids[j]`, in order.

    begin_step rejects a step if a request has too few blocks for its tokens.
    """

    rows: IntArray = field(default_factory=lambda: _EMPTY)
    """[N], rows; a row may occur more than once."""
    block_ids: IntArray = field(default_factory=lambda: _EMPTY)
    """[N], ids of kernel blocks."""


@dataclass(frozen=True)
class Batch:
    """A scheduled step. The arrays are only read.

    The changes of rows are applied in the order `removed`, `moves`, `new` and `resumed`,
    `new_blocks`. Then the step runs on `rows`.
    """

    rows: IntArray
    """[B], the row at each batch position, without duplicates. A runner that keeps its requests in
    batch order (vLLM's V1) passes `arange(B)` and `moves`. A runner that maps positions to rows
    (V2) passes this mapping."""
    num_scheduled_tokens: IntArray
    """[B], number of tokens of each request in this step, including drafts; at least 1."""
    num_scheduled_drafts: IntArray
    """[B], how many of these tokens are drafts of the last step: 0 to k, and 0 unless the request
    sampled in the last step. If the lookup found fewer drafts, they are padded. To schedule only
    existing drafts, see :meth:`AsyncSpecState.wait_drafts`."""
    removed: IntArray = field(default_factory=lambda: _EMPTY)
    """[F], rows of finished and preempted requests."""
    moves: IntArray = field(default_factory=lambda: _EMPTY_PAIRS)
    """[N,2], pairs (from, to) of rows, applied simultaneously; any permutation is allowed. Moves
    relabel rows and copy no data."""
    new: Sequence[Admission] = ()
    resumed: Sequence[Admission] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    """One element per KV group, or empty."""


def check_types(batch: Batch, num_groups: int) -> None:
    """Raises ValueError if a field has the wrong type; the message names the field."""
    if not isinstance(batch, Batch):
        raise ValueError(f"batch: expected a Batch, got {type(batch).__name__}")
    for name, item_type in (("new", Admission), ("resumed", Admission), ("new_blocks", NewBlocks)):
        check_sequence(name, getattr(batch, name), item_type)
    for admission in (*batch.new, *batch.resumed):
        ids = admission.block_ids
        if not isinstance(ids, (tuple, list)) or len(ids) != num_groups:
            raise ValueError(
                f"new/resumed: block_ids: expected {num_groups} arrays, one per KV group, got "
                f"{ids!r}"
            )
    if len(batch.new_blocks) not in (0, num_groups):
        raise ValueError(
            f"new_blocks: expected {num_groups}, one per KV group, got {len(batch.new_blocks)}"
        )


def check_sequence(name: str, items: object, item_type: type) -> None:
    wrong_type = None
    # Tuples and lists are checked first, because the check for Sequence takes a microsecond.
    if not isinstance(items, (tuple, list)) and not isinstance(items, Sequence):
        wrong_type = type(items)
    else:
        wrong_type = next((t for t in {*map(type, items)} if not issubclass(t, item_type)), None)
    if wrong_type is not None:
        raise ValueError(
            f"{name}: expected a sequence of {item_type.__name__}, got {wrong_type.__name__}"
        )
