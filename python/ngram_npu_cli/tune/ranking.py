"""Ranks settings by speed-up on the selection half of the conversations and evaluates them on the
held-out half."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from ngram_npu.step_time import VerificationCost

from ngram_npu_cli.replay.walks import Counts as TotalCounts
from ngram_npu_cli.tune.candidates import STORE_SIZES, Candidate
from ngram_npu_cli.tune.measure import Counts

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

RESAMPLES = 1000
SEED = 20_260_801


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % bootstrap interval, for which conversations are resampled."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Measured:
    """The measured counts of all settings for all conversations.

    Attributes:
        counts: For each setting [N, K+1], the number of steps of each conversation by number of
            drafted tokens.
        tokens: [N], number of generated tokens, the same for all settings.
        selection_half: [N], whether the conversation belongs to the selection half.
    """

    counts: Mapping[Candidate, Counts]
    tokens: npt.NDArray[np.int64]
    selection_half: BoolArray

    def extend(self, counts: Mapping[Candidate, Counts]) -> Measured:
        """Returns these counts and those of other settings for the same conversations."""
        return replace(self, counts={**self.counts, **counts})

    def select(self, drafts: str) -> Measured:
        """Returns the counts of the settings with padded or with trimmed drafts only."""
        return replace(self, counts={c: n for c, n in self.counts.items() if c.drafts == drafts})

    def sum_counts(self, candidate: Candidate, selection: BoolArray) -> TotalCounts:
        """Returns the counts of a setting, summed over some conversations."""
        steps = self.counts[candidate][selection].sum(axis=0, dtype=np.int64)
        drafted = int(steps @ np.arange(len(steps)))
        return TotalCounts(int(self.tokens[selection].sum()), int(steps.sum()), drafted)

    def compute_speedup(
        self, candidate: Candidate, cost: VerificationCost, batch: int, selection: BoolArray
    ) -> float:
        """Returns the speed-up of a setting over some conversations together."""
        steps = self.counts[candidate][selection].sum(axis=0, dtype=np.int64)
        return float(cost.compute_speedup(batch, [int(self.tokens[selection].sum())], [steps])[0])


def rank(
    measured: Measured, cost: VerificationCost, among: Iterable[Candidate] | None = None
) -> list[Candidate]:
    """Returns all settings, or those in `among`, ordered from best to worst on the selection half.

    A server uses one setting at all batch sizes. For each batch size, the speed-up of a setting is
    divided by the best speed-up at this size. The smallest of these ratios is the setting's score.
    Batch sizes at which no setting is faster than no drafts are ignored, because drafting is off at
    these sizes. Settings with equal scores keep their order.
    """
    candidates = list(measured.counts if among is None else among)
    speedups = np.array(
        [
            [
                measured.compute_speedup(c, cost, batch, measured.selection_half)
                for batch in cost.batch_sizes
            ]
            for c in candidates
        ]
    ).reshape(len(candidates), -1)
    best = speedups.max(axis=0, initial=0)
    if (best > 1).any():
        speedups, best = speedups[:, best > 1], best[best > 1]
    scores = (speedups / best).min(axis=1)
    return [candidates[i] for i in np.argsort(-scores, kind="stable")]


@dataclass(frozen=True)
class StoreGain:
    """Ratio of the speed-ups of the best settings with and without a store, on the held-out half at
    the smallest batch size."""

    best: Candidate
    without: Candidate
    ratio: Interval


def recommend(measured: Measured, cost: VerificationCost) -> tuple[Candidate, StoreGain | None]:
    """Returns the best setting, and the gain of a store if one was tried.

    Because a store shares text between requests, a store is recommended only if a setting with a
    store is the best setting on the selection half and the interval of the ratio is above 1 on the
    held-out half.
    """
    order = rank(measured, cost)
    with_store = [c for c in order if c.has_store]
    without_store = [c for c in measured.counts if not c.has_store]
    if not with_store or not without_store:
        return order[0], None
    best, storeless = with_store[0], rank(measured, cost, without_store)[0]
    ratio = compute_interval(measured, best, cost, cost.batch_sizes[0], storeless)
    is_store_recommended = order[0] == best and ratio.low > 1
    return best if is_store_recommended else storeless, StoreGain(best, storeless, ratio)


def search_stores(
    measured: Measured,
    cost: VerificationCost,
    candidates: Sequence[Candidate],
    measure: Callable[[Sequence[Candidate]], Mapping[Candidate, Counts]],
) -> Measured:
    """Measures ladders with a store by a local search, and adds their counts.

    The best ladder with a store often differs from the best ladder without one. So the search
    starts at the best ladder without a store and moves to the best neighbour (the next length or
    probability) until no neighbour is better. Then stores of the other sizes are tried.
    """
    ladders = [
        c for c in candidates if c.config.min_draft_probability is not None and not c.has_store
    ]
    if not ladders:
        return measured
    ladder_of = {_add_store(ladder, STORE_SIZES[-1]): ladder for ladder in ladders}
    best_ladder = rank(measured, cost, ladders)[0]
    while True:
        nearby = [best_ladder, *_list_neighbours(best_ladder, ladders)]
        with_store = [_add_store(ladder, STORE_SIZES[-1]) for ladder in nearby]
        unmeasured = [c for c in with_store if c not in measured.counts]
        if not unmeasured:
            break
        measured = measured.extend(measure(unmeasured))
        with_store = [c for c in measured.counts if c in ladder_of]
        best_ladder = ladder_of[rank(measured, cost, with_store)[0]]
    other_sizes = [_add_store(best_ladder, tokens) for tokens in STORE_SIZES[:-1]]
    unmeasured = [c for c in other_sizes if c not in measured.counts]
    return measured.extend(measure(unmeasured)) if unmeasured else measured


def _add_store(ladder: Candidate, tokens: int) -> Candidate:
    return Candidate.of(**dict(ladder.options), store="live", store_tokens=tokens)


def _list_neighbours(ladder: Candidate, ladders: Sequence[Candidate]) -> list[Candidate]:
    """Returns the ladders of the next lower and higher length and probability."""
    neighbours: list[Candidate] = []
    for name, fixed_name in (("k", "min_draft_probability"), ("min_draft_probability", "k")):
        fixed_value = getattr(ladder.config, fixed_name)
        line = [c for c in ladders if getattr(c.config, fixed_name) == fixed_value]
        line.sort(key=lambda candidate: float(getattr(candidate.config, name)))
        position = line.index(ladder)
        neighbours += line[max(0, position - 1) : position] + line[position + 1 : position + 2]
    return neighbours


def draw_weights(count: int) -> FloatArray:
    """Returns weights of conversations, [1 + RESAMPLES, count]: of the sample itself, where each is
    1, and of samples drawn from it with replacement.

    Whole conversations are drawn, because steps of one conversation are similar.
    """
    draws = np.random.default_rng(SEED).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return np.concatenate([np.ones((1, count)), draws])


def make_interval(values: FloatArray) -> Interval:
    """Returns the interval for values computed with each row of `draw_weights`."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Interval(float(values[0]), float(low), float(high))


def compute_interval(
    measured: Measured,
    candidate: Candidate,
    cost: VerificationCost,
    batch: int,
    against: Candidate | None = None,
) -> Interval:
    """Returns the speed-up on the held-out half, or its ratio to that of `against`."""
    held_out = np.flatnonzero(~measured.selection_half)
    weights = draw_weights(len(held_out))
    tokens = weights @ measured.tokens[held_out]

    def resample(setting: Candidate) -> FloatArray:
        return cost.compute_speedup(batch, tokens, weights @ measured.counts[setting][held_out])

    values = resample(candidate)
    if against is not None:
        values = values / resample(against)
    return make_interval(values)


def find_frontier(totals: Mapping[Candidate, TotalCounts]) -> list[Candidate]:
    """Returns the Pareto front: the settings for which no other setting yields as many tokens per
    step with fewer drafted tokens."""
    frontier: list[Candidate] = []
    highest = 0.0
    for candidate, counts in sorted(
        totals.items(), key=lambda item: (item[1].drafted_per_step, -item[1].tokens_per_step)
    ):
        if counts.tokens_per_step > highest:
            frontier.append(candidate)
            highest = counts.tokens_per_step
    return frontier


def choose_lengths(
    measured: Measured, cost: VerificationCost, candidate: Candidate
) -> list[tuple[int, int, int]]:
    """Returns the draft length for each range of batch sizes: vLLM's
    ``num_speculative_tokens_per_batch_size``.

    The length is that with the highest speed-up on the held-out half among the settings that differ
    from `candidate` only in k, or 0 if no setting is faster than no drafts. A batch size without
    step times gets the length of the next larger batch size with step times, because drafts save
    less time at larger batch sizes.
    """
    variants = [
        c
        for c in measured.counts
        if c.drafts == candidate.drafts
        and dict(c.options) == {**dict(candidate.options), "k": c.config.k}
    ]
    table: list[tuple[int, int, int]] = []
    for batch in cost.batch_sizes:
        speedups = {
            c.config.k: measured.compute_speedup(c, cost, batch, ~measured.selection_half)
            for c in variants
        }
        length = max(speedups, key=lambda k: speedups[k])
        if speedups[length] <= 1:
            length = 0
        first = table[-1][1] + 1 if table else 1
        if table and table[-1][2] == length:
            first = table.pop()[0]
        table.append((first, batch, length))
    return table


def advise(
    batches: Sequence[tuple[int, bool]], *, any_batch: bool = False
) -> tuple[str, int | None]:
    """Returns one sentence of advice, and the batch size above which drafting should be off.

    The batch size is 0 if drafting should always be off, and None if it should never be off.
    `batches` contains the batch sizes, ascending, and for each whether the interval of a setting is
    above 1 at this size.
    """
    faster_batches = [batch for batch, is_faster in batches if is_faster]
    if not faster_batches:
        return "Do not speculate: no gain is sure on this traffic.", 0
    last = faster_batches[-1]
    off_ranges = [
        f"at batch {batch}" for batch, is_faster in batches if not is_faster and batch < last
    ]
    off_above = None if last == batches[-1][0] else last
    if off_above is not None:
        off_ranges.append(f"above batch {last}")
    if off_ranges:
        return f"Do not speculate {' or '.join(off_ranges)}: no gain is sure there.", off_above
    if any_batch:
        return "It pays at this verification cost.", None
    return f"It pays at every measured batch size, up to {last}.", None
