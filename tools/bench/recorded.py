"""Reads recorded conversations, and replays them with a drafter's drafts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramConfig, NgramStore
from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.replay import BATCH_SIZE, Drafter, simulate
from ngram_npu_cli.tokenization import Tokenization, TokenRequest, read_requests

STORE_TOKENS = 1 << 20
_DEFAULT_DATA = Path(__file__).parents[3] / "shared" / "data"

Int32Array = npt.NDArray[np.int32]
Sets = dict[str, list[TokenRequest]]


def find_data(folder: Path | None) -> Path | None:
    """Returns the folder of recorded data: the given one, NGRAM_NPU_DATA, or ../shared/data beside
    the project. None if there is none, as on a user's machine."""
    named = folder or os.environ.get("NGRAM_NPU_DATA")
    if named:
        return Path(named)
    return _DEFAULT_DATA if _DEFAULT_DATA.is_dir() else None


def load_sets(data: Path | None, pattern: str = "replay/*.jsonl.gz") -> Sets:
    """Returns the conversations by set: those of the files in the folder that match the pattern.
    Without a folder, the set is the bytes of a few sources of Python's standard library."""
    if data is None:
        return {"stdlib": _read_conversations([], "bytes")[:8]}
    return {
        path.name.partition(".")[0]: _read_conversations([path], "mistral-v1")
        for path in sorted(data.glob(pattern))
    }


def _read_conversations(paths: Sequence[Path], tokenizer: str) -> list[TokenRequest]:
    reader = LogReader(paths, strict=True)
    read = read_requests(reader, Tokenization(tokenizer))
    return [request for _, requests in read for request in requests]


class Counts(NamedTuple):
    """Results of a replay."""

    tokens_per_step: float
    drafted_per_step: float

    def compute_speedup(self, cost: float) -> float:
        """Returns the speed-up if a drafted token takes ``cost`` of a step's time to verify."""
        return self.tokens_per_step / (1 + cost * self.drafted_per_step)


def replay(
    conversations: Sequence[TokenRequest], drafter: Drafter, k: int, *, padded: bool
) -> Counts:
    """Replays conversations as ``ngram-npu replay`` does."""
    figures = simulate(conversations, drafter, k=k, padded=padded)
    if not figures.is_complete:
        raise KeyboardInterrupt
    return Counts(figures.tokens_per_step, figures.drafted_per_step)


class PaddingDrafter:
    """Drafts as an asynchronous runner does: drafts are padded with the text that follows, and the
    newest step's tokens are not in the store yet."""

    def __init__(self, config: NgramConfig, has_store: bool) -> None:
        self._k = config.k
        self._arguments = config.lookup_arguments
        del self._arguments["k"]
        self._store = make_store() if has_store else None

    def reset(self, rows: Any) -> None:
        """Marks the rows as those of new requests."""
        if self._store is not None:
            self._store.begin_requests(rows)

    def step(
        self, token_ids: Any, num_tokens: Any, sampled: Any, *, row_indices: Any, advance: bool
    ) -> Any:
        """Appends the sampled tokens to the rows and drafts; the replay always advances."""
        rows = np.arange(len(token_ids), dtype=np.int32) if row_indices is None else row_indices
        num_sampled = (sampled >= 0).sum(axis=1, dtype=np.int32)
        for row, new, number in zip(rows, sampled, num_sampled, strict=True):
            token_ids[row, num_tokens[row] : num_tokens[row] + number] = new[:number]
        num_tokens[rows] += num_sampled
        drafts = {
            "draft_token_ids": np.empty((len(rows), self._k), np.int32),
            "num_draft_tokens": np.empty(len(rows), np.int32),
            "match_len": np.empty(len(rows), np.int32),
        }
        step = {"row_indices": rows, "num_sampled": num_sampled}
        _C.ngram_propose_(token_ids, num_tokens, **step, **drafts, fill=True, **self._arguments)
        if self._store is not None:
            rows_and_counts = token_ids, num_tokens, num_sampled
            self._store.begin_step(len(rows), self._k + 1)
            self._store.append(
                *rows_and_counts, row_indices=rows, slot_indices=rows, max_new=self._k + 1
            )
            agreement = np.empty(len(rows), np.int32)
            self._store.propose(
                *rows_and_counts, row_indices=rows, agreement=agreement, fill=True, **drafts
            )
        drafts["num_draft_tokens"] = np.full(len(rows), self._k)
        return SimpleNamespace(**drafts)


def make_store() -> NgramStore:
    return NgramStore(STORE_TOKENS, num_slots=BATCH_SIZE, max_batch=BATCH_SIZE)


def compute_mean(values: Any) -> float:
    """Returns the geometric mean over sets, rounded."""
    return round(geometric_mean(values), 4)


@dataclass(frozen=True)
class Steps:
    """Rows of recorded text, and steps that each append two tokens to every row."""

    rows: Int32Array
    """[B, S]; a row already contains the text of all steps."""
    lengths: list[Int32Array]
    """[B] for each step: the rows' lengths with the step's tokens."""
    sampled: list[list[list[int]]]
    """The tokens that each step appends."""


def make_steps(sets: Sets, size: str, count: int = 12) -> Steps:
    """Returns steps for a batch such as "128x32k" (k: 1024 tokens). The rows begin at different
    places of the text of all sets; they are a few tokens wider than the steps need."""
    batch, context = (int(n.removesuffix("k")) * (1024 if "k" in n else 1) for n in size.split("x"))
    text = np.concatenate([c.tokens() for conversations in sets.values() for c in conversations])
    starts = np.arange(batch) * len(text) // batch
    # An odd number of cache lines per row, so that the rows begin in different cache sets.
    width = ((context + 2 * count + 16) // 16 | 1) * 16
    rows = np.take(text, starts[:, None] + np.arange(width), mode="wrap").astype(np.int32)
    ends = [context + 2 * (step + 1) for step in range(count + 1)]
    return Steps(
        rows,
        [np.full(batch, end, np.int32) for end in ends],
        [rows[:, end - 2 : end].tolist() for end in ends],
    )
