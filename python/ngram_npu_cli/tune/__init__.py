"""Finds the best setting for recorded traffic, and its speed-up at a verification cost.

    >>> from ngram_npu_cli.tune import share_of_a_step, tune
    >>> report = tune(["traffic.jsonl"], share_of_a_step(0.05))  # doctest: +SKIP
    >>> report.vllm_options  # doctest: +SKIP

Functions of this package do not print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

import numpy as np
from ngram_npu.errors import InputError
from ngram_npu.step_time import VerificationCost, load_cost, share_of_a_step

from ngram_npu_cli.logs.reader import ShowProgress, ignore_progress
from ngram_npu_cli.options import TuneOptions
from ngram_npu_cli.report import Run
from ngram_npu_cli.tune.candidates import (
    BASELINE,
    BASELINES,
    CANDIDATES,
    RUNNERS,
    SYNCHRONOUS_SHARE,
    Candidate,
    Runner,
)
from ngram_npu_cli.tune.measure import Counts, measure_settings
from ngram_npu_cli.tune.ranking import Measured, search_stores
from ngram_npu_cli.tune.traffic import read_traffic
from ngram_npu_cli.tune.tune_report import TuneReport, format_report, make_report

__all__ = [
    "BASELINE",
    "CANDIDATES",
    "Candidate",
    "TuneOptions",
    "TuneReport",
    "format_report",
    "load_cost",
    "share_of_a_step",
    "tune",
]


def tune(
    paths: Sequence[str | PathLike[str]],
    cost: VerificationCost,
    options: TuneOptions | None = None,
    *,
    candidates: Sequence[Candidate] = CANDIDATES,
    against: Candidate | None = None,
    progress: ShowProgress = ignore_progress,
    command: str = "",
) -> TuneReport:
    """Searches settings over recorded traffic.

    Args:
        paths: As for `replay`.
        cost: Step times, from which the time of verification follows.
        options: See `TuneOptions`. Here, `jobs` is 1 by default: a script that uses more must call
            `tune` under ``if __name__ == "__main__":``, because worker processes import the script.
        candidates: The settings to search. `against` is added if it is missing, and so are ladders
            with a store if the option `store` is set.
        against: The setting to compare the recommended setting with, with drafts as the runner
            verifies them; None: n-grams of 2 to 5, k = 5.
        progress: Called often; must return quickly.
        command: Command line to show in the report.

    Raises:
        InputError: The errors of `replay`, or no setting is for the runner.

    Returns:
        The report for the runner. Without a runner, the report for the GPU, with the report for the
        host in `others`; only the report for the host if no candidate is for the GPU.
    """
    options = options or TuneOptions()
    run = Run(command)
    traffic = read_traffic(paths, options, progress)
    runners = _select_runners(options.runner, candidates)
    baselines = {
        r.name: BASELINES[r.drafts] if against is None else replace(against, drafts=r.drafts)
        for r in runners
    }
    drafts = {runner.drafts for runner in runners}
    searched_candidates = [c for c in candidates if c.drafts in drafts]
    jobs = options.jobs or 1

    def measure(candidates: Sequence[Candidate]) -> dict[Candidate, Counts]:
        request_counts = measure_settings(
            candidates,
            traffic.requests,
            streams=traffic.list_streams(),
            jobs=jobs,
            progress=progress,
        )
        totals = {}
        for candidate, counts in request_counts.items():
            totals[candidate] = np.zeros((len(traffic.names), counts.shape[1]), np.int32)
            np.add.at(totals[candidate], traffic.conversation_of, counts)
        return totals

    counts = measure(tuple(dict.fromkeys([*searched_candidates, *baselines.values()])))
    measured = Measured(counts, traffic.tokens, traffic.selection_half)
    costs = {r.name: _add_synchronous(r, cost, options.synchronous) for r in runners}
    host_runners = [runner for runner in runners if runner.drafts == "trimmed"]
    if options.store and host_runners:
        measured = search_stores(measured, costs[host_runners[0].name], candidates, measure)
    about = {**run.describe(), "jobs": jobs, "seconds": run.seconds}
    first, *others = (
        make_report(
            measured.select(runner.drafts),
            costs[runner.name],
            traffic,
            against=baselines[runner.name],
            runner=runner,
            about=about,
        )
        for runner in runners
    )
    return replace(first, others=tuple(others))


def _select_runners(name: str | None, candidates: Sequence[Candidate]) -> list[Runner]:
    """Returns the runner `name`. Without a name, returns those of the GPU and host runners that
    have candidates."""
    selected = [RUNNERS[name]] if name is not None else [RUNNERS["gpu"], RUNNERS["host"]]
    runners = [r for r in selected if any(c.drafts == r.drafts for c in candidates)]
    if not runners:
        raise InputError(
            f"runner {name}: no setting to search: {selected[0].drafts} drafts are supported for "
            "consecutive n-gram sizes only"
        )
    return runners


def _add_synchronous(
    runner: Runner, cost: VerificationCost, synchronous: float | None
) -> VerificationCost:
    if not runner.is_synchronous:
        return cost
    if synchronous is None:
        synchronous = 0.0 if cost.is_measured else SYNCHRONOUS_SHARE
    return replace(cost, synchronous=synchronous)
