"""Recommends a setting: chosen on one half of the conversations, judged on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from ngram_npu.step_time import VerificationCost

from ngram_npu_cli.replay.walks import Counts as Figures
from ngram_npu_cli.tune.candidates import STORE_SIZES, Candidate
from ngram_npu_cli.tune.measure import Counts

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
        candidates: the settings.
        counts: per setting [N, K+1], steps of a conversation by the number of tokens drafted.
        tokens: [N], generated in steps, the same for all settings.
        chosen_half: [N], whether the conversation belongs to the half for choosing.
    """

    candidates: tuple[Candidate, ...]
    counts: tuple[Counts, ...]
    tokens: npt.NDArray[np.int64]
    chosen_half: npt.NDArray[np.bool_]

    def and_also(self, other: Measured) -> Measured:
        """These and other settings over the same conversations."""
        return replace(
            self,
            candidates=self.candidates + other.candidates,
            counts=self.counts + other.counts,
        )

    def verified(self, drafts: str) -> Measured:
        """Only the settings whose drafts are verified so."""
        kept = [i for i, candidate in enumerate(self.candidates) if candidate.drafts == drafts]
        return replace(
            self,
            candidates=tuple(self.candidates[i] for i in kept),
            counts=tuple(self.counts[i] for i in kept),
        )

    def figures(self, candidate: int, where: npt.NDArray[np.bool_]) -> Figures:
        steps = self.counts[candidate][where].sum(axis=0, dtype=np.int64)
        drafted = int(steps @ np.arange(len(steps)))
        return Figures(int(self.tokens[where].sum()), int(steps.sum()), drafted)

    def speedup(
        self, candidate: int, cost: VerificationCost, batch: int, where: npt.NDArray[np.bool_]
    ) -> float:
        steps = self.counts[candidate][where].sum(axis=0, dtype=np.int64)
        tokens = int(self.tokens[where].sum())
        return float(cost.speedup(batch, [tokens], [steps])[0])

    def each(self, candidate: int, cost: VerificationCost, batch: int) -> FloatArray:
        """[N], the speed-up of a batch of requests that are all like this conversation."""
        return cost.speedup(batch, self.tokens, self.counts[candidate])


def best(measured: Measured, cost: VerificationCost) -> int:
    """The first of `ranked`."""
    return ranked(measured, cost)[0]


def ranked(
    measured: Measured, cost: VerificationCost, among: Iterable[int] | None = None
) -> list[int]:
    """The settings, or some of them, the best first on the half for choosing; equal settings keep
    their order.

    One setting serves all batch sizes. So it is ranked by the batch size where it is the furthest
    behind the best setting for that size alone. Sizes where no setting gains do not count, because
    drafting is off there.
    """
    numbers = list(range(len(measured.candidates)) if among is None else among)
    speedups = np.array(
        [
            [measured.speedup(i, cost, batch, measured.chosen_half) for batch in cost.batch_sizes]
            for i in numbers
        ]
    ).reshape(len(numbers), -1)
    most = speedups.max(axis=0, initial=0)
    if (most > 1).any():
        speedups, most = speedups[:, most > 1], most[most > 1]
    behind = (speedups / most).min(axis=1)
    order = sorted(range(len(numbers)), key=lambda i: float(behind[i]), reverse=True)
    return [numbers[i] for i in order]


def with_stores(
    measured: Measured,
    cost: VerificationCost,
    among: Sequence[Candidate],
    replay: Callable[[tuple[Candidate, ...]], Measured],
) -> Measured:
    """Adds ladders with a store.

    The best ladder with a store is another one than without. So the search begins with the best one
    without, goes on to the best of those of the next length or probability until none is better,
    and tries that one with stores of the other sizes.

    Args:
        measured: all settings so far.
        cost: of verification.
        among: the settings whose ladders are tried.
        replay: measures settings over the same conversations.
    """
    ladders = [c for c in among if c.config.min_draft_probability is not None and not c.has_store]
    of_stored = {_stored(ladder, STORE_SIZES[-1]): ladder for ladder in ladders}

    def first_of(wanted: Iterable[Candidate]) -> Candidate:
        numbers = [i for i, c in enumerate(measured.candidates) if c in wanted]
        return measured.candidates[ranked(measured, cost, numbers)[0]]

    if not ladders:
        return measured
    here = first_of(ladders)

    def missing(wanted: Iterable[Candidate]) -> tuple[Candidate, ...]:
        return tuple(c for c in wanted if c not in measured.candidates)

    while new := missing(_stored(of, STORE_SIZES[-1]) for of in (here, *_next_to(here, ladders))):
        measured = measured.and_also(replay(new))
        here = of_stored[first_of(of_stored)]
    new = missing(_stored(here, tokens) for tokens in STORE_SIZES[:-1])
    return measured.and_also(replay(new)) if new else measured


def _stored(ladder: Candidate, tokens: int) -> Candidate:
    return Candidate.of(**dict(ladder.options), store="live", store_tokens=tokens)


def _next_to(ladder: Candidate, ladders: Sequence[Candidate]) -> list[Candidate]:
    """The ladders that differ in length or probability by one place."""
    found: list[Candidate] = []
    for name, other in (("k", "min_draft_probability"), ("min_draft_probability", "k")):
        same = getattr(ladder.config, other)
        line = [of for of in ladders if getattr(of.config, other) == same]
        line.sort(key=lambda of: float(getattr(of.config, name)))
        place = line.index(ladder)
        found += line[max(0, place - 1) : place] + line[place + 1 : place + 2]
    return found


def interval(
    measured: Measured,
    candidate: int,
    cost: VerificationCost,
    batch: int,
    against: int | None = None,
) -> Interval:
    """The speed-up on the other half; with `against`, its ratio to that of another setting.

    Whole conversations are drawn, with replacement: steps of one conversation are alike.
    """
    where = np.flatnonzero(~measured.chosen_half)
    draws = np.random.default_rng(SEED).multinomial(
        len(where), np.full(len(where), 1 / len(where)), RESAMPLES
    )
    # The first row is the sample itself.
    weights = np.concatenate([np.ones((1, len(where)), np.int64), draws]).astype(np.float64)
    tokens = weights @ measured.tokens[where]

    def of(number: int) -> FloatArray:
        return cost.speedup(batch, tokens, weights @ measured.counts[number][where])

    found = of(candidate) if against is None else of(candidate) / of(against)
    low, high = np.percentile(found[1:], [2.5, 97.5])
    return Interval(float(found[0]), float(low), float(high))


def frontier(figures: Sequence[Figures]) -> list[int]:
    """Numbers of the Pareto front: no other yields as many tokens per step with fewer drafted."""
    order = sorted(
        range(len(figures)),
        key=lambda i: (figures[i].drafted_per_step, -figures[i].tokens_per_step),
    )
    kept: list[int] = []
    for i in order:
        if not kept or figures[i].tokens_per_step > figures[kept[-1]].tokens_per_step:
            kept.append(i)
    return kept


def advice(batches: Sequence[tuple[int, bool]], cost: VerificationCost) -> tuple[str, int | None]:
    """One sentence of advice, and the largest batch size at which a gain is sure.

    Args:
        batches: batch sizes, ascending, and whether a setting surely gains there.
        cost: the cost of the speed-ups.

    Returns:
        The advice and the batch size: 0 if drafting pays at no size, None if it pays at the last.
    """
    gaining = [batch for batch, gains in batches if gains]
    if not gaining:
        return "Do not speculate: no gain is sure on this traffic.", 0
    most = gaining[-1]
    off = [f"at batch {batch}" for batch, gains in batches if not gains and batch < most]
    off += [f"above batch {most}"] if most != batches[-1][0] else []
    if off:
        off_above = None if most == batches[-1][0] else most
        return f"Do not speculate {' or '.join(off)}: no gain is sure there.", off_above
    if cost.same_for_any_batch:
        return "It pays at this verification cost.", None
    return f"It pays at every batch size looked at, up to {most}.", None
