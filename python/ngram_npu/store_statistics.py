"""What a store says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Visibility = Literal["live", "finish"]


@dataclass(frozen=True)
class StoreStatistics:
    """Contents of a store and events since it was made, also those before it was saved; the
    counters from ``lookups`` on wrap at 2**32."""

    num_slots: int
    num_blocks: int
    """Capacity, in blocks of 256 tokens."""
    line_bits: int
    visibility: Visibility
    tokens_held: int
    """Tokens in the store; those that two blocks repeat count once."""
    blocks_in_use: int
    open_slots: int
    lookups: int
    """Requests that a step could have drafted for."""
    hits: int
    """Lookups that found a match, whether or not its draft was used."""
    drafts: int
    """Drafts taken from the store."""
    draft_tokens: int
    """Tokens of these."""
    tokens_entered: int
    entries_evicted: int
    """Entries overwritten while their text was still in the store."""
    blocks_lost: int
    """Blocks reused while their request was still writing to them."""
    renumberings: int
    """Times that the block numbers had run out (16.7 million) and were given out anew."""
    calls_busy: int
    """Calls that skipped the store because another call was using it."""

    @property
    def hit_share(self) -> float:
        """Hits over lookups, 0 to 1."""
        return self.hits / max(1, self.lookups)

    @property
    def draft_share(self) -> float:
        """Drafts taken from the store over lookups, 0 to 1."""
        return self.drafts / max(1, self.lookups)
