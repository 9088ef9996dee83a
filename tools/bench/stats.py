"""Statistics of a sample of times, and the result of a comparison."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from tools.bench.data import Workload
from tools.bench.options import BenchError, Options

Drafts = list[list[int]]

DIGITS = 5
"""Significant digits kept in files: further ones are noise."""


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def spread(sample: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    median, p10, p90 = np.percentile(np.asarray(sample, dtype=np.float64), [50, 10, 90])
    return {"median": rounded(median), "p10": rounded(p10), "p90": rounded(p90)}


def ratios(peer_us: Sequence[float], ours_us: Sequence[float]) -> dict[str, float]:
    """Peer over ours, round by round: both were measured close together in time, so a slowdown of
    the machine in a round hardly affects their ratio."""
    return spread([p / o for p, o in zip(peer_us, ours_us, strict=True)])


class Agreement:
    """Whether contestants of equal semantics draft the same."""

    same: bool | None = None
    """None: nothing was compared."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[str, list[Drafts]]] = {}

    def add(self, name: str, semantics: Hashable, made: list[Drafts]) -> None:
        """
        Args:
            semantics: a key shared by contestants that must agree.
            made: the drafts of each step.

        Raises:
            BenchError: They differ from another contestant's with the same semantics.
        """
        other, expected = self._seen.setdefault(semantics, (name, made))
        if made != expected:
            raise BenchError(f"{name} and {other} draft differently: nothing to compare")
        if name != other:
            self.same = True


def drafted_share(made: list[Drafts]) -> float:
    """Share of requests for which there was a draft."""
    rows = [bool(draft) for step in made for draft in step]
    return sum(rows) / len(rows)


def comparison(
    workload: Workload,
    options: Options,
    details: Mapping[str, str],
    rounds_us: Mapping[str, Sequence[float]],
    **more: Any,
) -> dict[str, Any]:
    """One size's result.

    Args:
        details: contestant -> what exactly it is, ours first.
        rounds_us: contestant -> microseconds per step in each round.
        more: kept in the result as it is.
    """
    ours, *peers = details
    figures = {
        name: {f"{key}_us": us for key, us in spread(rounds_us[name]).items()} | {"what": what}
        for name, what in details.items()
    }
    against = {peer: ratios(rounds_us[peer], rounds_us[ours]) for peer in peers}
    return {
        "size": str(workload.size),
        "batch": workload.size.batch,
        "context": workload.size.context,
        "cache": options.cache,
        "idle_ms": options.idle_ms,
        "frontend": options.frontend,
        "engine": options.engine,
        "data": workload.describes,
        **more,
        "ours": figures.pop(ours),
        "peers": figures,
        "ratio": {peer: ratio.pop("median") for peer, ratio in against.items()},
        "ratio_spread": against,
    }
