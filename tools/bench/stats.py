"""Figures of a sample of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

DIGITS = 5
"""Significant digits kept in files: more would only show noise."""


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def spread(sample: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, median absolute deviation, and smallest of a sample."""
    values = np.asarray(sample, dtype=np.float64)
    if values.size == 0:
        raise ValueError("spread of an empty sample")
    median = float(np.median(values))
    return {
        "median": rounded(median),
        "p10": rounded(float(np.percentile(values, 10))),
        "p90": rounded(float(np.percentile(values, 90))),
        "mad": rounded(float(np.median(np.abs(values - median)))),
        "min": rounded(float(values.min())),
    }


def times(rounds_us: Sequence[float], tokens: int) -> dict[str, Any]:
    """The figures of one contestant: microseconds per step in each round, tokens it looks at."""
    figures: dict[str, Any] = {f"{name}_us": v for name, v in spread(rounds_us).items()}
    figures["ns_per_token"] = rounded(float(np.median(rounds_us)) * 1e3 / max(tokens, 1))
    return figures


def ratios(peer_us: Sequence[float], ours_us: Sequence[float]) -> dict[str, float]:
    """Peer over ours, round by round: both were measured within moments of each other, so what
    slowed the machine in a round hardly touches their quotient."""
    return spread([p / o for p, o in zip(peer_us, ours_us, strict=True)])
