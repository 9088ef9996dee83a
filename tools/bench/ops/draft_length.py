"""Simulates tokens per second with draft lengths chosen by load, from step times and recorded text.

The real controller and sampler run on recorded completions, which replace the target model. Step
times come from the curves below, with noise. A cell is a combination of a curve, a batch size and a
data set.
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
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import Options
from tools.fit_draft_costs import load_sets

K = 5
CONFIG = NgramConfig(min_n=1, max_n=16, k=K, match_policy="latest", overlap=True)
BATCHES = (1, 8, 32, 128, 512)
STEPS, FIRST_STEPS = 20_000, 500
"""Number of steps of a cell, and how many of them, from the start, are reported separately."""
TIME_DEVIATION, OUTLIER_FACTOR, OUTLIER_SHARE = 0.03, 10, 0.002
"""Standard deviation of the logarithm of step times; a random 0.2 % of the steps take 10 times as
long."""
FIXED_LENGTHS = tuple(range(K + 1))
LIMITS = {"steady": (0.98, 0.95), "change": (0.97, 0.93)}
"""Minimum tokens per second for a pass, relative to no speculation and to the best fixed length:
with constant load, and if load and data set change after half of the steps."""

IntArray = npt.NDArray[np.int64]
Curve = Callable[[int, int], float]
"""Returns the seconds of a step for a batch size and a draft length."""

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


def _compute_forward_seconds(
    weight_bytes: float, operations_per_token: float, gpus: int, num_verified: int
) -> float:
    read_seconds = weight_bytes / (gpus * BANDWIDTH * EFFICIENCY)
    operations = operations_per_token * num_verified
    return max(read_seconds, operations / (gpus * OPERATIONS * COMPUTE_EFFICIENCY))


def _compute_kv_read_seconds(batch: int, bytes_per_token: int, gpus: int) -> float:
    """Returns the time to read the KV cache of 1024 tokens of context per request."""
    return batch * 1024 * bytes_per_token / (gpus * BANDWIDTH * EFFICIENCY)


def time_dense_8b(batch: int, length: int) -> float:
    """Returns the step time of Llama 3.1 8B on one H100, with 1k tokens of context per request."""
    forward_seconds = _compute_forward_seconds(16.06e9, 16.06e9, 1, batch * (1 + length))
    return forward_seconds + _compute_kv_read_seconds(batch, 131072, 1)


def time_dense_70b_tp4(batch: int, length: int) -> float:
    """Returns the step time of Llama 3.1 70B on four H100, with two all-reduces of 8192 bf16 values
    per token and layer."""
    num_verified = batch * (1 + length)
    transfer_seconds = num_verified * 80 * 2 * 8192 * 2 * 1.5 / NVLINK + 80 * 2 * ALL_REDUCE_S
    forward_seconds = _compute_forward_seconds(141e9, 141e9, 4, num_verified)
    return forward_seconds + _compute_kv_read_seconds(batch, 327680, 4) + transfer_seconds


def time_moe_30b(batch: int, length: int) -> float:
    """Returns the step time of Qwen3 30B-A3B on one H100. A step reads the experts that its tokens
    activate: on average E (1 - (1 - k/E)^t) of E for t tokens (MoESD, arXiv:2505.19645), with
    E = 128 and k = 8."""
    num_verified = batch * (1 + length)
    activated_share = 1 - (1 - 8 / 128) ** num_verified
    weight_bytes = 2 * (1.5e9 + 29e9 * activated_share)
    launch_seconds = 0.002  # 48 layers of small kernels (assumed)
    forward_seconds = _compute_forward_seconds(weight_bytes, 6.6e9, 1, num_verified)
    return forward_seconds + _compute_kv_read_seconds(batch, 98304, 1) + launch_seconds


CURVES: Mapping[str, Curve] = {
    "dense-tp1": time_dense_8b,
    "dense-tp4": time_dense_70b_tp4,
    "moe": time_moe_30b,
}


class RecordedCompletions:
    """The completions of a data set, concatenated, and for each position the number of leading
    draft tokens that are correct."""

    def __init__(self, requests: Sequence[TokenRequest]) -> None:
        self.contexts: list[npt.NDArray[np.int32]] = []
        self.prompt_lengths: list[int] = []
        """Per completion: the number of tokens before it in its context."""
        offsets, num_accepted = [0], []
        for request in requests:
            token_ids = np.ascontiguousarray(request.tokens(), np.int32)
            for begin, end in request.spans():
                self.contexts.append(token_ids[:end])
                self.prompt_lengths.append(begin)
                num_accepted.append(_count_accepted(token_ids[:end], begin))
                offsets.append(offsets[-1] + end - begin)
        self.num_accepted = np.concatenate(num_accepted)
        self.first_positions, self.end_positions = np.array(offsets[:-1]), np.array(offsets[1:])
        spans = list(zip(self.first_positions, self.end_positions, strict=True))
        self.num_steps: dict[int, IntArray] = {}
        """By draft length: the number of steps of each completion."""
        for k in FIXED_LENGTHS:
            self.num_steps[k] = np.array([self.count_steps(*span, k) for span in spans])

    def count_steps(self, begin: int, end: int, length: int) -> int:
        """Returns the number of steps between two positions with drafts of `length` tokens."""
        position, num_steps = int(begin), 0
        while position < end:
            position += 1 + min(int(self.num_accepted[position]), length)
            num_steps += 1
        return num_steps


def _count_accepted(token_ids: npt.NDArray[np.int32], begin: int) -> IntArray:
    """Returns the number of correct leading draft tokens at each position from ``begin`` on."""
    positions = np.arange(begin, len(token_ids), dtype=np.int32)
    rows = np.broadcast_to(token_ids, (len(positions), len(token_ids)))
    arguments = CONFIG.lookup_arguments | {"fill": True}
    drafts = _C.ngram_propose(rows, positions, **arguments)[0]
    columns = positions[:, None] + np.arange(K)
    is_known = columns < len(token_ids)
    is_correct = (drafts == token_ids[np.minimum(columns, len(token_ids) - 1)]) & is_known
    num_accepted: IntArray = np.cumprod(is_correct, axis=1).sum(axis=1, dtype=np.int64)
    return num_accepted


@dataclass
class RunningRequest:
    """The completion that a row generates, with what the sampler reads of vLLM's Request."""

    rows: Rows
    row: int
    completion: int
    finished: bool = False

    @property
    def all_token_ids(self) -> npt.NDArray[np.int32]:
        recorded, completion = self.rows.recorded, self.completion
        context = recorded.contexts[completion]
        if self.finished:
            return context
        num_generated = int(self.rows.positions[self.row] - recorded.first_positions[completion])
        return context[: recorded.prompt_lengths[completion] + num_generated]

    def is_finished(self) -> bool:
        return self.finished


class Rows:
    """A batch of requests: each row generates the completions of a set in its own random order."""

    def __init__(self, recorded: RecordedCompletions, batch: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.recorded, self.batch = recorded, batch
        num_completions = len(recorded.end_positions)
        self.order = np.stack([rng.permutation(num_completions) for _ in range(batch)])
        self.num_finished = np.zeros(batch, np.int64)
        """Per row: the number of completions that the row has finished."""
        first = recorded.first_positions[self.order[:, 0]]
        self.end_positions = recorded.end_positions[self.order[:, 0]]
        self.positions = first + (rng.random(batch) * (self.end_positions - first)).astype(np.int64)
        self.running = [RunningRequest(self, i, int(self.order[i, 0])) for i in range(batch)]

    def step(self, length: int) -> int:
        """Runs a step of all rows with drafts of `length` tokens. Returns the number of tokens."""
        recorded = self.recorded
        num_tokens = np.minimum(recorded.num_accepted[self.positions], length) + 1
        num_tokens = np.minimum(num_tokens, self.end_positions - self.positions)
        self.positions += num_tokens
        for row in np.flatnonzero(self.positions >= self.end_positions):
            self.running[row].finished = True
            self.num_finished[row] += 1
            completion = int(self.order[row, self.num_finished[row] % self.order.shape[1]])
            self.running[row] = RunningRequest(self, int(row), completion)
            self.positions[row] = recorded.first_positions[completion]
            self.end_positions[row] = recorded.end_positions[completion]
        return int(num_tokens.sum())

    def copy_progress(self) -> tuple[IntArray, IntArray]:
        """Returns copies of the rows' finished completions and positions, for count_steps()."""
        return self.num_finished.copy(), self.positions.copy()

    def count_steps(self, start: tuple[IntArray, IntArray], length: int) -> float:
        """Returns the number of steps, averaged over rows, that drafts of `length` tokens need for
        the text since `start`, a result of copy_progress()."""
        recorded, num_steps = self.recorded, 0
        for row in range(self.batch):
            first_index, position = int(start[0][row]), int(start[1][row])
            last_index, end = int(self.num_finished[row]), int(self.positions[row])
            order = self.order[row]
            if first_index == last_index:
                num_steps += recorded.count_steps(position, end, length)
                continue
            completions = order[np.arange(first_index, last_index + 1) % len(order)]
            first_end = recorded.end_positions[completions[0]]
            num_steps += recorded.count_steps(position, first_end, length)
            num_steps += int(recorded.num_steps[length][completions[1:-1]].sum())
            last_begin = recorded.first_positions[completions[-1]]
            num_steps += recorded.count_steps(last_begin, end, length)
        return num_steps / self.batch


class ConstantLength:
    """A policy with a constant length, to check that LIMITS reject bad policies."""

    def __init__(self, lengths: Sequence[int], max_batch: int, length: int) -> None:
        self.lengths, self.table = tuple(lengths), [length] * (max_batch + 1)
        self.acceptance = DraftLengthController(lengths, max_batch).acceptance

    def observe_schedule(self, batch: int, length: int) -> None: ...
    def observe_step(self, batch: int, length: int, seconds: float | None) -> None: ...


@dataclass
class Totals:
    """Tokens and seconds of some steps, and the seconds that each fixed length would need."""

    tokens: int = 0
    seconds: float = 0.0
    fixed_seconds: IntArray | npt.NDArray[np.float64] = None  # type: ignore[assignment]

    def compute_ratios(self) -> tuple[float, float, int]:
        """Returns the tokens per second relative to no drafts, the same relative to the best fixed
        length, and that length."""
        best = int(self.fixed_seconds.argmin())
        none_seconds, best_seconds = self.fixed_seconds[0], self.fixed_seconds[best]
        return none_seconds / self.seconds, best_seconds / self.seconds, best


Phase = tuple[RecordedCompletions, int]
"""A data set and a batch size."""


def simulate(
    phases: Sequence[Phase], curve: Curve, make_controller: Any, num_steps: int = STEPS
) -> tuple[Totals, Totals]:
    """Runs a controller through phases with the same number of steps each.

    Returns:
        The totals of the first 500 steps, and of all other steps.
    """
    rng = np.random.default_rng(1)
    lengths = choose_lengths(K, 512)
    controller = make_controller(lengths, max(batch for _, batch in phases))
    uses_sampler = not isinstance(controller, ConstantLength)
    zeros = np.zeros(len(FIXED_LENGTHS))
    first_steps, later_steps = Totals(fixed_seconds=zeros), Totals(fixed_seconds=zeros)
    length = previous_length = 0
    for i, (recorded, batch) in enumerate(phases):
        rows = Rows(recorded, batch, seed=i)
        capacity = 1 + max(map(len, recorded.contexts))
        sampler = AcceptanceSampler(CONFIG, lengths, capacity, controller.acceptance)
        count = num_steps // len(phases)
        spans = [(later_steps, count)]
        if i == 0:
            spans = [(first_steps, FIRST_STEPS), (later_steps, count - FIRST_STEPS)]
        for totals, span in spans:
            start = rows.copy_progress()
            for step in range(span):
                seconds = curve(batch, length)
                num_tokens = rows.step(length)
                totals.tokens += num_tokens
                totals.seconds += seconds
                next_length = controller.table[batch]
                controller.observe_schedule(batch, next_length)
                measured_s = seconds * math.exp(rng.normal(0, TIME_DEVIATION))
                measured_s *= OUTLIER_FACTOR if rng.random() < OUTLIER_SHARE else 1
                is_unchanged = length == previous_length
                controller.observe_step(batch, length, measured_s if is_unchanged else None)
                controller.acceptance.observe_verified(length, num_tokens, batch)
                if uses_sampler and step % SAMPLE_STEPS == 0:
                    sampler.sample(rows.running)
                previous_length, length = length, next_length
            fixed = [rows.count_steps(start, k) * curve(batch, k) for k in FIXED_LENGTHS]
            totals.fixed_seconds = totals.fixed_seconds + np.array(fixed)
    return first_steps, later_steps


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
        "noise": f"the logarithm of step times has a standard deviation of {TIME_DEVIATION:g}; a "
        f"share of {OUTLIER_SHARE:g} of the steps take {OUTLIER_FACTOR} times as long",
        "ratios": "tokens per second relative to no drafts, and relative to the best fixed length "
        "from 0 to 5 on the same text; the smallest ratio of all sets; the first 500 steps are "
        "reported separately",
        "change": "after half of the steps, the next batch size and the next set of the lists",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        sets = load_sets([find_data(options.data)], load_tokenizer())
        recorded = {name: RecordedCompletions(requests) for name, requests in sets.items()}
        names = list(recorded)
        num_steps = options.steps or STEPS
        for policy, make_controller in POLICIES.items():
            for kind, limits in LIMITS.items():
                results: list[Result] = []
                for (curve_name, curve), j in product(CURVES.items(), range(len(BATCHES))):
                    totals = {}
                    for i, name in enumerate(names):
                        phases = [(recorded[name], BATCHES[j])]
                        if kind == "change":
                            next_set = recorded[names[(i + 1) % len(names)]]
                            phases.append((next_set, BATCHES[(j + 1) % len(BATCHES)]))
                        totals[name] = simulate(phases, curve, make_controller, num_steps)
                    key = {"policy": policy, "kind": kind, "curve": curve_name}
                    results.append(key | _summarize(BATCHES[j], totals, limits))
                    yield results[-1]
                smallest = {
                    name: min(result[name] for result in results)
                    for name in ("over none", "over best", "first 500 over none", "passes")
                }
                yield {"policy": policy, "kind": kind, "curve": "all", "batch": "all", **smallest}


def _summarize(
    batch: int, totals: Mapping[str, tuple[Totals, Totals]], limits: tuple[float, float]
) -> Result:
    """Returns the smallest ratios of all sets, for a curve and a batch size.

    Args:
        totals: Per set, the totals of the first and of the later steps.
    """
    ratios = {name: later.compute_ratios() for name, (_, later) in totals.items()}
    first_over_none = min(first.compute_ratios()[0] for first, _ in totals.values())
    over_none, over_best, _ = (list(column) for column in zip(*ratios.values(), strict=True))
    return {
        "batch": batch,
        "over none": round(float(min(over_none)), 4),
        "over best": round(float(min(over_best)), 4),
        "first 500 over none": round(float(first_over_none), 4),
        "passes": bool(min(over_none) >= limits[0] and min(over_best) >= limits[1]),
        "best lengths": sorted({best for _, _, best in ratios.values()}),
    }
