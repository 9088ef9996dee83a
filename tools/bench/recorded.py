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
from ngram_npu_cli.logs.conversations import TokenRequest, stdlib_conversations
from ngram_npu_cli.logs.tokenizers import load_tokenizer
from ngram_npu_cli.replay import ReplayInput, load_inputs, simulate, tokenize

BATCH = 32
"""Number of conversations that are replayed at the same time."""
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


def load_sets(data: Path | None, *names: str) -> Sets:
    """Returns the requests by set: the files ``names`` below the folder, or the 11 sets in its
    subfolder ``replay``. Without a folder, the set is the sources of Python's standard library."""
    tokenizer = load_tokenizer()
    if data is None:
        conversations, _ = stdlib_conversations()
        inputs: Sequence[ReplayInput] = (ReplayInput("stdlib", tuple(conversations)),)
    else:
        inputs = load_inputs([data / name for name in names or ("replay",)])
    return {item.name: tokenize(item, tokenizer) for item in inputs}


class Counts(NamedTuple):
    """Results of a replay."""

    tokens_per_step: float
    drafted_per_step: float

    def compute_speedup(self, cost: float) -> float:
        """Returns the speed-up if a drafted token takes ``cost`` of a step's time to verify."""
        return self.tokens_per_step / (1 + cost * self.drafted_per_step)


def replay(requests: Sequence[TokenRequest], drafter: Any, k: int, *, padded: bool) -> Counts:
    """Replays conversations, `BATCH` at a time. ``padded``: all k draft tokens are verified."""
    figures = simulate("", requests, drafter, k=k, batch_size=BATCH, padded=padded)
    steps = figures.num_steps
    return Counts(figures.num_tokens / steps, figures.num_draft_tokens / steps)


class HoldingBackDrafter:
    """Drafts as an asynchronous runner does: the newest step's tokens are not in the store yet, and
    drafts are padded with the text that follows."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._arguments = NgramConfig(k=k).lookup_arguments
        del self._arguments["k"]
        self._store = NgramStore(STORE_TOKENS, num_slots=BATCH, max_batch=BATCH)

    def reset(self, rows: Any) -> None:
        """Marks the rows as those of new requests."""
        self._store.begin_requests(rows.astype(np.int64))

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
        self._store.begin_step(len(rows), self._k + 1)
        self._store.append(
            token_ids,
            num_tokens,
            num_sampled,
            row_indices=rows,
            slot_indices=rows,
            max_new=self._k + 1,
        )
        drafts["agreement"] = np.empty(len(rows), np.int32)
        self._store.propose(
            token_ids, num_tokens, num_sampled, row_indices=rows, fill=True, **drafts
        )
        drafts["num_draft_tokens"] = np.full(len(rows), self._k)
        return SimpleNamespace(**drafts)


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
    text = np.concatenate([request.tokens() for r in sets.values() for request in r])
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
