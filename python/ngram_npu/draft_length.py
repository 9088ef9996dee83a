"""Chooses the number of draft tokens per step from measured step times and acceptance.

An engine that verifies K draft tokens of every request, found by a lookup or padded, loses time at
batch sizes where verification is expensive, and on text that does not repeat. The controller
maximizes goodput, as TurboSpec (Liu et al., arXiv:2406.14066) defines it: generated tokens per
second, for a batch of b requests

    goodput(b, K) = b * tokens_per_step(K) / step_time(b, K).

`tokens_per_step(K)` is a property of the traffic and shared by all batch sizes. `step_time(b, K)`
is a property of the deployment and is measured per range of batch sizes, from 2**(i-1) + 1 to 2**i.

Each range has a chosen length. Both factors change while an engine runs, so that a *burst* of a few
steps tries another length from time to time. The next burst of a length comes when the time that it
is expected to lose is a small share of the time since the last one. So a length is tried more and
more rarely the worse it is, but never given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

from ngram_npu.draft_acceptance import Acceptance

BURST_REQUESTS, MIN_BURST_STEPS, MAX_BURST_STEPS = 32, 4, 8
"""Number of requests that a burst verifies, within these bounds of its number of steps."""
FIRST_BURSTS, FIRST_INTERVAL = 3, 16
"""Number of bursts of a length before its result decides when it is tried again, and the minimum
number of steps between two bursts of any length."""
MIN_INTERVAL, MAX_INTERVAL = 64, 1000
"""Bounds of the number of steps between two later bursts of a length."""
LOSS_SHARE = 0.0125
"""Maximum share of the time that the later bursts of a length are expected to lose."""
MIN_GAIN = 0.02
"""Minimum relative gain of goodput for choosing another length."""
CHOICE_STEPS = 16
"""Number of steps between two decisions in a range."""
MAX_REFERENCES, MIN_REFERENCES, MAX_REFERENCE_AGE = 16, 4, 300
"""Maximum and minimum number of times of the chosen length with which a burst's times are compared,
and the maximum number of steps since then."""
MAX_BATCH_DIFFERENCE = 1 / 16
"""Maximum relative difference of the numbers of decoding requests in two compared steps."""
MAX_RATIOS, MAX_CONTRADICTION = 5, 0.25
"""Number of newest bursts whose times are used. If the newest two differ from the median by more
than this relative difference, in the same direction, only these two."""
KIND_STEPS = 512
"""Number of steps after which the weight of a kind of steps is halved."""
MAX_SECONDS = 60.0
"""Step times from this value on are not used: the process was suspended, or the clock was set."""


@dataclass(frozen=True)
class Change:
    """A decision of the controller, for the log.

    Attributes:
        first, last: First and last batch size of the range.
        before, after: Draft lengths before and after the decision.
        gain: Expected goodput of the new length, relative to the one before.
        goodput: Expected goodput of the new length, relative to no drafts.
    """

    first: int
    last: int
    before: int
    after: int
    gain: float
    goodput: float


@dataclass
class _Range:
    """A range of batch sizes.

    Attributes:
        first, last: First and last batch size of the range.
        lengths: The allowed draft lengths.
        length: The chosen draft length.
        steps: Number of observed steps.
        num_times: Number of them whose time was used.
        references: By kind of step, the newest steps with the chosen length: value of `steps`,
            number of decoding requests, seconds.
        kind_weights: By kind of step, the number of steps, with decaying weights.
        ratios: By draft length and kind of step, the step times of the newest bursts, relative to
            those of the chosen length.
        burst_ratios: The same for each step of the burst that is being observed.
        bursts: By draft length, the number of bursts, and the value of `steps` at the last one.
        remaining_steps: Number of steps of a burst that still have to be scheduled.
        next_burst: Value of `steps` from which on the next burst may begin.
    """

    first: int
    last: int
    lengths: tuple[int, ...]
    length: int = 0
    steps: int = 0
    num_times: int = 0
    references: dict[Hashable, deque[tuple[int, int, float]]] = field(default_factory=dict)
    kind_weights: dict[Hashable, float] = field(default_factory=dict)
    ratios: dict[tuple[int, Hashable], deque[float]] = field(default_factory=dict)
    burst_ratios: dict[tuple[int, Hashable], list[float]] = field(default_factory=dict)
    bursts: dict[int, tuple[int, int]] = field(default_factory=dict)
    remaining_steps: int = 0
    next_burst: int = FIRST_INTERVAL

    @property
    def burst_steps(self) -> int:
        return min(max(MIN_BURST_STEPS, BURST_REQUESTS // self.last), MAX_BURST_STEPS)


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
        self.acceptance = Acceptance(lengths[-1])
        self._on_change = on_change
        self._ranges: list[_Range] = []
        first = 1
        while first <= max_batch:
            last = min(1 << (first - 1).bit_length(), max_batch)
            allowed_lengths = tuple(k for k in self.lengths if k == 0 or is_allowed(last, k))
            self._ranges.append(_Range(first, last, allowed_lengths))
            first = last + 1
        for sizes in self._ranges:
            self._set_length(sizes, 0)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First and last batch size of each range."""
        return [(sizes.first, sizes.last) for sizes in self._ranges]

    def observe_schedule(self, batch: int) -> None:
        """Counts a scheduled step of `batch` requests, for which the table was read."""
        sizes = self._find_range(batch)
        if sizes is not None and sizes.remaining_steps:
            sizes.remaining_steps -= 1
            if not sizes.remaining_steps:
                self._set_length(sizes, sizes.length)

    def observe_step(
        self,
        batch: int,
        length: int,
        seconds: float | None,
        *,
        num_decodes: int | None = None,
        kind: Hashable = None,
    ) -> None:
        """Counts a completed step of `batch` requests that verified `length` draft tokens each.

        Args:
            seconds: Time of the step; None if it is not known, or the step before had another
                draft length.
            num_decodes: Number of requests that were decoding (default: all).
            kind: What else the step did. Only times of equal kinds are compared.
        """
        sizes = self._find_range(batch)
        if sizes is None:
            return
        sizes.steps += 1
        if seconds is not None and 0 < seconds < MAX_SECONDS and length in sizes.lengths:
            num_decodes = batch if num_decodes is None else num_decodes
            self._observe_time(sizes, length, seconds, num_decodes, kind)
        if sizes.steps % CHOICE_STEPS == 0 and not sizes.remaining_steps:
            self._choose_length(sizes)
            if sizes.steps >= sizes.next_burst:
                self._begin_burst(sizes)

    def describe_measurements(self) -> str:
        """Returns what was measured in the range with the most steps, in one line."""
        sizes = max(self._ranges, key=lambda sizes: sizes.steps)
        results = []
        for length in sizes.lengths[1:]:
            tokens = self.acceptance.estimate_tokens_per_step(length)
            ratio = self._estimate_time(sizes, length)
            results.append(
                f"with {length} draft tokens a step takes "
                f"{'an unknown time' if ratio is None else f'{ratio:.2f} times as long'} and "
                f"generates {'unknown' if tokens is None else f'{tokens:.2f}'} tokens per request"
            )
        return (
            f"batch sizes {sizes.first}-{sizes.last}: "
            f"{'; '.join(results) or 'no other length is possible'}; the times of "
            f"{sizes.num_times} of {sizes.steps} steps were used"
        )

    def _find_range(self, batch: int) -> _Range | None:
        number = (batch - 1).bit_length() if batch > 0 else -1
        return self._ranges[number] if 0 <= number < len(self._ranges) else None

    def _set_length(self, sizes: _Range, length: int) -> None:
        end = min(sizes.last + 1, len(self.table))
        self.table[sizes.first : end] = [length] * (end - sizes.first)

    def _observe_time(
        self, sizes: _Range, length: int, seconds: float, num_decodes: int, kind: Hashable
    ) -> None:
        if sizes.num_times % KIND_STEPS == KIND_STEPS - 1:
            sizes.kind_weights = {k: weight / 2 for k, weight in sizes.kind_weights.items()}
        sizes.num_times += 1
        sizes.kind_weights[kind] = sizes.kind_weights.get(kind, 0.0) + 1
        references = sizes.references.setdefault(kind, deque(maxlen=MAX_REFERENCES))
        if length == sizes.length:
            references.append((sizes.steps, num_decodes, seconds))
            self._end_burst(sizes)
            return
        oldest, limit = sizes.steps - MAX_REFERENCE_AGE, MAX_BATCH_DIFFERENCE * num_decodes
        similar_times = [
            time
            for step, number, time in references
            if step >= oldest and abs(number - num_decodes) <= limit
        ]
        if len(similar_times) < MIN_REFERENCES:
            return
        # Verifying takes at most the time of as many single tokens. So an outlier is limited.
        ratio, bound = seconds / median(similar_times), (1 + length) / (1 + sizes.length)
        ratio = min(ratio, bound) if length > sizes.length else max(ratio, bound)
        sizes.burst_ratios.setdefault((length, kind), []).append(ratio)

    def _end_burst(self, sizes: _Range) -> None:
        for key, burst_ratios in sizes.burst_ratios.items():
            ratios = sizes.ratios.setdefault(key, deque(maxlen=MAX_RATIOS))
            ratios.append(median(burst_ratios))
            if len(ratios) > 2:
                changes = [ratio / median(ratios) for ratio in (ratios[-2], ratios[-1])]
                limit = 1 + MAX_CONTRADICTION
                if min(changes) > limit or max(changes) < 1 / limit:
                    sizes.ratios[key] = deque((ratios[-2], ratios[-1]), maxlen=MAX_RATIOS)
        sizes.burst_ratios.clear()

    def _estimate_time(
        self,
        sizes: _Range,
        length: int,
        estimate_ratio: Callable[[Sequence[float]], float] = median,
    ) -> float | None:
        """Returns the step time of a length relative to that of the chosen one, in the range's mix
        of kinds of steps; None if it is unknown."""
        time = chosen_time = 0.0
        for kind, references in sizes.references.items():
            ratios = sizes.ratios.get((length, kind))
            if ratios and references:
                weight = sizes.kind_weights[kind] * median(seconds for _, _, seconds in references)
                chosen_time += weight
                time += weight * estimate_ratio(ratios)
        return time / chosen_time if chosen_time else None

    def _estimate_tokens(self, sizes: _Range, length: int) -> float | None:
        """Returns the tokens per step of a length, relative to those of the chosen one."""
        tokens = self.acceptance.estimate_tokens_per_step(length)
        chosen_tokens = self.acceptance.estimate_tokens_per_step(sizes.length)
        return None if tokens is None or chosen_tokens is None else tokens / chosen_tokens

    def _choose_length(self, sizes: _Range) -> None:
        best_length, best_gain = sizes.length, 1 + MIN_GAIN
        for length in sizes.lengths:
            if length == sizes.length:
                continue
            time, tokens = self._estimate_time(sizes, length), self._estimate_tokens(sizes, length)
            if time is not None and tokens is not None and tokens / time > best_gain:
                best_length, best_gain = length, tokens / time
        if best_length != sizes.length:
            self._change_length(sizes, best_length, best_gain)

    def _change_length(self, sizes: _Range, length: int, gain: float) -> None:
        before, old_ratios = sizes.length, sizes.ratios
        sizes.ratios = {}
        for kind in sizes.references:
            ratios = old_ratios.get((length, kind))
            if ratios:
                unit = median(ratios)
                for other in sizes.lengths:
                    if other == before:
                        new_ratios = [1 / ratio for ratio in ratios]
                    else:
                        new_ratios = [ratio / unit for ratio in old_ratios.get((other, kind), ())]
                    if other != length and new_ratios:
                        sizes.ratios[other, kind] = deque(new_ratios, maxlen=MAX_RATIOS)
        if length == 0:
            goodput = 1.0
        elif (time_without_drafts := self._estimate_time(sizes, 0)) is not None:
            tokens = self.acceptance.estimate_tokens_per_step(length)
            goodput = (tokens or 1.0) * time_without_drafts
        else:
            goodput = gain
        sizes.length = length
        sizes.references.clear()
        sizes.bursts[before] = sizes.bursts.get(before, (0, 0))[0], sizes.steps
        sizes.next_burst = sizes.steps + FIRST_INTERVAL
        self._set_length(sizes, length)
        if self._on_change is not None:
            change = Change(sizes.first, sizes.last, before, length, gain, goodput)
            self._on_change(change)

    def _begin_burst(self, sizes: _Range) -> None:
        """Begins a burst of the length that was not tried for the longest time, if it is due."""
        due_lengths = []
        for length in sizes.lengths:
            count, last_step = sizes.bursts.get(length, (0, -MAX_INTERVAL))
            interval = self._compute_interval(sizes, length) if count >= FIRST_BURSTS else 0
            if length != sizes.length and sizes.steps - last_step >= interval:
                due_lengths.append((last_step, count, length))
        if due_lengths:
            _, count, length = min(due_lengths)
            sizes.bursts[length] = count + 1, sizes.steps
            sizes.remaining_steps = sizes.burst_steps
            sizes.next_burst = sizes.steps + sizes.burst_steps + FIRST_INTERVAL
            self._set_length(sizes, length)

    def _compute_interval(self, sizes: _Range, length: int) -> float:
        """Returns the number of steps between two bursts of a length that loses time. If the newest
        burst was faster than the others, it is confirmed soon."""
        time = self._estimate_time(sizes, length, lambda ratios: min(ratios[-1], median(ratios)))
        if time is None:  # no step could be compared; assume the longest possible time
            time = max(1.0, (1 + length) / (1 + sizes.length))
        tokens = self._estimate_tokens(sizes, length)
        loss = sizes.burst_steps * (time - (1.0 if tokens is None else tokens))
        return min(max(MIN_INTERVAL, loss / LOSS_SHARE), MAX_INTERVAL)
