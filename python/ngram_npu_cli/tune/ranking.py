"""Ranks settings by speed-up: chosen on one half of the conversations, judged on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    """A figure and its 95 % interval over resampled conversations."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Measured:
    """Counts of all settings over all conversations.

    Attributes:
        counts: By setting [N, K+1], steps of a conversation by the number of tokens drafted.
        tokens: [N], generated in steps, the same for all settings.
        chosen_half: [N], whether the conversation belongs to the half for choosing.
    """

    counts: Mapping[Candidate, Counts]
    tokens: npt.NDArray[np.int64]
    chosen_half: BoolArray

    def extend(self, counts: Mapping[Candidate, Counts]) -> Measured:
        """Returns these and other settings over the same conversations."""
        return replace(self, counts={**self.counts, **counts})

    def select(self, drafts: str) -> Measured:
        """Returns only the settings with padded or with trimmed drafts."""
        return replace(self, counts={c: n for c, n in self.counts.items() if c.drafts == drafts})

    def total(self, candidate: Candidate, where: BoolArray) -> TotalCounts:
        """Returns the counts of a setting, summed over some conversations."""
        steps = self.counts[candidate][where].sum(axis=0, dtype=np.int64)
        drafted = int(steps @ np.arange(len(steps)))
        return TotalCounts(int(self.tokens[where].sum()), int(steps.sum()), drafted)

    def speedup(
        self, candidate: Candidate, cost: VerificationCost, batch: int, where: BoolArray
    ) -> float:
        """Returns the speed-up of a setting over some conversations together."""
        steps = self.counts[candidate][where].sum(axis=0, dtype=np.int64)
        return float(cost.speedup(batch, [int(self.tokens[where].sum())], [steps])[0])


def rank(
    measured: Measured, cost: VerificationCost, among: Iterable[Candidate] | None = None
) -> list[Candidate]:
    """Returns all or some settings, the best first on the half for choosing.

    One setting serves all batch sizes. So a setting is ranked by the batch size where its speed-up
    is the smallest share of the best speed-up for that size. Sizes where no setting gains do not
    count, because drafting is off there. Equal settings keep their order.
    """
    candidates = list(measured.counts if among is None else among)
    speedups = np.array(
        [
            [measured.speedup(c, cost, batch, measured.chosen_half) for batch in cost.batch_sizes]
            for c in candidates
        ]
    ).reshape(len(candidates), -1)
    best = speedups.max(axis=0, initial=0)
    # A server turns drafting off at sizes where no setting gains, so they must not decide.
    if (best > 1).any():
        speedups, best = speedups[:, best > 1], best[best > 1]
    smallest_share = (speedups / best).min(axis=1)
    return [candidates[i] for i in np.argsort(-smallest_share, kind="stable")]


@dataclass(frozen=True)
class StoreGain:
    """Gain of a store on the held-out half, at the smallest batch size: ratio of the speed-ups of
    the best settings with and without one."""

    best: Candidate
    without: Candidate
    ratio: Interval


def recommend(measured: Measured, cost: VerificationCost) -> tuple[Candidate, StoreGain | None]:
    """Returns the best setting, and the gain of a store if one was tried.

    A store shares text between requests. So one is recommended only if its interval on the held-out
    half lies above 1 too.
    """
    order = rank(measured, cost)
    stored = [c for c in order if c.has_store]
    others = [c for c in measured.counts if not c.has_store]
    if not stored or not others:
        return order[0], None
    without = rank(measured, cost, others)[0]
    ratio = compute_interval(measured, stored[0], cost, cost.batch_sizes[0], without)
    is_certain = order[0] == stored[0] and ratio.low > 1
    return stored[0] if is_certain else without, StoreGain(stored[0], without, ratio)


def search_stores(
    measured: Measured,
    cost: VerificationCost,
    candidates: Sequence[Candidate],
    measure: Callable[[Sequence[Candidate]], Mapping[Candidate, Counts]],
) -> Measured:
    """Adds ladders with a store.

    The best ladder with a store often differs from the best one without. So the search begins with
    the best one without a store, continues with the best ladder of the next length or probability
    until none is better, and tries that one with stores of the other sizes.
    """
    ladders = [
        c for c in candidates if c.config.min_draft_probability is not None and not c.has_store
    ]
    if not ladders:
        return measured
    ladder_of = {_add_store(ladder, STORE_SIZES[-1]): ladder for ladder in ladders}
    current = rank(measured, cost, ladders)[0]
    while True:
        nearby = [current, *_list_neighbours(current, ladders)]
        stored = [_add_store(ladder, STORE_SIZES[-1]) for ladder in nearby]
        missing = [c for c in stored if c not in measured.counts]
        if not missing:
            break
        measured = measured.extend(measure(missing))
        current = ladder_of[rank(measured, cost, [c for c in measured.counts if c in ladder_of])[0]]
    others = [_add_store(current, tokens) for tokens in STORE_SIZES[:-1]]
    missing = [c for c in others if c not in measured.counts]
    return measured.extend(measure(missing)) if missing else measured


def _add_store(ladder: Candidate, tokens: int) -> Candidate:
    return Candidate.of(**dict(ladder.options), store="live", store_tokens=tokens)


def _list_neighbours(ladder: Candidate, ladders: Sequence[Candidate]) -> list[Candidate]:
    """Returns the ladders of the next lower and higher length and probability."""
    neighbours: list[Candidate] = []
    for name, other in (("k", "min_draft_probability"), ("min_draft_probability", "k")):
        fixed = getattr(ladder.config, other)
        line = [c for c in ladders if getattr(c.config, other) == fixed]
        line.sort(key=lambda candidate: float(getattr(candidate.config, name)))
        position = line.index(ladder)
        neighbours += line[max(0, position - 1) : position] + line[position + 1 : position + 2]
    return neighbours


def compute_interval(
    measured: Measured,
    candidate: Candidate,
    cost: VerificationCost,
    batch: int,
    against: Candidate | None = None,
) -> Interval:
    """Returns the speed-up on the held-out half, or with `against` its ratio to another setting's.

    Whole conversations are drawn, with replacement, because steps of one conversation are similar.
    """
    where = np.flatnonzero(~measured.chosen_half)
    draws = np.random.default_rng(SEED).multinomial(
        len(where), np.full(len(where), 1 / len(where)), RESAMPLES
    )
    # The first row is the sample itself.
    weights = np.concatenate([np.ones((1, len(where)), np.int64), draws]).astype(np.float64)
    tokens = weights @ measured.tokens[where]

    def resample(setting: Candidate) -> FloatArray:
        return cost.speedup(batch, tokens, weights @ measured.counts[setting][where])

    values = resample(candidate)
    if against is not None:
        values = values / resample(against)
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Interval(float(values[0]), float(low), float(high))


def find_frontier(figures: Mapping[Candidate, TotalCounts]) -> list[Candidate]:
    """Returns the Pareto front: no other yields as many tokens per step with fewer drafted."""
    frontier: list[Candidate] = []
    highest = 0.0
    for candidate, counts in sorted(
        figures.items(), key=lambda item: (item[1].drafted_per_step, -item[1].tokens_per_step)
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

    It is the length with the highest speed-up on the held-out half among the settings that differ
    from `candidate` in k only; 0 if none gains. Batch sizes without step times get the length of
    the next larger one, which is the more cautious choice.
    """
    same = replace(candidate, options=_without_k(candidate))
    variants = [c for c in measured.counts if replace(c, options=_without_k(c)) == same]
    table: list[tuple[int, int, int]] = []
    for batch in cost.batch_sizes:
        speedups = {
            c.config.k: measured.speedup(c, cost, batch, ~measured.chosen_half) for c in variants
        }
        length = max(speedups, key=lambda k: speedups[k])
        if speedups[length] <= 1:
            length = 0
        first = table[-1][1] + 1 if table else 1
        if table and table[-1][2] == length:
            first = table.pop()[0]
        table.append((first, batch, length))
    return table


def _without_k(candidate: Candidate) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in candidate.options if name != "k")


def advise(
    batches: Sequence[tuple[int, bool]], *, any_batch: bool = False
) -> tuple[str, int | None]:
    """Returns one sentence of advice, and the batch size above which drafting should be off.

    That is 0 for all sizes, and None for no size. `batches` has the batch sizes, ascending, and
    whether the interval of a setting lies above 1 there.
    """
    gaining = [batch for batch, gains in batches if gains]
    if not gaining:
        return "Do not speculate: no gain is sure on this traffic.", 0
    last = gaining[-1]
    off = [f"at batch {batch}" for batch, gains in batches if not gains and batch < last]
    off_above = None if last == batches[-1][0] else last
    if off_above is not None:
        off.append(f"above batch {last}")
    if off:
        return f"Do not speculate {' or '.join(off)}: no gain is sure there.", off_above
    if any_batch:
        return "It pays at this verification cost.", None
    return f"It pays at every measured batch size, up to {last}.", None
