"""NgramStore: allocation, text of requests, scopes, files and statistics."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike, fspath
from typing import Any, Literal, NoReturn, SupportsIndex
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu.config import STORE_TOKENS, NgramConfig
from ngram_npu.store import file as store_file
from ngram_npu.store.file import FileSizes, StoreFileError
from ngram_npu.store.identifiers import Scope, scope_of
from ngram_npu.store.text_store import (
    ClearedDuringSaveError,
    TextStore,
    count_tokens_by_scope,
)
from ngram_npu.tensors import (
    WORD_BYTES,
    Int32Array,
    IntegrityError,
    allocate_words,
    is_tensor,
    operators_for,
)

BLOCK_TOKENS = 256

Kind = Literal["numpy", "torch"]
Visibility = Literal["live", "finish"]
VISIBILITIES: tuple[Visibility, ...] = ("live", "finish")
"""Indexed by the code in a store's header."""

_MIN_SLOT_TOKENS = 4 * BLOCK_TOKENS
# A line is a bucket of the hash table whose entries find n-grams in the text. It has eight entries:
# two for each token of the capacity.
_TOKENS_PER_LINE = 4
_MAX_LINE_BITS = 24
_SLOT_WORDS = 4
_LOCK_TIMEOUT_S = 10.0
_BLOCK_HEAD = np.dtype(
    [
        ("serial", "<u4"),
        ("fill", "<u4"),
        ("first", "<u4"),  # the tokens before it repeat the end of the previous block
        ("previous", "<u4"),
        ("next", "<u4"),
        ("scope", "<i8"),
        ("unused", "<u4"),
    ]
)
"""Layout of a block's head (csrc/core/store.h)."""


@dataclass(frozen=True)
class StoreStatistics:
    """Contents of a store, and events since its creation, including those before it was saved. The
    counters from ``lookups`` on wrap at 2**32."""

    num_slots: int
    num_blocks: int
    """Capacity, in blocks of 256 tokens."""
    line_bits: int
    visibility: Visibility
    tokens_held: int
    """Tokens in the store. Tokens that are repeated at the start of the next block count once."""
    blocks_in_use: int
    open_slots: int
    lookups: int
    """Requests that a step could have drafted for."""
    hits: int
    """Lookups that found a match, whether or not its draft was used."""
    drafts: int
    """Drafts taken from the store."""
    draft_tokens: int
    """Tokens of these drafts."""
    tokens_inserted: int
    entries_evicted: int
    """Entries overwritten while their text was still in the store."""
    blocks_lost: int
    """Blocks reused while their request was still writing to them."""
    renumberings: int
    """Times that the block numbers (16.7 million) were used up and assigned again."""
    calls_skipped: int
    """Calls that skipped the store because another call was using it."""

    @property
    def draft_share(self) -> float:
        """Drafts taken from the store per lookup, 0 to 1."""
        return self.drafts / max(1, self.lookups)


class NgramStore(TextStore):
    """The memory of the store operators: text of requests, from which other requests draft.

    Memory is bounded: new text overwrites the oldest. One tensor holds text and the entries of a
    hash table, which find n-grams in the text. It takes 5 bytes per token of capacity for text, and
    16 to 32 bytes for entries, rounded to a power of two (21 MB for a million tokens). All memory
    is committed when the store is created, so that no step waits for memory.

    :class:`NgramProposer` calls ``ngram_store_step_``, which drafts from the store and adds the new
    tokens. A slot belongs to one request, as in an index. Requests share text only within a *scope*
    (:func:`scope_of`): text of one scope is never compared with text of another scope, and never
    drafted for it.

    One call uses the store at a time. Calls of other threads wait (:meth:`save`, :meth:`clear`,
    :meth:`merge`, ...), except steps, which skip the store. A forked process has its own copy,
    which is empty if another thread was using the store.

    Args:
        num_slots: maximum number of concurrently writing requests.
        token_capacity: maximum number of tokens; at least 1024 per slot.
        visibility: when other requests can draft from a request's text: ``"live"`` immediately,
            ``"finish"`` after the request has finished.
        tokenizer: digest of the vocabulary (``ngram_npu.store.tokenizer_digest``), which is saved
            in the file; empty: unknown.
        kind: ``"numpy"`` or ``"torch"`` (a CPU tensor over the same memory).

    Raises:
        ValueError: a size out of bounds, an unknown visibility or kind.
    """

    tensor: Any
    """[W] int32, the ``store`` argument of the operators."""
    seed = checksum = ""
    """Checksums of the file that this store was seeded with, and of the file that it was loaded
    from, as in ``store.file.Description``."""

    def __init__(
        self,
        num_slots: int = 256,
        token_capacity: int = STORE_TOKENS,
        *,
        visibility: Visibility = "live",
        tokenizer: str = "",
        kind: Kind = "numpy",
    ) -> None:
        if visibility not in VISIBILITIES:
            raise ValueError(
                f"NgramStore: visibility: expected 'live' or 'finish', got {visibility!r}"
            )
        if num_slots < 1:
            raise ValueError(f"NgramStore: num_slots: expected at least 1, got {num_slots}")
        num_blocks = -(-token_capacity // BLOCK_TOKENS)
        min_capacity = num_slots * _MIN_SLOT_TOKENS
        if num_blocks * BLOCK_TOKENS < min_capacity:
            raise ValueError(
                f"NgramStore: token_capacity: expected at least {min_capacity}, 1024 for each of "
                f"{num_slots} slots, got {token_capacity}"
            )
        line_bits = min(
            _MAX_LINE_BITS, math.ceil(math.log2(num_blocks * BLOCK_TOKENS / _TOKENS_PER_LINE))
        )
        sizes = FileSizes(num_blocks, line_bits, VISIBILITIES.index(visibility))
        if not _C.store_words(num_slots, num_blocks, line_bits):
            raise ValueError(f"NgramStore: token_capacity: too large, got {token_capacity}")
        self.num_slots, self._sizes = num_slots, sizes
        self.tokenizer = store_file.check_digest(tokenizer)
        self._allocate(kind)

    def _allocate(self, kind: str) -> None:
        if kind not in ("numpy", "torch"):
            raise ValueError(f"NgramStore: kind: expected 'numpy' or 'torch', got {kind!r}")
        self.kind, num_slots, sizes = kind, self.num_slots, self._sizes
        words = _C.store_words(num_slots, sizes.num_blocks, sizes.line_bits)
        # Without prefault the first steps would be slow: entries are spread over all of the memory,
        # so that nearly every new entry would wait for the system to zero a huge page.
        self._words = allocate_words(words, prefault=True)
        _C.store_init(self._words, num_slots, sizes.num_blocks, sizes.line_bits, sizes.visibility)
        self.tensor = self._words
        if kind == "torch":
            import torch

            self.tensor = torch.from_numpy(self._words)
        self._update_marks: list[int] = []
        """By update of the weights that text may still be older than: the next block's number."""
        self._mutex = threading.RLock()
        _STORES.add(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("NgramStore: a store cannot be copied or pickled; save it and load it")

    @property
    def nbytes(self) -> int:
        """Size of the tensor, all of which is committed when the store is created."""
        return self._words.nbytes

    @property
    def token_capacity(self) -> int:
        return self._sizes.num_blocks * BLOCK_TOKENS

    @property
    def visibility(self) -> Visibility:
        return VISIBILITIES[self._sizes.visibility]

    @property
    def statistics(self) -> StoreStatistics:
        """Text in the store, lookups and drafts since the store was created."""
        counters: dict[str, Any] = _C.store_statistics(self._words)
        return StoreStatistics(**{**counters, "visibility": self.visibility})

    def finish(self, slot_indices: Any) -> None:
        """Frees the slots of finished requests, slot_indices [N] int32 or int64. With
        ``visibility="finish"`` their text can be drafted from then on."""
        ops = operators_for("ngram_store_finish_", store=self.tensor, slot_indices=slot_indices)
        ops.ngram_store_finish_(self.tensor, slot_indices)

    def clear(self, scope: int | str | None = None) -> None:
        """Removes all text of a scope and zeroes its memory; None: of all scopes. Open requests
        continue in new blocks.

        Raises:
            RuntimeError: another call has been using the store for ten seconds.
        """
        with self._mutex, self._locked():
            _C.store_clear(self._words, None if scope is None else scope_of(scope))

    def mark_update(self, keep_updates: int | None = None) -> None:
        """Announces that the model's weights have changed, and removes text of older weights.

        Open requests continue in new blocks. Text that was loaded, warmed or merged belongs to the
        weights at that time; files do not contain the updates.

        Args:
            keep_updates: text from before the last ``keep_updates`` updates, including this one, is
                removed and its memory zeroed; 1 removes all text. None: no text is removed.

        Raises:
            ValueError: ``keep_updates`` is less than 1.
            RuntimeError: another call has been using the store for ten seconds.
        """
        self._check_keep_updates(keep_updates)
        with self._mutex, self._locked():
            self._update_marks.append(_C.store_mark_update(self._words))
            if keep_updates is not None and len(self._update_marks) >= keep_updates:
                del self._update_marks[:-keep_updates]
                _C.store_drop(self._words, self._update_marks[0])

    def _save_once(self, path: str | PathLike[str]) -> None:
        epoch = self._epoch
        # The mutex prevents a clear between the check and the replacement.
        with self.write_new_file(path) as replace, self._mutex:
            self._check_epoch(epoch)
            replace()

    def write_new_file(
        self, path: str | PathLike[str]
    ) -> AbstractContextManager[Callable[[], None]]:
        """Returns a context that writes a new file and yields a function that replaces ``path`` by
        it. :meth:`save` checks in between that no text of the file has been cleared."""
        return store_file.write_new_file(
            path, self._sizes, self.tokenizer, self.seed, self._pieces(self._epoch)
        )

    @property
    def _epoch(self) -> int:
        """Changes when a copy that was made before is no longer valid, as after :meth:`clear`."""
        return self._read_word("epoch")

    @property
    def revision(self) -> tuple[int, int]:
        """Changes whenever text is added or cleared."""
        return self._read_word("inserted"), self._epoch

    @property
    def calls_skipped(self) -> int:
        """As in ``statistics``, but reads only this counter, which is faster."""
        return self._read_word("calls_skipped")

    def _read_word(self, name: str) -> int:
        return int(self._words[_C.STORE_WORDS[name]])

    def _check_epoch(self, epoch: int) -> None:
        if self._epoch != epoch:
            raise ClearedDuringSaveError

    def _pieces(self, epoch: int) -> Iterator[memoryview]:
        """Yields the contents for a file. All pieces use the same buffer, because allocating memory
        would delay steps."""
        buffer = np.empty(_C.STORE_PIECE_WORDS, np.int32)
        buffer_bytes = buffer.data.cast("B")
        for piece in range(_C.store_pieces(self._words)):
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while (count := _C.store_pack(self._words, piece, buffer)) is None:
                _sleep_until_free(deadline)
            self._check_epoch(epoch)
            yield buffer_bytes[: count * WORD_BYTES]

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        num_slots: int | None = None,
        token_capacity: int | None = None,
        visibility: Visibility | None = None,
        tokenizer: str = "",
        kind: Kind = "numpy",
    ) -> NgramStore:
        """Loads a store that :meth:`save` wrote, with its statistics. No request is open.

        Args:
            path: the file.
            num_slots: maximum number of concurrently writing requests; None: one per 1024 tokens of
                capacity.
            token_capacity: None: the value in the file. With another value, the file's text is
                added to a new store, as in :meth:`merge`.
            visibility: like ``token_capacity``.
            tokenizer: expected digest of the vocabulary; empty: not checked.
            kind: ``"numpy"`` or ``"torch"``.

        Raises:
            StoreFileError: the file is not a store file, has another version or vocabulary, or is
                truncated or damaged.
            ValueError: too many slots for the capacity.
            OSError: it cannot be read.
        """
        name = str(fspath(path))
        with open(path, "rb") as file:
            description = store_file.read_description(file, name)
            if tokenizer and description.tokenizer and tokenizer != description.tokenizer:
                raise StoreFileError(
                    f"{name}: of another tokenizer: expected vocabulary {tokenizer}, got "
                    f"{description.tokenizer}"
                )
            sizes = description.sizes
            max_slots = sizes.num_blocks * BLOCK_TOKENS // _MIN_SLOT_TOKENS
            has_valid_sizes = _C.store_words(max(1, max_slots), *sizes[:2]) > 0
            if not has_valid_sizes or sizes.visibility >= len(VISIBILITIES):
                raise StoreFileError(f"{name}: corrupt: no store has the sizes in its header")
            store = cls.__new__(cls)
            store._sizes = sizes
            store.tokenizer = description.tokenizer or tokenizer
            store.seed, store.checksum = description.seed, description.checksum
            capacity = token_capacity or store.token_capacity
            new_visibility = visibility or store.visibility
            is_unchanged = (
                -(-capacity // BLOCK_TOKENS) == sizes.num_blocks
                and new_visibility == store.visibility
            )
            store.num_slots = max_slots
            if is_unchanged and num_slots is not None:
                store.num_slots = max(1, min(num_slots, max_slots))
            store._read_contents(file, name, kind)
        if is_unchanged:
            if num_slots not in (None, store.num_slots):
                raise ValueError(
                    f"NgramStore: num_slots: expected 1 to {max_slots}, got {num_slots}"
                )
            return store
        slots = num_slots or max(1, capacity // _MIN_SLOT_TOKENS)
        resized = cls(
            slots, capacity, visibility=new_visibility, tokenizer=store.tokenizer, kind=kind
        )
        resized.merge(store)
        resized.seed, resized.checksum = store.seed, store.checksum
        return resized

    def _read_contents(self, file: BufferedReader, name: str, kind: str) -> None:
        """Allocates the store and copies the contents of its file to it."""
        self._allocate(kind)
        number = -1
        for number, piece in enumerate(store_file.read_pieces(file, name)):
            if fault := _C.store_unpack(self._words, number, piece):
                raise StoreFileError(f"{name}: corrupt: NgramStore: {_C.STORE_FAULTS[fault]}")
        if number + 1 != (expected := _C.store_pieces(self._words)):
            raise StoreFileError(
                f"{name}: corrupt: expected {expected} pieces for the sizes in its header, got "
                f"{number + 1}"
            )

    def check_integrity(self) -> None:
        """Checks the structure, and each entry against the text. Slow: for tests and diagnosis.

        Raises:
            IntegrityError: the message names the violated rule, and the slot, block or line.
            RuntimeError: another call has been using the store for ten seconds.
        """
        with self._locked():
            copy = self._words.copy()
        _C.store_unlock(copy)
        fault, where = _C.store_check(copy)
        if fault:
            raise IntegrityError(f"NgramStore: {_C.STORE_FAULTS[fault]} ({where})")

    @property
    def scopes(self) -> dict[Scope, int]:
        """Number of tokens in the store by scope."""
        with self._locked():
            heads = self._words[self._parts()["heads"]].copy().view(_BLOCK_HEAD)
        used = heads[heads["serial"] > 0]
        tokens = used["fill"] - np.minimum(used["first"], used["fill"])
        return count_tokens_by_scope(used["scope"], tokens)

    def _parts(self) -> dict[str, slice]:
        """Returns the parts of the tensor as slices of words."""
        blocks = self._sizes.num_blocks
        spans = _C.store_parts(self.num_slots, blocks, self._sizes.line_bits)
        parts = {name: slice(*span) for name, span in spans.items()}
        # The span of the heads includes padding, which aligns the next part; the slice does not.
        start = parts["heads"].start
        parts["heads"] = slice(start, start + blocks * _BLOCK_HEAD.itemsize // WORD_BYTES)
        return parts

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the store's lock. Steps skip the store meanwhile."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _C.store_lock(self._words):
            _sleep_until_free(deadline)
        try:
            yield
        finally:
            _C.store_unlock(self._words)

    def add_text(self, text: Int32Array, scope: int) -> None:
        if not len(text):
            return
        slots = np.array([self.num_slots - 1], np.int32)
        length, scopes = np.array([len(text)], np.int32), np.array([scope], np.int64)
        with self._mutex:  # only one text at a time can use the last slot
            self.close_slots(slots)
            self.append_rows(text[None], length, length, slot_indices=slots, scopes=scopes)
            self.close_slots(slots)

    def close_slots(self, slot_indices: Int32Array) -> None:
        """Does what :meth:`finish` does, but waits while another call uses the store.

        Raises:
            RuntimeError: another call has been using the store for ten seconds.
        """
        self._repeat_until_done(
            lambda: _C.ngram_store_finish_(self._words, slot_indices),
            lambda: not self._slots[slot_indices, 0].any(),
        )

    def append_rows(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        num_new: Int32Array,
        *,
        slot_indices: Int32Array,
        scopes: npt.NDArray[np.int64],
        row_indices: Int32Array | None = None,
    ) -> None:
        """Adds the newest tokens of rows without drafting. Waits while another call uses the store.

        Args:
            token_ids: [R, S] the rows.
            num_tokens: [R] their lengths.
            num_new: [B] number of new tokens at each row's end, at least 1.
            slot_indices: [B] as in ``ngram_store_step_``; slots are distinct.
            scopes: [B] as in ``ngram_store_step_``.
            row_indices: [B] as in ``ngram_store_step_``.

        Raises:
            RuntimeError: another call has been using the store for ten seconds.
        """
        batch = len(num_new)
        lengths = num_tokens if row_indices is None else num_tokens[row_indices]

        def step() -> None:
            _C.ngram_store_step_(
                token_ids,
                num_tokens,
                num_new,
                self._words,
                row_indices=row_indices,
                slot_indices=slot_indices,
                scopes=scopes,
                draft_token_ids=np.zeros((batch, 0), np.int32),
                num_draft_tokens=np.zeros(batch, np.int32),
                match_len=np.zeros(batch, np.int32),
                draft_costs=np.zeros((batch, 0), np.uint8),
                costs=np.zeros((16, _C.STORE_COST_COLUMNS), np.uint8),
            )

        self._repeat_until_done(
            step, lambda: bool((self._slots[slot_indices, 1] == lengths[:batch]).all())
        )

    @property
    def _slots(self) -> Int32Array:
        """[num_slots, 4]. In each row, the first word is 0 if no request is open, and the second is
        the length up to which the request's text was stored or skipped."""
        return self._words[self._parts()["slots"]].reshape(self.num_slots, _SLOT_WORDS)

    def _repeat_until_done(
        self, operator_call: Callable[[], None], is_done: Callable[[], bool]
    ) -> None:
        """Repeats a call that does nothing while another call holds the lock."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            operator_call()
            if is_done():
                return
            _sleep_until_free(deadline)

    def texts(self) -> list[tuple[int, Int32Array]]:
        with self._locked():
            parts = self._parts()
            heads = self._words[parts["heads"]].copy().view(_BLOCK_HEAD)
            tokens = self._words[parts["tokens"]].copy().reshape(-1, BLOCK_TOKENS)
        texts: list[tuple[int, list[Int32Array]]] = []
        pieces_by_newest: dict[int, list[Int32Array]] = {}  # by serial number of the newest block
        for block in np.argsort(heads["serial"]):
            head = heads[block]
            if not head["serial"]:
                continue
            pieces = pieces_by_newest.pop(int(head["previous"]), None)
            if pieces is None:
                pieces = [tokens[block, : head["fill"]]]
                texts.append((int(head["scope"]), pieces))
            else:
                pieces.append(tokens[block, head["first"] : head["fill"]])
            pieces_by_newest[int(head["serial"])] = pieces
        return [(scope, np.concatenate(pieces)) for scope, pieces in texts]


def make_store(config: NgramConfig, num_slots: int, *, kind: Kind) -> NgramStore:
    """Creates the store that ``config.store`` requests.

    Raises:
        ValueError: too few ``store_tokens`` for ``num_slots`` slots.
    """
    assert config.store is not None
    min_tokens = num_slots * _MIN_SLOT_TOKENS
    if config.store_tokens < min_tokens:
        raise ValueError(
            f"NgramConfig: store_tokens: expected at least {min_tokens}, 1024 for each of "
            f"{num_slots} requests, got {config.store_tokens}"
        )
    return NgramStore(num_slots, config.store_tokens, visibility=config.store, kind=kind)


def store_arguments(config: NgramConfig, like: Any) -> dict[str, Any]:
    """Returns the keyword arguments of ``ngram_store_step_`` for a config. Tables are arrays or
    tensors, as ``like`` is."""
    table: Any = config.store_cost_table
    if is_tensor(like):
        table = sys.modules["torch"].from_numpy(table.copy())
    arguments = {"costs": table, "cost_limit": config.cost_limit}
    return arguments if config.max_len is None else {**arguments, "max_len": config.max_len}


_STORES: WeakSet[NgramStore] = WeakSet()


def _release_locks_in_child() -> None:
    """Unlocks all stores in a forked process, where the threads that took the locks do not exist.
    A store that such a thread was writing to is incomplete, so it is emptied."""
    for store in _STORES:
        store._mutex = threading.RLock()
        if store._words[_C.STORE_WORDS["lock"]] == 1:
            _C.store_clear(store._words, None)
        _C.store_unlock(store._words)


os.register_at_fork(after_in_child=_release_locks_in_child)


def _sleep_until_free(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"NgramStore: in use by another call for {_LOCK_TIMEOUT_S:g} seconds")
    time.sleep(1e-4)
