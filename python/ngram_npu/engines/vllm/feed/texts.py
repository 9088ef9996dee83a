"""Joins the blocks of KV events to texts.

An event names full blocks of a publisher's KV cache by their hashes, with their tokens and the hash
of the block before them (the parent). A hash covers all text before the block, the LoRA adapter and
the ``cache_salt``, so a block whose parent is known certainly continues that text.

The scope of a text is known from its first block; where that block was not received, the text is
skipped (an *orphan*). A block is skipped too if it contains embeddings, such as an image, whose
token ids are placeholders, or if it is in another tier or another group of the cache, which repeat
the text of the first group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ngram_npu.store import PRIVATE_SCOPE, SHARED_SCOPE, scope_of_request
from ngram_npu.store.contents import BLOCK_TOKENS, SIZES

TOKEN_BYTES = 4
PIECE_BYTES = TOKEN_BYTES * BLOCK_TOKENS
"""Maximum length of a piece, which takes a block of the store."""
CONTEXT_BYTES = TOKEN_BYTES * max(SIZES)
"""Length of what a piece repeats of the text before it: the longest n-gram."""
PAUSE_S = 4.0
"""A text that gets no block for this time becomes a piece, even if it is short."""
MAX_BLOCKS = 1 << 15
"""Number of blocks of a publisher that are remembered, in 10 MB, so that others can follow them."""

BlockHash = int | bytes


@dataclass
class _OpenText:
    """The end of a text that may be continued. Its last ``num_new`` bytes are in no piece."""

    tokens: bytes
    num_new: int = 0
    updated: float = 0.0


class TextJoiner:
    """Joins the blocks of one publisher, whose hashes mean nothing for other publishers.

    Args:
        vocab_size: Token ids from this value on are rejected, because a draft with them could end
            the engine.
        is_private: Whether text without an adapter and a salt is not stored.
        deliver: Called with the scope and the int32 tokens of each piece.
        counters: By name of a metric (``ngram_npu_feed_*``).
    """

    def __init__(
        self,
        vocab_size: int,
        is_private: bool,
        deliver: Callable[[int, bytes], None],
        counters: Counter[str],
    ) -> None:
        self._vocab_size, self._is_private = vocab_size, is_private
        self._deliver, self._counters = deliver, counters
        self._blocks: OrderedDict[BlockHash, tuple[int, bytes]] = OrderedDict()
        """Scope of a block, and the last tokens up to its end; the newest use is last."""
        self._open: OrderedDict[tuple[int, BlockHash | None], _OpenText] = OrderedDict()
        """By scope and last block; the newest update is last."""

    def forget_blocks(self) -> None:
        """Makes all later blocks begin other texts."""
        self._blocks.clear()

    def drop_open_texts(self) -> None:
        """Drops what is in no piece, because blocks that follow may have been lost."""
        num_bytes = sum(text.num_new for text in self._open.values())
        self._counters["dropped"] += num_bytes // TOKEN_BYTES
        self._open.clear()

    def deliver_paused_texts(self, now: float) -> None:
        """Delivers the open texts that got no block for a while."""
        while self._open:
            (scope, _), text = next(iter(self._open.items()))
            if now - text.updated < PAUSE_S:
                return
            self._open.popitem(last=False)
            if text.num_new:
                self._deliver(scope, text.tokens)

    def add_event(self, event: Any, now: float) -> None:
        """Adds the text of vLLM's event ``BlockStored``, received at the time ``now``."""
        if event.medium not in (None, "GPU") or event.locality == "REMOTE" or event.group_idx:
            return
        blocks, size, parent = event.block_hashes, event.block_size, event.parent_block_hash
        tokens, keys = np.array(event.token_ids, np.int64), event.extra_keys or []
        # A sliding window or a recurrent layer leaves out blocks, but not their tokens. A publisher
        # without keys publishes no salts.
        if size < 1 or not len(blocks) == len(keys) == len(tokens) / size > 0:
            self._counters["rejected"] += max(1, len(blocks))
            return
        origin = (self._find_scope(event), b"") if parent is None else self._find(parent)
        if origin is None:
            self._counters["orphans"] += len(blocks)
            return
        scope, names = origin[0], () if event.lora_name is None else (event.lora_name,)
        rows = tokens.reshape(len(blocks), size)
        is_valid = (rows.min(axis=1) >= 0) & (rows.max(axis=1) < self._vocab_size)
        data, num_bytes = tokens.astype(np.int32).tobytes(), TOKEN_BYTES * size
        for i, block in enumerate(blocks):
            has_names = parent is None or tuple(keys[i] or ()) == names
            known = self._find(block)
            is_other = known is not None and known[0] != scope
            if scope is None or not has_names or not is_valid[i] or is_other:
                self._counters["rejected"] += len(blocks) - i
                return
            if known is None:  # otherwise it is of a prefix that was published before
                self._add_block(
                    parent, block, scope, data[i * num_bytes : (i + 1) * num_bytes], now
                )
            parent = block

    def _find(self, block: BlockHash) -> tuple[int, bytes] | None:
        if block in self._blocks:
            self._blocks.move_to_end(block)
        return self._blocks.get(block)

    def _find_scope(self, event: Any) -> int | None:
        """Returns the scope of a text from the keys of its first block: the adapter's name, then
        the salt. None if there are other keys, or an adapter without a name."""
        name, keys = event.lora_name, tuple(event.extra_keys[0] or ())
        salts = keys if name is None else keys[1:]
        is_named = keys[:1] == (name,) or (name is None and event.lora_id is None)
        if not is_named or len(salts) > 1 or not all(isinstance(salt, str) for salt in salts):
            return None
        scope = scope_of_request(salts[0] if salts else None, name)
        return PRIVATE_SCOPE if self._is_private and scope == SHARED_SCOPE else scope

    def _add_block(
        self, parent: BlockHash | None, block: BlockHash, scope: int, tokens: bytes, now: float
    ) -> None:
        context = b"" if parent is None else self._blocks[parent][1]
        self._blocks[block] = scope, (context + tokens)[-CONTEXT_BYTES:]
        if len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
        if scope == PRIVATE_SCOPE:
            return
        self._counters["tokens"] += len(tokens) // TOKEN_BYTES
        text = self._open.pop((scope, parent), None) or _OpenText(context)
        text.tokens, text.updated = text.tokens + tokens, now
        text.num_new += len(tokens)
        while len(text.tokens) >= PIECE_BYTES:
            self._deliver(scope, text.tokens[:PIECE_BYTES])
            text.num_new = len(text.tokens) - PIECE_BYTES
            text.tokens = text.tokens[PIECE_BYTES - CONTEXT_BYTES :]
        self._open[scope, block] = text
