"""Contains step times of the target model, by batch size and by number of verified tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngram_npu.errors import InputError, suggest_similar, to_one_line

FORMAT = "ngram_npu.cost/1"
"""The format of a file of step times."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class VerificationCost:
    """Step times by batch size and number of verified tokens.

    Attributes:
        name: Origin of the times, for reports.
        tables: By batch size, the numbers of tokens verified in a step (all requests together,
            ascending) and the times of such steps, in any unit. Times between and beyond these
            numbers are interpolated and extrapolated linearly.
        is_example: Whether the times are computed for an example machine.
        is_measured: Whether the times are measured on the user's server.
        same_for_any_batch: Whether the only table, of batch size 1, applies to all batch sizes.
        synchronous: Time that synchronous scheduling adds to each step with speculation, as a share
            of a step without drafts; 0 with asynchronous scheduling.
    """

    name: str
    tables: Mapping[int, tuple[tuple[float, ...], tuple[float, ...]]]
    is_example: bool = False
    is_measured: bool = False
    same_for_any_batch: bool = False
    synchronous: float = 0.0

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.tables))

    def select_batch_sizes(self, batch_sizes: Sequence[int]) -> VerificationCost:
        """Returns only the step times of the given batch sizes.

        Raises:
            InputError: A batch size has no step times.
        """
        missing = [size for size in batch_sizes if size not in self.tables]
        if missing:
            known = ", ".join(map(str, self.batch_sizes))
            raise InputError(f"batch size {missing[0]}: {self.name} has step times for {known}")
        tables = {size: self.tables[size] for size in batch_sizes}
        return replace(self, tables=tables)

    def compute_times(self, batch: int, verified: FloatArray) -> FloatArray:
        """Returns the times of steps of `batch` requests that verify `verified` tokens in total."""
        tokens, times = (np.asarray(column, np.float64) for column in self.tables[batch])
        interpolated = np.interp(verified, tokens, times)
        slope = (times[-1] - times[-2]) / (tokens[-1] - tokens[-2])
        seconds: FloatArray = interpolated + np.maximum(0, verified - tokens[-1]) * max(0.0, slope)
        return seconds

    def make_relative_times(self, lengths: Sequence[int]) -> Callable[[int], dict[int, float]]:
        """Returns a function that maps a batch size to the time of a step with each of the draft
        lengths, relative to a step without drafts. `lengths` must begin with 0. The function uses
        the step times of the nearest batch size that has step times."""

        def find_relative_times(batch: int) -> dict[int, float]:
            nearest = min(self.tables, key=lambda size: abs(math.log(size / batch)))
            times = self.compute_times(nearest, nearest * (1 + np.asarray(lengths, np.float64)))
            return dict(zip(lengths, (times / times[0]).tolist(), strict=True))

        return find_relative_times

    def compute_token_cost(self, max_batch: int, k: int) -> tuple[float, int]:
        """Returns the time to verify one more token of each request, as a share of a step without
        drafts (0 to 1, the mean over `k` tokens), and the batch size with this cost.

        The batch size is the largest one that has step times and is at most `max_batch`, otherwise
        the smallest one that has step times. A token costs most at the largest batch size, so
        drafts that reduce the time per token there also do so at smaller batch sizes.
        """
        batch = max((size for size in self.tables if size <= max_batch), default=min(self.tables))
        without_drafts, with_drafts = self.compute_times(batch, batch * np.array([1.0, 1.0 + k]))
        return min(1.0, max(0.0, float(with_drafts / without_drafts - 1) / k)), batch

    def compute_speedup(self, batch: int, tokens: Any, counts: Any) -> FloatArray:
        """Returns the tokens per second, relative to the tokens per second without speculation.

        Requests of a batch draft independently of each other. So the step time is averaged over the
        distribution of the number of tokens that a batch verifies, instead of using the time of a
        step of average size.

        Args:
            batch: Number of requests in a step.
            tokens: [R], number of generated tokens of each request.
            counts: [R, K+1], number of steps of each request that drafted 0, 1, ..., K tokens.

        Returns:
            [R], the speed-up of a batch of such requests; 1 for a request without a step.
        """
        counts = np.asarray(counts, np.float64)
        steps = counts.sum(axis=1)
        distribution = counts / np.maximum(steps, 1)[:, None]
        size = batch * (counts.shape[1] - 1) + 1
        if batch > 1:  # the sum of `batch` independent requests: a convolution by FFT
            transform = np.fft.rfft(distribution, size, axis=1) ** batch
            distribution = np.maximum(0, np.fft.irfft(transform, size, axis=1))
        times = self.compute_times(batch, batch + np.arange(size, dtype=np.float64))
        per_step = np.asarray(tokens, np.float64) / np.maximum(steps, 1)
        mean_time = distribution @ times + self.synchronous * times[0]
        speedup: FloatArray = per_step * times[0] / np.where(steps > 0, mean_time, 1)
        return np.where(steps > 0, speedup, 1.0)


def share_of_a_step(share: float) -> VerificationCost:
    """Returns step times for any batch size: a drafted token takes `share` of a step without
    drafts.

    The speed-up is then tokens per step / (1 + share * drafted tokens per step).
    """
    return VerificationCost(
        f"{share:g} of a step per drafted token",
        {1: ((1, 2), (1, 1 + share))},
        same_for_any_batch=True,
    )


def load_cost(name: str) -> VerificationCost:
    """Loads one of `EXAMPLES`, or a file of step times.

    Raises:
        InputError: The file cannot be read, has another format, or contains invalid step times.
    """
    if name in EXAMPLES:
        return _compute_example(name)
    path = Path(name)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(EXAMPLES)
        raise InputError(
            f"{path}: not a file of step times: {to_one_line(error):.200}; make one with "
            f"`ngram-npu measure-cost`, or use an example: {known}{suggest_similar(name, EXAMPLES)}"
        ) from error
    steps: dict[int, dict[float, float]] = {}
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT!r}, got {data['format']!r}")
        for step in data["steps"]:
            batch, verified, seconds = int(step["batch"]), step["verified"], step["seconds"]
            if not (batch >= 1 and verified >= batch and 0 < seconds < float("inf")):
                raise ValueError(
                    f"expected batch >= 1, verified >= batch, seconds > 0, got {json.dumps(step)}"
                )
            steps.setdefault(batch, {})[float(verified)] = float(seconds)
        for batch, times in steps.items():
            if len(times) < 2 or min(times) != batch:
                numbers = ", ".join(f"{number:g}" for number in sorted(times))
                raise ValueError(
                    f"batch size {batch}: expected a step without drafts (verified = {batch}) and "
                    f"a step with drafts, got verified = {numbers}"
                )
        if not steps:
            raise ValueError("expected at least one step, got no steps")
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a file of step times: {to_one_line(error):.200}") from error
    tables = {
        batch: (tuple(sorted(times)), tuple(times[v] for v in sorted(times)))
        for batch, times in steps.items()
    }
    return VerificationCost(f"step times of {path.name}", tables, is_measured=True)


# Examples


@dataclass(frozen=True)
class _Machine:
    """A model on a machine, with rates from data sheets; `kv_bytes` is for 1k tokens of context."""

    description: str
    parameters: float
    bytes_per_s: float
    operations_per_s: float
    kv_bytes: float
    batches: tuple[int, ...]


_ABOUT = "{} parameters in bf16, 1k tokens of context, {} of {} TB/s and {} TFLOP/s"
EXAMPLES = {
    "example-8b-h100": _Machine(
        _ABOUT.format("8B", "one GPU", 3.35, 990),
        *(8e9, 3.35e12, 990e12, 1024 * 131072),
        batches=(1, 4, 16, 64, 256),
    ),
    "example-8b-l4": _Machine(
        _ABOUT.format("8B", "one GPU", 0.3, 121),
        *(8e9, 0.3e12, 121e12, 1024 * 131072),
        batches=(1, 4, 16, 48),
    ),
    "example-70b-4xh100": _Machine(
        _ABOUT.format("70B", "four GPUs", 3.35, 990) + " each",
        *(70e9, 4 * 3.35e12, 4 * 990e12, 1024 * 327680),
        batches=(1, 4, 16, 64, 256),
    ),
}
"""Machines for which step times are computed, not measured. A step takes 2 ms, plus the longer of
the times for reading the weights and for multiplying, plus the time for reading the KV cache, at
half of the data sheet's rates. Each drafted token of a request adds 1 % of a step without drafts,
because kernels and sampler process more than one token."""

_EFFICIENCY = 0.5
_OVERHEAD_S = 0.002
_DRAFT_TOKEN_SHARE = 0.01


def _compute_example(name: str) -> VerificationCost:
    machine = EXAMPLES[name]
    tables = {}
    for batch in machine.batches:
        drafted = np.linspace(0, 64, 129)
        verified = batch * (1 + drafted)
        multiply = 2 * machine.parameters * verified / machine.operations_per_s
        weights = 2 * machine.parameters / machine.bytes_per_s
        cache = batch * machine.kv_bytes / machine.bytes_per_s
        times = _OVERHEAD_S + (np.maximum(weights, multiply) + cache) / _EFFICIENCY
        times += _DRAFT_TOKEN_SHARE * times[0] * drafted
        tables[batch] = (tuple(verified.tolist()), tuple(times.tolist()))
    description = f'the EXAMPLE "{name}", computed and not measured: {machine.description}'
    return VerificationCost(description, tables, is_example=True)
