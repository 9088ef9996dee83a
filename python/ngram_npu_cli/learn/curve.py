"""Measures the learning curve: tokens per step of the newest conversations, by the share of the
earlier answers that the store contains.

Also reads and checks store files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ngram_npu.config import NgramConfig
from ngram_npu.errors import InputError
from ngram_npu.output import check_writable
from ngram_npu.proposer import NgramProposer
from ngram_npu.store import BLOCK_TOKENS, NgramStore
from ngram_npu.store.file import MAGIC
from ngram_npu.tensors import Int32Array

from ngram_npu_cli.logs.conversations import TokenRequest
from ngram_npu_cli.logs.reader import Progress, ShowProgress
from ngram_npu_cli.logs.remote import LogPath, list_errors
from ngram_npu_cli.replay.simulation import simulate
from ngram_npu_cli.replay.walks import Counts

ScopedText = tuple[int, Int32Array]
"""An answer: the number of its scope, and its tokens."""

SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the earlier answers that the store contains, always the newest answers."""

MIN_CONVERSATIONS = 20
"""Number of conversations below which a note states that the results depend on chance."""

MAX_EVALUATED_TOKENS = 100_000
"""Maximum number of generated tokens that are replayed per point, in about ten seconds."""

TRIED_K = (8, 16, 32)
"""Maximum draft lengths that are tried in addition to the chosen one."""

MIN_STORE_TOKENS = 1 << 16
MAX_STORE_TOKENS = 1 << 26
"""Bounds of the store's size if the user does not choose the size."""

_NEW_TOKENS_PER_LATER_BLOCK = BLOCK_TOKENS - 16
"""Later blocks of a text begin with the last 16 tokens of the previous block."""


@dataclass(frozen=True)
class TokenConversation:
    """A recorded conversation as token ids; it has at least one step."""

    scope: int
    requests: tuple[TokenRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def num_generated(self) -> int:
        return sum(request.num_generated for request in self.requests)

    @property
    def answers(self) -> list[ScopedText]:
        """The texts that a server would store: one per turn, unless it is a single token, from
        which nothing can be drafted."""
        completions = (turn.completion for request in self.requests for turn in request.turns)
        return [(self.scope, tokens) for tokens in completions if len(tokens) > 1]


@dataclass(frozen=True, kw_only=True)
class Point(Counts):
    """A point of the curve.

    Attributes:
        share: Share of the earlier answers that the store contains; None: no store.
        known_tokens: Number of tokens of these answers.
        store_tokens: Capacity of the store in tokens.
    """

    share: float | None
    known_tokens: int
    store_tokens: int


class Evaluation:
    """Replays the last tenth of the conversations with a store of earlier answers.

    As on a server, each turn is a request, whose text the store receives. At most
    `MAX_EVALUATED_TOKENS` tokens are replayed: those of the newest conversations.

    Attributes:
        conversations: The conversations that are replayed.
        earlier: The texts that are older than these conversations.
    """

    def __init__(
        self,
        recent: Sequence[TokenConversation],
        num_read: int,
        texts: Sequence[ScopedText],
        config: NgramConfig,
        show: ShowProgress,
    ) -> None:
        """Selects from the `recent` conversations, whose answers are the last of the texts.

        `num_read` is the number of all conversations.
        """
        self._num_read, self._config, self._show = num_read, config, show
        self.conversations: list[TokenConversation] = []
        num_generated = num_answers = 0
        for conversation in reversed(recent):
            num_generated += conversation.num_generated
            is_tenth = 10 * len(self.conversations) >= num_read
            if self.conversations and (is_tenth or num_generated > MAX_EVALUATED_TOKENS):
                break
            self.conversations.insert(0, conversation)
            num_answers += len(conversation.answers)
        self.earlier = list(texts)[: max(0, len(texts) - num_answers)]

    def list_notes(self, store_tokens: int | None) -> list[str]:
        """Returns warnings about unreliable results and a size that is too small."""
        notes = []
        needed, num_replayed = count_store_tokens(self.earlier), len(self.conversations)
        if store_tokens is not None and needed > store_tokens:
            notes.append(
                f"the earlier answers need {needed} tokens of store capacity, but the store has "
                f"{store_tokens}: the oldest are evicted, so the curve is flat at its end"
            )
        if 10 * num_replayed < self._num_read:
            notes.append(f"replayed: the newest {num_replayed} conversations of the last tenth")
        if num_replayed < MIN_CONVERSATIONS:
            notes.append(
                f"TOO FEW: the results are from {num_replayed} conversations and depend on chance"
            )
        return notes

    def replay_curve(self, store_tokens: int) -> tuple[Point, ...]:
        """Returns the point without a store and the points for all shares."""
        shares = [self.replay_point(share, store_tokens) for share in SHARES]
        return (self.replay_point(None, 0), *shares)

    def replay_lengths(self, last: Point) -> dict[int, Point]:
        """Returns the points with all earlier answers, by the maximum draft length.

        `last` is the point for the configured draft length.
        """
        points = {
            k: self.replay_point(1.0, last.store_tokens, k) for k in {*TRIED_K} - {self._config.k}
        }
        return dict(sorted({**points, self._config.k: last}.items()))

    def replay_point(self, share: float | None, store_tokens: int, k: int | None = None) -> Point:
        """Replays the conversations with a store of this size that contains a share of the earlier
        answers, or without a store, and returns the point."""
        config = self._config if k is None else replace(self._config, k=k)
        known_texts: Sequence[ScopedText] = ()
        store = None
        label = "no store"
        if share is not None:
            known_texts = self.earlier[len(self.earlier) - round(share * len(self.earlier)) :]
            store = make_store(store_tokens)
            for scope, tokens in known_texts:
                store.add_text(tokens, scope)
            label = f"{store_tokens} tokens, {share:.1%} known"
        total = Counts()
        for num_done, conversation in enumerate(self.conversations, 1):
            for request in conversation.requests:
                # As in vLLM, each turn is a request. Each request gets a new proposer, because only
                # the store must persist.
                turns = [turn for turn in request.split_turns() if turn.spans()]
                proposer = _make_proposer(config, store, conversation.scope)
                figures = simulate("", turns, proposer, k=config.k, batch_size=1)
                total += Counts(figures.num_tokens, figures.num_steps, figures.num_draft_tokens)
                if store is not None:
                    store.finish(np.zeros(1, np.int32))
            self._show(Progress(label, "replay", num_done, len(self.conversations)))
        known_tokens = sum(len(tokens) for _, tokens in known_texts)
        return Point(
            **vars(total), share=share, known_tokens=known_tokens, store_tokens=store_tokens
        )


def _make_proposer(config: NgramConfig, store: NgramStore | None, scope: int) -> Any:
    """Returns a proposer that uses this scope for all requests."""
    proposer = NgramProposer(config, "index", store=store)
    if store is None:
        return proposer
    step = functools.partial(proposer.step, scopes=np.array([scope], np.int64))
    return SimpleNamespace(step=step, reset=proposer.reset, append=proposer.append)


def compute_full_size(texts: Sequence[ScopedText]) -> int:
    """Returns the smallest power of two of tokens, within bounds, that can store all texts."""
    size = 1 << max(0, count_store_tokens(texts) - 1).bit_length()
    return min(MAX_STORE_TOKENS, max(MIN_STORE_TOKENS, size))


def count_store_tokens(texts: Sequence[ScopedText]) -> int:
    """Returns the capacity in tokens that the texts need, each in separate blocks."""
    return BLOCK_TOKENS * sum(count_blocks(len(tokens)) for _, tokens in texts)


def count_blocks(num_tokens: int) -> int:
    """Returns the number of blocks that a store needs for a text."""
    return 1 + max(0, -(-(num_tokens - BLOCK_TOKENS) // _NEW_TOKENS_PER_LATER_BLOCK))


# Files of stores


def is_store_file(path: LogPath) -> bool:
    """Returns whether a file begins like a store file; false if the file cannot be read, because
    reading it as a log then reports the reason."""
    try:
        if not path.is_file():  # opening a pipe would consume its data
            return False
        with path.open("rb") as file:
            return bool(file.read(len(MAGIC)) == MAGIC)
    except list_errors(path):
        return False


@contextmanager
def input_errors(path: str | PathLike[str] | None = None) -> Iterator[None]:
    """Converts errors of settings, stores and their files to InputError."""
    try:
        yield
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def make_store(store_tokens: int, tokenizer: str = "") -> NgramStore:
    """Returns an empty store for a vocabulary. Raises an InputError if the size is invalid."""
    with input_errors():
        return NgramStore(1, store_tokens, tokenizer=tokenizer)


def load_store(path: LogPath, tokenizer: str = "") -> NgramStore:
    """Returns the store in a file. Raises an InputError if the file is unusable or was saved for
    another vocabulary."""
    if not isinstance(path, Path):
        raise InputError(f"{path}: expected a local file, because it is a store; copy it first")
    with input_errors(path):
        return NgramStore.load(path, tokenizer=tokenizer)


def check_output(path: Path) -> None:
    """Checks that a store can be saved to a path, and that it would not overwrite another kind of
    file, for example a log file if the user forgot the file name after `-o`."""
    check_writable(path)
    is_empty_file = path.is_file() and not path.stat().st_size
    if path.exists() and not is_store_file(path) and not is_empty_file:
        raise InputError(f"{path}: exists and is not a store file; it will not be overwritten")


def describe(path: Path) -> dict[str, Any]:
    """Describes the contents of a store file. Raises an InputError if the file is unusable."""
    store = load_store(path)
    return {
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "token_capacity": store.token_capacity,
        "tokens_held": store.statistics.tokens_held,
        "blocks_in_use": store.statistics.blocks_in_use,
        "texts": len(store.texts()),
        "scopes": len(store.scopes),
        "visibility": store.visibility,
        "tokenizer": store.tokenizer,
    }
