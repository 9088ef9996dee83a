"""Input of :class:`AsyncSpecState` from a model runner: its sizes once, then one Batch per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ngram_npu.async_state.neural import MergeConfig
from ngram_npu.config import INDEX_POLICY, NgramConfig
from ngram_npu.drafting import takes_index
from ngram_npu.host_drafting import Stop

IntArray = npt.NDArray[np.integer[Any]]
"""One-dimensional unless said otherwise; any integer dtype, int32 costs no conversion."""

_INT32_MAX = 2**31 - 1
_EMPTY = np.zeros(0, np.int32)
_EMPTY.flags.writeable = False
_EMPTY_PAIRS = _EMPTY.reshape(0, 2)


def _none() -> IntArray:
    return _EMPTY


@dataclass(frozen=True)
class KVGroup:
    """One group of KV caches that share a block table."""

    block_size: int
    """Tokens per block, for the attention kernel."""
    max_blocks: int
    """Blocks a row may have: the width NB of its block table."""
    blocks_per_kv_block: int = 1
    """Kernel blocks of one block of the block manager; `block_ids` are kernel blocks."""


@dataclass(frozen=True)
class AsyncConfig:
    """Sizes and modes; all memory is allocated once for them.

    Raises:
        ValueError: a value out of its range; the message names it.
    """

    ngram: NgramConfig
    max_rows: int
    """R, requests that may live at once."""
    row_capacity: int
    """S, tokens of the longest request. No step may exceed it."""
    max_step_tokens: int
    """Tokens of the largest step, all its requests together."""
    kv_groups: tuple[KVGroup, ...]
    """At least one."""
    engine: Literal["index", "scan", "auto"] = "auto"
    """How drafts are found: with an index of the rows, or by scanning them. The drafts are the
    same. ``"auto"``: the index on the CPU for rows beyond 2048 tokens, otherwise the scan. The
    index, and so a ladder, needs the CPU or ``draft_on="host"``."""
    draft_on: Literal["auto", "device", "host"] = "auto"
    """Where drafts are found. ``"host"``: in a job in the order of the device's stream, with an
    index and a store in host memory; the store lags one step. ``"auto"``: there for a store on a
    device other than the CPU."""
    token_capacity: int | None = None
    """Tokens that the index holds for all rows together (the KV cache's capacity); None: enough for
    full rows. Rows beyond it are scanned."""
    merge: MergeConfig | None = None
    """How n-gram drafts stand beside those of a neural drafter, which each end_step then takes.
    None: there is none."""
    disable_padded_drafter_batch: bool = False
    """Whether the batch of a model-based drafter drops the rejected tokens (``prepare_inputs``)
    instead of keeping and skipping them (``prepare_inputs_padded``). vLLM's name."""
    pad_token: int = 0
    """Input token for a draft that was scheduled but not found. It is verified like any draft."""
    pad_slot: int = -1
    """Slot of a token whose KV is not stored; of `slot_dtype`."""
    slot_dtype: Literal["int32", "int64"] = "int64"
    cp_world: int = 1
    """Number of context-parallel ranks that share the positions (``compute_slot_mapping_``)."""
    cp_rank: int = 0
    """This rank: 0 to cp_world-1."""
    cp_interleave: int = 1
    """Number of consecutive positions that stay on one rank. With several ranks it must divide each
    KV group's block_size * blocks_per_kv_block."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "row_capacity", "max_step_tokens", "cp_world", "cp_interleave"):
            self._check_range(name, 1, _INT32_MAX)
        self._check_range("pad_token", -_INT32_MAX - 1, _INT32_MAX)
        if not self.kv_groups:
            raise ValueError("AsyncConfig: kv_groups: expected at least one, got none")
        for group in self.kv_groups:
            sizes = (group.block_size, group.max_blocks, group.blocks_per_kv_block)
            if not all(isinstance(size, Integral) for size in sizes) or min(sizes) < 1:
                raise ValueError(f"AsyncConfig: kv_groups: expected integers >= 1, got {group}")
        if self.slot_dtype not in ("int32", "int64"):
            raise ValueError(f"AsyncConfig: slot_dtype: int32 or int64, got {self.slot_dtype!r}")
        if self.draft_on not in ("auto", "device", "host"):
            raise ValueError(
                f"AsyncConfig: draft_on: expected 'auto', 'device' or 'host', got {self.draft_on!r}"
            )
        self.takes_index(on_cpu=True)
        if self.token_capacity is not None:
            self._check_range("token_capacity", 0, _INT32_MAX)
        self._check_layout()

    @property
    def index_capacity(self) -> int:
        """Tokens that an index has room for."""
        full = self.max_rows * self.row_capacity
        return full if self.token_capacity is None else self.token_capacity

    def drafts_on_host(self, *, on_cpu: bool, has_store: bool) -> bool:
        if self.draft_on == "auto":
            return has_store and not on_cpu
        return self.draft_on == "host"

    def takes_index(self, *, on_cpu: bool) -> bool:
        """Whether drafts are found with an index. Another device may refuse to make one.

        Raises:
            ValueError: ``engine`` contradicts ``ngram``.
        """
        return takes_index(
            self.ngram,
            self.engine,
            capacity=self.row_capacity,
            short=INDEX_POLICY.short_row if on_cpu else self.row_capacity,
            device_type="cpu",
            says="AsyncConfig: ",
        )

    def _check_layout(self) -> None:
        """Checks the requirements of the operators that map slots. They would reject the sizes only
        in begin_step, after the host has begun the step."""
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
    """A request that takes a row: a new one, or one that comes back after a preemption."""

    row: int
    """0 to R-1, free after the batch's `removed` and `moves`."""
    token_ids: IntArray
    """[T] its tokens known to the host: the prompt, and the tokens generated so far."""
    block_ids: tuple[IntArray, ...]
    """Its blocks in each KV group."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in those blocks already (prefix cache), below T."""
    scope: int = 0
    """With a store: requests share text only within a scope (:func:`ngram_npu.scope_of`)."""
    stop: Stop | None = None
    """With a store and drafts on the host: how the request may end. What it says up to there is
    stored, and nothing behind it. None: what it says in its last step is not stored."""


@dataclass(frozen=True)
class NewBlocks:
    """Blocks appended to rows in one KV group: `block_ids[j]` goes to row `rows[j]`, in order.

    A step needs blocks for all its tokens; otherwise begin_step rejects it.
    """

    rows: IntArray = field(default_factory=_none)
    """[N]; a row may occur more than once."""
    block_ids: IntArray = field(default_factory=_none)
    """[N]."""


@dataclass(frozen=True)
class Batch:
    """One step, as the scheduler made it. It is never written to.

    Rows change in the order of the fields `removed`, `moves`, `new` and `resumed`, `new_blocks`;
    then the step runs on `rows`.
    """

    rows: IntArray
    """[B] the row at each batch position, each at most once. A runner that keeps its requests in
    batch order (vLLM's V1) passes `arange(B)` and `moves`; one that maps positions to rows (V2)
    passes this mapping."""
    num_scheduled_tokens: IntArray
    """[B] tokens of each request in this step, drafts included; >= 1."""
    num_scheduled_drafts: IntArray
    """[B] how many of them, at the end, are drafts of the last step: 0 to k, and 0 unless the
    request sampled in the last step. Drafts that were not found are padded; to schedule only those
    found, see :meth:`AsyncSpecState.wait_drafts`."""
    removed: IntArray = field(default_factory=_none)
    """[F] rows of finished and preempted requests."""
    moves: IntArray = field(default_factory=lambda: _EMPTY_PAIRS)
    """[N,2] (from, to), all at once: any permutation. Moves relabel rows and copy no data."""
    new: Sequence[Admission] = ()
    resumed: Sequence[Admission] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    """One for each KV group, or none at all."""


def check_types(batch: Batch, num_groups: int) -> None:
    """Checks the types of all fields, so that errors name the caller's field.

    Raises:
        ValueError: it names the field.
    """
    if not isinstance(batch, Batch):
        raise ValueError(f"batch: expected a Batch, got {type(batch).__name__}")
    for name, kind in (("new", Admission), ("resumed", Admission), ("new_blocks", NewBlocks)):
        check_sequence(name, getattr(batch, name), kind)
    for admission in (*batch.new, *batch.resumed):
        ids = admission.block_ids
        if not isinstance(ids, (tuple, list)) or len(ids) != num_groups:
            raise ValueError(
                f"new/resumed: block_ids: expected {num_groups} arrays, one for each KV group, got "
                f"{ids!r}"
            )
    if len(batch.new_blocks) not in (0, num_groups):
        raise ValueError(
            f"new_blocks: expected {num_groups}, one for each KV group, got {len(batch.new_blocks)}"
        )


def check_sequence(name: str, given: object, kind: type) -> None:
    # Tuples and lists first: the test for Sequence takes a microsecond.
    if not isinstance(given, (tuple, list)) and not isinstance(given, Sequence):
        raise ValueError(
            f"{name}: expected a sequence of {kind.__name__}, got {type(given).__name__}"
        )
    for found in {*map(type, given)}:
        if not issubclass(found, kind):
            raise ValueError(
                f"{name}: expected a sequence of {kind.__name__}, got {found.__name__}"
            )
