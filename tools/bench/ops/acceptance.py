"""Measures tokens per step and drafted tokens per step on recorded sets, for our drafts and for
peers, without a store and with a store that conversations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

from ngram_npu import NgramConfig, NgramProposer
from ngram_npu_cli.logs.tokenizers import load_tokenizer
from ngram_npu_cli.replay import Proposer, TokenRequest, simulate
from ngram_npu_cli.replay.walks import Counts

from tools.bench import arctic_peer
from tools.bench.data import find_data
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import BenchError, Options
from tools.fit_draft_costs import PARTS, load_sets

Requests = Sequence[TokenRequest]
K = (8, 16)
LIMITS = tuple(range(2, 102, 2))
"""Limits of a draft's total cost, in sixteenths of a bit."""
DEFAULT_LIMIT, HIGH_LIMIT = 40, 54
BATCH = 128
"""Number of conversations replayed together, which does not affect the results."""
VERIFICATION_COST = 0.05
"""Time to verify a drafted token in the computed speed-up, as a share of a step."""
REFERENCE = "arctic-local"
"""The peer with which our tokens and drafts per step are compared."""

STORE_LIMITS = (34, 38, 40, 42, 44, 46, 50, 54, 60)
STORE_PEER = "arctic-global"


def replay_ladder(requests: Requests, k: int, limit: int) -> Counts:
    config = NgramConfig(sizes="ladder", k=k, min_draft_probability=2 ** (-limit / 16))
    return replay_drafts(requests, NgramProposer(config, "index"), k)


def replay_drafts(
    requests: Requests, proposer: Proposer, k: int, batch_size: int = BATCH
) -> Counts:
    """Replays the requests with a proposer's drafts, as `ngram-npu replay` does."""
    figures = simulate("", requests, proposer, k=k, batch_size=batch_size)
    return Counts(figures.num_tokens, figures.num_steps, figures.num_draft_tokens)


PEERS: Mapping[str, Callable[[Requests], Counts]] = {
    "vllm-ngram-k5": lambda requests: replay_drafts(
        requests, NgramProposer(NgramConfig(min_n=2, max_n=5, k=5), "index"), 5
    ),
    REFERENCE: lambda requests: replay_drafts(requests, arctic_peer.SuffixDecoding(8), 8),
}


@dataclass(frozen=True)
class ReplayCounts:
    """Counts of replays of the same conversations: the peers' by name, ours by k and cost limit."""

    peers: dict[str, Counts]
    ours: dict[tuple[int, int], Counts]

    def __add__(self, other: ReplayCounts) -> ReplayCounts:
        return ReplayCounts(
            {name: counts + other.peers[name] for name, counts in self.peers.items()},
            {key: counts + other.ours[key] for key, counts in self.ours.items()},
        )

    def get_curve(self, k: int) -> list[Counts]:
        """Returns our counts, one per limit in `LIMITS`."""
        return [self.ours[k, limit] for limit in LIMITS]

    def compare_to_reference(self, k: int) -> dict[str, Any]:
        return compare_to_peer(
            self.peers[REFERENCE], self.get_curve(k), self.ours[k, DEFAULT_LIMIT]
        )


class Acceptance(Op):
    name = "acceptance"
    help = "tokens per step and drafted tokens per step of ours and peers on recorded sets"
    sizes = ()
    peers = tuple(PEERS)
    engines = ("index",)
    assumptions: Mapping[str, Any] = {
        "engine": "index: drafted by NgramProposer",
        "k": K,
        "limits": f"{LIMITS[0]}, {LIMITS[1]}, ... {LIMITS[-1]} sixteenths of a bit, the limit of a "
        f"draft's costs; {DEFAULT_LIMIT}, the default, is a probability of "
        f"{2 ** (-DEFAULT_LIMIT / 16):.3f}",
        "at_equal_drafts": "our tokens per step at the limit with as many drafted tokens per "
        f"step as {REFERENCE}, interpolated linearly between two limits",
        "dominates": f"more tokens per step and no more drafted tokens per step than {REFERENCE}",
        "speedup": f"tokens per step / (1 + {VERIFICATION_COST:g} * drafted tokens per step), "
        "geometric mean over the sets",
        "odd": "the conversations that the costs were not fitted on (the first is number 0)",
        "vllm-ngram": "the earliest match of 2 to 5 tokens, drafted by this project's operator",
        REFERENCE: arctic_peer.DETAIL,
        "target": "recorded completions replace the target model; a conversation is one row",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        names = self.peers if options.peers is None else options.peers
        if unknown := set(names) - set(PEERS):
            raise BenchError(f"{self.name}: peer {unknown}: expected one of {', '.join(PEERS)}")
        if REFERENCE in names:
            with self.skip_unavailable(REFERENCE, skip_reasons):
                arctic_peer.load_suffix_tree()
        peers = [name for name in names if name not in skip_reasons]
        counts: dict[str, list[ReplayCounts]] = {"whole": [], "odd": []}
        for name, requests in load_sets([find_data(options.data)], load_tokenizer()).items():
            even = _replay(requests[PARTS["even"]], peers)
            odd = _replay(requests[PARTS["odd"]], peers)
            counts["whole"].append(even + odd)
            counts["odd"].append(odd)
            yield {
                "set": name,
                "conversations": len(requests),
                "whole": _make_figures(even + odd),
                "whole_by_limit": _make_curve(even + odd, K[0]),
            }
        summaries = {name: _summarize(sets) for name, sets in counts.items()}
        yield {"set": "all", **summaries}


def _replay(requests: Requests, peers: Sequence[str]) -> ReplayCounts:
    return ReplayCounts(
        {name: PEERS[name](requests) for name in peers},
        {(k, limit): replay_ladder(requests, k, limit) for k in K for limit in LIMITS},
    )


def _make_figures(counts: ReplayCounts) -> dict[str, Any]:
    ours = {f"limit_{DEFAULT_LIMIT}": round_per_step(counts.ours[K[0], DEFAULT_LIMIT])}
    if REFERENCE in counts.peers:
        ours |= counts.compare_to_reference(K[0])
    peers = {name: round_per_step(peer) for name, peer in counts.peers.items()}
    return {"peers": peers, f"k{K[0]}": ours}


def _make_curve(counts: ReplayCounts, k: int) -> dict[str, list[float]]:
    """Returns tokens and drafted tokens per step, one value per limit in `LIMITS`."""
    points = [round_per_step(c) for c in counts.get_curve(k)]
    return {key: [point[key] for point in points] for key in points[0]}


def round_per_step(counts: Counts) -> dict[str, float]:
    return {
        "tokens_per_step": round(counts.tokens_per_step, 4),
        "drafted_per_step": round(counts.drafted_per_step, 4),
    }


def interpolate_tokens(curve: Sequence[Counts], drafted_per_step: float) -> float:
    """Returns tokens per step at a number of drafted tokens per step, linear between two points."""
    for point, next_point in pairwise(curve):
        low, high = point.drafted_per_step, next_point.drafted_per_step
        if low <= drafted_per_step < high:
            gain = next_point.tokens_per_step - point.tokens_per_step
            return point.tokens_per_step + gain * (drafted_per_step - low) / (high - low)
    raise BenchError(f"no limit drafts {drafted_per_step:.2f} tokens per step")


def compare_to_peer(peer: Counts, curve: Sequence[Counts], default: Counts) -> dict[str, Any]:
    """Compares our counts by limit (`curve`) and our counts at the default limit with a peer's."""
    tokens = interpolate_tokens(curve, peer.drafted_per_step)
    return {
        "at_equal_drafts": {
            "tokens_per_step": round(tokens, 4),
            "ratio": round(tokens / peer.tokens_per_step, 5),
        },
        "dominates": default.tokens_per_step > peer.tokens_per_step
        and default.drafted_per_step <= peer.drafted_per_step,
    }


def summarize_comparisons(comparisons: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarizes the results of `compare_to_peer` over several sets."""
    ratios = [comparison["at_equal_drafts"]["ratio"] for comparison in comparisons]
    return {
        "sets_at_least_equal": sum(ratio >= 1 for ratio in ratios),
        "least_ratio": min(ratios),
        "mean_ratio": round(geometric_mean(ratios), 4),
        "sets_dominated": sum(comparison["dominates"] for comparison in comparisons),
    }


def compute_speedup(counts: Sequence[Counts]) -> float:
    return round(geometric_mean(c.compute_speedup(VERIFICATION_COST) for c in counts), 4)


def _summarize(sets: Sequence[ReplayCounts]) -> dict[str, Any]:
    peers = sets[0].peers
    summary: dict[str, Any] = {
        "sets": len(sets),
        "speedup": {
            name: compute_speedup([counts.peers[name] for counts in sets]) for name in peers
        },
    }
    for k in K:
        speedups = {}
        for limit in (DEFAULT_LIMIT, HIGH_LIMIT):
            speedups[f"limit_{limit}"] = compute_speedup([counts.ours[k, limit] for counts in sets])
        summary[f"k{k}"] = {"speedup": speedups}
        if REFERENCE in peers:
            comparisons = [counts.compare_to_reference(k) for counts in sets]
            summary[f"k{k}"] |= summarize_comparisons(comparisons)
    return summary


class AcceptanceStore(Op):
    name = "acceptance-store"
    help = "acceptance, with a store that conversations share, in the order of the file"
    sizes = ()
    peers = (STORE_PEER,)
    engines = ("index",)
    assumptions: Mapping[str, Any] = {
        "engine": "index: drafted by NgramProposer, one conversation after the other; each set "
        "begins with an empty store",
        "k": K[0],
        "limits": STORE_LIMITS,
        "at_equal_drafts, dominates, speedup, target": f"as in {Acceptance.name}, for {STORE_PEER}",
        STORE_PEER: arctic_peer.GLOBAL_DETAIL,
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        with self.skip_unavailable(STORE_PEER, skip_reasons):
            arctic_peer.load_suffix_tree()
        counts_of_sets: list[dict[str, Counts]] = []
        results: list[Result] = []
        for name, requests in load_sets([find_data(options.data)], load_tokenizer()).items():
            counts = {f"limit_{n}": replay_with_store(requests, "live", n) for n in STORE_LIMITS}
            curve = list(counts.values())
            counts["finish"] = replay_with_store(requests, "finish", DEFAULT_LIMIT)
            counts["no store"] = replay_with_store(requests, None, DEFAULT_LIMIT)
            result: Result = {"set": name}
            if STORE_PEER not in skip_reasons:
                proposer = arctic_peer.SuffixDecoding(K[0], has_shared_tree=True)
                peer = replay_drafts(requests, proposer, K[0], batch_size=1)
                result |= compare_to_peer(peer, curve, counts[f"limit_{DEFAULT_LIMIT}"])
                counts[STORE_PEER] = peer
            result |= {variant: round_per_step(c) for variant, c in counts.items()}
            counts_of_sets.append(counts)
            results.append(result)
            yield result
        speedups = {}
        for variant in counts_of_sets[0]:
            speedups[variant] = compute_speedup([counts[variant] for counts in counts_of_sets])
        summary: Result = {"set": "all", "sets": len(results), "speedup": speedups}
        if "dominates" in results[0]:
            summary |= summarize_comparisons(results)
        yield summary


def replay_with_store(requests: Requests, store: str | None, limit: int) -> Counts:
    """Replays the requests one after the other, with a ladder and optionally with a store."""
    probability = 2 ** (-limit / 16)
    config = NgramConfig(sizes="ladder", k=K[0], min_draft_probability=probability, store=store)
    return replay_drafts(requests, NgramProposer(config, "index"), K[0], batch_size=1)
