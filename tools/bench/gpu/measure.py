"""Rounds in which contestants take turns on a GPU, and what the device could do at best."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tools.bench import stats
from tools.bench.data import Workload
from tools.bench.gpu.contestant import GpuContestant
from tools.bench.gpu.runtime import Runtime
from tools.bench.ops.base import Skipped
from tools.bench.options import BenchError, Options, UnavailableError

STEPS = 12
"""Steps of the workload in one graph; each replay does them from the beginning."""
_CHECKED_STEPS = 4
_WARM_UP_ROUNDS = 2
_REASON_CHARACTERS = 300


def compare(
    contestants: Sequence[GpuContestant],
    checked: Workload,
    timed: Workload,
    runtime: Runtime,
    options: Options,
    skipped: Skipped,
) -> dict[str, Any]:
    """Measures the contestants, ours first in the list.

    In each round every contestant replays its graph of STEPS steps once; who begins changes from
    round to round. Clock changes and whatever else the machine does touch all of them alike.

    Args:
        checked: data on which there are drafts, compared before anything is timed.
        timed: what the figures are of.
        skipped: gets the peers that fail or draft otherwise than ours, which are left out.

    Raises:
        BenchError: variants of ours that ought to agree do not.
    """
    steps = min(STEPS, timed.steps)
    share, same = _check(contestants, checked, skipped)
    replays = {}
    for contestant in contestants:
        if contestant.name in skipped:
            continue
        with left_out_if_it_fails(contestant.name, skipped):
            contestant.load(timed)
            works = [_step(contestant, number) for number in range(steps)]
            contestant.restore()
            cold = options.cache != "hot"
            replays[contestant.name] = runtime.prepare(works, contestant.restore, cold)
    contestants = [contestant for contestant in contestants if contestant.name in replays]
    rounds_us: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    names = list(rounds_us)
    for number in range(-_WARM_UP_ROUNDS, options.rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            us = replays[name]() / steps
            if number >= 0:
                rounds_us[name].append(us)
    return {
        "size": str(timed.size),
        "batch": timed.size.batch,
        "context": timed.size.context,
        "config": [options.min_n, options.max_n],
        "cache": options.cache,
        "idle_ms": 0.0,
        "frontend": "torch",
        "engine": options.engine,
        "device": runtime.device,
        "data": timed.describes,
        "rounds": options.rounds,
        "steps_per_round": steps,
        "drafted_share": share,
        "same_drafts": same,
        **_figures(contestants, rounds_us, timed),
        "floors": floors(contestants[0], timed, runtime, rounds_us[names[0]]),
    }


@contextmanager
def left_out_if_it_fails(name: str, skipped: Skipped) -> Iterator[None]:
    """What others' code may raise must not cost our figures; what ours raises comes out."""
    try:
        yield
    except UnavailableError as error:
        skipped[name] = str(error)
    except Exception as error:
        if name.partition(":")[0] == "ours":
            raise
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        skipped[name] = re.sub(r"/\S*/", "", text)[:_REASON_CHARACTERS]  # no folder of one machine


def _step(contestant: GpuContestant, number: int) -> Any:
    return lambda: contestant.step(number)


def _figures(
    contestants: Sequence[GpuContestant], rounds_us: dict[str, list[float]], timed: Workload
) -> dict[str, Any]:
    figures = {
        c.name: {**stats.times(rounds_us[c.name], timed.size.tokens), "what": c.detail}
        for c in contestants
    }
    ours = contestants[0].name
    against = {p: stats.ratios(rounds_us[p], rounds_us[ours]) for p in figures if p != ours}
    return {
        "ours": figures.pop(ours),
        "peers": figures,
        "ratio": {peer: ratio["median"] for peer, ratio in against.items()},
        "ratio_spread": against,
    }


def floors(
    ours: GpuContestant, timed: Workload, runtime: Runtime, ours_us: list[float]
) -> dict[str, float]:
    """What no step can be faster than, and how ours stands to it."""
    bandwidth, empty = runtime.copy_bandwidth(), runtime.empty_node_us()
    median = stats.spread(ours_us)["median"]
    values = {
        "copy_gb_per_s": bandwidth / 1e9,
        "empty_node_us": empty,
        "ours_above_empty_us": median - empty,
    }
    if ours.reads_tokens:
        live_bytes = timed.size.tokens * timed.token_ids.itemsize
        read_us = live_bytes / bandwidth * 1e6
        values |= {"live_bytes": live_bytes, "read_us": read_us, "ours_over_read": median / read_us}
    return {name: stats.rounded(value) for name, value in values.items()}


def _check(
    contestants: Sequence[GpuContestant], checked: Workload, skipped: Skipped
) -> tuple[float | None, bool | None]:
    """A few steps of all, whose results are compared.

    Returns:
        The share of requests for which ours drafted, and whether anything was compared.
    """
    seen: dict[Any, tuple[str, list[Any]]] = {}
    share, same = None, None
    for contestant in contestants:
        if contestant.semantics is None:
            continue
        with left_out_if_it_fails(contestant.name, skipped):
            contestant.load(checked)
            contestant.restore()
            made = [
                contestant.drafts(contestant.step(number))
                for number in range(min(_CHECKED_STEPS, checked.steps))
            ]
            if contestant is contestants[0] and contestant.is_drafter:
                rows = [bool(draft) for drafts in made for draft in drafts]
                share = sum(rows) / len(rows)
            name, expected = seen.setdefault(contestant.semantics, (contestant.name, made))
            if made != expected:
                raise BenchError(
                    f"{contestant.name} and {name} draft differently: nothing to compare"
                )
            if name != contestant.name:
                same = True
    return share, same
