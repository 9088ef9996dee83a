"""The form of an op's entry, and the comparison that most ops run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from tools.bench import device, stats
from tools.bench.data import Workload, make_workload
from tools.bench.measure import measure
from tools.bench.options import BenchError, Options, Size, UnavailableError

Make = Callable[[Workload, Options], Any]
"""Makes a contestant; raises UnavailableError if it cannot take part."""
Result = dict[str, Any]
Skipped = dict[str, str]
OPS: dict[str, Op] = {}
"""Those that can be measured, by name: every subclass with a name."""


class Op:
    """One thing to measure: how ours does it, and its peers.

    Attributes:
        name: as on the command line.
        help: one line.
        make: makes ours, if its ``run`` makes contestants.
        sizes, peers: the defaults if the command line names none.
        device_peers: the peers' default on a device; None: the op is not measured there.
        engines: the first is the default.
        peer_makers: peer's name -> its maker. Every op also knows ``ours:key=value``, itself with
            other options.
        unused_settings: settings of the command line that this op does not use.
        assumptions: unmeasured assumptions behind the figures; kept in the file.
    """

    name: str
    help: str = ""
    make: Make
    sizes: tuple[str, ...]
    peers: tuple[str, ...] = ()
    device_peers: tuple[str, ...] | None = None
    engines: tuple[str, ...] = ("scan",)
    peer_makers: ClassVar[Mapping[str, Make]] = {}
    unused_settings: frozenset[str] = frozenset()
    assumptions: Mapping[str, Any] = {}

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            OPS[cls.name] = cls()

    def workload(self, size: Size, options: Options) -> Workload:
        return make_workload(size, options)

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        """Measures all sizes, and adds to ``skipped`` the reason for each peer that is left out."""
        options = replace(options, engine=options.engine or self.engines[0])
        peers = options.peers
        if peers is None:
            peers = self.peers if options.device == "cpu" else self.device_peers or ()
        for size in self.sizes_of(options):
            contestants: list[Any] = []  # first frees the previous size's contestants
            workload = self.workload(size, options)
            for name in ("ours", *peers):
                make, changed = self._maker(name, options)
                if name not in skipped:  # a peer left out at one size stays out
                    with self.left_out(name, skipped):
                        contestants.append(make(workload, changed))
                        contestants[-1].name = name
            yield self.compare(contestants, workload, options)

    def shown(self, result: Result) -> Result:
        """What the table shows of it."""
        return result

    def sizes_of(self, options: Options) -> tuple[Size, ...]:
        return options.sizes or tuple(Size.parse(text) for text in self.sizes)

    def _maker(self, name: str, options: Options) -> tuple[Make, Options]:
        """The contestant's maker and its options."""
        if name.partition(":")[0] == "ours":
            changed = options if name == "ours" else options.changed(name.removeprefix("ours:"))
            if changed.engine not in self.engines:
                raise BenchError(f"{self.name}: engine: expected one of {', '.join(self.engines)}")
            if changed.is_ladder and (changed.engine != "index" or changed.device != "cpu"):
                raise BenchError(f"{self.name}: a ladder: expected the index, on the CPU")
            return self.make, changed
        if name in self.peer_makers:
            return self.peer_makers[name], options
        known = ", ".join([*self.peer_makers, "ours:key=value"])
        raise BenchError(f"{self.name}: peer {name!r}: expected one of {known}")

    @contextmanager
    def left_out(self, name: str, skipped: Skipped) -> Iterator[None]:
        """Skips a peer that cannot take part, with the reason; ours must take part."""
        try:
            yield
        except UnavailableError as error:
            if name == "ours":
                raise
            skipped[name] = str(error)

    def compare(self, contestants: list[Any], workload: Workload, options: Options) -> Result:
        """Measures the contestants, ours first, at one size."""
        if options.device == "cpu":
            measured = measure(contestants, workload.steps, options)
        else:
            measured = device.measure(contestants, workload.steps, options)
        result = stats.comparison(
            workload,
            options,
            {contestant.name: contestant.detail for contestant in contestants},
            measured.rounds_us,
            disturbed_rounds=measured.disturbed_rounds,
            steps_per_round=measured.steps,
            drafted_share=measured.drafted_share,
            same_drafts=measured.same_drafts,
        )
        figures = {"ours": result["ours"], **result["peers"]}
        for name, worst in measured.worst_us.items():
            figures[name]["worst_step_us"] = stats.rounded(worst)
        return result
