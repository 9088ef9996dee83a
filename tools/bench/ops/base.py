"""The base class of an op, and the comparison that most ops run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from tools.bench import device, measure
from tools.bench.data import Workload, make_workload
from tools.bench.options import BenchError, Options, Size, UnavailableError

Make = Callable[[Workload, Options], Any]
"""Makes a contestant; raises UnavailableError if it cannot take part."""
Result = dict[str, Any]
Skipped = dict[str, str]
OPS: dict[str, Op] = {}
"""Every subclass with a name."""


class Op:
    """One thing to measure: our implementation and its peers.

    Attributes:
        name: As on the command line.
        help: One line.
        make: Makes our contestant, if ``run`` is not overridden.
        sizes, peers: The defaults of the command line.
        device_peers: The default peers on a device; None: the op is not measured there.
        engines: The first is the default.
        peer_makers: The makers by peer. Every op also has ``ours:key=value``, itself with other
            options.
        assumptions: Unmeasured assumptions of the figures, kept in the file.
    """

    name: str
    help: str = ""
    make: Make
    sizes: tuple[str, ...]
    peers: tuple[str, ...] = ()
    device_peers: tuple[str, ...] | None = None
    engines: tuple[str, ...] = ("scan",)
    peer_makers: ClassVar[Mapping[str, Make]] = {}
    assumptions: Mapping[str, Any] = {}

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            OPS[cls.name] = cls()

    def workload(self, size: Size, options: Options) -> Workload:
        return make_workload(size, options)

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        """Measures all sizes and adds to ``skipped`` the reason for each peer that is left out."""
        options = replace(options, engine=options.engine or self.engines[0])
        peers = options.peers
        if peers is None:
            peers = self.peers if options.device == "cpu" else self.device_peers or ()
        for size in self.select_sizes(options):
            contestants: list[Any] = []  # first frees the previous size's contestants
            workload = self.workload(size, options)
            for name in ("ours", *peers):
                make, changed = self._find_maker(name, options)
                if name not in skipped:  # a peer left out at one size stays out
                    with self.skip_unavailable(name, skipped):
                        contestants.append(make(workload, changed))
                        contestants[-1].name = name
            yield self.compare(contestants, workload, options)

    def select_sizes(self, options: Options) -> tuple[Size, ...]:
        return options.sizes or tuple(Size.parse(text) for text in self.sizes)

    def _find_maker(self, name: str, options: Options) -> tuple[Make, Options]:
        """Returns the contestant's maker and its options."""
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
    def skip_unavailable(self, name: str, skipped: Skipped) -> Iterator[None]:
        """Skips a peer that cannot take part, with the reason; our contestant must take part."""
        try:
            yield
        except UnavailableError as error:
            if name == "ours":
                raise
            skipped[name] = str(error)

    def compare(self, contestants: list[Any], workload: Workload, options: Options) -> Result:
        """Measures the contestants, ours first, at one size."""
        measure_contestants = measure.measure if options.device == "cpu" else device.measure
        measurement = measure_contestants(contestants, workload.steps, options)
        details = {contestant.name: contestant.detail for contestant in contestants}
        return measure.compare(workload, options, details, measurement)
