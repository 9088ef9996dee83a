"""Joins the blocks of KV events to texts.

A publisher sends an event when blocks of its KV cache become full: the hashes of the blocks, the
hash of the block before them (the parent), and their tokens. An event continues the text of its
parent. Whoever can reach the port may have sent it, so any value can be false.

Only blocks that are certainly text of a certain scope are used. The scope is known from a text's
first block; where that block was not received, the text is skipped (an *orphan*). A block is
skipped too if it contains embeddings, such as an image, whose token ids are placeholders, or if it
is in another tier or another group of the cache, which repeat the text of the first group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any

import msgspec
import numpy as np

from ngram_npu.engines.vllm.feed.texts import CONTEXT_TOKENS, FedText
from ngram_npu.store import scope_of_request

MAX_EVENTS = 1 << 14
"""Maximum number of events in a batch, which has the events of one step. It limits how long one
call of the decoder keeps other threads waiting."""
MAX_TOKENS = 1 << 17
"""Maximum number of tokens of an event."""
MAX_BLOCKS = MAX_TOKENS // 16
"""Maximum number of blocks of an event."""
MAX_HASH = 64
"""Maximum length of a block's hash in bytes. vLLM's have at most 32."""
MAX_KEYS = 8
"""Maximum number of keys of a block. Plain text has two at most."""
MAX_NAME = 1024
"""Maximum length of a salt or of an adapter's name. Longer ones would take much memory."""
MAX_OPEN_TEXTS = 1 << 12
"""Number of a publisher's texts that can be continued under their number."""
TEXT_OVERHEAD = 64
"""Tokens that take as much memory as a waiting text without tokens. Texts can be short."""
_DECODE_ERRORS = msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError
_MAX_KEY_BYTES = 4 * MAX_NAME + 5
_NUM_DICTS = 64
_TOKEN_BYTES = 4
_SCOPE_BYTES = 8

# The limits of all fields bound the time of one call of the decoder, during which the scheduler
# cannot run, and the memory of what is remembered.
BlockHash = int | Annotated[bytes, msgspec.Meta(max_length=MAX_HASH)]
BlockKeys = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_KEYS)]


class _Batch(msgspec.Struct, array_like=True):
    """vLLM's ``KVEventBatch``. The events are decoded one after the other."""

    timestamp: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


class BlockStored(msgspec.Struct):
    """The fields of vLLM's event of this name, as far as they are used here. Its type is checked by
    :class:`TextJoiner`: all fields have defaults, because other events are decoded with it too."""

    type: str
    block_hashes: Annotated[list[BlockHash], msgspec.Meta(max_length=MAX_BLOCKS)] = []
    parent_block_hash: BlockHash | None = None
    token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)] = []
    block_size: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    locality: str | None = None
    group_idx: int | None = None
    extra_keys: Annotated[list[BlockKeys | None], msgspec.Meta(max_length=MAX_BLOCKS)] | None = None
    """For each block, without tags and in this order: the adapter's name; an identifier and an
    offset for each image; in a text's first block the salt; a digest of embeddings."""


_batch_decoder = msgspec.msgpack.Decoder(_Batch)
_event_decoder = msgspec.msgpack.Decoder(BlockStored)


class EventError(ValueError):
    """A batch or an event that cannot be used."""


def split_batch(payload: bytes) -> Iterator[msgspec.Raw]:
    """Returns the events of a batch, each of which :func:`decode_event` decodes.

    Raises:
        EventError: The batch is malformed.
    """
    try:
        return iter(_batch_decoder.decode(payload).events)
    except _DECODE_ERRORS as error:
        raise EventError(str(error)) from None


def decode_event(raw: msgspec.Raw) -> BlockStored:
    """Returns an event; of other types than ``BlockStored`` only the fields that have a meaning.

    Raises:
        EventError: The event is malformed.
    """
    try:
        return _event_decoder.decode(raw)
    except _DECODE_ERRORS as error:
        raise EventError(str(error)) from None


@dataclass(slots=True)
class OpenText:
    """A text that was received up to a block, and the tokens that the engine has not taken yet."""

    number: int
    scope: int
    last_block: BlockHash
    waiting: list[bytes] = field(default_factory=list)
    """int32 tokens."""
    num_waiting: int = 0
    waiting_since: float = 0.0

    def take(self, max_tokens: int) -> FedText:
        """Returns up to ``max_tokens`` tokens, of which at least one waits, and removes them."""
        data = b"".join(self.waiting)
        end = max_tokens * _TOKEN_BYTES
        self.waiting = [data[end:]] if len(data) > end else []
        self.num_waiting = max(0, self.num_waiting - max_tokens)
        return FedText(self.number, self.scope, np.frombuffer(data[:end], np.int32).copy())


Blocks = dict[BlockHash, bytes]
"""By block hash, the scope of the block and the tokens at its end, as bytes."""


class _RecentBlocks:
    """The blocks that were added or found last, about ``capacity`` of them.

    They are in many small dicts, since Python takes 100 ms to free or to enlarge one with half a
    million blocks, in which no other thread runs. Each dict of newer blocks has one of older
    blocks. If the newer one is full, it replaces the older one, which is freed later. A block that
    is found moves to the newer dict.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._newer, self._older = _make_dicts(), _make_dicts()
        self._unused: list[Blocks] = []

    def __len__(self) -> int:
        return sum(map(len, self._newer)) + sum(map(len, self._older))

    def find(self, block: BlockHash) -> bytes | None:
        number = hash(block) % _NUM_DICTS
        record = self._newer[number].get(block)
        if record is None and (record := self._older[number].pop(block, None)) is not None:
            self.add(block, record)
        return record

    def add(self, block: BlockHash, record: bytes) -> None:
        if self._unused:
            self._unused.pop()
        number = hash(block) % _NUM_DICTS
        if len(self._newer[number]) >= max(1, self.capacity // (2 * _NUM_DICTS)):
            self._unused.append(self._older[number])
            self._older[number], self._newer[number] = self._newer[number], {}
        self._newer[number][block] = record

    def clear(self) -> None:
        self._unused = self.remove_all()

    def remove_all(self) -> list[Blocks]:
        """Returns all dicts, for the caller to free them one after the other."""
        blocks = [part for part in (*self._newer, *self._older, *self._unused) if part]
        self._newer, self._older, self._unused = _make_dicts(), _make_dicts(), []
        return blocks


def _make_dicts() -> list[Blocks]:
    return [{} for _ in range(_NUM_DICTS)]


class TextJoiner:
    """Joins the blocks of one publisher to texts, which wait in :attr:`waiting` until they are
    taken. A publisher's hashes mean nothing to another publisher's joiner."""

    def __init__(self, vocab_size: int, numbers: Iterator[int] | None = None) -> None:
        """
        Args:
            vocab_size: Token ids from this value on are rejected: a drafted token id that the
                model does not have could end the engine.
            numbers: Numbers of the texts, which no other joiner of the engine uses.
        """
        self._vocab_size, self._numbers = vocab_size, count() if numbers is None else numbers
        self._blocks = _RecentBlocks(MAX_OPEN_TEXTS)
        self._open_texts: OrderedDict[BlockHash, OpenText] = OrderedDict()
        self.waiting: OrderedDict[int, OpenText] = OrderedDict()
        """By number, in the order of their first waiting token."""
        self.num_waiting = 0
        self.num_texts = 0
        self.num_tokens = 0
        self.num_orphans = 0
        self.num_rejected = 0

    @property
    def waiting_size(self) -> int:
        """Memory that waiting texts take, in tokens."""
        return self.num_waiting + TEXT_OVERHEAD * len(self.waiting)

    def set_capacity(self, blocks: int) -> None:
        """Sets about how many blocks are remembered."""
        self._blocks.capacity = blocks

    def remove_blocks(self) -> list[Blocks]:
        """Forgets all blocks, and returns them, so that they can be freed in small parts."""
        return self._blocks.remove_all()

    def add_event(self, event: BlockStored, now: float) -> None:
        """Adds the text of an event, received at the time ``now``, to the waiting texts."""
        if event.type == "AllBlocksCleared":  # whatever follows does not refer to earlier blocks
            self._blocks.clear()
            self._open_texts.clear()
        if event.type != "BlockStored" or not _is_in_first_group(event):
            return
        blocks, size = event.block_hashes, event.block_size
        # A sliding window or a recurrent layer leaves out blocks, but not their tokens.
        if not blocks or size <= 0 or len(event.token_ids) != len(blocks) * size:
            self.num_rejected += max(1, len(blocks))
            return
        if event.parent_block_hash is None:
            scope, context = _find_scope(event), b""
            if scope is None:
                self.num_rejected += len(blocks)
                return
        else:
            record = self._blocks.find(event.parent_block_hash)
            if record is None:
                self.num_orphans += len(blocks)
                return
            scope = int.from_bytes(record[:_SCOPE_BYTES], "little")
            context = record[_SCOPE_BYTES:]
        num_plain = self._count_plain_blocks(event)
        self.num_rejected += len(blocks) - num_plain
        num_known = 0  # blocks of a prefix that is in the publisher's cache already
        while (
            num_known < num_plain and (record := self._blocks.find(blocks[num_known])) is not None
        ):
            num_known, context = num_known + 1, record[_SCOPE_BYTES:]
        if num_known < num_plain:
            tokens = np.array(event.token_ids[num_known * size : num_plain * size], np.int32)
            parent = blocks[num_known - 1] if num_known else event.parent_block_hash
            self._add_blocks(
                parent, blocks[num_known:num_plain], scope, context, tokens.tobytes(), now
            )

    def _count_plain_blocks(self, event: BlockStored) -> int:
        """Returns the number of blocks before the first one that has other keys than those that
        :func:`_find_scope` reads, or tokens that the model does not have."""
        names = [] if event.lora_name is None else [event.lora_name]
        size, tokens, all_keys = event.block_size, event.token_ids, event.extra_keys or []
        is_valid = min(tokens) >= 0 and max(tokens) < self._vocab_size
        for i in range(len(event.block_hashes)):
            is_first = event.parent_block_hash is None and i == 0
            if not is_first and (i >= len(all_keys) or _read_keys(all_keys[i]) != names):
                return i
            if not is_valid:
                block = tokens[i * size : (i + 1) * size]
                if min(block) < 0 or max(block) >= self._vocab_size:
                    return i
        return len(event.block_hashes)

    def _add_blocks(
        self,
        parent: BlockHash | None,
        blocks: list[BlockHash],
        scope: int,
        context: bytes,
        data: bytes,
        now: float,
    ) -> None:
        """Adds new blocks with the tokens ``data`` behind ``context``, the last tokens of
        ``parent``."""
        block_bytes = len(data) // len(blocks)
        prefix, joined = scope.to_bytes(_SCOPE_BYTES, "little"), context + data
        end = len(context)
        for block in blocks:
            end += block_bytes
            start = max(0, end - CONTEXT_TOKENS * _TOKEN_BYTES)
            self._blocks.add(block, prefix + joined[start:end])
        text = None if parent is None else self._open_texts.pop(parent, None)
        if text is None:
            text = OpenText(next(self._numbers), scope, blocks[-1])
            self.num_texts += 1
            self._add_waiting(text, context, now)
        text.last_block = blocks[-1]
        self._open_texts[text.last_block] = text
        while len(self._open_texts) > MAX_OPEN_TEXTS:
            self._open_texts.popitem(last=False)
        self._add_waiting(text, data, now)
        self.num_tokens += len(data) // _TOKEN_BYTES

    def _add_waiting(self, text: OpenText, data: bytes, now: float) -> None:
        if not data:
            return
        if text.number not in self.waiting:
            self.waiting[text.number] = text
            text.waiting_since = now
        text.waiting.append(data)
        text.num_waiting += len(data) // _TOKEN_BYTES
        self.num_waiting += len(data) // _TOKEN_BYTES

    def take(self, max_tokens: int) -> tuple[float, FedText]:
        """Returns up to ``max_tokens`` tokens of the text that has waited longest, and since when
        they wait, and removes them."""
        text = self.waiting[next(iter(self.waiting))]
        fed_text = text.take(max_tokens)
        self.num_waiting -= len(fed_text.tokens)
        if not text.num_waiting:
            del self.waiting[text.number]
        return text.waiting_since, fed_text

    def drop_oldest(self) -> int:
        """Removes the text that has waited longest, and returns its number of tokens. What follows
        it becomes another text, because its tokens would not follow directly."""
        _, text = self.waiting.popitem(last=False)
        if self._open_texts.get(text.last_block) is text:
            del self._open_texts[text.last_block]
        self.num_waiting -= text.num_waiting
        return text.num_waiting


def _is_in_first_group(event: BlockStored) -> bool:
    is_local = event.medium in (None, "GPU") and event.locality != "REMOTE"
    return is_local and event.group_idx in (None, 0)


def _find_scope(event: BlockStored) -> int | None:
    """Returns the scope of a text, from the keys of its first block; None if the keys do not tell
    it: they are missing, as in events of an engine that does not publish salts, or the block has
    other keys than the adapter's name and the salt."""
    if event.extra_keys is None or len(event.extra_keys) != len(event.block_hashes):
        return None
    keys, name = _read_keys(event.extra_keys[0]), event.lora_name
    if keys is None or (name is None and event.lora_id is not None):
        return None
    if name is not None:
        if not keys or keys[0] != name:
            return None
        keys = keys[1:]
    salt = keys[0] if keys else None
    if len(keys) > 1 or not isinstance(salt, str | None):
        return None
    if max(len(name or ""), len(salt or "")) > MAX_NAME:
        return None
    return scope_of_request(salt, name)


def _read_keys(keys: list[msgspec.Raw] | None) -> list[Any] | None:
    """Returns the keys of a block; None if they are malformed, or too many or too long for a name
    and a salt."""
    if not keys:
        return []
    if len(keys) > 2 or max(map(len, keys)) > _MAX_KEY_BYTES:
        return None
    try:
        return [msgspec.msgpack.decode(key) for key in keys]
    except _DECODE_ERRORS:
        return None
