"""Chooses the number of draft tokens per step from measured step times and acceptance.

An engine that verifies K draft tokens of every request, found by a lookup or padded, loses time at
batch sizes where verification is expensive, and on text that does not repeat. The controller
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
"""Consecutive steps of a trial. The first follows a change of length, so its time is not used."""
FIRST_STEPS = 300
FIRST_SHARE, LATER_SHARE = 0.08, 0.01
"""Maximum share of the first `FIRST_STEPS` steps, and of later steps, that try other lengths."""
MAX_LOST_SHARE = 0.004
"""Maximum share of the time that trials after the first `FIRST_STEPS` steps may lose."""
MIN_GAIN_OF_LONGER, MIN_GAIN_OF_SHORTER = 0.02, 0.005
"""Minimum relative gains of goodput for replacing the length by a longer and a shorter one."""
UNKNOWN_ACCEPTANCE = 0.3
"""Assumed tokens per draft token of a length whose acceptance is unknown, so that it is tried."""
RECENT_STEPS = 16
"""Number of newest step times that are kept per range, and of steps between two decisions."""
MAX_BATCH_DIFFERENCE = 1 / 16
"""Maximum relative difference of two batch sizes whose times are compared."""
MAX_SECONDS = 60.0
"""Step times from this value on are not used: the process was suspended, or the clock was set."""


@dataclass(frozen=True)
class Change:
    """A decision of the controller, for the log.

    Attributes:
        first, last: First and last batch size of the range.
        before, after: Draft lengths before and after the decision.
        goodput: Goodput of the new length, relative to no drafts.
        reason: Reason of the decision, in one line.
    """

    first: int
    last: int
    before: int
    after: int
    goodput: float
    reason: str


@dataclass
class _Range:
    """A range of batch sizes.

    Attributes:
        first, last: First and last batch size of the range.
        lengths: The allowed draft lengths.
        length: The chosen draft length.
        steps: Number of observed steps.
        trial_steps: Number of observed steps that tried another length.
        lost_steps: Time that trials after the first `FIRST_STEPS` steps are estimated to have lost,
            as a number of steps of the chosen length.
        relative_times: By length, the step time relative to that of length 0.
        trials: By length, the number of trials, and the value of `steps` at the last trial.
        recent: Newest batch sizes and step times at the chosen length.
        trial_length: The length that is being tried; None if there is no trial.
        remaining_steps: Number of steps of the trial that still have to be scheduled.
        trial_times: Batch sizes and step times of the trial.
    """

    first: int
    last: int
    lengths: tuple[int, ...]
    length: int = 0
    steps: int = 0
    trial_steps: int = 0
    lost_steps: float = 0.0
    relative_times: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    trials: dict[int, tuple[int, int]] = field(default_factory=dict)
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    trial_length: int | None = None
    remaining_steps: int = 0
    trial_times: list[tuple[int, float]] = field(default_factory=list)


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
        is_allowed: Called with a batch size and a draft length; returns whether this batch size may
            use this length. Length 0 is always allowed.
        relative_times: Maps a batch size to the known step times of `lengths`, relative to that of
            length 0.
        on_change: Called with each decision.

    Raises:
        ValueError: `lengths` is not ascending from 0, or `table` is too short.
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
            allowed_lengths = tuple(k for k in self.lengths if k == 0 or is_allowed(last, k))
            self._ranges.append(_Range(first, last, allowed_lengths))
            first = last + 1
        for sizes in self._ranges:
            if relative_times is not None:
                known_times = relative_times(sizes.last)
                known_lengths = known_times.keys() & set(sizes.lengths[1:])
                sizes.relative_times |= {k: known_times[k] for k in known_lengths}
            self._set_length(sizes, 0)

    def observe_schedule(self, batch: int, length: int) -> None:
        """Counts a scheduled step of `batch` requests after which `length` tokens are drafted."""
        sizes = self._find_range(batch)
        if sizes is None or sizes.trial_length is None or length != sizes.trial_length:
            return
        sizes.remaining_steps -= 1
        if sizes.remaining_steps <= 0:
            self._set_length(sizes, sizes.length)

    def observe_step(self, batch: int, length: int, seconds: float | None) -> None:
        """Counts a completed step of `batch` requests that verified `length` draft tokens each.

        Args:
            seconds: Time of the step; None if it is not comparable with that of other steps, for
                example because the step contained a prefill or followed one of another length.
        """
        sizes = self._find_range(batch)
        if sizes is None:
            return
        sizes.steps += 1
        is_usable = seconds is not None and 0 < seconds < MAX_SECONDS
        if sizes.trial_length is not None:
            if length == sizes.trial_length:
                sizes.trial_steps += 1
                if is_usable and seconds is not None:
                    sizes.trial_times.append((batch, seconds))
            elif sizes.remaining_steps <= 0 and (sizes.trial_times or length == sizes.length):
                self._end_trial(sizes)
        elif is_usable and seconds is not None and length == sizes.length:
            sizes.recent.append((batch, seconds))
        if sizes.trial_length is None:
            if sizes.steps % RECENT_STEPS == 0:
                self._choose_length(sizes)
            self._begin_trial(sizes)

    def _find_range(self, batch: int) -> _Range | None:
        number = (batch - 1).bit_length() if batch > 0 else -1
        return self._ranges[number] if 0 <= number < len(self._ranges) else None

    def _set_length(self, sizes: _Range, length: int) -> None:
        end = min(sizes.last + 1, len(self.table))
        self.table[sizes.first : end] = [length] * (end - sizes.first)

    def _estimate_goodput(self, sizes: _Range, length: int) -> float | None:
        tokens, time = (
            self.acceptance.estimate_tokens_per_step(length),
            sizes.relative_times.get(length),
        )
        return None if tokens is None or time is None else tokens / time

    def _begin_trial(self, sizes: _Range) -> None:
        if len(sizes.recent) < BURST_STEPS:
            return
        first = min(sizes.steps, FIRST_STEPS)
        max_trial_steps = FIRST_SHARE * first + LATER_SHARE * (sizes.steps - first)
        if sizes.trial_steps + BURST_STEPS > max_trial_steps:
            return
        length = self._choose_trial(sizes)
        if length is None:
            return
        sizes.trial_length, sizes.remaining_steps, sizes.trial_times = length, BURST_STEPS, []
        self._set_length(sizes, length)

    def _choose_trial(self, sizes: _Range) -> int | None:
        """Returns the length to try next; None if trials would lose more time than allowed."""
        current_goodput = self._estimate_goodput(sizes, sizes.length) or 1.0
        times = self._expect_times(sizes)
        best_length, best_priority = None, 0.0
        for length in sizes.lengths:
            if length == sizes.length:
                continue
            tokens = self.acceptance.estimate_tokens_per_step(length)
            if tokens is None:
                tokens = 1 + UNKNOWN_ACCEPTANCE * length
            loss = max(0.0, 1 - tokens / times[length] / current_goodput)
            lost_steps = sizes.lost_steps + BURST_STEPS * loss * times[length] / times[sizes.length]
            if sizes.steps > FIRST_STEPS and lost_steps > MAX_LOST_SHARE * sizes.steps:
                continue
            trials, last_step = sizes.trials.get(length, (0, 0))
            # Lengths that were never tried come first. Lengths that lose more time come later.
            age = sizes.steps - last_step if trials else 10 * sizes.steps
            priority = age / (1 + 20 * loss)
            if priority > best_priority:
                best_length, best_priority = length, priority
        return best_length

    def _expect_times(self, sizes: _Range) -> dict[int, float]:
        """Returns the relative step time of each length. A longer draft is never verified faster
        than a shorter one, so an unknown time is estimated as that of the next shorter length."""
        times: dict[int, float] = {}
        time = 1.0
        for length in sizes.lengths:
            time = times[length] = sizes.relative_times.get(length, time)
        return times

    def _end_trial(self, sizes: _Range) -> None:
        length, ratios = sizes.trial_length, _compare_times(sizes.trial_times, sizes.recent)
        sizes.trial_length = None
        self._set_length(sizes, sizes.length)
        if length is None or not ratios:
            return
        current_time = sizes.relative_times[sizes.length]
        measured = current_time * median(ratios)
        trials, _ = sizes.trials.get(length, (0, 0))
        old_time = sizes.relative_times.get(length)
        weight = 1 / min(trials + 1, 4)
        new_time = measured
        if old_time is not None and trials:
            new_time = old_time + weight * (measured - old_time)
        # Only ratios of times are used. The relative time of length 0 is always 1, so a new time of
        # length 0 changes the relative time of the current length instead.
        if length == 0:
            sizes.relative_times[sizes.length] = current_time / new_time
        else:
            sizes.relative_times[length] = new_time
        sizes.trials[length] = trials + 1, sizes.steps
        tokens = self.acceptance.estimate_tokens_per_step(length)
        if sizes.steps > FIRST_STEPS and tokens is not None:
            loss = 1 - (tokens / new_time) / (self._estimate_goodput(sizes, sizes.length) or 1.0)
            sizes.lost_steps += BURST_STEPS * max(0.0, loss) * new_time / current_time
        self._choose_length(sizes)

    def _choose_length(self, sizes: _Range) -> None:
        current_goodput = self._estimate_goodput(sizes, sizes.length)
        best_length, best_goodput = sizes.length, current_goodput or 0.0
        for length in sizes.lengths:
            goodput = self._estimate_goodput(sizes, length)
            if goodput is None or length == sizes.length:
                continue
            gain = MIN_GAIN_OF_SHORTER
            if length > sizes.length:
                gain = max(MIN_GAIN_OF_LONGER, self.acceptance.estimate_relative_error(length))
            is_gain = current_goodput is None or goodput > current_goodput * (1 + gain)
            if is_gain and goodput > best_goodput:
                best_length, best_goodput = length, goodput
        if best_length == sizes.length:
            return
        change = Change(
            sizes.first,
            sizes.last,
            sizes.length,
            best_length,
            best_goodput,
            f"goodput {best_goodput:.3f} of no drafts, before "
            + ("unknown" if current_goodput is None else f"{current_goodput:.3f}"),
        )
        sizes.length = best_length
        sizes.recent.clear()
        self._set_length(sizes, best_length)
        if self._on_change is not None:
            self._on_change(change)


def _compare_times(
    times: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]
) -> list[float]:
    """Returns the ratio of each time to the median of those `others` that have about the same batch
    size. A time without such others has no ratio."""
    ratios = []
    for batch, seconds in times:
        limit = MAX_BATCH_DIFFERENCE * batch
        similar = [time for other, time in others if abs(other - batch) <= limit]
        if similar:
            ratios.append(seconds / median(similar))
    return ratios
