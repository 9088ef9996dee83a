"""Estimates what n-grams add to a neural drafter (vLLM's option `beside`) on recorded traffic.

The drafts of the neural drafter are not known, only how many of its tokens are accepted. So their
number at each position is drawn from a model, and the rule of `merge_drafts_` chooses a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ngram_npu.config import default_match_costs
from ngram_npu.errors import InputError
from ngram_npu.step_time import VerificationCost

from ngram_npu_cli.logs.conversations import TokenRequest
from ngram_npu_cli.logs.reader import Progress, ShowProgress, ignore_progress
from ngram_npu_cli.options import TuneOptions
from ngram_npu_cli.replay.walks import MAX_K, simulate_ladder
from ngram_npu_cli.report import Block, Run, Table, format_blocks
from ngram_npu_cli.tune.ranking import SEED, Interval, draw_weights, make_interval
from ngram_npu_cli.tune.traffic import read_traffic
from ngram_npu_cli.tune.tune_report import describe_traffic

FORMAT = "ngram_npu.beside/1"
SIZES = range(2, 17)
"""Sizes of the n-grams: the default of `beside`, with the latest match and overlap."""
MODELS = ("independent", "same positions")
"""How the acceptance of the neural drafts depends on that of the n-gram drafts: not at all, or most
of their tokens are accepted at the positions where most tokens of the n-gram drafts are."""
_UNIT = 65536
_CHANCES = np.array([*accumulate(range(255), lambda c, _: c * 62757 // _UNIT, initial=_UNIT), 0])
"""Chances by cost, in the unit of `merge_drafts_`; 0 from a cost of 256 on."""


class Positions(NamedTuple):
    """The n-gram drafts at the positions of a request at which a step may begin.

    Attributes:
        promise: Expected number of accepted tokens of each draft, in 65536ths; 0 without a draft.
        correct: Number of leading tokens that equal the recording, at most K.
        remaining: Number of tokens up to the completion's end.
    """

    promise: list[int]
    correct: list[int]
    remaining: list[int]


def find_positions(request: TokenRequest, k: int) -> Positions:
    """Looks up the n-gram drafts of `k` tokens at all positions of a request."""
    drafts = simulate_ladder([request], SIZES)
    costs = np.cumsum(default_match_costs()[drafts.match[:, :k]], axis=1, dtype=np.int64)
    promise = _CHANCES[np.minimum(costs, 256)].sum(axis=1) * (drafts.length > 0)
    correct = np.minimum(drafts.num_correct, k)
    return Positions(promise.tolist(), correct.tolist(), drafts.num_tokens_to_end.tolist())


def count_steps(
    positions: Positions, neural_accepted: Sequence[int], k: int, *, with_ngrams: bool
) -> tuple[int, int, int]:
    """Replays a request with neural drafts of `k` tokens, which n-gram drafts may replace.

    Returns:
        The numbers of steps, of steps with n-gram drafts, and of accepted neural tokens.
    """
    steps = ngram_steps = total = i = 0
    mean = k * _UNIT  # of the accepted neural tokens; each turn is a new request
    while i < len(positions.remaining):
        steps += 1
        if with_ngrams and positions.promise[i] > mean:
            ngram_steps += 1
            accepted = positions.correct[i]
        else:
            accepted = neural_accepted[i]
            total += accepted
            difference = accepted * _UNIT - mean
            mean += abs(difference) // 8 * (1 if difference > 0 else -1)
        if accepted + 1 >= positions.remaining[i]:
            i += positions.remaining[i]
            mean = k * _UNIT
        else:
            i += accepted + 1
    return steps, ngram_steps, total


def simulate_drafters(
    requests: Sequence[Positions], model: str, mean_accepted: float, k: int
) -> npt.NDArray[np.int64]:
    """Returns the counts of `count_steps` for each request without and with n-grams, [2, R, 3].

    A neural token is accepted with a fixed probability if all earlier ones are. The probability is
    such that the neural drafter alone has `mean_accepted` accepted tokens per step.
    """
    correct = np.concatenate([np.array(request.correct) for request in requests])
    quantiles = np.random.default_rng(SEED).random(len(correct))
    if model == "same positions":
        order = np.lexsort((quantiles, correct))
        quantiles[order] = (np.arange(len(correct)) + 0.5) / len(correct)
    ends = np.cumsum([len(request.correct) for request in requests])[:-1]

    def simulate(probability: float, *, with_ngrams: bool) -> Any:
        limits = 1 - probability ** np.arange(1, k + 1)
        drawn = np.split(np.searchsorted(limits, quantiles, side="right"), ends)
        pairs = zip(requests, drawn, strict=True)
        return np.array(
            [count_steps(request, a.tolist(), k, with_ngrams=with_ngrams) for request, a in pairs]
        )

    low, high = 0.0, 1.0
    while high - low > 1e-4:
        probability = (low + high) / 2
        steps, _, accepted = simulate(probability, with_ngrams=False).sum(axis=0)
        low, high = (low, probability) if accepted > mean_accepted * steps else (probability, high)
    return np.stack([simulate(low, with_ngrams=is_used) for is_used in (False, True)])


@dataclass(frozen=True)
class BesideResult:
    """Result with one of `MODELS`.

    Attributes:
        gain: The ratio of the tokens per step.
        break_even: By batch size, how much longer a step may become until the gain is lost, as a
            share of a step without drafts.
    """

    model: str
    neural_tokens_per_step: float
    tokens_per_step: float
    ngram_share: float
    gain: Interval
    break_even: dict[int, float]


@dataclass(frozen=True)
class BesideReport:
    """What n-grams add to a neural drafter that drafts `k` tokens per step, of which
    `mean_accepted` are accepted. `about` is as in `TuneReport`."""

    about: dict[str, Any]
    traffic: dict[str, Any]
    cost: VerificationCost
    mean_accepted: float
    k: int
    results: tuple[BesideResult, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self.about,
            **{name: getattr(self, name) for name in ("traffic", "mean_accepted", "k", "advice")},
            "cost": self.cost.name,
            "results": [asdict(result) for result in self.results],
        }

    @property
    def advice(self) -> str:
        """Advice in one sentence."""
        best, worst = (result.gain for result in self.results)
        if best.low <= 1:
            return "Do not use beside: no gain is sure on this traffic."
        if worst.low > 1:
            return "Use beside if lookup and selection take less time than the limits below."
        return "Measure beside on your server: the gain depends on how both drafters are related."


def estimate_beside(
    paths: Sequence[str | PathLike[str]],
    cost: VerificationCost,
    mean_accepted: float,
    k: int,
    options: TuneOptions | None = None,
    *,
    progress: ShowProgress = ignore_progress,
    command: str = "",
) -> BesideReport:
    """Estimates what n-grams add to a neural drafter.

    Args:
        paths, cost, options, progress, command: As for `tune`.
        mean_accepted: Mean number of accepted draft tokens per step of the neural drafter.
        k: Number of draft tokens per step.

    Raises:
        InputError: The errors of `replay`, or `mean_accepted` or `k` is out of its range.
    """
    if k > MAX_K:
        raise InputError(f"k: expected at most {MAX_K} with beside, got {k}")
    if not 0 < mean_accepted < k:
        raise InputError(f"beside: expected above 0 and below k = {k}, got {mean_accepted:g}")
    run = Run(command)
    traffic = read_traffic(paths, options or TuneOptions(), progress)
    positions = []
    for done, request in enumerate(traffic.requests, 1):
        positions.append(find_positions(request, k))
        progress(Progress("n-grams", "replay", done, len(traffic.requests)))
    num_tokens, results = traffic.tokens.sum(), []
    for model in MODELS:
        counts = simulate_drafters(positions, model, mean_accepted, k)
        neural_steps, steps = (np.bincount(traffic.conversation_of, n) for n in counts[:, :, 0])
        weights = draw_weights(len(steps))
        gain = make_interval((weights @ neural_steps) / (weights @ steps))
        break_even = {}
        for batch in cost.batch_sizes:
            without_drafts, with_drafts = cost.compute_times(batch, batch * np.array([1.0, 1 + k]))
            break_even[batch] = float((gain.value - 1) * with_drafts / without_drafts)
        results.append(
            BesideResult(
                model,
                neural_tokens_per_step=float(num_tokens / neural_steps.sum()),
                tokens_per_step=float(num_tokens / steps.sum()),
                ngram_share=float(counts[1, :, 1].sum() / steps.sum()),
                gain=gain,
                break_even=break_even,
            )
        )
    about = {**run.describe(), "seconds": run.seconds}
    return BesideReport(about, traffic.describe(), cost, mean_accepted, k, tuple(results))


def format_report(report: BesideReport) -> str:
    """Returns the report as text for a terminal, without a final newline."""
    method = (
        f"A neural drafter drafts {report.k} tokens per step, of which {report.mean_accepted:g} "
        "are accepted; n-grams of 2 to 16 tokens."
    )
    results = [
        [
            result.model,
            f"{result.neural_tokens_per_step:.3f}",
            f"{result.tokens_per_step:.3f}",
            f"{result.ngram_share:.0%}",
            str(result.gain),
        ]
        for result in report.results
    ]
    limits = []
    for batch in report.cost.batch_sizes:
        shares = [result.break_even[batch] for result in report.results]
        cells = [f"{share:.1%}" if share > 0 else "no gain" for share in shares]
        limits.append(["any" if report.cost.same_for_any_batch else str(batch), *cells])
    header = ["acceptance", "neural alone", "with n-grams", "n-gram drafts", "ratio"]
    blocks: list[Block] = [
        *describe_traffic(report.traffic, report.cost, method),
        "",
        f"ADVICE: {report.advice}",
        "",
        "Tokens per step, and their ratio with its 95 % interval over conversations:",
        "",
        Table([header, *results], left=[0]),
        "",
        "Assumed: a neural token is accepted with a fixed probability if all earlier ones are,",
        "either independently of the text, or (pessimistic) mostly where n-grams are right too.",
        "Output is greedy. Each step verifies K tokens with and without n-grams, so the",
        "ratio is the speed-up if lookup and selection take no time. The gain is lost if they take",
        "this share of a step without drafts:",
        "",
        Table([["batch", *MODELS], *limits]),
    ]
    return format_blocks(blocks, indent="  ")
