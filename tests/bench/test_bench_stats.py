"""The statistics on samples whose answers are known."""

from __future__ import annotations

import pytest

from tools.bench import stats


def test_spread_of_known_sample() -> None:
    found = stats.spread([float(v) for v in range(11)])
    assert found == {"median": 5.0, "p10": 1.0, "p90": 9.0, "mad": 3.0, "min": 0.0}


def test_spread_ignores_order_and_one_outlier() -> None:
    found = stats.spread([3.0, 1.0, 2.0, 1_000_000.0, 2.0])
    assert found["median"] == 2.0
    assert found["mad"] == 1.0


def test_spread_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        stats.spread([])


def test_ratio_is_formed_per_round() -> None:
    """A slow machine in one round slows both: their quotient stays, the quotient of medians not."""
    ours, peer = [1.0, 10.0, 2.0], [5.0, 50.0, 30.0]
    assert stats.ratios(peer, ours)["median"] == 5.0


def test_times_per_token() -> None:
    found = stats.times([100.0, 200.0, 300.0], tokens=1000)
    assert found["median_us"] == 200.0
    assert found["ns_per_token"] == 200.0
