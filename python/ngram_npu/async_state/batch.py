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


# The API reference prints the names of these functions as default values.
def _no_values() -> IntArray:
    return _EMPTY


def _no_pairs() -> IntArray:
    return _EMPTY_PAIRS


@dataclass(frozen=True)
class KVGroup:
    """One group of KV caches that share a block table.

    Attributes:
        block_size: Number of tokens per block of the attention kernel.
        max_blocks: Maximum number of blocks per row: the width NB of the block table. A row never
            has more tokens than fit in `max_blocks` blocks of each group, even if
            ``AsyncConfig.row_capacity`` is larger.
        blocks_per_kv_block: Kernel blocks per block of the block manager; `block_ids` are ids of
            kernel blocks.
    """

    block_size: int
    max_blocks: int
    blocks_per_kv_block: int = 1


@dataclass(frozen=True)
class MergeConfig:
    """Decides per request between n-gram drafts and neural drafts (docs/ops/merge_drafts.md).

    N-gram drafts are used where their expected number of accepted tokens exceeds the number that
    the neural drafter has achieved on the request.

    Attributes:
        min_match_len: Minimum match length in tokens; n-gram drafts of a shorter match are not
            used.
        min_accepted: Minimum expected number of accepted tokens of an n-gram draft, 0 to 32767.
        extend: Whether n-gram drafts that begin with the neural draft may extend it.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """

    min_match_len: int = 1
    min_accepted: float = 0.0
    extend: bool = False

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

    Attributes:
        ngram: Lookup and draft settings.
        max_rows: R, maximum number of concurrent requests.
        row_capacity: S, maximum number of tokens per request. No step may exceed it.
        max_step_tokens: Maximum number of tokens per step, over all its requests.
        kv_groups: The groups of KV caches, at least one.
        merge: How n-gram drafts are merged with neural drafts. Each end_step then requires a neural
            drafter (default: no merging).
        disable_padded_drafter_batch: Whether the rejected tokens are removed from the neural
            drafter's batch (``prepare_inputs``) instead of being kept and skipped
            (``prepare_inputs_padded``). The option has vLLM's name.
        pad_token: Input token for a scheduled draft that the lookup did not find; verified like any
            draft.
        pad_slot: KV slot of a token that this rank does not store; a value of `slot_dtype`.
        slot_dtype: dtype of `StepInputs.slot_mappings`, ``"int32"`` or ``"int64"``.
        position_dims: D, number of dimensions of rotary positions: 3 for models with M-RoPE.
        cp_world: Number of context-parallel ranks (``compute_slot_mapping_``).
        cp_rank: Context-parallel rank of this process, 0 to cp_world-1.
        cp_interleave: Number of consecutive positions on the same rank. With several ranks, it must
            divide each KV group's block_size * blocks_per_kv_block.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """

    ngram: NgramConfig
    max_rows: int
    row_capacity: int
    max_step_tokens: int
    kv_groups: tuple[KVGroup, ...]
    merge: MergeConfig | None = None
    disable_padded_drafter_batch: bool = False
    pad_token: int = 0
    pad_slot: int = -1
    slot_dtype: Literal["int32", "int64"] = "int64"
    position_dims: int = 1
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.ngram, NgramConfig):
            raise ValueError(
                f"AsyncConfig: ngram: expected an NgramConfig, got {type(self.ngram).__name__}"
            )
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
    """A request that enters a row: a new request, or one that resumes after preemption.

    Attributes:
        row: 0 to R-1; must be free after the batch's `removed` and `moves`.
        token_ids: [T], the tokens known to the host: the prompt and the tokens generated so far.
        block_ids: [M] for each KV group: ids of the request's kernel blocks, in order.
        num_computed_tokens: Number of tokens with keys and values in these blocks (prefix cache),
            below T.
        scope: With a store, requests share text only within a scope. Pass
            :func:`ngram_npu.scope_of` of a name, or ``ngram_npu.PRIVATE_SCOPE`` to share with
            nobody (default: the scope of all requests without a name).
        rope_positions: [D,L], L at most T: rotary positions of the first L tokens, those of a
            prompt with images. Requires ``AsyncConfig.position_dims`` above 1 (default: L = 0).
        rope_delta: Rotary position minus index, for all tokens from index L on
            (`mrope_position_delta`).
    """

    row: int
    token_ids: IntArray
    block_ids: tuple[IntArray, ...]
    num_computed_tokens: int = 0
    scope: int = 0
    rope_positions: IntArray | None = None
    rope_delta: int = 0


@dataclass(frozen=True)
class NewBlocks:
    """Blocks appended to rows of one KV group: row `rows[j]` gets `block_ids[j]`, in order.

    begin_step rejects a step if a request has too few blocks for its tokens.

    Attributes:
        rows: [N], rows; a row may occur more than once.
        block_ids: [N], ids of kernel blocks.
    """

    rows: IntArray = field(default_factory=_no_values)
    block_ids: IntArray = field(default_factory=_no_values)


@dataclass(frozen=True)
class Batch:
    """A scheduled step. The arrays are only read.

    The changes of rows are applied in the order `removed`, `moves`, `new` and `resumed`,
    `new_blocks`. Then the step runs on `rows`.

    Attributes:
        rows: [B], the row at each batch position, in any order, without duplicates. A runner that
            keeps its requests in batch order (vLLM's V1) passes `arange(B)` and `moves`. A runner
            that maps positions to rows (V2) passes this mapping.
        num_scheduled_tokens: [B], number of tokens of each request in this step, including drafts;
            at least 1.
        num_scheduled_drafts: [B], how many of these tokens are drafts of the last step: 0 to k, and
            0 unless the request sampled in the last step. If the lookup found fewer drafts, they
            are padded. To schedule only existing drafts, see :meth:`AsyncSpecState.wait_drafts`.
        removed: [F], rows of finished and preempted requests. Other requests may enter these rows
            and use their blocks in the same batch.
        moves: [N,2], pairs (from, to) of rows, applied simultaneously; any permutation is allowed.
            Moves relabel rows and copy no data.
        new: Requests that enter rows.
        resumed: Requests that enter rows after preemption. They are treated like `new`.
        new_blocks: One element per KV group, or empty.
    """

    rows: IntArray
    num_scheduled_tokens: IntArray
    num_scheduled_drafts: IntArray
    removed: IntArray = field(default_factory=_no_values)
    moves: IntArray = field(default_factory=_no_pairs)
    new: Sequence[Admission] = ()
    resumed: Sequence[Admission] = ()
    new_blocks: tuple[NewBlocks, ...] = ()


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
