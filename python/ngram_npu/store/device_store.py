"""DeviceStore: text that requests share in a device's memory; no step calls code on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ngram_npu.ops import store_append_, store_propose_, workspace_size
from ngram_npu.store import file as store_file
from ngram_npu.store.device_store_integrity import check_contents
from ngram_npu.store.device_store_layout import (
    BLOCK_TOKENS,
    END_OF_BLOCK_NUMBERS,
    HEAD_FILL,
    HEAD_NEXT,
    HEAD_NUMBER,
    HEAD_WORDS,
    MAX_BLOCKS,
    SCOPE_HIGH,
    SCOPE_LOW,
    SIZES,
    SLOT_BLOCK,
    SLOT_WORDS,
    read_scopes,
    read_texts,
    split_scope,
)
from ngram_npu.store.identifiers import Scope, scope_of
from ngram_npu.store.store import NgramStore, Visibility
from ngram_npu.store.text_store import ClearedDuringSaveError, TextStore, count_tokens_by_scope
from ngram_npu.tensors import Int32Array

_COLUMNS_PER_TOKEN = 2
_TIMEOUT_S = 10.0


class Streams(Protocol):
    """Orders a store's launches and copies with the steps of its runner."""

    def use_current_stream_for_steps(self) -> None:
        """Makes the current stream the one in which steps run."""

    def use_step_stream(self) -> AbstractContextManager[Any]:
        """Returns a context in which any thread launches in the stream of the steps."""

    def mark(self) -> Any:
        """Returns a mark of this point of the stream of the steps."""

    def read(self, snapshot: tuple[Tensor, ...], mark: Any) -> list[Int32Array]:
        """Returns copies of the tensors as they are at the mark, and zeroes the tensors. Only the
        calling thread waits, not the stream.

        Raises:
            RuntimeError: the device did not reach the mark within ten seconds.
        """


class CpuStreams:
    """Work on the CPU runs within the calls."""

    def use_current_stream_for_steps(self) -> None:
        pass

    def use_step_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> None:
        pass

    def read(self, snapshot: tuple[Tensor, ...], mark: None) -> list[Int32Array]:
        arrays = [tensor.numpy().copy() for tensor in snapshot]
        for tensor in snapshot:
            tensor.zero_()
        return arrays


class CudaStreams:
    """The stream of the steps, and a second one that copies to the host.

    Args:
        snapshot: the tensors that :meth:`read` gets; it may also get only the first of them. Pinned
            memory is allocated for each.
    """

    def __init__(self, device: torch.device, snapshot: tuple[Tensor, ...]) -> None:
        self._device = device
        self._steps = torch.cuda.current_stream(device)
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._host = [torch.zeros_like(t, device="cpu", pin_memory=True) for t in snapshot]

    def use_current_stream_for_steps(self) -> None:
        self._steps = torch.cuda.current_stream(self._device)

    def use_step_stream(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._steps)
        return context

    def mark(self) -> Any:
        return self._steps.record_event()

    def read(self, snapshot: tuple[Tensor, ...], mark: Any) -> list[Int32Array]:
        hosts = self._host[: len(snapshot)]
        self._copies.wait_event(mark)
        with torch.cuda.stream(self._copies):
            for host, tensor in zip(hosts, snapshot, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.zero_()
        copied = self._copies.record_event()
        # A stream that hangs, because another rank has ended, must not hang the engine's end.
        deadline = time.monotonic() + _TIMEOUT_S
        while not copied.query():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"DeviceStore: the device did not finish its steps within {_TIMEOUT_S:g} s"
                )
            time.sleep(0.001)
        arrays = [host.numpy().copy() for host in hosts]
        for host in hosts:
            host.zero_()
        return arrays


@dataclass(frozen=True)
class DeviceStoreStatistics:
    """Contents of a device store."""

    num_slots: int
    num_blocks: int
    """Capacity, in blocks of 256 tokens."""
    visibility: Visibility
    tokens_held: int
    blocks_in_use: int


class DeviceStore(TextStore):
    """The memory of the operators ``store_append_`` and ``store_propose_``.

    The text is in a ring of blocks of 256 tokens, each with the text of one request. Block numbers
    increase up to 2**23, and new blocks replace the oldest. Per token of capacity, the store takes
    4 bytes for the token, 4 for the copy that :meth:`save` writes, and 48 to 96 for entries,
    rounded to a power of two (59 MB for 2**20 tokens). Requests share text only within a scope
    (:func:`ngram_npu.scope_of`).

    A step calls :meth:`begin_step`, then :meth:`append` and :meth:`propose`. Only ``append`` and
    ``propose`` may be captured in a graph: they launch kernels and read nothing on the host.
    Ranks that make the same calls have equal stores.

    Other threads may call the methods that read the text, such as :meth:`save`; these launch in the
    stream of the newest step. No thread may call them while a graph with ``append`` is captured or
    replayed. Methods that change the text belong to the thread of the steps, before a step's
    :meth:`begin_step` or after its ``append``.

    Args:
        num_slots: maximum number of concurrently writing requests.
        token_capacity: maximum number of tokens, rounded up to blocks of 256.
        max_batch: maximum number of requests in a step.
        device: device of the tensors, which has the operators' kernels (CPU or CUDA).
        tokenizer: digest of the vocabulary, as for :class:`NgramStore`.

    Raises:
        ValueError: a size out of bounds, or a malformed digest.
    """

    visibility: Visibility = "live"
    calls_skipped = 0
    """Number of calls that left out the store because another call was using it: always 0 here."""
    seed = ""
    """Checksum of the file that the store was seeded with; :meth:`save` writes it to its file."""

    def __init__(
        self,
        num_slots: int,
        token_capacity: int,
        *,
        max_batch: int,
        device: torch.device | str = "cpu",
        tokenizer: str = "",
    ) -> None:
        num_blocks = -(-token_capacity // BLOCK_TOKENS)
        for name, value, low, high in (
            ("num_slots", num_slots, 1, 2**31 - 2),
            ("token_capacity", token_capacity, BLOCK_TOKENS + 1, MAX_BLOCKS * BLOCK_TOKENS),
            ("max_batch", max_batch, 1, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise ValueError(f"DeviceStore: {name}: expected {low} to {high}, got {value}")
        num_columns = 1 << (_COLUMNS_PER_TOKEN * num_blocks * BLOCK_TOKENS - 1).bit_length()

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tokenizer = store_file.check_digest(tokenizer)
        self.num_slots = num_slots
        self.slots = zeros(num_slots + 1, SLOT_WORDS)
        """One per request, and the last one for the text that :meth:`add_text` adds."""
        self.text = zeros(num_blocks, BLOCK_TOKENS)
        self.blocks = zeros(num_blocks, HEAD_WORDS)
        self.table = zeros(len(SIZES), num_columns)
        self.allocator = zeros(2)
        self._workspace = zeros(workspace_size("store_append_", max_batch))
        self._snapshot = torch.zeros_like(self.blocks), torch.zeros_like(self.text)
        self._max_number = 1
        """Upper bound of the next block number."""
        self._num_changes = self._num_clears = 0
        self._number_offset = torch.zeros((), dtype=torch.int64, device=device)
        """What :meth:`clear` and renumbering have subtracted from the block numbers."""
        self._update_marks: list[Tensor] = []
        """As in :class:`NgramStore`: number of the next block, plus the offset at that time."""
        self._mutex = threading.RLock()
        """Held during the launches of a call."""
        self._snapshot_mutex = threading.Lock()
        """Held while the snapshot contains text. A thread that needs both takes this one first."""
        is_cuda = self.text.device.type == "cuda"
        self._streams: Streams = (
            CudaStreams(self.text.device, self._snapshot) if is_cuda else CpuStreams()
        )

    @property
    def token_capacity(self) -> int:
        return self.text.numel()

    @property
    def file_capacity(self) -> int:
        """Capacity of the store in a file of :meth:`save`, in tokens. A block in a file repeats the
        last 16 tokens of the block before, so a text of 497 to 512 tokens needs three blocks in the
        file and two on the device."""
        return self.token_capacity * 3 // 2

    @property
    def nbytes(self) -> int:
        """Memory of the store's tensors on the device."""
        tensors = self.slots, self.text, self.blocks, self.table, self.allocator, self._workspace
        return sum(tensor.nbytes for tensor in (*tensors, *self._snapshot))

    @property
    def revision(self) -> tuple[int, int]:
        """Changes whenever text is added or cleared, and possibly at other times."""
        return self._num_changes, self._num_clears

    @property
    def statistics(self) -> DeviceStoreStatistics:
        """The contents after the newest step, for which the call waits."""
        (blocks,) = self._copy_to_host(heads_only=True)
        return DeviceStoreStatistics(
            num_slots=self.num_slots,
            num_blocks=len(blocks),
            visibility=self.visibility,
            tokens_held=int(blocks[:, HEAD_FILL].sum()),
            blocks_in_use=int(np.count_nonzero(blocks[:, HEAD_NUMBER])),
        )

    @property
    def scopes(self) -> dict[Scope, int]:
        """Number of tokens in the store by scope, after the newest step."""
        (blocks,) = self._copy_to_host(heads_only=True)
        blocks = blocks[blocks[:, HEAD_NUMBER] != 0]
        return count_tokens_by_scope(read_scopes(blocks), blocks[:, HEAD_FILL])

    def texts(self) -> list[tuple[int, Int32Array]]:
        """Returns scope and tokens of each request's text, as far as its blocks are still in the
        store, after the newest step."""
        blocks, text = self._copy_to_host()
        return read_texts(text, blocks)

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
            self._streams.use_current_stream_for_steps()
            self._reserve_numbers(num_requests, max_new)

    def begin_request(self, slot: int) -> None:
        """Announces that another request uses a slot, before its first step. The call is optional:
        without it the slot recognizes most new requests by their text. It launches in the current
        stream, which is that of the steps."""
        with self._mutex:
            self.slots[slot].zero_()

    def begin_requests(self, slots: Tensor) -> None:
        """Does what :meth:`begin_request` does for slots [N] int64, which are on the device."""
        with self._mutex:
            self.slots.index_fill_(0, slots, 0)

    def append(
        self, token_ids: Tensor, num_tokens: Tensor, num_sampled: Tensor, **arguments: Any
    ) -> None:
        """Calls ``store_append_``.

        Args:
            token_ids: the rows after the step.
            num_tokens: their lengths.
            num_sampled: number of tokens that each request sampled.
            arguments: the other arguments of the operator, except the tensors of the store.
        """
        with self._mutex:
            store_append_(
                token_ids,
                num_tokens,
                num_sampled,
                slots=self.slots,
                text=self.text,
                blocks=self.blocks,
                table=self.table,
                allocator=self.allocator,
                workspace=self._workspace,
                **arguments,
            )

    def propose(
        self, token_ids: Tensor, num_tokens: Tensor, num_sampled: Tensor, **arguments: Any
    ) -> None:
        """Calls ``store_propose_``. The arguments are chosen as in :meth:`append`."""
        store_propose_(
            token_ids,
            num_tokens,
            num_sampled,
            text=self.text,
            blocks=self.blocks,
            table=self.table,
            **arguments,
        )

    def clear(self, scope: int | str | None = None) -> None:
        """Removes the text of a scope; None: of all scopes. No token of it stays in the store's
        memory.

        It launches kernels in the stream of the steps. If :meth:`save` is copying the text, it
        waits for the copy. Requests that are writing continue with the tokens of their next step;
        tokens that are held back are dropped.
        """
        with self._snapshot_mutex, self._between_steps():
            self._num_clears += 1
            self.slots.zero_()
            if scope is None:
                self._number_offset += self.allocator[0]
                for tensor in (self.text, self.blocks, self.table, self.allocator):
                    tensor.zero_()
                self._max_number = 1
                return
            low, high = split_scope(scope_of(scope))
            has_scope = self.blocks[:, SCOPE_LOW] == low
            has_scope &= self.blocks[:, SCOPE_HIGH] == high
            self._clear_blocks(has_scope)

    def mark_update(self, keep_updates: int | None = None) -> None:
        """Announces that the model's weights have changed, and removes text of older weights, as
        :meth:`NgramStore.mark_update` does. Tokens that are held back are dropped. Launches and
        waits are those of :meth:`clear`.

        Raises:
            ValueError: ``keep_updates`` is less than 1.
        """
        self._check_keep_updates(keep_updates)
        with self._snapshot_mutex, self._between_steps():
            self.slots.zero_()
            self._update_marks.append(self.allocator[0] + self._number_offset)
            if keep_updates is not None and len(self._update_marks) >= keep_updates:
                del self._update_marks[:-keep_updates]
                self._num_clears += 1
                end = (self._update_marks[0] - self._number_offset).clamp_(min=0)
                self._clear_blocks(self.blocks[:, HEAD_NUMBER] < end)

    def _clear_blocks(self, is_cleared: Tensor) -> None:
        self.text.masked_fill_(is_cleared[:, None], 0)
        self.blocks.masked_fill_(is_cleared[:, None], 0)

    def _save_once(self, path: str | PathLike[str]) -> None:
        num_clears = self._num_clears
        copy = NgramStore(1, self.file_capacity, tokenizer=self.tokenizer)
        copy.seed = self.seed
        for scope, text in self.texts():
            copy.add_text(text, scope)
        # This mutex prevents a clear. Steps do not take it, since a rename may be slow.
        with copy.write_new_file(path) as replace, self._snapshot_mutex:
            if num_clears != self._num_clears:
                raise ClearedDuringSaveError
            replace()

    def check_integrity(self) -> None:
        """Checks the structure, and each entry against the text. Slow: for tests and diagnosis.

        Raises:
            IntegrityError: the message names the violated rule, and the slot, block or entry.
        """
        names = ("slots", "text", "blocks", "table", "allocator")
        with self._between_steps():
            arrays = {name: getattr(self, name).cpu().numpy() for name in names}
        check_contents({name: array.astype(np.int64) for name, array in arrays.items()})

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Returns a context whose launches run between two steps, in their stream."""
        with self._mutex, self._streams.use_step_stream():
            yield

    def _copy_to_host(self, *, heads_only: bool = False) -> list[Int32Array]:
        """Returns blocks and text after the newest step; with ``heads_only`` the blocks alone.
        Later steps overwrite blocks while the copy to the host is running, so it reads a copy on
        the device."""
        snapshot = self._snapshot[:1] if heads_only else self._snapshot
        with self._snapshot_mutex:
            with self._between_steps():
                for copy, tensor in zip(snapshot, (self.blocks, self.text), strict=False):
                    copy.copy_(tensor)
                mark = self._streams.mark()
            return self._streams.read(snapshot, mark)

    def add_text(self, text: Int32Array, scope: int) -> None:
        """Adds a text in slices of at most half of the ring, the most that a call accepts."""
        max_slice = len(self.blocks) // 2 * BLOCK_TOKENS
        device = self.text.device
        with self._between_steps():
            scopes = torch.tensor([scope], dtype=torch.int64, device=device)
            slots = torch.tensor([self.num_slots], dtype=torch.int32, device=device)
            row = torch.from_numpy(text)[None].to(device)
            self.begin_request(self.num_slots)
            for begin in range(0, len(text), max_slice):
                end = min(begin + max_slice, len(text))
                self._reserve_numbers(1, end - begin)
                self.append(
                    row,
                    torch.tensor([end], dtype=torch.int32, device=device),
                    torch.tensor([end - begin], dtype=torch.int32, device=device),
                    slot_indices=slots,
                    scopes=scopes,
                    max_new=max_slice,
                    hold_back=False,
                )

    def _reserve_numbers(self, num_requests: int, max_new: int) -> None:
        num_blocks = len(self.blocks)
        num_new = min(num_blocks // 2, num_requests * -(-max_new // BLOCK_TOKENS))
        if self._max_number + num_new > END_OF_BLOCK_NUMBERS:
            self._renumber()
            self._max_number = 2 * num_blocks
        self._max_number += num_new
        self._num_changes += 1

    def _renumber(self) -> None:
        """Subtracts the largest multiple of the number of blocks that leaves the number of each
        block in the ring above 0. References to blocks that were replaced become 0."""
        num_blocks = len(self.blocks)
        rounds = torch.div(self.allocator[0] - 1, num_blocks, rounding_mode="floor") - 1
        offset = rounds.clamp_(min=0) * num_blocks
        self._number_offset += offset
        numbers = self.blocks[:, HEAD_NUMBER : HEAD_NEXT + 1]
        for tensor in (self.slots[:, SLOT_BLOCK], numbers, self.allocator):
            tensor.sub_(offset).clamp_(min=0)
        self.table.sub_(offset * BLOCK_TOKENS).clamp_(min=0)
