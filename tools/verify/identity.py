"""Compares the drafts of the index with those of a scan over many random and replayed steps.

    python -m tools.verify.identity --json tools/bench/results/index-identity.json

A case is determined by its number alone.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramIndex

from tools.bench.data import make_workload
from tools.bench.options import Options, Size
from tools.bench.report import publish

Int32Array = npt.NDArray[np.int32]
IndexStep = Callable[..., tuple[Int32Array, ...]]

ROWS = 32
CAPACITY = 2048
SPANS = ((2, 4), (2, 5), (1, 1), (1, 8), (3, 3), (5, 12))
VOCABULARIES = (1, 2, 6, 50, 3000)
K = 5


@dataclass(frozen=True)
class Case:
    """The case of a number: consecutive numbers go through all combinations."""

    number: int

    @property
    def span(self) -> tuple[int, int]:
        return SPANS[self.number % len(SPANS)]

    @property
    def match_policy(self) -> int:
        return self.number // len(SPANS) % 2

    @property
    def overlap(self) -> bool:
        return self.number % 5 == 0

    @property
    def replayed(self) -> bool:
        return self.number % 3 == 0


def _random_steps(case: Case, rng: np.random.Generator) -> Any:
    vocabulary = VOCABULARIES[case.number % len(VOCABULARIES)]
    rows = rng.integers(0, vocabulary, (ROWS, CAPACITY), np.int32)
    lengths = rng.integers(0, CAPACITY, ROWS).astype(np.int32)
    return rows, lengths, lambda _: rng.integers(-1, vocabulary, (ROWS, 4), np.int32)


def _replayed_steps(case: Case, data: Path | None) -> Any:
    workload = make_workload(Size(ROWS, CAPACITY // 2), Options(data=data))
    sampled = workload.sampled
    return workload.token_ids, workload.lengths[0].copy(), lambda step: sampled[step % len(sampled)]


def run_case(case: Case, steps: int, index_step: IndexStep, data: Path | None) -> Counter[str]:
    """Runs both operators on the same rows, which finish, start again and change places.

    Raises:
        AssertionError: anything differs: drafts, counts, match lengths, tokens or lengths.
    """
    rng = np.random.default_rng(case.number)
    if case.replayed:
        tokens, lengths, sampled_at = _replayed_steps(case, data)
    else:
        tokens, lengths, sampled_at = _random_steps(case, rng)
    tokens, base = tokens.copy(), lengths.copy()
    low, high = case.span
    options = {
        "min_n": low,
        "max_n": high,
        "k": K,
        "match_policy": case.match_policy,
        "overlap": case.overlap,
    }
    index = NgramIndex(ROWS, tokens.size, min_n=low, max_n=high, any_data=True)
    slots = np.arange(ROWS, dtype=np.int32)
    totals: Counter[str] = Counter()
    for step in range(steps):
        if step % 61 == 60:
            order = rng.permutation(ROWS)
            tokens, lengths, base, slots = tokens[order], lengths[order], base[order], slots[order]
        ended = lengths > tokens.shape[1] - 8
        ended |= rng.random(ROWS) < 0.002
        if ended.any():
            index.reset(slots[ended])
            lengths[ended] = base[ended] // 2
        sampled = sampled_at(step)
        discard = rng.random(ROWS) < 0.05
        expected_tokens, expected_lengths = tokens.copy(), lengths.copy()
        arguments = {"discard": discard, **options}
        expected = _C.ngram_step_(expected_tokens, expected_lengths, sampled, **arguments)
        found = index_step(tokens, lengths, sampled, index.tensor, slot_indices=slots, **arguments)
        pairs = [*zip(found, expected, strict=True), (lengths, expected_lengths)]
        if not all(map(np.array_equal, *zip(*pairs, strict=True))) or not np.array_equal(
            tokens, expected_tokens
        ):
            raise AssertionError(f"case {case.number}, step {step}: the index differs")
        totals.update(row_steps=ROWS, drafted=int(np.count_nonzero(expected[3])))
    statistics = index.statistics
    totals.update(answered_from_index=statistics.rows_indexed, page_splits=statistics.page_splits)
    index.check_integrity()
    return totals


def run(
    cases: int, steps: int, data: Path | None, index_step: IndexStep = _C.ngram_index_step_
) -> dict[str, Any]:
    """What cases 0 to cases-1 came to; the first that differs ends it (AssertionError)."""
    totals: dict[str, Counter[str]] = {"random": Counter(), "replayed": Counter()}
    for number in range(cases):
        case = Case(number)
        counts = run_case(case, steps, index_step, data)
        totals["replayed" if case.replayed else "random"].update(counts)
    return {"cases": cases, "identical": True, **{k: dict(v) for k, v in totals.items()}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.verify.identity", description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--data", type=Path, help="recorded conversations, as for tools.bench")
    parser.add_argument("--note", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    publish("tools.verify.identity", arguments, given, run(given.cases, given.steps, given.data))


if __name__ == "__main__":
    main()
