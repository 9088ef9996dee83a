"""Tunes on recorded traffic: makes a report with one recommended setting."""

from __future__ import annotations

import datetime
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from ngram_npu.replay._run import Progress
from ngram_npu.replay.environment import machine, versions
from ngram_npu.tune.candidates import BASELINE, CANDIDATES, Candidate
from ngram_npu.tune.costs import VerificationCost
from ngram_npu.tune.measure import Cache, Counts, measure
from ngram_npu.tune.report import TuneReport, make_report
from ngram_npu.tune.search import Measured, with_stores
from ngram_npu.tune.traffic import Traffic, read_traffic

__all__ = ["DEFAULT_SAMPLE", "TuneOptions", "tune"]

DEFAULT_SAMPLE = 10_000_000
"""Characters: all settings over it take two minutes on two cores."""


@dataclass(frozen=True)
class TuneOptions:
    """How to tune.

    Attributes:
        format, limit, strict, tokenizer, chat_template: as in `ReplayOptions`.
        sample: maximum number of characters to replay; None: all.
        jobs: processes; None: one per core.
        cache: file that keeps finished pieces for later runs; None: a file for this traffic, which
            is deleted after a complete run.
        store: whether to try the best ladders also with a store, from which requests draft other
            requests' text.
    """

    format: str | None = None
    limit: int | None = None
    strict: bool = False
    tokenizer: str | None = None
    chat_template: str = "auto"
    sample: int | None = DEFAULT_SAMPLE
    jobs: int | None = None
    cache: Path | None = None
    store: bool = True


def tune(
    paths: Sequence[str | PathLike[str]],
    cost: VerificationCost,
    options: TuneOptions | None = None,
    *,
    candidates: Sequence[Candidate] = CANDIDATES,
    against: Candidate = BASELINE,
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
) -> TuneReport:
    """Search settings over recorded traffic.

    Args:
        paths: as for `replay`.
        cost: the time of verification.
        options: see `TuneOptions`.
        candidates: the settings; `against` is added if it is missing, and so are the best ladders
            with a store.
        against: the setting to compare the recommended one with.
        progress: called often; must return quickly.
        command: command line to show in the report.

    Raises:
        ReplayError: as for `replay`; the cache cannot be used.
    """
    options = options or TuneOptions()
    started = time.monotonic()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    traffic = read_traffic(
        paths,
        format_name=options.format,
        limit=options.limit,
        strict=options.strict,
        sample=options.sample,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        progress=progress,
    )
    searched = tuple(dict.fromkeys([*candidates, against]))
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
    if options.store:
        stores = with_stores(measured, cost, candidates)
        stores = tuple(c for c in stores if c not in searched)
        if stores:
            measured = measured.and_also(measured_with(stores))
    if options.cache is None and cache.path is not None:
        cache.path.unlink(missing_ok=True)
    return make_report(
        measured,
        cost,
        traffic,
        against=searched.index(against),
        about={
            "command": command,
            "date": date,
            "machine": machine(None),
            "versions": versions(),
            "jobs": jobs,
            "pieces_from_an_earlier_run": resumed,
            "seconds": round(time.monotonic() - started, 2),
        },
    )


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
