"""The simulator of a ladder's drafts agrees with the reference; they share no code."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ngram_npu.reference import ladder
from ngram_npu.replay import TokenRequest, TokenTurn

from tools.drafts.simulator import Counts, candidates, outcomes, walks

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
    """The reference, one step at a time."""
    counts = Counts()
    context: list[int] = []
    for prompt, completion in turns:
        context += [*prompt, *completion[:1]]
        rest = completion[1:]
        while rest:
            draft, _, _ = ladder.draft(context, 8, costs, limit, True, 10_000)
            right = [drafted == token for drafted, token in zip(draft, rest, strict=False)]
            accepted = (right + [False]).index(False)
            counts += Counts(len(rest[: accepted + 1]), 1, len(draft))
            context += rest[: accepted + 1]
            rest = rest[accepted + 1 :]
    return counts


@pytest.mark.parametrize("limit", LIMITS)
def test_a_replay(limit: int) -> None:
    rng = random.Random(limit)
    costs = [[rng.randrange(40) for _ in range(32)] for _ in range(16)]
    turns = [
        ([rng.randrange(4) for _ in range(10)], [rng.randrange(3) for _ in range(length)])
        for length in (20, 0, 1, 33, 2, 17)
    ]
    made = tuple(TokenTurn(np.array(p, np.int32), np.array(c, np.int32)) for p, c in turns)
    found = walks([TokenRequest("none", ()), TokenRequest("one", made)])
    expected = replayed(turns, costs, limit)
    assert found.replay(found.lengths(np.array(costs), limit, 8)) == expected
    assert expected.tokens == 19 + 32 + 1 + 16
