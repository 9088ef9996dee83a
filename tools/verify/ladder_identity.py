"""Compares the index's drafts with a ladder with those of a brute-force search, for many random and
recorded rows and all ways to build an index of them.

    python -m tools.verify.ladder_identity --json tools/bench/results/ladder-identity.json

Each case is a batch of rows, wholly determined by its number. It is taken by every instruction set
that the machine has, from numpy and from torch, on one thread and on all of them; each time the
index comes about in another way.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from ngram_npu import _C, NgramIndex
from ngram_npu.config import default_costs

from tools.bench.data import load_corpus
from tools.bench.report import publish
from tools.verify.ladder_oracle import Draft, Int32Array, Truth, UInt8Array, truth_of

ROWS = 1024
"""So many that threads pay, also for numpy."""
CAPACITY = 300
WITHOUT_PROMPT = 100
"""Rows whose prompt is left to a step: no more tokens than it may index."""
VOCABULARIES = (1, 2, 4, 12, 60, 3000)
LADDER: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "ladder": True}
LIMITS = (0, 20, 40, 54, 150)
OUTCOMES_AS_COSTS = np.tile(np.arange(32, dtype=np.uint8), (16, 1))
"""A table whose costs are the outcomes themselves."""
Kind = Literal["numpy", "torch"]


@dataclass(frozen=True)
class Taker:
    """A way to run a case: instruction set, front end and number of threads (0: all)."""

    instruction_set: str
    kind: Kind
    threads: int

    def call(self, op: str, *tensors: Any, **options: Any) -> Any:
        """An operator on arrays, whose memory it shares."""
        if self.kind == "numpy":
            return getattr(_C, op)(*tensors, **options)

        def given(value: Any) -> Any:
            return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

        found = getattr(torch.ops.ngram_npu, op)(
            *map(given, tensors), **{name: given(value) for name, value in options.items()}
        )
        return None if found is None else tuple(tensor.numpy() for tensor in found)


def takers() -> Iterator[Taker]:
    for name in ("scalar", "avx2", "avx512", "neon"):
        try:
            _C.set_instruction_set(name)
        except ValueError:
            continue
        kinds: tuple[Kind, ...] = ("numpy", "torch")
        yield from (Taker(name, *rest) for rest in product(kinds, (1, 0)))


class Rows:
    """Rows of a case, and the truth about them.

    Attributes:
        recorded: whether from conversations.
        tokens: [B, S]; ``lengths`` [B] of them are the rows.
    """

    def __init__(self, number: int, data: Path | None) -> None:
        rng = np.random.default_rng(number)
        self.recorded = number % 2 == 1
        self.lengths = rng.integers(2, CAPACITY, ROWS, np.int32, endpoint=True)
        if self.recorded:
            corpus, _ = load_corpus(data)
            starts = rng.integers(0, len(corpus) - CAPACITY, ROWS)
            self.tokens = corpus[starts[:, None] + np.arange(CAPACITY)].astype(np.int32)
        else:
            vocabulary = VOCABULARIES[number // 2 % len(VOCABULARIES)]
            self.tokens = rng.integers(0, vocabulary, (ROWS, CAPACITY), np.int32)
            self._repeat(rng)
        rows = zip(self.tokens, self.lengths, strict=True)
        self.truths: list[Truth] = [truth_of(tokens[:length]) for tokens, length in rows]

    def _repeat(self, rng: np.random.Generator) -> None:
        """Half of the rows repeat text, so that long matches occur with any vocabulary."""
        for row in self.tokens[::2]:
            size, start = int(rng.integers(1, 90)), int(rng.integers(0, 90))
            to = int(rng.integers(start + 1, CAPACITY - size))
            row[to : to + size] = row[start : start + size].copy()


Build = Callable[["Attempt", np.random.Generator], None]


class Attempt:
    """One taker's rows and index. A way to build leaves the last token of each row to a step.

    Attributes:
        compared: drafts so far.
    """

    def __init__(self, case: int, taker: Taker, rows: Rows, costs: UInt8Array, limit: int) -> None:
        self.case, self.taker, self.rows, self.costs, self.limit = case, taker, rows, costs, limit
        self.tokens, self.lengths = rows.tokens.copy(), np.zeros(ROWS, np.int32)
        sizes: dict[str, Any] = {"sizes": "ladder", "outcomes": True, "any_data": True}
        self.index = NgramIndex(ROWS, ROWS * CAPACITY, min_n=1, max_n=16, **sizes)
        self.overlap = bool(case % 3)
        self.compared: Counter[str] = Counter()

    def append(self, lengths: Int32Array) -> None:
        self.lengths[:] = lengths
        operands = (self.tokens, self.lengths, self.index.tensor)
        self.taker.call("ngram_index_append_", *operands, outcomes=True, **LADDER)

    def step(self, counts: Int32Array) -> None:
        """Samples the rows' next tokens, ``counts`` of each."""
        places = np.arange(max(1, int(counts.max())))
        at = np.minimum(self.lengths[:, None] + places, CAPACITY - 1)
        sampled = np.take_along_axis(self.rows.tokens, at, 1)
        sampled = np.where(places < counts[:, None], sampled, -1).astype(np.int32)
        operands = (self.tokens, self.lengths, sampled, self.index.tensor)
        self._draft("ngram_index_step_", operands, counts > 0, self.costs, self.limit, k=8)

    def ask_again(self) -> None:
        """Drafts again without new tokens: the result is the candidate that the slot has kept."""
        operands = (self.tokens, self.lengths, self.index.tensor)
        every = np.ones(ROWS, np.bool_)
        self._draft("ngram_index_propose_", operands, every, OUTCOMES_AS_COSTS, 2**31 - 1, k=64)
        self._draft("ngram_index_propose_", operands, every, self.costs, self.limit, k=8)

    def _draft(
        self, op: str, operands: Any, drafts: Any, costs: UInt8Array, limit: int, *, k: int
    ) -> None:
        paid = np.zeros((ROWS, k), np.uint8)
        options = {"k": k, "overlap": self.overlap, **LADDER}
        given = {"costs": costs, "cost_limit": limit, "draft_costs": paid}
        ids, counts, matches = self.taker.call(op, *operands, **options, **given)[-3:]
        for row in range(ROWS):
            length = int(self.lengths[row]) if drafts[row] else 0
            want = self.rows.truths[row].draft(length, k, costs, limit, self.overlap)
            row_ids, row_paid = ids[row].tolist(), paid[row].tolist()
            if Draft(row_ids, int(counts[row]), int(matches[row]), row_paid) != want:
                raise AssertionError(f"case {self.case}, {self.taker}, row {row}: {op} differs")
        self.compared.update(drafts=int(np.count_nonzero(drafts)), tokens=int(counts.sum()))


def at_once(attempt: Attempt, rng: np.random.Generator) -> None:
    attempt.append(attempt.rows.lengths - 1)


def in_pieces(attempt: Attempt, rng: np.random.Generator) -> None:
    for share in np.sort(rng.random(6)):
        attempt.append((share * (attempt.rows.lengths - 1)).astype(np.int32))
    at_once(attempt, rng)


def in_steps(attempt: Attempt, rng: np.random.Generator) -> None:
    """Some prompts are indexed by the step behind them."""
    target = attempt.rows.lengths - 1
    prompts = np.maximum(0, target - 24)
    attempt.append(np.where(np.arange(ROWS) < WITHOUT_PROMPT, 0, prompts).astype(np.int32))
    attempt.lengths[:] = prompts
    while (attempt.lengths < target).any():
        left = (target - attempt.lengths).astype(np.int32)
        attempt.step(np.minimum(left, rng.integers(0, 13, ROWS, np.int32)))


def cut_and_rebuilt(attempt: Attempt, rng: np.random.Generator) -> None:
    """A row went on otherwise, and is cut to what it shares with the right one."""
    lengths = attempt.rows.lengths
    keep = (rng.random(ROWS) * (lengths - 1)).astype(np.int32)
    for row, at in enumerate(keep):
        attempt.tokens[row, at:] = np.roll(attempt.rows.tokens[row, at:], 1)
    attempt.append(lengths)
    attempt.tokens[:] = attempt.rows.tokens
    if rng.random() < 0.5:
        attempt.append(keep)
    attempt.lengths[:] = keep
    in_pieces(attempt, rng)


def after_another(attempt: Attempt, rng: np.random.Generator) -> None:
    """The slots had indexed other rows and were reset."""
    attempt.tokens[:] = attempt.rows.tokens[rng.permutation(ROWS)]
    attempt.append(np.full(ROWS, CAPACITY, np.int32))
    attempt.taker.call("ngram_index_reset_", attempt.index.tensor, np.arange(ROWS, dtype=np.int32))
    attempt.tokens[:] = attempt.rows.tokens
    at_once(attempt, rng)


BUILDS: tuple[Build, ...] = (at_once, in_pieces, in_steps, cut_and_rebuilt, after_another)


def run_case(number: int, all_takers: Sequence[Taker], data: Path | None) -> Counter[str]:
    """
    Raises:
        AssertionError: anything differs: drafts, counts, match lengths, costs, and with them the
            outcomes of the tokens that a draft would be read from.
    """
    rows = Rows(number, data)
    limit = LIMITS[number % len(LIMITS)]
    totals: Counter[str] = Counter(rows=ROWS)
    for i, taker in enumerate(all_takers):
        _C.set_instruction_set(taker.instruction_set)
        _C.set_num_threads(taker.threads)
        build = BUILDS[(number + i) % len(BUILDS)]
        attempt = Attempt(number, taker, rows, default_costs().copy(), limit)
        build(attempt, np.random.default_rng([number, i]))
        attempt.step(np.ones(ROWS, np.int32))
        attempt.ask_again()
        statistics = attempt.index.statistics
        if statistics.rows_scanned_full or statistics.rows_scanned_catching_up:
            raise AssertionError(f"case {number}, {taker}: rows were scanned")
        totals.update(attempt.compared, answered_from_index=statistics.rows_indexed)
        totals[f"built_{build.__name__}"] += ROWS
    return totals


def run(cases: int, data: Path | None) -> dict[str, Any]:
    """What cases 0 to cases-1 came to; the first that differs ends it (AssertionError)."""
    totals: dict[str, Counter[str]] = {"random": Counter(), "recorded": Counter()}
    before = _C.instruction_set(), _C.num_threads()
    everyone = list(takers())
    try:
        for number in range(cases):
            counts = run_case(number, everyone, data)
            totals["recorded" if number % 2 else "random"].update(counts)
    finally:
        _C.set_instruction_set(before[0])
        _C.set_num_threads(before[1])
    return {
        "rows": ROWS * cases,
        "each_taken_by": [
            f"{t.instruction_set}, {t.kind}, {t.threads or 'all'} thread(s)" for t in everyone
        ],
        "identical": True,
        "text": load_corpus(data)[1],
        **{kind: dict(counts) for kind, counts in totals.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.verify.ladder_identity", description=__doc__
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--data", type=Path, help="recorded conversations, as for tools.bench")
    parser.add_argument("--note", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    publish(
        "tools.verify.ladder_identity", arguments, given, run(-(-given.rows // ROWS), given.data)
    )


if __name__ == "__main__":
    main()
