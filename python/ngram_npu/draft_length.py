"""Chooses the number of draft tokens per step from measured step times and acceptance.

An engine that verifies K tokens of every request, whether or not they were found, loses time at
batch sizes where verification is expensive or on text that does not repeat. The controller
maximizes goodput, as TurboSpec (Liu et al., arXiv:2406.14066) defines it: generated tokens per
second, for a batch of b requests

    goodput(b, K) = b * tokens_per_step(K) / step_time(b, K).

`tokens_per_step(K)` is a property of the traffic and shared by all batch sizes. `step_time(b, K)`
is a property of the deployment and is measured per range of batch sizes, from 2**(i-1) + 1 to 2**i.
Only ratios of times within one range are compared, and only of steps that follow each other
closely, because step times also drift with the length of the contexts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ngram_npu.draft_acceptance import Acceptance

BURST_STEPS = 4
"""Steps in a row that try another length. The first follows a change, so its time is not used."""
FIRST_STEPS = 300
FIRST_SHARE, LATER_SHARE = 0.08, 0.01
"""Largest share of a range's first 300 steps, and of its later steps, that try other lengths."""
MAX_LOST_SHARE = 0.004
"""Largest share of time that later trials may lose by what is known about the lengths they try."""
MIN_GAIN, MIN_GAIN_DOWN = 0.02, 0.005
"""Relative gains of goodput for which a longer and a shorter length replace the current one."""
UNKNOWN_ACCEPTANCE = 0.3
"""Assumed tokens per draft token of a length whose acceptance is unknown, so that it is tried."""
RECENT_STEPS = 16
MAX_BATCH_DIFFERENCE = 1 / 16
"""Only times of batch sizes that differ at most by this share are compared."""
MAX_SECONDS = 60.0
"""Longer step times are not used: the process was suspended, or the clock was set."""


@dataclass(frozen=True)
class Change:
    """A decision of the controller, for the log.

    Attributes:
        first, last: The range of batch sizes.
        before, after: Draft lengths.
        goodput: Of the new length, relative to no drafts.
        reason: Why, in one line.
    """

    first: int
    last: int
    before: int
    after: int
    goodput: float
    reason: str


@dataclass
class _Range:
    """A range of batch sizes, first to last.

    Attributes:
        lengths: The draft lengths that are allowed.
        length: The chosen one.
        steps: Number of observed steps.
        trial_steps: Of these, steps that tried another length.
        lost: Time that later trials are estimated to have lost, in steps of the chosen length.
        relative: By length, the step time relative to that of length 0.
        measured: By length, the number of trials, and the step of the last one.
        recent: Newest batch sizes and step times at the chosen length.
        trial: Length that is being tried; None: none.
        remaining: Steps that still have to be scheduled with it.
        times: Batch sizes and step times of the trial.
    """

    first: int
    last: int
    lengths: tuple[int, ...]
    length: int = 0
    steps: int = 0
    trial_steps: int = 0
    lost: float = 0.0
    relative: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    measured: dict[int, tuple[int, int]] = field(default_factory=dict)
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    trial: int | None = None
    remaining: int = 0
    times: list[tuple[int, float]] = field(default_factory=list)


class DraftLengthController:
    """Chooses the draft length for each range of batch sizes.

    An engine calls :meth:`observe_schedule` when it has scheduled a step and :meth:`observe_step`
    when the step is complete, with any number of steps in between. It reads the draft length for a
    batch from :attr:`table`. Tokens per step are observed through :attr:`acceptance`.

    Args:
        lengths: The lengths to choose from, ascending, beginning with 0.
        max_batch: The largest batch size.
        table: By batch size from 0 to `max_batch`, the length of the next drafts. The controller
            changes its elements in place.
        is_allowed: Whether a batch size may use a draft length. Length 0 is always allowed.
        relative_times: Known step times: maps a batch size to the times of `lengths` relative to
            that of length 0.
        on_change: Called with each decision.

    Raises:
        ValueError: `lengths` is not as described, or `table` is too short.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_batch: int,
        *,
        table: list[int] | None = None,
        is_allowed: Callable[[int, int], bool] = lambda batch, length: True,
        relative_times: Callable[[int], Mapping[int, float]] | None = None,
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        if len(lengths) < 2 or lengths[0] != 0 or sorted({*lengths}) != list(lengths):
            raise ValueError(
                f"DraftLengthController: lengths: expected 0 and further values, ascending, got "
                f"{list(lengths)}"
            )
        self.lengths = tuple(lengths)
        self.table = [0] * (max_batch + 1) if table is None else table
        if len(self.table) <= max_batch:
            raise ValueError(
                f"DraftLengthController: table: expected {max_batch + 1} elements, got "
                f"{len(self.table)}"
            )
        self.acceptance = Acceptance(lengths)
        self._on_change = on_change
        self._ranges: list[_Range] = []
        first = 1
        while first <= max_batch:
            last = min(1 << (first - 1).bit_length(), max_batch)
            allowed = tuple(k for k in self.lengths if k == 0 or is_allowed(last, k))
            self._ranges.append(_Range(first, last, allowed))
            first = last + 1
        for batches in self._ranges:
            if relative_times is not None:
                known = relative_times(batches.last)
                batches.relative |= {k: known[k] for k in batches.lengths[1:] if k in known}
            self._write(batches, 0)

    def observe_schedule(self, batch: int, length: int) -> None:
        """Counts a scheduled step of `batch` requests that drafts `length` tokens for the next."""
        batches = self._range(batch)
        if batches is None or batches.trial is None or length != batches.trial:
            return
        batches.remaining -= 1
        if batches.remaining <= 0:
            self._write(batches, batches.length)

    def observe_step(self, batch: int, length: int, seconds: float | None) -> None:
        """Counts a completed step of `batch` requests that verified `length` draft tokens each.

        Args:
            seconds: Its time; None if it is not comparable with that of other steps, for example
                because it contained a prefill or followed a step of another length.
        """
        batches = self._range(batch)
        if batches is None:
            return
        batches.steps += 1
        is_usable = seconds is not None and 0 < seconds < MAX_SECONDS
        if batches.trial is not None:
            if length == batches.trial:
                batches.trial_steps += 1
                if is_usable and seconds is not None:
                    batches.times.append((batch, seconds))
            elif batches.remaining <= 0 and (batches.times or length == batches.length):
                self._end_trial(batches)
        elif is_usable and seconds is not None and length == batches.length:
            batches.recent.append((batch, seconds))
        if batches.trial is None:
            if batches.steps % RECENT_STEPS == 0:
                self._decide(batches)
            self._begin_trial(batches)

    def _range(self, batch: int) -> _Range | None:
        number = (batch - 1).bit_length() if batch > 0 else -1
        return self._ranges[number] if 0 <= number < len(self._ranges) else None

    def _write(self, batches: _Range, length: int) -> None:
        end = min(batches.last + 1, len(self.table))
        self.table[batches.first : end] = [length] * (end - batches.first)

    def _goodput(self, batches: _Range, length: int) -> float | None:
        tokens, time = self.acceptance.tokens_per_step(length), batches.relative.get(length)
        return None if tokens is None or time is None else tokens / time

    def _begin_trial(self, batches: _Range) -> None:
        if len(batches.recent) < BURST_STEPS:
            return
        first = min(batches.steps, FIRST_STEPS)
        allowed = FIRST_SHARE * first + LATER_SHARE * (batches.steps - first)
        if batches.trial_steps + BURST_STEPS > allowed:
            return
        length = self._choose_trial(batches)
        if length is None:
            return
        batches.trial, batches.remaining, batches.times = length, BURST_STEPS, []
        self._write(batches, length)

    def _choose_trial(self, batches: _Range) -> int | None:
        """Returns the length to try next; None if trials would lose more time than allowed."""
        current = self._goodput(batches, batches.length) or 1.0
        times = self._expect_times(batches)
        best, best_priority = None, 0.0
        for length in batches.lengths:
            if length == batches.length:
                continue
            tokens = self.acceptance.tokens_per_step(length)
            if tokens is None:
                tokens = 1 + UNKNOWN_ACCEPTANCE * length
            loss = max(0.0, 1 - tokens / times[length] / current)
            lost = batches.lost + BURST_STEPS * loss * times[length] / times[batches.length]
            if batches.steps > FIRST_STEPS and lost > MAX_LOST_SHARE * batches.steps:
                continue
            trials, last = batches.measured.get(length, (0, 0))
            # A length that was never tried comes first. Others come the more seldom, the more a
            # trial loses.
            age = batches.steps - last if trials else 10 * batches.steps
            priority = age / (1 + 20 * loss)
            if priority > best_priority:
                best, best_priority = length, priority
        return best

    def _expect_times(self, batches: _Range) -> dict[int, float]:
        """Returns the relative step time of each length. A longer draft is never verified faster,
        so for an unknown time this is the time of the longest shorter length."""
        times: dict[int, float] = {}
        longest = 1.0
        for length in batches.lengths:
            longest = times[length] = batches.relative.get(length, longest)
        return times

    def _end_trial(self, batches: _Range) -> None:
        length, ratios = batches.trial, _compare_times(batches.times, batches.recent)
        batches.trial = None
        self._write(batches, batches.length)
        if length is None or not ratios:
            return
        current = batches.relative[batches.length]
        measured = current * median(ratios)
        trials, _ = batches.measured.get(length, (0, 0))
        before = batches.relative.get(length)
        weight = 1 / min(trials + 1, 4)
        new = measured if before is None or not trials else before + weight * (measured - before)
        # Only ratios count. Length 0 stays at 1, and so the current length moves instead of it.
        if length == 0:
            batches.relative[batches.length] = current / new
        else:
            batches.relative[length] = new
        batches.measured[length] = trials + 1, batches.steps
        tokens = self.acceptance.tokens_per_step(length)
        if batches.steps > FIRST_STEPS and tokens is not None:
            loss = 1 - (tokens / new) / (self._goodput(batches, batches.length) or 1.0)
            batches.lost += BURST_STEPS * max(0.0, loss) * new / current
        self._decide(batches)

    def _decide(self, batches: _Range) -> None:
        current = self._goodput(batches, batches.length)
        best, best_goodput = batches.length, current if current is not None else 0.0
        for length in batches.lengths:
            goodput = self._goodput(batches, length)
            if goodput is None or length == batches.length:
                continue
            gain = MIN_GAIN_DOWN
            if length > batches.length:
                gain = max(MIN_GAIN, self.acceptance.relative_error(length))
            is_gain = current is None or goodput > current * (1 + gain)
            if is_gain and goodput > best_goodput:
                best, best_goodput = length, goodput
        if best == batches.length:
            return
        change = Change(
            batches.first,
            batches.last,
            batches.length,
            best,
            best_goodput,
            f"goodput {best_goodput:.3f} of no drafts, before "
            + ("unknown" if current is None else f"{current:.3f}"),
        )
        batches.length = best
        batches.recent.clear()
        self._write(batches, best)
        if self._on_change is not None:
            self._on_change(change)


def _compare_times(
    times: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]
) -> list[float]:
    """Returns each time over the median of the other times with about the same batch size; those
    without such times are left out."""
    ratios = []
    for batch, seconds in times:
        limit = MAX_BATCH_DIFFERENCE * batch
        similar = [time for other, time in others if abs(other - batch) <= limit]
        if similar:
            ratios.append(seconds / median(similar))
    return ratios
