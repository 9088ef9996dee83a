"""The yield of drafting: tokens per step against drafted tokens per step, ours and its peers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np
from ngram_npu import NgramConfig, NgramProposer
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER
from ngram_npu_cli.replay import Proposer, TokenRequest, simulate
from ngram_npu_cli.replay.walks import Counts, IntArray, at_equal_drafts, walks

from tools.bench import arctic_peer
from tools.bench.data import default_data
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import BenchError, Options
from tools.drafts import PARTS, calibration, load
from tools.fit_costs import TABLE

K = (8, 16)
LIMITS = tuple(range(2, 102, 2))
DEFAULT_LIMIT, HIGH_LIMIT = 40, 54
BATCH = 128
"""Conversations at once; no figure depends on it."""
VERIFYING = 0.05
"""Cost of a drafted token in the speed-up, in steps."""
REFERENCE = "arctic-local"

Replayer = Callable[[int, int], Counts]
"""Ours on some conversations: maps k and limit to the counts of a replay."""


def costs_table() -> IntArray:
    """[16, 32], the package's."""
    return np.array(json.loads(TABLE.read_text(encoding="utf-8"))["row"], np.int64)


def simulated(requests: Sequence[TokenRequest]) -> Replayer:
    """Ours without its kernels."""
    found, costs = walks(requests), costs_table()
    return lambda k, limit: found.replay(found.lengths(costs, limit, k))


def indexed(requests: Sequence[TokenRequest]) -> Replayer:
    """Ours, from its index; the replayer raises BenchError if the simulator's counts differ."""
    expected = simulated(requests)

    def replay(k: int, limit: int) -> Counts:
        config = NgramConfig(sizes="ladder", k=k, min_draft_probability=2 ** (-limit / 16))
        found = proposed(requests, NgramProposer(config, "index"), k)
        if found != expected(k, limit):
            raise BenchError(f"k {k}, limit {limit}: {found}, simulated {expected(k, limit)}")
        return found

    return replay


def proposed(
    requests: Sequence[TokenRequest], proposer: Proposer, k: int, batch_size: int = BATCH
) -> Counts:
    """Any proposer's drafts, by the package's own replay."""
    figures = simulate("", requests, proposer, k=k, batch_size=batch_size)
    return Counts(figures.num_tokens, figures.num_steps, figures.num_draft_tokens)


def _ngram(k: int) -> Callable[[Sequence[TokenRequest]], Counts]:
    config = NgramConfig(min_n=2, max_n=5, k=k)
    return lambda requests: proposed(requests, NgramProposer(config, "index"), k)


def _arctic(k: int) -> Callable[[Sequence[TokenRequest]], Counts]:
    return lambda requests: proposed(requests, arctic_peer.SuffixDecoding(k), k)


PEERS: Mapping[str, Callable[[Sequence[TokenRequest]], Counts]] = {
    "vllm-ngram-k5": _ngram(5),
    "vllm-ngram-k8": _ngram(8),
    REFERENCE: _arctic(8),
}
ENGINES: Mapping[str, Callable[[Sequence[TokenRequest]], Replayer]] = {
    "index": indexed,
    "simulator": simulated,
}


@dataclass(frozen=True)
class Part:
    """The counts on a set or on its odd half: peers by name; ours by k and limit."""

    peers: dict[str, Counts]
    ours: dict[tuple[int, int], Counts]

    def __add__(self, other: Part) -> Part:
        return Part(
            {name: counts + other.peers[name] for name, counts in self.peers.items()},
            {at: counts + other.ours[at] for at, counts in self.ours.items()},
        )

    def curve(self, k: int) -> list[Counts]:
        return [self.ours[k, limit] for limit in LIMITS]

    def against_reference(self, k: int) -> dict[str, Any]:
        return against(self.peers[REFERENCE], self.curve(k), self.ours[k, DEFAULT_LIMIT])


class Acceptance(Op):
    name = "acceptance"
    help = "tokens per step and drafted tokens per step of ours and peers on recorded sets"
    sizes = ()
    peers = tuple(PEERS)
    engines = tuple(ENGINES)
    unused_settings = frozenset({"config", "k", "match_policy", "threads", "rounds", "device"})
    assumptions: Mapping[str, Any] = {
        "engine": "index: drafted by NgramProposer, and each figure is the simulator's too, or the "
        "run ends; simulator: walks, without kernels",
        "k": K,
        "limits": f"{LIMITS[0]}, {LIMITS[1]}, ... {LIMITS[-1]} sixteenths of a bit, which a "
        f"draft's costs do not pass; {DEFAULT_LIMIT}, the default, is a probability of "
        f"{2 ** (-DEFAULT_LIMIT / 16):.3f}",
        "at_equal_drafts": "tokens per step where ours drafts as many tokens a step as "
        f"{REFERENCE}, in a straight line between two limits",
        "dominates": f"more tokens per step and no more drafted tokens per step than {REFERENCE}",
        "speedup": f"tokens per step / (1 + {VERIFYING:g} * drafted tokens per step), geometric "
        "mean over the sets",
        "odd": "the conversations that the costs were not fitted on (the first is number 0)",
        "vllm-ngram": "n-grams of 2 to 5, the earliest, drafted by this project's operator",
        REFERENCE: arctic_peer.DETAIL,
        "target": "recorded completions stand for the target model; a conversation is one row",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        engine = options.engine or self.engines[0]
        if engine not in ENGINES:
            raise BenchError(f"{self.name}: engine: expected one of {', '.join(ENGINES)}")
        names = self.peers if options.peers is None else options.peers
        if unknown := set(names) - set(PEERS):
            raise BenchError(f"{self.name}: peer {unknown}: expected one of {', '.join(PEERS)}")
        if REFERENCE in names:
            with self.left_out(REFERENCE, skipped):
                arctic_peer.suffix_tree()
        peers = [name for name in names if name not in skipped]
        data = load([default_data(options.data)], DEFAULT_TOKENIZER)
        parts: dict[str, list[Part]] = {"whole": [], "odd": []}
        for name, requests in data.sets.items():
            even, odd = (_part(requests[PARTS[half]], engine, peers) for half in ("even", "odd"))
            parts["whole"].append(even + odd)
            parts["odd"].append(odd)
            yield {
                "set": name,
                "engine": engine,
                "conversations": len(requests),
                "whole": _figures(even + odd),
                "whole_by_limit": _curve(even + odd, K[0]),
                "odd_calibration": calibration(
                    walks(requests[PARTS["odd"]]), costs_table(), DEFAULT_LIMIT, K[0]
                ),
            }
        yield {"set": "all", "engine": engine, **{p: _summary(of) for p, of in parts.items()}}

    def shown(self, result: Result) -> Result:
        return {"set": result["set"], **result["whole"]}


def _part(requests: Sequence[TokenRequest], engine: str, peers: Sequence[str]) -> Part:
    ours = ENGINES[engine](requests)
    return Part(
        {name: PEERS[name](requests) for name in peers},
        {(k, limit): ours(k, limit) for k in K for limit in LIMITS},
    )


def _figures(part: Part) -> dict[str, Any]:
    ours = {f"limit_{DEFAULT_LIMIT}": per_step(part.ours[K[0], DEFAULT_LIMIT])}
    if REFERENCE in part.peers:
        ours |= part.against_reference(K[0])
    return {"peers": {n: per_step(of) for n, of in part.peers.items()}, f"k{K[0]}": ours}


def _curve(part: Part, k: int) -> dict[str, list[float]]:
    """By limit, as `LIMITS` has them."""
    curve = part.curve(k)
    return {
        "tokens_per_step": [round(of.tokens_per_step, 4) for of in curve],
        "drafted_per_step": [round(of.drafted_per_step, 4) for of in curve],
    }


def against(peer: Counts, curve: Sequence[Counts], default: Counts) -> dict[str, Any]:
    """A curve of ours by limit, and its point at the default limit, against a peer."""
    tokens, _ = at_equal_drafts(curve, peer.drafted_per_step)
    return {
        "at_equal_drafts": {
            "tokens_per_step": round(tokens, 4),
            "ratio": round(tokens / peer.tokens_per_step, 5),
        },
        "dominates": default.tokens_per_step > peer.tokens_per_step
        and default.drafted_per_step <= peer.drafted_per_step,
    }


def over_sets(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `against` found on several sets."""
    ratios = [of["at_equal_drafts"]["ratio"] for of in found]
    return {
        "sets_at_least_equal": sum(ratio >= 1 for ratio in ratios),
        "least_ratio": min(ratios),
        "mean_ratio": round(geometric_mean(ratios), 4),
        "sets_dominated": sum(of["dominates"] for of in found),
    }


def _summary(parts: Sequence[Part]) -> dict[str, Any]:
    """Figures over all sets."""

    def speedup(of: Callable[[Part], Counts]) -> float:
        return round(geometric_mean(of(part).speedup(VERIFYING) for part in parts), 4)

    found: dict[str, Any] = {
        "sets": len(parts),
        "speedup": {name: speedup(lambda p, n=name: p.peers[n]) for name in parts[0].peers},  # type: ignore[misc]
    }
    for k in K:
        found[f"k{k}"] = {
            "speedup": {
                f"limit_{limit}": speedup(lambda p, at=(k, limit): p.ours[at])  # type: ignore[misc]
                for limit in (DEFAULT_LIMIT, HIGH_LIMIT)
            }
        }
        if REFERENCE in parts[0].peers:
            found[f"k{k}"] |= over_sets([part.against_reference(k) for part in parts])
    return found


def per_step(counts: Counts) -> dict[str, float]:
    return {
        "tokens_per_step": round(counts.tokens_per_step, 4),
        "drafted_per_step": round(counts.drafted_per_step, 4),
    }
