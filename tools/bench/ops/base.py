"""The form of an op's entry, and the comparison that most ops run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tools.bench import stats
from tools.bench.contestant import Contestant
from tools.bench.data import Workload, make_workload
from tools.bench.measure import measure
from tools.bench.options import BenchError, Options, Size, UnavailableError

Make = Callable[[Workload, Options], Contestant]
Result = dict[str, Any]
Skipped = dict[str, str]


class Op(ABC):
    """One thing to measure: how ours does it, and who else does.

    Attributes:
        name: as on the command line.
        help: one line.
        sizes, peers: what is taken where the command line names none.
        engines: the first is the default.
        peer_makers: peer's name -> how it is made; it raises UnavailableError where it cannot be.
            Every op besides knows ``ours:key=value``, itself with other options.
        workload: size and options -> the data.
        unused_settings: what the command line says, and this op does not ask.
        assumptions: what figures rest on that were not measured; kept in the file.
    """

    name: str
    help: str
    sizes: tuple[str, ...]
    peers: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("scan",)
    peer_makers: ClassVar[Mapping[str, Make]] = {}
    unused_settings: frozenset[str] = frozenset()
    assumptions: Mapping[str, Any] = {}

    @abstractmethod
    def make(self, workload: Workload, options: Options) -> Contestant:
        """Ours."""

    def workload(self, size: Size, options: Options) -> Workload:
        return make_workload(size, options)

    def run(
        self, options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        """Measures all sizes; ``report`` gets each result as it is ready.

        Returns:
            The results, and for each peer that was left out the reason.
        """
        return self.compare(self.sizes_of(options), options, report)

    def sizes_of(self, options: Options) -> tuple[Size, ...]:
        return options.sizes or tuple(Size.parse(text) for text in self.sizes)

    def compare(
        self, sizes: tuple[Size, ...], options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        options = replace(options, engine=options.engine or self.engines[0])
        if options.engine not in self.engines:
            raise BenchError(f"{self.name}: engine: expected one of {', '.join(self.engines)}")
        results: list[Result] = []
        skipped: Skipped = {}
        for size in sizes:
            workload = self.workload(size, options)
            contestants = [self._ours(workload, options)]
            for peer in self.peers if options.peers is None else options.peers:
                try:
                    contestants.append(self._peer(peer, workload, options))
                except UnavailableError as error:
                    skipped[peer] = str(error)
            results.append(_compare_one(contestants, workload, options))
            report(results[-1])
        return results, skipped

    def _ours(self, workload: Workload, options: Options) -> Contestant:
        contestant = self.make(workload, options)
        contestant.name = "ours"
        return contestant

    def _peer(self, peer: str, workload: Workload, options: Options) -> Contestant:
        if peer.startswith("ours:"):
            contestant = self.make(workload, options.changed(peer.removeprefix("ours:")))
        elif peer in self.peer_makers:
            contestant = self.peer_makers[peer](workload, options)
        else:
            known = ", ".join([*self.peer_makers, "ours:key=value"])
            raise BenchError(f"{self.name}: peer {peer!r}: expected one of {known}")
        contestant.name = peer
        return contestant


def _compare_one(contestants: list[Contestant], workload: Workload, options: Options) -> Result:
    measured = measure(contestants, workload.steps, options)
    size = workload.size
    result: Result = {
        "size": str(size),
        "batch": size.batch,
        "context": size.context,
        "config": [options.min_n, options.max_n],
        "cache": options.cache,
        "idle_ms": options.idle_ms,
        "frontend": options.frontend,
        "engine": options.engine,
        "data": workload.describes,
        "rounds": options.rounds,
        "disturbed_rounds": measured.disturbed_rounds,
        "steps_per_round": measured.steps,
        "drafted_share": measured.drafted_share,
        "same_drafts": measured.same_drafts,
    }
    figures = {}
    for contestant in contestants:
        rounds = measured.rounds_us[contestant.name]
        figures[contestant.name] = {
            **stats.times(rounds, size.tokens),
            "worst_step_us": stats.rounded(measured.worst_us[contestant.name]),
            "what": contestant.detail,
        }
    ours = contestants[0].name
    result["ours"] = figures.pop(ours)
    result["peers"] = figures
    against = {p: stats.ratios(measured.rounds_us[p], measured.rounds_us[ours]) for p in figures}
    result["ratio"] = {peer: ratio["median"] for peer, ratio in against.items()}
    result["ratio_spread"] = against
    return result


def all_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
