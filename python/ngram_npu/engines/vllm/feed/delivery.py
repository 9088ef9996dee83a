"""Delivers fed texts from an engine's scheduler to its ranks, which insert them into their stores.

All ranks must insert the same text before the same step, since each of them embeds its own drafts.
So only the scheduler's process reads the feed. It adds the text to the output of ``schedule``,
which vLLM sends to all ranks, and each rank inserts it when the runner processes that output
(:mod:`~ngram_npu.engines.vllm.feed.insertion`). The scheduler also assigns texts to rows, so that a
rank only copies tokens. Each step with text carries a digest of all text so far, with which a rank
compares a digest of what it has inserted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ngram_npu.engines.vllm.feed.addresses import parse_publishers
from ngram_npu.engines.vllm.feed.texts import CONTEXT_TOKENS, FedText, TextSource
from ngram_npu.engines.vllm.metrics import FeedMetrics
from ngram_npu.engines.vllm.options import (
    Options,
    engine_index,
    publishes_text,
)
from ngram_npu.engines.vllm.patching import format_error, logger
from ngram_npu.store import SHARED_SCOPE
from ngram_npu.tensors import Int32Array

ATTRIBUTE = "ngram_npu_texts"
"""Attribute of a ``SchedulerOutput`` that holds its :class:`TextStep`."""
TOKENS_PER_STEP = 1024
"""Maximum number of fed tokens per step. Each takes about a quarter of a microsecond."""
ROW_TOKENS = 2048
"""Capacity of a text row. A longer text continues at the beginning of its row, after its last
``CONTEXT_TOKENS`` tokens."""

Piece = tuple[int, bool, int, Int32Array]
"""Tokens for one row: row, whether another text begins in it, scope, tokens."""


@dataclass(frozen=True, slots=True)
class TextStep:
    """The P pieces of text that the ranks insert before a step, in this order. vLLM pickles it for
    ranks in other processes."""

    rows: Int32Array
    """[P]"""
    begins_text: npt.NDArray[np.bool_]
    """[P] whether another text than the one in the row begins."""
    scopes: npt.NDArray[np.int64]
    """[P]"""
    counts: Int32Array
    """[P] number of tokens."""
    tokens: Int32Array
    """[sum of ``counts``] the tokens of all pieces."""
    digest: bytes
    """Digest of all pieces that the scheduler has sent, including these."""

    def list_columns(self) -> list[bytes]:
        """Returns the contents of the arrays."""
        columns = self.rows, self.begins_text, self.scopes, self.counts, self.tokens
        return [column.tobytes() for column in columns]

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling bytes takes a tenth of the time of pickling arrays.
        return _unpickle_step, (self.list_columns(), self.digest)


def _unpickle_step(columns: list[bytes], digest: bytes) -> TextStep:
    dtypes: Any = np.int32, np.bool_, np.int64, np.int32, np.int32
    arguments: Any = *map(np.frombuffer, columns, dtypes), digest
    return TextStep(*arguments)


class TextDigest:
    """A digest of all pieces that a process has sent or inserted."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.digest = self._hash.digest()

    def add(self, step: TextStep) -> bytes:
        """Adds the pieces of a step, and returns the new digest."""
        for column in step.list_columns():
            self._hash.update(column)
        self.digest = self._hash.digest()
        return self.digest


class TextRows:
    """Assigns texts to a fixed number of rows. A new text replaces the one that was continued least
    recently. If that text continues later, it begins again without its earlier tokens."""

    def __init__(self, num_rows: int, capacity: int = ROW_TOKENS) -> None:
        self._free_rows = list(range(num_rows))
        self._row_of_chain: dict[int, int] = {}  # the least recently continued text first
        self._lengths = [0] * num_rows
        self._newest_tokens = [np.zeros(0, np.int32)] * num_rows
        self._capacity = capacity

    def split(self, text: FedText) -> list[Piece]:
        """Splits a text into pieces that fit into rows."""
        row = self._row_of_chain.pop(text.chain, None)
        begins = row is None
        if row is None:
            if self._free_rows:
                row = self._free_rows.pop()
            else:
                row = self._row_of_chain.pop(next(iter(self._row_of_chain)))
        self._row_of_chain[text.chain] = row
        tokens, pieces = text.tokens, []
        while len(tokens):
            if begins:
                self._lengths[row] = 0
            elif self._lengths[row] == self._capacity:
                begins, tokens = True, np.concatenate((self._newest_tokens[row], tokens))
                continue
            count = min(len(tokens), self._capacity - self._lengths[row])
            pieces.append((row, begins, text.scope, tokens[:count]))
            self._lengths[row] += count
            newest = tokens[:count][-CONTEXT_TOKENS:]
            if not begins and count < CONTEXT_TOKENS:
                newest = np.concatenate((self._newest_tokens[row], newest))[-CONTEXT_TOKENS:]
            self._newest_tokens[row] = newest
            begins, tokens = False, tokens[count:]
        return pieces


class TextDelivery:
    """Takes text from a reader, and adds it to the outputs of a scheduler."""

    def __init__(
        self,
        source: TextSource,
        num_rows: int,
        metrics: FeedMetrics | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        """
        Args:
            is_private: Whether texts without salt and adapter are left out.
        """
        self._source: TextSource | None = source
        self._metrics = metrics
        self._excluded_scope = SHARED_SCOPE if is_private else None
        self.ready = source.ready
        self.closed = threading.Event()
        """Set when the feed has ended."""
        self._rows, self._digest = TextRows(num_rows), TextDigest()

    def add_texts(self, output: Any) -> None:
        """Adds the next text to the output of a step. Never raises: an error ends the feed.

        A step without tokens gets none: it drafts nothing, so the text of many such steps would
        reach the store at once."""
        if self._source is None or not output.total_num_scheduled_tokens:
            return
        try:
            if self._metrics is not None:
                self._metrics.update(self._source.get_counters())
            pieces: list[Piece] = []
            for text in self._source.take_texts(TOKENS_PER_STEP):
                if text.scope != self._excluded_scope:
                    pieces += self._rows.split(text)
            if pieces:
                setattr(output, ATTRIBUTE, self._make_step(pieces))
        except Exception as error:
            logger.error("ngram_npu: store_feed is off: %s", format_error(error))
            self.close()

    def close(self) -> None:
        if self._source is not None:
            source, self._source = self._source, None
            self.closed.set()
            source.close()

    def _make_step(self, pieces: list[Piece]) -> TextStep:
        rows, begins_text, scopes, tokens = zip(*pieces, strict=True)
        step = TextStep(
            np.array(rows, np.int32),
            np.array(begins_text, np.bool_),
            np.array(scopes, np.int64),
            np.fromiter(map(len, tokens), np.int32, len(pieces)),
            np.concatenate(tokens),
            b"",
        )
        return dataclasses.replace(step, digest=self._digest.add(step))


def make_delivery(vllm_config: Any, options: Options) -> TextDelivery | None:
    """Returns the delivery of an engine's scheduler; None without a feed. Never raises."""
    if not options.store_feed:
        return None
    try:
        source = make_source(vllm_config, options)
    except Exception as error:
        logger.error("ngram_npu: store_feed is off: %s", format_error(error))
        return None
    is_private = options.scope == "private"
    metrics = FeedMetrics(vllm_config)
    return TextDelivery(source, options.num_text_rows, metrics, is_private=is_private)


def make_source(vllm_config: Any, options: Options) -> TextSource:
    """Returns a reader of the publishers in ``store_feed`` that leaves out this engine's own."""
    from ngram_npu.engines.vllm.feed.reader import FeedReader  # needs packages that vLLM requires

    endpoint = None
    if publishes_text(vllm_config) and vllm_config.kv_events_config.endpoint.startswith("tcp"):
        address, _, port = vllm_config.kv_events_config.endpoint.rpartition(":")
        # vLLM adds the number of the engine in a data-parallel server to the port.
        endpoint = f"{address}:{int(port) + engine_index(vllm_config.parallel_config)}"
    return FeedReader(
        parse_publishers(options.store_feed),
        vocab_size=vllm_config.model_config.get_vocab_size(),
        own_endpoint=endpoint,
    )
