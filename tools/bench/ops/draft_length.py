"""Tokens per second with draft lengths chosen by load, simulated from step times and recorded text.

The real controller and sampler run on recorded completions, which replace the target model. Step
times come from the curves below, with noise. A cell is one curve, batch size and set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramConfig
from ngram_npu.draft_acceptance import AcceptanceSampler
from ngram_npu.draft_length import DraftLengthController
from ngram_npu.engines.vllm.auto_k import SAMPLE_STEPS, choose_lengths
from ngram_npu_cli.logs.tokenizers import load_tokenizer
from ngram_npu_cli.replay import TokenRequest

from tools.bench.data import find_data
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options
from tools.fit_draft_costs import load

K = 5
CONFIG = NgramConfig(min_n=1, max_n=16, k=K, match_policy="latest", overlap=True)
BATCHES = (1, 8, 32, 128, 512)
STEPS, FIRST_STEPS = 20_000, 500
"""Number of steps of a cell, and how many of them, from the start, are reported separately."""
NOISE, HICCUP, HICCUP_SHARE = 0.03, 10, 0.002
"""Standard deviation of the logarithm of step times; a random 0.2 % of the steps take 10 times as
long."""
FIXED = tuple(range(K + 1))
LIMITS = {"steady": (0.98, 0.95), "change": (0.97, 0.93)}
"""Smallest accepted ratio to no speculation and to the best fixed length."""

IntArray = npt.NDArray[np.int64]
Curve = Callable[[int, int], float]

# NVIDIA's data sheet of the H100 SXM: bytes and dense bf16 operations per second, and half of
# NVLink's 900 GB/s, which is the rate of one direction.
BANDWIDTH, OPERATIONS, NVLINK = 3.35e12, 989e12, 450e9
EFFICIENCY = 16.06e9 / BANDWIDTH / 6.48e-3
"""0.74: Llama 3.1 8B takes 6.48 ms per token at concurrency 1 (InferenceBench, "Recipe: concurrency
sweep", one H100, vLLM 0.21.0, fp16, 2026-05-16), of which its 16.06 GB take 4.79 ms to read."""
COMPUTE_EFFICIENCY = 0.6
"""Share of the peak rate that large matrix products reach (assumed)."""
ALL_REDUCE_S = 10e-6
"""Latency of an all-reduce (assumed)."""


def _seconds(weight_bytes: float, operations: float, gpus: int, verified: int) -> float:
    reading = weight_bytes / (gpus * BANDWIDTH * EFFICIENCY)
    return max(reading, operations * verified / (gpus * OPERATIONS * COMPUTE_EFFICIENCY))


def _kv_seconds(batch: int, bytes_per_token: int, gpus: int) -> float:
    return batch * 1024 * bytes_per_token / (gpus * BANDWIDTH * EFFICIENCY)


def dense_8b(batch: int, length: int) -> float:
    """Llama 3.1 8B on one H100, 1k tokens of context per request."""
    return _seconds(16.06e9, 16.06e9, 1, batch * (1 + length)) + _kv_seconds(batch, 131072, 1)


def dense_70b_tp4(batch: int, length: int) -> float:
    """Llama 3.1 70B on four H100: two all-reduces of 8192 bf16 values per token and layer."""
    verified = batch * (1 + length)
    transfer = verified * 80 * 2 * 8192 * 2 * 1.5 / NVLINK + 80 * 2 * ALL_REDUCE_S
    return _seconds(141e9, 141e9, 4, verified) + _kv_seconds(batch, 327680, 4) + transfer


def moe_30b(batch: int, length: int) -> float:
    """Qwen3 30B-A3B on one H100. A step reads the experts that its tokens activate: on average
    E (1 - (1 - k/E)^t) of E for t tokens (MoESD, arXiv:2505.19645), with E = 128 and k = 8."""
    verified = batch * (1 + length)
    activated = 1 - (1 - 8 / 128) ** verified
    weight_bytes = 2 * (1.5e9 + 29e9 * activated)
    launch = 0.002  # 48 layers of small kernels (assumed)
    return _seconds(weight_bytes, 6.6e9, 1, verified) + _kv_seconds(batch, 98304, 1) + launch


CURVES: Mapping[str, Curve] = {"dense-tp1": dense_8b, "dense-tp4": dense_70b_tp4, "moe": moe_30b}


class Recorded:
    """Completions of a set, one after the other, and how many tokens of a draft at each position
    are right."""

    def __init__(self, requests: Sequence[TokenRequest]) -> None:
        self.contexts: list[npt.NDArray[np.int32]] = []
        offsets, accepted = [0], []
        self.begins: list[int] = []
        for request in requests:
            token_ids = np.ascontiguousarray(request.tokens(), np.int32)
            for begin, end in request.spans():
                self.contexts.append(token_ids[:end])
                self.begins.append(begin)
                accepted.append(_count_accepted(token_ids[:end], begin))
                offsets.append(offsets[-1] + end - begin)
        self.accepted = np.concatenate(accepted)
        self.firsts, self.ends = np.array(offsets[:-1]), np.array(offsets[1:])
        spans = list(zip(self.firsts, self.ends, strict=True))
        self.steps = {k: np.array([self.count_steps(*span, k) for span in spans]) for k in FIXED}

    def count_steps(self, first: int, end: int, length: int) -> int:
        """Returns the steps from one position to another with drafts of `length` tokens."""
        position, steps = int(first), 0
        while position < end:
            position += 1 + min(int(self.accepted[position]), length)
            steps += 1
        return steps


def _count_accepted(token_ids: npt.NDArray[np.int32], begin: int) -> IntArray:
    positions = np.arange(begin, len(token_ids), dtype=np.int32)
    rows = np.broadcast_to(token_ids, (len(positions), len(token_ids)))
    arguments = CONFIG.lookup_arguments | {"fill": True}
    drafts = _C.ngram_propose(rows, positions, **arguments)[0]
    columns = positions[:, None] + np.arange(K)
    is_known = columns < len(token_ids)
    is_right = (drafts == token_ids[np.minimum(columns, len(token_ids) - 1)]) & is_known
    accepted: IntArray = np.cumprod(is_right, axis=1).sum(axis=1, dtype=np.int64)
    return accepted


@dataclass
class RunningRequest:
    """A completion in a row, as the sampler reads it."""

    rows: Rows
    row: int
    completion: int
    finished: bool = False

    @property
    def all_token_ids(self) -> npt.NDArray[np.int32]:
        recorded, number = self.rows.recorded, self.completion
        context = recorded.contexts[number]
        if self.finished:
            return context
        generated = int(self.rows.positions[self.row] - recorded.firsts[number])
        return context[: recorded.begins[number] + generated]

    def is_finished(self) -> bool:
        return self.finished


class Rows:
    """A batch of requests: each row generates the completions of a set in its own random order."""

    def __init__(self, recorded: Recorded, batch: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.recorded, self.batch = recorded, batch
        number = len(recorded.ends)
        self.order = np.stack([rng.permutation(number) for _ in range(batch)])
        self.turns = np.zeros(batch, np.int64)
        first, self.ends = recorded.firsts[self.order[:, 0]], recorded.ends[self.order[:, 0]]
        self.positions = first + (rng.random(batch) * (self.ends - first)).astype(np.int64)
        self.running = [RunningRequest(self, i, int(self.order[i, 0])) for i in range(batch)]

    def step(self, length: int) -> int:
        """Generates with drafts of `length` tokens and returns the number of tokens."""
        recorded = self.recorded
        tokens = np.minimum(recorded.accepted[self.positions], length) + 1
        tokens = np.minimum(tokens, self.ends - self.positions)
        self.positions += tokens
        for row in np.flatnonzero(self.positions >= self.ends):
            self.running[row].finished = True
            self.turns[row] += 1
            completion = int(self.order[row, self.turns[row] % self.order.shape[1]])
            self.running[row] = RunningRequest(self, int(row), completion)
            self.positions[row] = recorded.firsts[completion]
            self.ends[row] = recorded.ends[completion]
        return int(tokens.sum())

    def mark(self) -> tuple[IntArray, IntArray]:
        return self.turns.copy(), self.positions.copy()

    def count_steps(self, begin: tuple[IntArray, IntArray], length: int) -> float:
        """Returns the steps, averaged over rows, for the text since `begin` at a fixed length."""
        recorded, steps = self.recorded, 0
        for row in range(self.batch):
            turn, position = int(begin[0][row]), int(begin[1][row])
            last, end = int(self.turns[row]), int(self.positions[row])
            order = self.order[row]
            if turn == last:
                steps += recorded.count_steps(position, end, length)
                continue
            completions = order[np.arange(turn, last + 1) % len(order)]
            steps += recorded.count_steps(position, recorded.ends[completions[0]], length)
            steps += int(recorded.steps[length][completions[1:-1]].sum())
            steps += recorded.count_steps(recorded.firsts[completions[-1]], end, length)
        return steps / self.batch


class ConstantLength:
    """A wrong controller, which ignores what it observes."""

    def __init__(self, lengths: Sequence[int], max_batch: int, length: int) -> None:
        self.lengths, self.table = tuple(lengths), [length] * (max_batch + 1)
        self.acceptance = DraftLengthController(lengths, max_batch).acceptance

    def observe_schedule(self, batch: int, length: int) -> None: ...
    def observe_step(self, batch: int, length: int, seconds: float | None) -> None: ...


@dataclass
class Figures:
    """Tokens and seconds of a part of a run, and the seconds that fixed lengths need for them."""

    tokens: int = 0
    seconds: float = 0.0
    fixed: IntArray | npt.NDArray[np.float64] = None  # type: ignore[assignment]

    def ratios(self) -> tuple[float, float, int]:
        """Returns tokens per second over those without drafts and over those of the best fixed
        length, and that length."""
        best = int(self.fixed.argmin())
        return self.fixed[0] / self.seconds, self.fixed[best] / self.seconds, best


def simulate(
    parts: Sequence[tuple[Recorded, int]], curve: Curve, make_controller: Any, steps: int = STEPS
) -> tuple[Figures, Figures]:
    """Runs a controller, with the same number of steps for each part's set and batch size.

    Returns:
        The figures of the first 500 steps, and of all others.
    """
    rng = np.random.default_rng(1)
    lengths = choose_lengths(K, 512)
    controller = make_controller(lengths, max(batch for _, batch in parts))
    begin, rest = Figures(fixed=np.zeros(len(FIXED))), Figures(fixed=np.zeros(len(FIXED)))
    length = previous = 0
    for number, (recorded, batch) in enumerate(parts):
        rows = Rows(recorded, batch, seed=number)
        capacity = 1 + max(map(len, recorded.contexts))
        sampler = AcceptanceSampler(CONFIG, lengths, capacity, controller.acceptance)
        samples = not isinstance(controller, ConstantLength)
        count = steps // len(parts)
        spans = [(rest, count)] if number else [(begin, FIRST_STEPS), (rest, count - FIRST_STEPS)]
        for figures, span in spans:
            start = rows.mark()
            for step in range(span):
                seconds = curve(batch, length)
                tokens = rows.step(length)
                figures.tokens += tokens
                figures.seconds += seconds
                planned = controller.table[batch]
                controller.observe_schedule(batch, planned)
                measured = seconds * math.exp(rng.normal(0, NOISE))
                measured *= HICCUP if rng.random() < HICCUP_SHARE else 1
                controller.observe_step(batch, length, measured if length == previous else None)
                controller.acceptance.observe_verified(length, tokens, batch)
                if samples and step % SAMPLE_STEPS == 0:
                    sampler.sample(rows.running)
                previous, length = length, planned
            needed = [rows.count_steps(start, k) * curve(batch, k) for k in FIXED]
            figures.fixed = figures.fixed + np.array(needed)
    return begin, rest


POLICIES: Mapping[str, Any] = {
    "controller": DraftLengthController,
    "always 0": lambda lengths, batch: ConstantLength(lengths, batch, 0),
    "always the maximum": lambda lengths, batch: ConstantLength(lengths, batch, lengths[-1]),
}


class DraftLength(Op):
    name = "draft-length"
    help = "simulated tokens per second with draft lengths that follow the load"
    sizes = ()
    unused_settings = frozenset(
        {"config", "k", "match_policy", "threads", "rounds", "device", "engine", "peers"}
    )
    assumptions: Mapping[str, Any] = {
        "text": "recorded completions replace the target model",
        "lookup": "n-grams of 1 to 16, padded to the step's draft length, at most 5",
        "lengths": choose_lengths(K, 512),
        "steps": f"{STEPS} per cell; --steps changes this",
        "curves": {name: " ".join(str(curve.__doc__).split()) for name, curve in CURVES.items()},
        "efficiency": round(EFFICIENCY, 3),
        "noise": f"step times deviate by {NOISE:g} (log); {HICCUP_SHARE:g} take {HICCUP} times",
        "ratios": "of tokens per second to no drafts, and to the best fixed length from 0 to 5 on "
        "the same text; the smallest of all sets, without the first 500 steps, which are separate",
        "change": "after half of the steps the batch and the set are the next ones of the list",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        sets = load([find_data(options.data)], load_tokenizer())
        recorded = {name: Recorded(requests) for name, requests in sets.items()}
        names = list(recorded)
        for policy, make_controller in POLICIES.items():
            steps = options.steps or STEPS
            for kind, limits in LIMITS.items():
                results: list[Result] = []
                for (curve_name, curve), number in product(CURVES.items(), range(len(BATCHES))):
                    cells = {}
                    for i, name in enumerate(names):
                        parts = [(recorded[name], BATCHES[number])]
                        if kind == "change":
                            other = recorded[names[(i + 1) % len(names)]]
                            parts.append((other, BATCHES[(number + 1) % len(BATCHES)]))
                        cells[name] = simulate(parts, curve, make_controller, steps)
                    key = {"policy": policy, "kind": kind, "curve": curve_name}
                    results.append(key | _summarize(BATCHES[number], cells, limits))
                    yield results[-1]
                smallest = {
                    name: min(result[name] for result in results)
                    for name in ("over none", "over best", "first 500 over none", "passes")
                }
                yield {"policy": policy, "kind": kind, "curve": "all", "batch": "all", **smallest}


def _summarize(
    batch: int,
    cells: Mapping[str, tuple[Figures, Figures]],
    limits: tuple[float, float],
) -> Result:
    ratios = {name: rest.ratios() for name, (_, rest) in cells.items()}
    over_none, over_best, _ = (list(column) for column in zip(*ratios.values(), strict=True))
    return {
        "batch": batch,
        "over none": round(float(min(over_none)), 4),
        "over best": round(float(min(over_best)), 4),
        "first 500 over none": round(float(min(b.ratios()[0] for b, _ in cells.values())), 4),
        "passes": bool(min(over_none) >= limits[0] and min(over_best) >= limits[1]),
        "best lengths": sorted({best for _, _, best in ratios.values()}),
    }
