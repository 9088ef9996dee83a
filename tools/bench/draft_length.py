"""Simulates tokens per second if the number of draft tokens follows the load ("k": "auto").

    python -m tools.bench.draft_length [--steps 2000] [--data FOLDER] [--json FILE]

The controller runs on recorded completions, which replace the target model. Step times are computed
from data sheets of H100 GPUs, or published by another project, with noise: nothing is measured. The
peers are a step without drafts, always K = 5, and the best K for each batch size, which is what
vLLM's table `num_speculative_tokens_per_batch_size` gives a user who knows the traffic. The load is
one batch size, or changes among all of them.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramConfig
from ngram_npu.draft_length import DraftLengthController
from ngram_npu_cli.tokenization import TokenRequest

from tools.bench.measure import make_parser, write_result
from tools.bench.recorded import find_data, load_sets

K = 5
LENGTHS = (0, 3, 5)
BATCHES = (1, 4, 8, 16, 32, 64)
MAX_TOKENS = 512
"""vLLM's largest graph: a batch uses a draft length whose tokens fit into it."""
FIRST_STEPS = 500
"""Number of steps at the beginning, in which the controller learns; they are not counted."""
LOAD_STEPS = 250
"""Number of steps after which a changing load has another batch size."""
PEERS = "no drafts", "always 5", "the best by batch size"
TIME_DEVIATION = 0.03
"""Standard deviation of the logarithm of step times."""
# NVIDIA's data sheet of the H100 SXM: bytes and dense bf16 operations per second.
BANDWIDTH, OPERATIONS = 3.35e12, 989e12
READ_EFFICIENCY, COMPUTE_EFFICIENCY = 0.74, 0.6
"""Shares of the peak rates: from a published time per token of Llama 3.1 8B (6.48 ms,
InferenceBench, vLLM 0.21.0, 2026-05-16), and assumed."""


Curve = Callable[[int, int], float]


def time_dense_8b(batch: int, length: int) -> float:
    """Returns the step time of Llama 3.1 8B on one H100, with 1k tokens of context per request."""
    read_bytes = 16.06e9 + batch * 1024 * 131072
    operations = 16.06e9 * batch * (1 + length)
    return max(
        read_bytes / (BANDWIDTH * READ_EFFICIENCY), operations / (OPERATIONS * COMPUTE_EFFICIENCY)
    )


def time_moe_30b(batch: int, length: int) -> float:
    """Returns the step time of Qwen3 30B-A3B on one H100. A step reads the experts that its tokens
    activate: on average E (1 - (1 - k/E)^t) of E for t tokens (MoESD, arXiv:2505.19645)."""
    activated_share = 1 - (1 - 8 / 128) ** (batch * (1 + length))
    read_bytes = 2 * (1.5e9 + 29e9 * activated_share) + batch * 1024 * 98304
    operations = 6.6e9 * batch * (1 + length)
    read_seconds = read_bytes / (BANDWIDTH * READ_EFFICIENCY)
    launch_seconds = 0.002  # 48 layers of small kernels (assumed)
    return max(read_seconds, operations / (OPERATIONS * COMPUTE_EFFICIENCY)) + launch_seconds


PUBLISHED_GAINS = {
    "published 4b": (1.19, 1.00, 0.90, 0.74, 0.59, 0.44),
    "published 27b": (1.62, 1.40, 1.33, 1.07, 0.80, 0.50),
}
"""Tokens per second with K = 5 over those without drafts, at 1.86 tokens per step, for BATCHES."""


def make_published_curve(gains: Sequence[float]) -> Curve:
    """Returns step times relative to no drafts, which are linear in K."""
    times = dict(zip(BATCHES, gains, strict=True))
    return lambda batch, length: 1 + (1.86 / times[batch] - 1) * length / K


CURVES: Mapping[str, Curve] = {
    "dense": time_dense_8b,
    "moe": time_moe_30b,
    **{name: make_published_curve(gains) for name, gains in PUBLISHED_GAINS.items()},
}


def count_accepted(conversations: Sequence[TokenRequest]) -> npt.NDArray[np.int64]:
    """Returns the number of correct leading draft tokens at each position of all completions."""
    counts = []
    arguments = NgramConfig(k=K).lookup_arguments | {"fill": True}
    for conversation in conversations:
        text, end = conversation.tokens(), 0
        for prompt, completion in conversation.turns:
            begin, end = end + len(prompt), end + len(prompt) + len(completion)
            positions = np.arange(begin + 1, end, dtype=np.int32)
            rows = np.broadcast_to(text, (len(positions), len(text)))
            drafts = _C.ngram_propose(rows, positions, **arguments)[0]
            columns = positions[:, None] + np.arange(K)
            is_correct = drafts == text[np.minimum(columns, len(text) - 1)]
            is_correct &= columns < end
            counts.append(np.cumprod(is_correct, axis=1).sum(axis=1, dtype=np.int64))
    return np.concatenate(counts)


def simulate(
    num_accepted: npt.NDArray[np.int64],
    curve: Curve,
    batches: Sequence[int],
    table: Mapping[int, int] | None = None,
) -> float:
    """Returns tokens per second of steps with these batch sizes, whose rows begin at random
    positions of the text: the geometric mean over batch sizes. Without a `table`, the controller
    chooses the draft lengths."""
    rng = np.random.default_rng(batches[0])
    positions = rng.integers(0, len(num_accepted), max(batches))
    controller = DraftLengthController(
        LENGTHS, max(batches), is_allowed=lambda batch, k: batch * (1 + k) <= MAX_TOKENS
    )
    num_tokens, seconds = (defaultdict[int, float](float) for _ in range(2))
    length = previous_length = table[batches[0]] if table else 0
    for step, batch in enumerate(batches):
        accepted = np.minimum(num_accepted[positions[:batch]], length)
        positions[:batch] = (positions[:batch] + accepted + 1) % len(num_accepted)
        time = curve(batch, length)
        if step >= FIRST_STEPS:
            num_tokens[batch] += int(accepted.sum()) + batch
            seconds[batch] += time
        if table is not None:
            length = table[batches[min(step + 1, len(batches) - 1)]]
            continue
        next_length = controller.table[batch]
        controller.observe_schedule(batch)
        counts = np.bincount(accepted, minlength=length + 1).tolist() if length else ()
        controller.acceptance.observe(batch, counts)
        measured = time * math.exp(rng.normal(0, TIME_DEVIATION))
        is_comparable = length == previous_length
        controller.observe_step(batch, length, measured if is_comparable else None)
        previous_length, length = length, next_length
    return geometric_mean(num_tokens[batch] / seconds[batch] for batch in num_tokens)


def compare(
    num_accepted: npt.NDArray[np.int64], curve: Curve, batches: Sequence[int]
) -> list[float]:
    """Returns tokens per second with K by load over those of the peers."""
    best = {}
    for batch in {*batches}:
        speeds = {
            k: simulate(num_accepted, curve, [batch] * 2 * FIRST_STEPS, {batch: k})
            for k in LENGTHS
            if batch * (1 + k) <= MAX_TOKENS
        }
        best[batch] = max(speeds, key=lambda k: speeds[k])
    tables = dict.fromkeys(best, 0), dict.fromkeys(best, K), best
    auto = simulate(num_accepted, curve, batches)
    return [auto / simulate(num_accepted, curve, batches, table) for table in tables]


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("draft_length", __doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps per simulation")
    options = parser.parse_args(arguments)
    sets = load_sets(find_data(options.data))
    accepted = {name: count_accepted(conversations) for name, conversations in sets.items()}
    results: list[dict[str, Any]] = []
    changing_load = [BATCHES[step // LOAD_STEPS * 5 % 6] for step in range(3 * options.steps)]
    loads = {str(batch): [batch] * options.steps for batch in BATCHES} | {"all": changing_load}
    for curve_name, curve in CURVES.items():
        for load, batches in loads.items():
            ratios = [compare(counts, curve, batches) for counts in accepted.values()]
            result: dict[str, Any] = {"curve": curve_name, "batch": load}
            for peer, values in zip(PEERS, zip(*ratios, strict=True), strict=True):
                result[f"over {peer}"] = round(geometric_mean(values), 3)
                result[f"least over {peer}"] = round(min(values), 3)
            print(*(f"{key}: {value}" for key, value in result.items()), sep="  ", flush=True)
            results.append(result)
    write_result(options.json, arguments, lengths=LENGTHS, steps=options.steps, results=results)


if __name__ == "__main__":
    main(sys.argv[1:])
