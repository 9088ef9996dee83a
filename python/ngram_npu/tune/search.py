"""Recommends a setting: chosen on one half of the conversations, judged on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngram_npu.replay.walks import Counts as Figures
from ngram_npu.tune.candidates import STORE_SIZES, Candidate
from ngram_npu.tune.costs import VerificationCost
from ngram_npu.tune.measure import Counts

FloatArray = npt.NDArray[np.float64]

RESAMPLES = 1000
SEED = 20_260_801
STORE_GAIN = 1.02
"""A store shares text and takes memory: it is chosen only if it is faster by this factor."""
STORE_LADDERS = 2
"""How many ladders are tried with stores."""


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
    """The setting with the highest speed-up on the half for choosing: the geometric mean over the
    batch sizes. A speed-up below 1 counts as 1, because drafting is switched off there."""
    return ranked(measured, cost)[0]


def ranked(measured: Measured, cost: VerificationCost) -> list[int]:
    """All settings, the best first; equal settings keep their order."""

    def score(number: int) -> float:
        speedups = [
            measured.speedup(number, cost, batch, measured.chosen_half)
            for batch in cost.batch_sizes
        ]
        handicap = STORE_GAIN if measured.candidates[number].has_store else 1.0
        return float(np.mean(np.log(np.maximum(1.0, speedups))) - np.log(handicap))

    return sorted(range(len(measured.candidates)), key=score, reverse=True)


def with_stores(
    measured: Measured, cost: VerificationCost, among: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """The best ladders of some settings, each with a store of every size."""
    ladders = [
        candidate
        for i in ranked(measured, cost)
        if (candidate := measured.candidates[i]) in among
        and candidate.config.min_draft_probability is not None
        and not candidate.has_store
    ]
    return tuple(
        Candidate.of(**dict(candidate.options), store="live", store_tokens=tokens)
        for candidate in ladders[:STORE_LADDERS]
        for tokens in STORE_SIZES
    )


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


def advice(
    batches: Sequence[tuple[int, Interval]], cost: VerificationCost
) -> tuple[str, int | None]:
    """One sentence of advice, and the largest batch size up to which a gain is sure.

    Args:
        batches: speed-ups by batch size, ascending.
        cost: the cost of the speed-ups.

    Returns:
        The advice and the batch size: 0 if drafting pays at no size, None if it pays at all.
    """
    paying = 0
    for batch, speedup in batches:
        if speedup.low <= 1:
            break
        paying = batch
    if paying == 0:
        return "Do not speculate: no gain is sure on this traffic.", 0
    if paying != batches[-1][0]:
        return f"Do not speculate above batch {paying}: no gain is sure there.", paying
    if cost.same_for_any_batch:
        return "It pays at this verification cost.", None
    return f"It pays at every batch size looked at, up to {paying}.", None
