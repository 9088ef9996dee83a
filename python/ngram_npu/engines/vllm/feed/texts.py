"""The interface between the reader of KV events and the delivery to the ranks."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Protocol

from ngram_npu.tensors import Int32Array

CONTEXT_TOKENS = 16
"""Number of tokens that a text repeats where it branches off another one or continues in another
place: the length of a store's longest n-gram."""

MAX_TEXTS = 64
"""Maximum number of texts that are taken at once, because a publisher may send very short blocks.
With blocks of 16 tokens, a step's limit of 1024 tokens is reached first."""


@dataclass(frozen=True, slots=True)
class FedText:
    """Token ids that another engine published, and the text that they continue."""

    chain: int
    """Number of the text. The tokens directly follow those of the previous :class:`FedText` with
    this number. A reader never uses a number for two texts, and takes a new number after a gap. A
    new text that branches off an earlier one may begin with that one's last tokens, at most 16:
    they are stored again, and are the context of its first n-grams."""
    scope: int
    """Scope in the store, of :func:`~ngram_npu.store.scope_of_request`. It is the same for all
    texts with this number."""
    tokens: Int32Array
    """[N], N > 0: token ids from 0 to 2**31 - 1."""


@dataclass(frozen=True, slots=True)
class FeedCounters:
    """Events since the reader was created, and its present state."""

    texts: int = 0
    """Texts received, by their number."""
    tokens: int = 0
    """Tokens received, including those that were dropped later."""
    gaps: int = 0
    """Batches of events that were lost and that no publisher replayed."""
    orphans: int = 0
    """Blocks skipped because the beginning of their text is unknown."""
    dropped: int = 0
    """Tokens dropped because more arrived than the engine takes."""
    rejected: int = 0
    """Messages and blocks skipped because they are malformed or ambiguous."""
    publishers: int = 0
    """Publishers that are connected now."""
    age_seconds: float = 0.0
    """Age of the oldest text that waits to be taken; 0: none waits."""


class TextSource(Protocol):
    """A reader of published text, such as :class:`~ngram_npu.engines.vllm.feed.reader.FeedReader`.
    No method raises or waits, except that :meth:`close` waits for the reader's thread."""

    @property
    def ready(self) -> Sized:
        """What can be taken: empty if there is no text. It is always the same object, so that a
        scheduler without text to take calls nothing."""

    def take_texts(self, max_tokens: int) -> list[FedText]:
        """Removes and returns at most ``MAX_TEXTS`` texts, in total ``max_tokens`` tokens or fewer.
        Tokens of one text are joined as far as possible; a text that is too long is split."""

    def get_counters(self) -> FeedCounters: ...

    def close(self) -> None: ...
