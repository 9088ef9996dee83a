"""NgramStore: bounded memory of text that requests share and draft from (docs/design/store.md)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu import _library
from ngram_npu.store import file as store_file
from ngram_npu.store.contents import (
    BLOCK_TOKENS,
    END_OF_BLOCK_NUMBERS,
    HEAD_FILL,
    HEAD_NEXT,
    HEAD_NUMBER,
    HEAD_WORDS,
    MAX_BLOCKS,
    OCCURRENCES,
    SCOPE_HIGH,
    SCOPE_LOW,
    SIZES,
    SLOT_BLOCK,
    SLOT_WORDS,
    count_tokens_by_scope,
    read_texts,
    split_scope,
)
from ngram_npu.store.file import StoreFileError
from ngram_npu.store.identifiers import Scope, scope_of
from ngram_npu.store.memory import DeviceMemory, HostMemory, Memory
from ngram_npu.tensors import Int32Array, is_tensor

DEFAULT_TOKENS = 1 << 20
MAX_SAVE_ATTEMPTS = 10
_COPY_TIMEOUT_S = 10.0
_ARRAYS = ("slots", "text", "blocks", "table", "allocator")

ScopeName = str | tuple[Any, ...] | Scope | None


@dataclass(frozen=True)
class StoreStatistics:
    """Contents of a store."""

    num_slots: int
    num_blocks: int
    """Capacity, in blocks of 256 tokens."""
    tokens_held: int
    blocks_in_use: int


@dataclass(frozen=True)
class StoreCopy:
    """A copy of a store's contents in host memory."""

    blocks: Int32Array
    text: Int32Array | None
    """None: only the heads of the blocks were copied."""
    revision: tuple[int, int]
    """:attr:`NgramStore.revision` when the copy was started."""
    num_clears: int

    @property
    def tokens_held(self) -> int:
        return int(self.blocks[:, HEAD_FILL].sum())

    def texts(self) -> list[tuple[Scope, Int32Array]]:
        """Returns the same as :meth:`NgramStore.texts`."""
        assert self.text is not None
        return read_texts(self.blocks, self.text)


class NgramStore:
    """The memory of the operators ``store_append_`` and ``store_propose_``: text of requests, from
    which other requests draft.

    The text is in a ring of blocks of 256 tokens, each with the text of one request; new blocks
    replace the oldest. A hash table finds the two newest occurrences of n-grams in the text. Per
    token of capacity, the store takes 4 bytes for the token and 48 to 96 for the table, rounded to
    a power of two; for a device, 4 more in host memory for the copy that :meth:`save` writes. All
    memory is committed when the store is created. Requests share text only within a scope
    (:func:`ngram_npu.scope_of`).

    A step calls :meth:`begin_step`, then :meth:`append` and :meth:`propose`. Only ``append`` and
    ``propose`` may be captured in a device graph: they launch kernels and read nothing on the host.
    Ranks that make the same calls have equal stores.

    A slot belongs to one request, and one slot more to the text that :meth:`warm`, :meth:`merge`
    and :meth:`add_text` add. The operators recognize a slot's request by its text: a row that moved
    to another slot begins a new text, and no text is stored twice.

    Other threads may call the methods that read the text, such as :meth:`save`; on a device these
    launch in the stream of the newest step. No thread may call them while a graph is captured, or
    one with ``append`` replayed, except :meth:`take_copy` and :meth:`save_copy`. Methods that
    change the text belong to the thread of the steps, before a step's :meth:`begin_step` or after
    its ``append``. A forked process must not use the store.

    Args:
        tokens: maximum number of tokens, rounded up to blocks of 256.
        device: None or ``"cpu"``: numpy arrays in host memory, which torch's CPU tensors may use
            too. Another device: torch tensors on it.
        num_slots: maximum number of concurrently writing requests (:meth:`reserve_slots`).
        max_batch: maximum number of requests in a step (default: ``num_slots``).
        tokenizer: digest of the vocabulary (``ngram_npu.store.tokenizer_digest``), which is saved
            in the file; empty: unknown.

    Raises:
        ValueError: a size out of bounds, a malformed digest, or a device without kernels.
    """

    slots: Any
    """[num_slots + 1, 8] int32, written by ``store_append_``, as the arrays below."""
    text: Any
    blocks: Any
    table: Any
    allocator: Any
    seed = checksum = ""
    """Checksums of the file that this store was seeded with, which :meth:`save` writes to its file,
    and of the file that it was loaded from, as in ``store.file.Description``."""

    def __init__(
        self,
        tokens: int = DEFAULT_TOKENS,
        *,
        device: Any = None,
        num_slots: int = 256,
        max_batch: int | None = None,
        tokenizer: str = "",
    ) -> None:
        max_batch = num_slots if max_batch is None else max_batch
        for name, value, low, high in (
            ("tokens", tokens, BLOCK_TOKENS + 1, MAX_BLOCKS * BLOCK_TOKENS),
            ("num_slots", num_slots, 1, 2**31 - 2),
            ("max_batch", max_batch, 1, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise ValueError(f"NgramStore: {name}: expected {low} to {high}, got {value}")
        self.tokenizer = store_file.check_digest(tokenizer)
        self._memory, self._device = _make_memory(device)
        self._num_blocks = num_blocks = -(-tokens // BLOCK_TOKENS)
        num_columns = 1 << (num_blocks * BLOCK_TOKENS - 1).bit_length()
        zeros = self._memory.zeros
        self.text = zeros(num_blocks, BLOCK_TOKENS)
        self.blocks = zeros(num_blocks, HEAD_WORDS)
        self.table = zeros(len(SIZES), OCCURRENCES * num_columns)
        self.allocator = zeros(2)
        self._number_offset = self._memory.place(np.zeros(1, np.int64))
        """What :meth:`clear` and renumbering have subtracted from the block numbers."""
        self._memory.prepare_copies((self.blocks, self.text))
        self.num_slots = self._max_batch = 0
        self._arguments: dict[bool, dict[str, Any]] = {}
        """The operators' arguments, arrays or (True) tensors of the same memory."""
        self.reserve_slots(num_slots, max_batch)
        self._max_number = 1
        """Upper bound of the next block number."""
        self._num_changes = self._num_clears = 0
        self._update_marks: list[Any] = []
        """By update of the weights that text may still be older than: number of the next block,
        plus the offset at that time."""
        self._mutex = threading.RLock()
        """Held during the launches of a call."""
        self._copy_mutex = threading.Lock()
        """Held while a copy is started, taken or replaced. A thread that needs both takes this one
        first."""
        self._started_copy: tuple[Any, ...] = ()
        """The arrays of a copy that was not taken."""
        self._started_revision = self.revision

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("NgramStore: a store cannot be copied or pickled; save it and load it")

    @property
    def device(self) -> str:
        """``"cpu"``, or the device of the tensors."""
        return str(self._device or "cpu")

    @property
    def capacity(self) -> int:
        """Maximum number of tokens."""
        return self._num_blocks * BLOCK_TOKENS

    @property
    def nbytes(self) -> int:
        """Memory of the store on its device."""
        workspace = self._arguments.get(True, {}).get("workspace")
        arrays = [*(getattr(self, name) for name in _ARRAYS), workspace]
        return sum(int(a.nbytes) for a in arrays if a is not None)

    @property
    def revision(self) -> tuple[int, int]:
        """Changes whenever text is added or cleared, and possibly at other times."""
        return self._num_changes, self._num_clears

    @property
    def statistics(self) -> StoreStatistics:
        """The contents after the newest step, for which the call waits."""
        copy = self._copy_to_host(heads_only=True)
        return StoreStatistics(
            num_slots=self.num_slots,
            num_blocks=self._num_blocks,
            tokens_held=copy.tokens_held,
            blocks_in_use=int(np.count_nonzero(copy.blocks[:, HEAD_NUMBER])),
        )

    @property
    def scopes(self) -> dict[Scope, int]:
        """Number of tokens in the store by scope, after the newest step."""
        return count_tokens_by_scope(self._copy_to_host(heads_only=True).blocks)

    def texts(self) -> list[tuple[Scope, Int32Array]]:
        """Returns scope and tokens of each request's text, as far as its blocks are still in the
        store, after the newest step, in the order of their oldest blocks."""
        return self._copy_to_host().texts()

    def reserve_slots(self, num_slots: int, max_batch: int | None = None) -> None:
        """Adds slots until there are ``num_slots``, and accepts steps of as many requests, or of
        ``max_batch``. On a device, it allocates new memory, so call it before the capture of a
        graph."""
        max_batch = max(self._max_batch, num_slots if max_batch is None else max_batch)
        if num_slots <= self.num_slots and max_batch == self._max_batch:
            return
        num_slots = max(num_slots, self.num_slots)
        slots = self._memory.zeros(num_slots + 1, SLOT_WORDS)
        if self.num_slots:
            slots[: self.num_slots] = self.slots[: self.num_slots]
        self.slots, self.num_slots, self._max_batch = slots, num_slots, max_batch
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        self._arguments = {self._device is not None: arrays}
        if self._device is not None:
            arrays["workspace"] = self._memory.zeros(_C.workspace_words("store_append_", max_batch))

    def begin_step(self, num_requests: int, max_new: int) -> None:
        """Renumbers the blocks if the step could exhaust the block numbers.

        Every rank must call it before each :meth:`append`, also before the replay of a graph, with
        the same values. The bound is computed from them alone, so all ranks renumber in the same
        step.

        Args:
            num_requests: maximum number of requests in the step.
            max_new: as in :meth:`append`.
        """
        with self._mutex:
            self._memory.use_current_stream_for_steps()
            self._reserve_numbers(num_requests, max_new)

    def begin_requests(self, slots: Any) -> None:
        """Announces that other requests use slots, before their first step. The call is optional:
        without it a slot recognizes most new requests by their text. It launches in the current
        stream, which is that of the steps.

        Args:
            slots: a slot, a slice of slots, or slots [N] int64, an array or a tensor on the store's
                device.
        """
        with self._mutex:
            if is_tensor(slots):
                # An assignment to an index would copy the zero from the host.
                self._get_arguments(is_torch=True)["slots"].index_fill_(0, slots, 0)
            else:
                self.slots[slots] = 0

    def append(self, token_ids: Any, num_tokens: Any, num_sampled: Any, **arguments: Any) -> None:
        """Calls ``store_append_``, which stores new text.

        Args:
            token_ids: [R, S], the rows after the step.
            num_tokens: [R], their lengths.
            num_sampled: [B], number of tokens that each request sampled.
            arguments: the other arguments of the operator, except the arrays of the store.
        """
        with self._mutex:
            is_torch = is_tensor(token_ids)
            operators = sys.modules["torch"].ops.ngram_npu if is_torch else _C
            memory = self._get_arguments(is_torch)
            operators.store_append_(token_ids, num_tokens, num_sampled, **memory, **arguments)

    def propose(self, token_ids: Any, num_tokens: Any, num_sampled: Any, **arguments: Any) -> None:
        """Calls ``store_propose_``, which replaces drafts. The arguments are chosen as in
        :meth:`append`."""
        with self._mutex:
            is_torch = is_tensor(token_ids)
            operators = sys.modules["torch"].ops.ngram_npu if is_torch else _C
            memory = self._get_arguments(is_torch)
            operators.store_propose_(
                token_ids,
                num_tokens,
                num_sampled,
                text=memory["text"],
                blocks=memory["blocks"],
                table=memory["table"],
                **arguments,
            )

    def append_and_propose(
        self,
        token_ids: Any,
        num_tokens: Any,
        num_sampled: Any,
        *,
        row_indices: Any,
        scopes: Any,
        slot_indices: Any = None,
        max_new: int,
        hold_back: bool,
        **arguments: Any,
    ) -> None:
        """Begins a step, stores its text, and then replaces drafts. The first five arguments are
        those of both operators, the next three those of ``store_append_``.

        Args:
            token_ids: [R, S], the rows after the step.
            num_tokens: [R], their lengths.
            num_sampled: [B], number of tokens that each request sampled.
            row_indices: [B], row of each request.
            scopes: [B], scope of each request.
            slot_indices: [B], slot of each request (default: its row).
            max_new: as in :meth:`append`.
            hold_back: as in :meth:`append`.
            arguments: the other arguments of ``store_propose_``.
        """
        self.begin_step(num_sampled.shape[0], max_new)
        self.append(
            token_ids,
            num_tokens,
            num_sampled,
            row_indices=row_indices,
            scopes=scopes,
            slot_indices=slot_indices,
            max_new=max_new,
            hold_back=hold_back,
        )
        self.propose(
            token_ids,
            num_tokens,
            num_sampled,
            row_indices=row_indices,
            scopes=scopes,
            **arguments,
        )

    def _get_arguments(self, is_torch: bool) -> dict[str, Any]:
        arguments = self._arguments.get(is_torch)
        if arguments is None:
            if not is_torch:
                raise ValueError(f"NgramStore: expected tensors on {self._device}, got arrays")
            from_numpy = sys.modules["torch"].from_numpy
            arguments = {name: from_numpy(getattr(self, name)) for name in _ARRAYS}
            self._arguments[is_torch] = arguments
        return arguments

    def add_text(self, text: Int32Array, scope: int) -> None:
        """Adds a text as the output of one request, in slices of 256 tokens."""
        ends = np.arange(BLOCK_TOKENS, len(text) + BLOCK_TOKENS, BLOCK_TOKENS, dtype=np.int32)
        ends = np.minimum(ends, len(text))
        place = self._memory.place
        with self._between_steps():
            row, lengths = place(np.ascontiguousarray(text, np.int32)[None]), place(ends)
            counts = place(np.diff(ends, prepend=np.int32(0)))
            slots, scopes = place(np.array([self.num_slots])), place(np.array([scope], np.int64))
            self.begin_requests(self.num_slots)
            for i in range(len(ends)):
                self._reserve_numbers(1, BLOCK_TOKENS)
                self.append(
                    row,
                    lengths[i : i + 1],
                    counts[i : i + 1],
                    slot_indices=slots,
                    scopes=scopes,
                    max_new=BLOCK_TOKENS,
                    hold_back=False,
                )

    def warm(self, texts: Iterable[npt.ArrayLike], *, scope: ScopeName = None) -> None:
        """Adds texts to the store, one after the other, each as the output of one request.

        Args:
            texts: lists or arrays of token ids: example answers, without their prompts.
            scope: the scope of the texts (:func:`ngram_npu.scope_of`).

        Raises:
            ValueError: a text is not a vector of token ids from 0 to 2**31 - 1.
        """
        scope_number = scope_of(scope)
        for text in [_check_token_ids(text) for text in texts]:
            self.add_text(text, scope_number)

    def merge(self, other: NgramStore, *, new_only: bool = False) -> None:
        """Adds the text of another store, each request's text in its scope, in the order of their
        oldest blocks; the text added last is overwritten last. A text contains what ``other`` still
        has of it, for open requests the text so far. ``other`` is not changed.

        Args:
            other: the store to copy from.
            new_only: skip texts that this store contains completely.

        Raises:
            ValueError: ``other`` is this store, or has another vocabulary.
        """
        if other is self:
            raise ValueError("NgramStore: merge: expected another store, got this one")
        if self.tokenizer and other.tokenizer and self.tokenizer != other.tokenizer:
            raise ValueError(
                f"NgramStore: merge: expected a store of vocabulary {self.tokenizer}, got "
                f"{other.tokenizer}"
            )
        known = {(scope, text.tobytes()) for scope, text in self.texts()} if new_only else set()
        for scope, text in other.texts():
            if (scope, text.tobytes()) not in known:
                self.add_text(text, scope)

    def clear(self, scope: ScopeName = None) -> None:
        """Removes the text of a scope; None: of all scopes. No token of it stays in the store's
        memory. Pass ``Scope(0)`` for the scope of requests without a name.

        If a copy of the text is being taken, it waits for it. Requests that are writing
        continue with the tokens of their next step; tokens that are held back are dropped.
        """
        number = None if scope is None else scope_of(scope)
        with self._copy_mutex, self._between_steps():
            self._num_clears += 1
            self.slots[...] = 0
            if number is None:
                self._number_offset += self.allocator[:1]
                for name in _ARRAYS:
                    getattr(self, name)[...] = 0
                self._max_number = 1
            else:
                low, high = split_scope(number)
                is_other_scope = self.blocks[:, SCOPE_LOW] != low
                self._keep_blocks(is_other_scope | (self.blocks[:, SCOPE_HIGH] != high))
            self._replace_copy()

    def mark_update(self, keep_updates: int | None = None) -> None:
        """Announces that the model's weights have changed, and removes text of older weights.

        Requests that are writing continue as after :meth:`clear`. Text that was loaded, warmed or
        merged belongs to the weights at that time; files do not contain the updates.

        Args:
            keep_updates: text from before the last ``keep_updates`` updates, including this one, is
                removed and its memory zeroed; 1 removes all text. None: no text is removed.

        Raises:
            ValueError: ``keep_updates`` is less than 1.
        """
        if keep_updates is not None and keep_updates < 1:
            raise ValueError(
                "NgramStore: mark_update: keep_updates: expected at least 1 or None, got "
                f"{keep_updates}"
            )
        with self._copy_mutex, self._between_steps():
            self.slots[...] = 0
            self._update_marks.append(self.allocator[:1] + self._number_offset)
            if keep_updates is not None and len(self._update_marks) >= keep_updates:
                del self._update_marks[:-keep_updates]
                self._num_clears += 1
                first_kept = self._update_marks[0] - self._number_offset
                self._keep_blocks(self.blocks[:, HEAD_NUMBER] >= first_kept)
                self._replace_copy()

    def _keep_blocks(self, is_kept: Any) -> None:
        # A multiplication releases the GIL, an assignment to selected rows does not.
        self.text *= is_kept[:, None]
        self.blocks *= is_kept[:, None]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the texts to a file, which is replaced atomically. A process that is killed during
        the call leaves the old file and a file that ends in ``.tmp``, which the next call for this
        path removes.

        The text is copied at one point between two steps; in host memory, a step waits for this
        copy. If :meth:`clear` is called meanwhile, the call starts again.

        The file contains unencrypted text as token ids: only its owner may read it.

        Raises:
            OSError: writing fails.
            RuntimeError: text was cleared during each of ten attempts.
        """
        for _ in range(MAX_SAVE_ATTEMPTS):
            if self.save_copy(path, self._copy_to_host()):
                return
        raise RuntimeError(
            f"NgramStore: save: text was cleared during each of {MAX_SAVE_ATTEMPTS} attempts"
        )

    def start_copy(self, *, heads_only: bool = False) -> None:
        """Copies the contents after the newest step for :meth:`take_copy`. Belongs to the thread of
        the steps, and does not wait for the device. Replaces a copy that was not taken.

        Args:
            heads_only: do not copy the text, only how much there is.
        """
        with self._copy_mutex:
            self._start_copy(heads_only)

    def take_copy(self) -> StoreCopy | None:
        """Returns the copy that was started last; None if the device has not finished it, or if it
        was taken. Any thread may call it at any time: it launches nothing, and calls no function of
        the device's runtime."""
        with self._copy_mutex:
            return self._take_copy()

    def save_copy(self, path: str | PathLike[str], copy: StoreCopy) -> bool:
        """Writes a copy as :meth:`save` does. Returns whether it did: if text was cleared after the
        copy, the file stays as it is. Any thread may call it at any time."""
        contents = copy.texts(), self.capacity, self.tokenizer, self.seed
        # This mutex prevents a clear. Steps do not take it, since a rename may be slow.
        with store_file.write_new_file(path, *contents) as replace, self._copy_mutex:
            if is_current := copy.num_clears == self._num_clears:
                replace()
        return is_current

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        tokens: int | None = None,
        device: Any = None,
        num_slots: int = 256,
        max_batch: int | None = None,
        tokenizer: str = "",
    ) -> NgramStore:
        """Loads a store that :meth:`save` wrote. If the capacity is too small for its text, the
        newest text is kept.

        Args:
            path: the file.
            tokens: capacity (default: the capacity in the file).
            tokenizer: expected digest of the vocabulary; empty: not checked.

        The other arguments are those of the class.

        Raises:
            StoreFileError: the file is not a store file, has another version or vocabulary, or is
                truncated or damaged.
            ValueError: a size out of bounds.
            OSError: it cannot be read.
        """
        description, texts = store_file.read_texts(path)
        if tokenizer and description.tokenizer and tokenizer != description.tokenizer:
            raise StoreFileError(
                f"{fspath(path)}: of another tokenizer: expected vocabulary {tokenizer}, got "
                f"{description.tokenizer}"
            )
        store = cls(
            description.capacity if tokens is None else tokens,
            device=device,
            num_slots=num_slots,
            max_batch=max_batch,
            tokenizer=description.tokenizer or tokenizer,
        )
        store.seed, store.checksum = description.seed, description.checksum
        for scope, text in texts:
            store.add_text(text, scope)
        return store

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Returns a context whose launches run between two steps, in their stream."""
        with self._mutex, self._memory.use_step_stream():
            yield

    def _copy_to_host(self, *, heads_only: bool = False) -> StoreCopy:
        """Returns a copy of the contents after the newest step."""
        with self._copy_mutex:
            self._start_copy(heads_only)
            # A stream that hangs, because another rank has ended, must not hang the engine's end.
            deadline = time.monotonic() + _COPY_TIMEOUT_S
            while (copy := self._take_copy()) is None:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        "NgramStore: the device did not finish its steps within "
                        f"{_COPY_TIMEOUT_S:g} s"
                    )
                time.sleep(0.001)
            return copy

    def _start_copy(self, heads_only: bool) -> None:
        # After a copy of the heads alone, the text of an earlier one would stay in host memory.
        heads_only = heads_only and len(self._started_copy) < 2
        self._started_copy = (self.blocks,) if heads_only else (self.blocks, self.text)
        self._started_revision = self.revision
        with self._between_steps():
            self._memory.start_copy(self._started_copy)

    def _take_copy(self) -> StoreCopy | None:
        if not self._started_copy:
            return None
        # Steps may change the arrays of a store in host memory, but not a copy of a device's.
        with self._mutex if self._device is None else nullcontext():
            arrays = self._memory.take_copy()
        if arrays is None:
            return None
        self._started_copy = ()
        text = arrays[1] if len(arrays) > 1 else None
        return StoreCopy(arrays[0], text, self._started_revision, self._num_clears)

    def _replace_copy(self) -> None:
        """Replaces a copy that was not taken, because it has text that was cleared."""
        if self._started_copy:
            self._memory.start_copy(self._started_copy)

    def _reserve_numbers(self, num_requests: int, max_new: int) -> None:
        num_blocks = self._num_blocks
        num_new = min(num_blocks // 2, num_requests * -(-max_new // BLOCK_TOKENS))
        if self._max_number + num_new > END_OF_BLOCK_NUMBERS:
            self._renumber()
            self._max_number = 2 * num_blocks
        self._max_number += num_new
        self._num_changes += 1

    def _renumber(self) -> None:
        """Subtracts the largest multiple of the number of blocks that leaves the number of each
        block in the ring above 0. References to blocks that were replaced become 0."""
        num_blocks = self._num_blocks
        rounds = (self.allocator[:1] - 1) // num_blocks - 1
        offset = rounds * (rounds > 0) * num_blocks
        self._number_offset += offset
        numbers = self.blocks[:, HEAD_NUMBER : HEAD_NEXT + 1]
        for array in (self.slots[:, SLOT_BLOCK], numbers, self.allocator):
            _subtract(array, offset)
        _subtract(self.table, offset * BLOCK_TOKENS)


def _subtract(array: Any, offset: Any) -> None:
    """Subtracts from an array in place; negative results become 0."""
    array -= offset
    array *= array > 0


def _make_memory(device: Any) -> tuple[Memory, Any]:
    """Returns the memory and the torch device; None in host memory."""
    if device is None or str(device) == "cpu":
        return HostMemory(), None
    import torch

    # Without torch_npu, torch.device does not know the name npu.
    is_name = isinstance(device, str)
    device_type = device.partition(":")[0] if is_name else torch.device(device).type
    if not _library.has_kernel("store_append_", device_type):
        backend = _library.backends().get(device_type)
        raise ValueError(
            "NgramStore: device: expected a device with kernels of the store, got "
            f"{device}" + (f": {backend.reason}" if backend and backend.reason else "")
        )
    torch_device = torch.device(device)
    return DeviceMemory(torch_device), torch_device


def _check_token_ids(text: npt.ArrayLike) -> Int32Array:
    """Returns the token ids of a text as int32."""
    token_ids = np.asarray(text)
    if token_ids.ndim != 1 or (token_ids.size and token_ids.dtype.kind not in "iu"):
        raise ValueError(
            f"NgramStore: warm: expected a vector of token ids, got {token_ids.dtype} of shape "
            f"{list(token_ids.shape)}"
        )
    if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < 2**31:
        raise ValueError(
            f"NgramStore: warm: expected token ids of 0 to 2**31 - 1, got {token_ids.min()} to "
            f"{token_ids.max()}"
        )
    return np.ascontiguousarray(token_ids, np.int32)
