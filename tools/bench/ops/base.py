"""Defines the base class of the ops, which are the operations that can be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from tools.bench import device, measure
from tools.bench.data import Workload, make_workload
from tools.bench.options import BenchError, Options, Size, UnavailableError

Maker = Callable[[Workload, Options], Any]
"""Creates an implementation; raises UnavailableError if it cannot run here."""
Result = dict[str, Any]
"""The entry of one size or set in the results file."""
SkipReasons = dict[str, str]
"""By peer that was left out: the reason."""
OPS: dict[str, Op] = {}
"""The instances of all subclasses with a name, by name."""


class Op:
    """An operation to measure: our implementation and its peers.

    Attributes:
        name: Name on the command line.
        help: Description in one line.
        make: Creates our implementation; not needed if ``run`` is overridden.
        sizes, peers: Defaults of the command line.
        device_peers: Default peers on a device; None if the op is not measured on devices.
        engines: Accepted values of the option ``engine``, the default first.
        peer_makers: Functions that create the peers. Every op also has the peer ``ours:key=value``,
            which is our implementation with other options.
        assumptions: What the results assume without a measurement; written to the results file.
    """

    name: str
    help: str = ""
    make: Maker
    sizes: tuple[str, ...]
    peers: tuple[str, ...] = ()
    device_peers: tuple[str, ...] | None = None
    engines: tuple[str, ...] = ("scan",)
    peer_makers: ClassVar[Mapping[str, Maker]] = {}
    assumptions: Mapping[str, Any] = {}

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            OPS[cls.name] = cls()

    def prepare_workload(self, size: Size, options: Options) -> Workload:
        return make_workload(size, options)

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        """Measures all sizes. For each peer that is left out, adds the reason to
        ``skip_reasons``."""
        options = replace(options, engine=options.engine or self.engines[0])
        peers = options.peers
        if peers is None:
            peers = self.peers if options.device == "cpu" else self.device_peers or ()
        for size in self.select_sizes(options):
            implementations: list[Any] = []  # frees the implementations of the previous size
            workload = self.prepare_workload(size, options)
            for name in ("ours", *peers):
                make, own_options = self._find_maker(name, options)
                if name not in skip_reasons:  # a peer that is left out at one size stays out
                    with self.skip_unavailable(name, skip_reasons):
                        implementations.append(make(workload, own_options))
                        implementations[-1].name = name
            yield self.compare(implementations, workload, options)

    def select_sizes(self, options: Options) -> tuple[Size, ...]:
        return options.sizes or tuple(Size.parse(text) for text in self.sizes)

    def _find_maker(self, name: str, options: Options) -> tuple[Maker, Options]:
        """Returns the function that creates an implementation, and the options for it."""
        if name.partition(":")[0] == "ours":
            if name != "ours":
                options = options.apply_changes(name.removeprefix("ours:"))
            engine = options.engine
            if engine not in self.engines:
                known = ", ".join(self.engines)
                raise BenchError(f"{self.name}: engine: expected one of {known}, got {engine}")
            if options.is_ladder and (engine != "index" or options.device != "cpu"):
                setting = f"{engine} on {options.device}"
                raise BenchError(f"{self.name}: a ladder needs engine index on cpu, got {setting}")
            return self.make, options
        if name in self.peer_makers:
            return self.peer_makers[name], options
        known = ", ".join([*self.peer_makers, "ours:key=value"])
        raise BenchError(f"{self.name}: peer {name!r}: expected one of {known}")

    @contextmanager
    def skip_unavailable(self, name: str, skip_reasons: SkipReasons) -> Iterator[None]:
        """If the peer raises UnavailableError, records the reason. Our implementation must run."""
        try:
            yield
        except UnavailableError as error:
            if name == "ours":
                raise
            skip_reasons[name] = str(error)

    def compare(self, implementations: list[Any], workload: Workload, options: Options) -> Result:
        """Measures the implementations at one size; the first is ours."""
        measure_implementations = measure.measure if options.device == "cpu" else device.measure
        measurement = measure_implementations(implementations, workload.steps, options)
        details = {implementation.name: implementation.detail for implementation in implementations}
        return measure.make_result(workload, options, details, measurement)
