"""The simulator of a ladder's drafts agrees with the reference and shares no code with it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ngram_npu_cli.replay.walks import candidates, outcomes
from ops.reference import ladder


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
