"""The simulator of a ladder's drafts agrees with the reference and shares no code with it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from naive_replay import naive_replay
from ngram_npu_cli.replay import TokenRequest, TokenTurn
from ngram_npu_cli.replay.walks import Counts, candidates, outcomes, walks
from ops.reference import ladder

LIMITS = (0, 20, 40, 100)


def rows() -> list[list[int]]:
    rng = random.Random(16)
    kinds = [rng.choice((1, 2, 3, 30)) for _ in range(60)]
    return [[rng.randrange(kind) for _ in range(rng.randrange(70))] for kind in kinds]


@pytest.mark.parametrize("tokens", rows())
def test_candidates_and_bytes(tokens: list[int]) -> None:
    row = np.array(tokens, np.int64)
    q, m = candidates(row)
    expected = [ladder.candidate(tokens[:x]) for x in range(len(tokens))]
    assert list(zip(q.tolist(), m.tolist(), strict=True)) == expected
    assert outcomes(row, q, m).tolist() == ladder.outcome_bytes(tokens)


def replayed(
    turns: list[tuple[list[int], list[int]]], costs: list[list[int]], limit: int
) -> Counts:
    """Replays with the reference, one step at a time."""

    def draft(context: list[int]) -> list[int]:
        return ladder.draft(context, 8, costs, limit, True, 10_000)[0]

    counts = naive_replay([turns], draft)
    return Counts(counts.tokens, counts.steps, sum(n * c for n, c in counts.drafted.items()))


@pytest.mark.parametrize("limit", LIMITS)
def test_a_replay(limit: int) -> None:
    rng = random.Random(limit)
    costs = [[rng.randrange(40) for _ in range(32)] for _ in range(16)]
    turns = [
        ([rng.randrange(4) for _ in range(10)], [rng.randrange(3) for _ in range(length)])
        for length in (20, 0, 1, 33, 2, 17)
    ]
    token_turns = tuple(TokenTurn(np.array(p, np.int32), np.array(c, np.int32)) for p, c in turns)
    drafts = walks([TokenRequest("none", ()), TokenRequest("one", token_turns)])
    expected = replayed(turns, costs, limit)
    assert drafts.replay(drafts.lengths(np.array(costs), limit, 8)) == expected
    assert expected.tokens == 19 + 32 + 1 + 16
