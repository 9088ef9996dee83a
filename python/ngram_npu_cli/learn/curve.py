"""What a store brings by what it knows: a replay of the newest conversations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from ngram_npu.config import NgramConfig
from ngram_npu.proposer import NgramProposer
from ngram_npu.store import BLOCK_TOKENS, NgramStore

from ngram_npu_cli.learn import stores
from ngram_npu_cli.learn.reading import Talk
from ngram_npu_cli.learn.stores import Text
from ngram_npu_cli.replay.simulation import simulate
from ngram_npu_cli.replay.walks import Counts

SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the earlier answers that are known, of the newest ones."""

MAX_EVALUATED = 100_000
"""Generated tokens that a point replays at most: some ten seconds."""

LONGER = (8, 16, 32)
"""Most tokens of a draft that are tried beside the given one."""

LEAST_TOKENS = 1 << 16
MOST_TOKENS = 1 << 26
"""Sizes that are looked at if none is asked for."""

ENOUGH = 0.998
"""The least share of the tokens per step of a store that holds everything. What doublings bring is
not compared one by one: several small steps together are a large one."""


@dataclass(frozen=True, kw_only=True)
class Point(Counts):
    """A point of the curve.

    Attributes:
        share: of the earlier answers that the store knew; None: there was no store.
        known_tokens: tokens of these answers.
        store_tokens: the store's size.
    """

    share: float | None
    known_tokens: int
    store_tokens: int


def split(
    recent: Sequence[Talk], conversations: int, texts: Sequence[Text]
) -> tuple[list[Talk], list[Text]]:
    """The last tenth of the conversations, and the texts from before them.

    Of a large tenth these are the newest conversations only: at most `MAX_EVALUATED` tokens, and
    what is kept whole.

    Args:
        recent: the newest conversations, whose answers are the last texts.
        conversations: how many there were in all.
        texts: all texts.
    """
    chosen: list[Talk] = []
    generated = 0
    for talk in reversed(recent):
        generated += talk.num_generated
        if chosen and (10 * len(chosen) >= conversations or generated > MAX_EVALUATED):
            break
        chosen.insert(0, talk)
    answers = sum(len(talk.answers) for talk in chosen)
    return chosen, list(texts[: max(0, len(texts) - answers)])


class Replayed:
    """The last conversations, replayed with what a store knew before them.

    As on a server each turn is a request, and the store learns from it.
    """

    def __init__(
        self,
        talks: Sequence[Talk],
        earlier: Sequence[Text],
        config: NgramConfig,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._talks, self._earlier, self._config = talks, earlier, config
        self._progress = progress
        self._found: dict[tuple[float | None, int, int], Point] = {}

    def point(self, share: float | None, store_tokens: int, k: int | None = None) -> Point:
        """With a store of a size that knows a share of the earlier answers, the newest ones."""
        config = self._config if k is None else replace(self._config, k=k)
        which = share, store_tokens, config.k
        if which not in self._found:
            self._found[which] = self._replay(share, store_tokens, config)
        return self._found[which]

    def curve(self, store_tokens: int) -> tuple[Point, ...]:
        """The points without a store, and of all shares."""
        return tuple(
            self.point(share, 0 if share is None else store_tokens) for share in (None, *SHARES)
        )

    def by_k(self, store_tokens: int) -> dict[int, Point]:
        """All known, by the most tokens of a draft."""
        ks = sorted({self._config.k, *LONGER})
        return {k: self.point(1.0, store_tokens, k) for k in ks}

    def sizes(self) -> tuple[int, tuple[Point, ...]]:
        """The smallest size that yields as much as a store that holds everything, but for a hardly
        noticeable rest (`ENOUGH`); and what was looked at: all known, from that store downwards."""
        size = holding([*self._earlier, *(a for talk in self._talks for a in talk.answers)])
        tried = [self.point(1.0, size)]
        while size > LEAST_TOKENS:
            tried.append(self.point(1.0, size // 2))
            if tried[-1].tokens_per_step < ENOUGH * tried[0].tokens_per_step:
                break
            size //= 2
        return size, tuple(tried)

    def _replay(self, share: float | None, store_tokens: int, config: NgramConfig) -> Point:
        known: Sequence[Text] = ()
        store = None
        if share is not None:
            known = self._earlier[len(self._earlier) - round(share * len(self._earlier)) :]
            store = stores.new(store_tokens)
            stores.enter(store, known)
        total = Counts()
        what = "no store" if share is None else f"{store_tokens} tokens, {share:.1%} known"
        for done, talk in enumerate(self._talks, 1):
            for request in talk.requests:
                turns = [turn for turn in request.turns_apart() if turn.spans()]
                proposer = _proposer(config, store, talk.scope)
                found = simulate("", turns, proposer, k=config.k, batch_size=1)
                total += Counts(found.num_tokens, found.num_steps, found.num_draft_tokens)
                if store is not None:
                    store.finish(np.zeros(1, np.int32))
            self._progress(what, done, len(self._talks))
        known_tokens = sum(len(text) for _, text in known)
        return Point(
            **vars(total), share=share, known_tokens=known_tokens, store_tokens=store_tokens
        )


def _proposer(config: NgramConfig, store: NgramStore | None, scope: int) -> Any:
    """One whose requests are all of this scope."""
    proposer = NgramProposer(config, "index", store=store)
    if store is None:
        return proposer
    step = functools.partial(proposer.step, scopes=np.array([scope], np.int64))
    return SimpleNamespace(step=step, reset=proposer.reset, append=proposer.append)


def holding(texts: Sequence[Text]) -> int:
    """The smallest power of two of tokens whose store forgets none of the texts, within bounds."""
    return min(MOST_TOKENS, max(LEAST_TOKENS, 1 << max(0, needed(texts) - 1).bit_length()))


def needed(texts: Sequence[Text]) -> int:
    """The tokens of a store that holds the texts, each in blocks of its own."""
    return BLOCK_TOKENS * sum(stores.blocks_of(len(tokens)) for _, tokens in texts)
