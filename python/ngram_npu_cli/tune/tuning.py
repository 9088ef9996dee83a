"""Tunes on recorded traffic: makes a report with one recommended setting."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy as np
from ngram_npu.errors import InputError
from ngram_npu.step_time import VerificationCost

from ngram_npu_cli.logs.log_files import Progress
from ngram_npu_cli.replay.environment import machine, versions
from ngram_npu_cli.tune.candidates import BASELINES, CANDIDATES, Candidate
from ngram_npu_cli.tune.measure import Cache, Counts, measure
from ngram_npu_cli.tune.runners import RUNNERS, SYNCHRONOUS, Runner
from ngram_npu_cli.tune.search import Measured, with_stores
from ngram_npu_cli.tune.traffic import Traffic, TuneOptions, read_traffic
from ngram_npu_cli.tune.tune_report import TuneReport, make_report


def tune(
    paths: Sequence[str | PathLike[str]],
    cost: VerificationCost,
    options: TuneOptions | None = None,
    *,
    candidates: Sequence[Candidate] = CANDIDATES,
    against: Candidate | None = None,
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
) -> TuneReport:
    """Search settings over recorded traffic.

    Args:
        paths: as for `replay`.
        cost: the time of verification.
        options: see `TuneOptions`.
        candidates: the settings; `against` is added if it is missing, and so are ladders with a
            store.
        against: the setting to compare the recommended one with, verified as the runner verifies;
            None: n-grams of 2 to 5, k = 5.
        progress: called often; must return quickly.
        command: command line to show in the report.

    Raises:
        InputError: as for `replay`; the cache cannot be used; no setting is for the runner.

    Returns:
        The report for the runner. Without one, the report for the GPU, whose `others` has the one
        for the host; only the latter if no candidate is for the GPU.
    """
    options = options or TuneOptions()
    started = time.monotonic()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    traffic = read_traffic(paths, options, progress)
    runners = _runners(options.runner, candidates)
    compared = {
        r.name: BASELINES[r.drafts] if against is None else replace(against, drafts=r.drafts)
        for r in runners
    }
    drafts = {r.drafts for r in runners}
    searched = tuple(
        dict.fromkeys([*(c for c in candidates if c.drafts in drafts), *compared.values()])
    )
    cache = Cache(options.cache or _own_cache(traffic))
    resumed = len(cache)

    def show(done: int, total: int) -> None:
        if progress is not None:
            progress(Progress(f"{total} pieces", "replay", done, total))

    jobs = options.jobs or len(os.sched_getaffinity(0))

    def measured_with(searched: tuple[Candidate, ...]) -> Measured:
        by_request = measure(
            searched,
            traffic.requests,
            streams=traffic.streams(),
            jobs=jobs,
            cache=cache,
            progress=show,
        )
        counts = tuple(_by_conversation(traffic, of) for of in by_request)
        return Measured(searched, counts, traffic.tokens, traffic.chosen_half)

    measured = measured_with(searched)
    costs = {r.name: _cost_of(r, cost, options.synchronous) for r in runners}
    on_host = [r for r in runners if r.drafts == "trimmed"]
    if options.store and on_host:
        measured = with_stores(measured, costs[on_host[0].name], candidates, measured_with)
    if options.cache is None and cache.path is not None:
        cache.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another run's file is there
            cache.path.parent.rmdir()
    about = {
        "command": command,
        "date": date,
        "machine": machine(None),
        "versions": versions(),
        "jobs": jobs,
        "pieces_from_an_earlier_run": resumed,
        "seconds": round(time.monotonic() - started, 2),
    }
    first, *others = (
        make_report(
            measured.verified(runner.drafts),
            costs[runner.name],
            traffic,
            against=compared[runner.name],
            runner=runner,
            about=about,
        )
        for runner in runners
    )
    return replace(first, others=tuple(others))


def _runners(name: str | None, candidates: Sequence[Candidate]) -> list[Runner]:
    """The one asked for, or all that vLLM has and that a candidate is for."""
    wanted = [RUNNERS[name]] if name is not None else [RUNNERS["gpu"], RUNNERS["host"]]
    found = [r for r in wanted if any(c.drafts == r.drafts for c in candidates)]
    if not found:
        raise InputError(
            f"runner {name}: no setting to search: {wanted[0].drafts} drafts are of consecutive "
            "sizes only"
        )
    return found


def _cost_of(runner: Runner, cost: VerificationCost, synchronous: float | None) -> VerificationCost:
    if not runner.is_synchronous:
        return cost
    if synchronous is None:
        synchronous = 0.0 if cost.is_measured else SYNCHRONOUS
    return replace(cost, synchronous=synchronous)


def _by_conversation(traffic: Traffic, of_requests: Counts) -> Counts:
    summed = np.zeros((len(traffic.names), of_requests.shape[1]), np.int32)
    np.add.at(summed, traffic.conversation_of, of_requests)
    return summed


def _own_cache(traffic: Traffic) -> Path | None:
    """The file for finished pieces of this traffic; None: there is no folder for it."""
    digest = hashlib.sha256()
    for request in traffic.requests:
        digest.update(request.tokens().tobytes())
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "ngram_npu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder / f"tune-{digest.hexdigest()[:16]}.jsonl"
