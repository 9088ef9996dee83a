"""Contestants that draft differently are an error: their times would compare nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench import stats
from tools.bench.measure import Contestant, measure
from tools.bench.options import BenchError, Options
from tools.bench.stats import Drafts


class Drafter(Contestant):
    semantics = (2, 4, 4, "earliest")

    def __init__(self, name: str, drafts: Drafts) -> None:
        self.name = name
        self.function = lambda: drafts

    def drafts(self, result: Any) -> Drafts:
        return list(result)


def test_different_drafts_are_an_error() -> None:
    one = Drafter("one", [[1], []])
    found = measure([one, Drafter("same", [[1], []])], 20, Options(rounds=1, steps=1))
    assert found.same_drafts is True
    assert found.drafted_share == 0.5
    with pytest.raises(BenchError, match="other and one draft differently"):
        measure([one, Drafter("other", [[2], []])], 20, Options(rounds=1, steps=1))


def test_spread_and_ratio() -> None:
    """A slow machine in one round slows both: their quotient stays, the quotient of medians not."""
    assert stats.spread([10.0, *range(10)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    ours, peer = [1.0, 10.0, 2.0], [5.0, 50.0, 30.0]
    assert stats.ratios(peer, ours)["median"] == 5.0
