"""The store of text that requests share: allocation, files, scopes, statistics."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from os import PathLike, fspath
from typing import Any, Literal, NoReturn, SupportsIndex
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu import store_file
from ngram_npu.config import STORE_TOKENS, NgramConfig
from ngram_npu.index import IntegrityError, is_tensor, operators_for
from ngram_npu.memory import WORD_BYTES, Int32Array, zeroed_words
from ngram_npu.scopes import Scope, scope_of
from ngram_npu.store_file import FileSizes, StoreFileError
from ngram_npu.store_statistics import StoreStatistics, Visibility

BLOCK_TOKENS = _C.STORE_BLOCK_TOKENS
LEAST_BLOCKS_PER_SLOT = _C.STORE_LEAST_BLOCKS_PER_SLOT

Kind = Literal["numpy", "torch"]
VISIBILITIES: tuple[Visibility, ...] = ("live", "finish")
"""By the numbers in a store's header."""

_TOKENS_PER_LINE = 4  # eight entries: two for each token
_MAX_LINE_BITS = 24
_SLOT_WORDS = 4  # the first one is 0 if no request is open
_PATIENCE_S = 10.0
_TRIES = 10
_HEAD = np.dtype(
    [
        ("serial", "<u4"),
        ("fill", "<u4"),
        ("first", "<u4"),
        ("previous", "<u4"),
        ("next", "<u4"),
        ("scope", "<i8"),
        ("unused", "<u4"),
    ]
)
"""A block's head (csrc/core/store.h)."""


class _ChangedError(Exception):
    """What a file already has of the store is no longer what it was."""


class NgramStore:
    """The memory behind the store operators: text of requests, from which other requests draft.

    It is bounded: new text overwrites the oldest. One tensor holds text and entries; per token of
    capacity it takes 5 bytes for text and 16 to 32 bytes for entries, rounded to a power of two
    (21 MB for a million tokens). All of it is committed when the store is made, so that no step
    waits for memory.

    :class:`NgramProposer` calls ``ngram_store_step_``, which drafts from the store and adds the new
    tokens. A slot belongs to one request, as in an index. Requests share text only within a *scope*
    (:func:`scope_of`): text of one scope is never compared with text of another, or drafted to it.

    One call uses the store at a time. Calls of other threads wait (:meth:`save`, :meth:`clear`,
    :meth:`merge`, ...), except steps, which skip the store. A forked process has a copy of its own,
    which is empty if another thread was using the store.

    Args:
        num_slots: requests that may write at once.
        token_capacity: tokens held at most; at least 1024 for each slot.
        visibility: when other requests can draft from a request's text: ``"live"`` at once,
            ``"finish"`` after it has finished.
        tokenizer: digest of the vocabulary (``ngram_npu.tokenizer_digest``), which the file keeps;
            empty: not known.
        kind: ``"numpy"`` or ``"torch"`` (a CPU tensor over the same memory).

    Raises:
        ValueError: a size out of bounds, an unknown visibility or kind.
    """

    tensor: Any
    """[W] int32, the ``store`` argument of the operators."""
    seed = checksum = ""
    """Of the file that this store began with, and of the one it was loaded from: what
    ``store_file.Description`` says."""

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
        least = num_slots * LEAST_BLOCKS_PER_SLOT * BLOCK_TOKENS
        num_blocks = -(-token_capacity // BLOCK_TOKENS)
        if num_blocks < num_slots * LEAST_BLOCKS_PER_SLOT:
            raise ValueError(
                f"NgramStore: token_capacity: expected at least {least}, 1024 for each of "
                f"{num_slots} slots, got {token_capacity}"
            )
        line_bits = min(
            _MAX_LINE_BITS, math.ceil(math.log2(num_blocks * BLOCK_TOKENS / _TOKENS_PER_LINE))
        )
        sizes = FileSizes(num_blocks, line_bits, VISIBILITIES.index(visibility))
        if not _C.store_words(num_slots, num_blocks, line_bits):
            raise ValueError(f"NgramStore: token_capacity: too large, got {token_capacity}")
        self.num_slots, self._sizes = num_slots, sizes
        self.tokenizer = store_file.checked_digest(tokenizer)
        self._allocate(kind)

    def _allocate(self, kind: str) -> None:
        if kind not in ("numpy", "torch"):
            raise ValueError(f"NgramStore: kind: expected 'numpy' or 'torch', got {kind!r}")
        self.kind, num_slots, sizes = kind, self.num_slots, self._sizes
        # A step enters its tokens all over the memory: almost each would wait for a huge page.
        words = _C.store_words(num_slots, sizes.num_blocks, sizes.line_bits)
        self._words = zeroed_words(words, prefault=True)
        _C.store_init(self._words, num_slots, sizes.num_blocks, sizes.line_bits, sizes.visibility)
        self.tensor = self._words
        if kind == "torch":
            import torch

            self.tensor = torch.from_numpy(self._words)
        self._mutex = threading.RLock()
        _STORES.add(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("NgramStore: a store cannot be copied or pickled; save it and load it")

    @property
    def nbytes(self) -> int:
        """Size of the tensor, all of which is committed when the store is made."""
        return self._words.nbytes

    @property
    def token_capacity(self) -> int:
        return self._sizes.num_blocks * BLOCK_TOKENS

    @property
    def visibility(self) -> Visibility:
        return VISIBILITIES[self._sizes.visibility]

    @property
    def statistics(self) -> StoreStatistics:
        """Text held, lookups and drafts since the store was created."""
        found: dict[str, Any] = _C.store_statistics(self._words)
        return StoreStatistics(**{**found, "visibility": VISIBILITIES[found["visibility"]]})

    def finish(self, slot_indices: Any) -> None:
        """Frees the slots of finished requests: slot_indices [N] int32 or int64. With
        ``visibility="finish"`` their text can be drafted from now on."""
        ops = operators_for("ngram_store_finish_", store=self.tensor, slot_indices=slot_indices)
        ops.ngram_store_finish_(self.tensor, slot_indices)

    def warm(self, texts: Iterable[npt.ArrayLike], *, scope: int | str | None = None) -> None:
        """Adds texts to the store, one after the other, each as the output of one request.

        A text is a list or an array of token ids: an example of an answer, without its prompt. The
        texts use the last slot; a request in this slot continues in a new block.

        Raises:
            ValueError: a text is not a vector of token ids from 0 to 2**31 - 1.
            RuntimeError: another call has been using the store for ten seconds.
        """
        whose = scope_of(scope)
        for text in texts:
            self._enter(_token_ids(text), whose)

    def merge(self, other: NgramStore, *, new_only: bool = False) -> None:
        """Adds the text of another store, each request's text under its scope.

        The result is the same as if each of these requests had generated its text again, as far as
        ``other`` still holds it, in the order of their oldest blocks. So the counts of the entries
        start again, and the text added last is overwritten last. Of open requests the text so far
        is added. ``other`` is not changed. With ``new_only`` texts that this store holds as a whole
        are left out.

        Raises:
            ValueError: ``other`` is this store, or of another vocabulary.
            RuntimeError: another call has been using one of the stores for ten seconds.
        """
        if other is self:
            raise ValueError("NgramStore: merge: expected another store, got this one")
        if self.tokenizer and other.tokenizer and self.tokenizer != other.tokenizer:
            raise ValueError(
                f"NgramStore: merge: expected a store of vocabulary {self.tokenizer}, got "
                f"{other.tokenizer}"
            )
        known = {(scope, text.tobytes()) for scope, text in self._texts()} if new_only else set()
        for scope, text in other._texts():
            if (scope, text.tobytes()) not in known:
                self._enter(text, scope)

    def clear(self, scope: int | str | None = None) -> None:
        """Removes all text of a scope and wipes it from memory; None: of all scopes. Open requests
        continue in new blocks.

        Raises:
            RuntimeError: another call has been using the store for ten seconds.
        """
        with self._mutex, self._locked():
            _C.store_clear(self._words, None if scope is None else scope_of(scope))

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the store, without the open requests, to a file, which is replaced atomically. A
        process that is killed during the call leaves the old file and one that ends in ``.tmp``,
        which the next call for this path removes.

        Steps of other threads go on: one waits at most for the copy of a megabyte. The file has a
        part of what comes in meanwhile. After a :meth:`clear` meanwhile, the call begins again.

        The file contains unencrypted text as token ids: only its owner may read it.

        Raises:
            OSError: writing fails.
            RuntimeError: another call has been using the store for ten seconds, or text was cleared
                again and again.
        """
        for _ in range(_TRIES):
            epoch = self._epoch
            with suppress(_ChangedError):
                made = store_file.written(
                    path, self._sizes, self.tokenizer, self.seed, self._pieces(epoch)
                )
                with made as replace, self._mutex:  # no clear between the two
                    self._check_epoch(epoch)
                    replace()
                return
        raise RuntimeError(f"NgramStore: save: text was cleared during each of {_TRIES} tries")

    @property
    def _epoch(self) -> int:
        return int(self._words[_C.STORE_WORDS["epoch"]])

    def _check_epoch(self, epoch: int) -> None:
        if self._epoch != epoch:
            raise _ChangedError

    def _pieces(self, epoch: int) -> Iterator[memoryview]:
        """The contents for a file, each piece in the same memory: allocating holds up steps."""
        room = np.empty(_C.STORE_PIECE_WORDS, np.int32)
        octets = room.data.cast("B")
        for piece in range(_C.store_pieces(self._words)):
            until = time.monotonic() + _PATIENCE_S
            while (count := _C.store_pack(self._words, piece, room)) is None:
                _wait(until)
            self._check_epoch(epoch)
            yield octets[: count * WORD_BYTES]

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
        """The store that :meth:`save` wrote, with its statistics; no request is open.

        Args:
            num_slots: requests that may write at once; None: the maximum, one for each 1024 tokens
                of capacity.
            token_capacity, visibility: None: those of the file. With others its text is added to a
                new store, as :meth:`merge` does.
            tokenizer: digest of the vocabulary that the file has to be of; empty: any.
            kind: ``"numpy"`` or ``"torch"``.

        Raises:
            StoreFileError: the file is not a store file, of another version or vocabulary,
                truncated or damaged.
            ValueError: too many slots for the capacity.
            OSError: it cannot be read.
        """
        name = str(fspath(path))
        with open(path, "rb") as file:
            found = store_file.read_head(file, name)
            if tokenizer and found.tokenizer and tokenizer != found.tokenizer:
                raise StoreFileError(
                    f"{name}: of another tokenizer: expected vocabulary {tokenizer}, got "
                    f"{found.tokenizer}"
                )
            store = cls.__new__(cls)
            store._sizes = found.sizes
            store.tokenizer = found.tokenizer or tokenizer
            store.seed, store.checksum = found.seed, found.checksum
            most = found.sizes.num_blocks // LEAST_BLOCKS_PER_SLOT
            possible = _C.store_words(max(1, most), *found.sizes[:2]) > 0
            if not possible or found.sizes.visibility >= len(VISIBILITIES):
                raise StoreFileError(f"{name}: corrupt: a store cannot have the sizes it names")
            capacity = token_capacity or store.token_capacity
            shown = visibility or store.visibility
            own = (
                -(-capacity // BLOCK_TOKENS) == found.sizes.num_blocks and shown == store.visibility
            )
            store.num_slots = most
            if own and num_slots is not None:
                store.num_slots = max(1, min(num_slots, most))
            store._read(file, name, kind)
        if own and num_slots not in (None, store.num_slots):
            raise ValueError(f"NgramStore: num_slots: expected 1 to {most}, got {num_slots}")
        if own:
            return store
        slots = num_slots or max(1, capacity // (LEAST_BLOCKS_PER_SLOT * BLOCK_TOKENS))
        made = cls(slots, capacity, visibility=shown, tokenizer=store.tokenizer, kind=kind)
        made.merge(store)
        made.seed, made.checksum = store.seed, store.checksum
        return made

    def _read(self, file: BufferedReader, name: str, kind: str) -> None:
        """Allocates the store and puts the contents of its file into it."""
        self._allocate(kind)
        number = -1
        for number, piece in enumerate(store_file.read_pieces(file, name)):
            if fault := _C.store_unpack(self._words, number, piece):
                raise StoreFileError(f"{name}: corrupt: NgramStore: {_C.STORE_FAULTS[fault]}")
        if number + 1 != _C.store_pieces(self._words):
            raise StoreFileError(f"{name}: corrupt: a store of its sizes has more pieces")

    def check_integrity(self) -> None:
        """Checks the structure, and each entry against the text. Slow: for tests and diagnosis.

        Raises:
            IntegrityError: it names the broken rule, and the slot, block or line.
            RuntimeError: another call has been using the store for ten seconds.
        """
        with self._locked():
            copy = self._words.copy()
        _C.store_give_back(copy)
        fault, where = _C.store_check(copy)
        if fault:
            raise IntegrityError(f"NgramStore: {_C.STORE_FAULTS[fault]} ({where})")

    @property
    def scopes(self) -> dict[Scope, int]:
        """Tokens held of each scope."""
        with self._locked():
            heads = self._words[self._parts()["heads"]].copy().view(_HEAD)
        used = heads[heads["serial"] > 0]
        found, which = np.unique(used["scope"], return_inverse=True)
        sums = np.bincount(which, weights=used["fill"] - np.minimum(used["first"], used["fill"]))
        return dict(zip(map(Scope, found.tolist()), map(int, sums), strict=True))

    def _parts(self) -> dict[str, slice]:
        """The parts of the tensor, in words."""
        blocks = self._sizes.num_blocks
        spans = _C.store_parts(self.num_slots, blocks, self._sizes.line_bits)
        found = {name: slice(*span) for name, span in spans.items()}
        heads = found["heads"].start  # behind which there is room, so that lines are aligned
        found["heads"] = slice(heads, heads + blocks * _HEAD.itemsize // WORD_BYTES)
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the store's lock; steps skip the store meanwhile."""
        until = time.monotonic() + _PATIENCE_S
        while not _C.store_take(self._words):
            _wait(until)
        try:
            yield
        finally:
            _C.store_give_back(self._words)

    def _enter(self, text: Int32Array, scope: int) -> None:
        if not len(text):
            return
        slot = np.array([self.num_slots - 1], np.int32)
        length = np.array([len(text)], np.int32)

        def finish() -> None:
            _C.ngram_store_finish_(self._words, slot)

        def step() -> None:
            _C.ngram_store_step_(
                text[None],
                length,
                length,
                self._words,
                slot_indices=slot,
                scopes=np.array([scope], np.int64),
                draft_token_ids=np.zeros((1, 0), np.int32),
                num_draft_tokens=np.zeros(1, np.int32),
                match_len=np.zeros(1, np.int32),
                draft_costs=np.zeros((1, 0), np.uint8),
                costs=np.zeros((16, _C.STORE_COST_COLUMNS), np.uint8),
            )

        with self._mutex:  # the last slot is one text's
            self._call(finish, opens=False)
            self._call(step, opens=True)
            self._call(finish, opens=False)

    def _call(self, operator_call: Callable[[], None], *, opens: bool) -> None:
        """Repeats the call until it got the lock, which the last slot's state shows."""
        word = self._parts()["slots"].stop - _SLOT_WORDS
        until = time.monotonic() + _PATIENCE_S
        while True:
            operator_call()
            if bool(self._words[word]) == opens:
                return
            _wait(until)

    def _texts(self) -> list[tuple[int, Int32Array]]:
        """Scope and text of each request, as far as its blocks are still in the store."""
        with self._locked():
            parts = self._parts()
            heads = self._words[parts["heads"]].copy().view(_HEAD)
            tokens = self._words[parts["tokens"]].copy().reshape(-1, BLOCK_TOKENS)
        found: list[tuple[int, list[Int32Array]]] = []
        last_of: dict[int, list[Int32Array]] = {}  # a text's pieces, by its newest block
        for block in np.argsort(heads["serial"]):
            head = heads[block]
            if not head["serial"]:
                continue
            pieces = last_of.pop(int(head["previous"]), None)
            if pieces is None:
                pieces = [tokens[block, : head["fill"]]]
                found.append((int(head["scope"]), pieces))
            else:
                pieces.append(tokens[block, head["first"] : head["fill"]])
            last_of[int(head["serial"])] = pieces
        return [(scope, np.concatenate(pieces)) for scope, pieces in found]


def store_lookup(config: NgramConfig, like: Any) -> dict[str, Any]:
    """Keyword arguments of ``ngram_store_step_`` from a config, of the kind of ``like``."""
    table: Any = config.store_cost_table
    if is_tensor(like):
        table = sys.modules["torch"].from_numpy(table.copy())
    found = {"costs": table, "cost_limit": config.cost_limit}
    return found if config.max_len is None else {**found, "max_len": config.max_len}


_STORES: WeakSet[NgramStore] = WeakSet()


def _free_in_child() -> None:
    """Frees each store that another thread was using, and empties it unless that only copied: in a
    forked process that thread does not exist, and what it was writing stays incomplete."""
    for store in _STORES:
        store._mutex = threading.RLock()
        if store._words[_C.STORE_WORDS["busy"]] == 1:
            _C.store_clear(store._words, None)
        _C.store_give_back(store._words)


os.register_at_fork(after_in_child=_free_in_child)


def _wait(until: float) -> None:
    if time.monotonic() > until:
        raise RuntimeError(f"NgramStore: in use by another call for {_PATIENCE_S:g} seconds")
    time.sleep(1e-4)


def _token_ids(text: npt.ArrayLike) -> Int32Array:
    found = np.asarray(text)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(
            f"NgramStore: warm: expected a vector of token ids, got {found.dtype} of shape "
            f"{list(found.shape)}"
        )
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < 2**31:
        raise ValueError(
            f"NgramStore: warm: expected token ids of 0 to 2**31 - 1, got {found.min()} to "
            f"{found.max()}"
        )
    return np.ascontiguousarray(found, np.int32)
