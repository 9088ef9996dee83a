"""Simulates tokens per second if the number of draft tokens follows the load ("k": "auto").

    python -m tools.bench.draft_length [--steps 4000] [--data FOLDER] [--json FILE]

The controller runs on recorded completions, which replace the target model. Step times come from
curves of models on H100 GPUs, computed from data sheets, with noise: nothing is measured. The peers
are a step without drafts, always K = 5, and the best fixed K for each batch size, which is what
vLLM's table `num_speculative_tokens_per_batch_size` gives a user who knows the traffic.
"""

from __future__ import annotations

import math
import sys
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
LENGTHS = (0, 1, 3, 5)
BATCHES = (1, 8, 32, 128, 512)
FIRST_STEPS = 500
"""Number of steps at the beginning, in which the controller learns; they are not counted."""
SAMPLE_STEPS, SAMPLED_REQUESTS = 8, 4
"""In every eighth step, the accepted tokens of four requests are counted for all lengths, as vLLM's
adapter does (``AcceptanceSampler``)."""
TIME_DEVIATION = 0.03
"""Standard deviation of the logarithm of step times."""
# NVIDIA's data sheet of the H100 SXM: bytes and dense bf16 operations per second.
BANDWIDTH, OPERATIONS = 3.35e12, 989e12
READ_EFFICIENCY, COMPUTE_EFFICIENCY = 0.74, 0.6
"""Shares of the peak rates: from a published time per token of Llama 3.1 8B (6.48 ms,
InferenceBench, vLLM 0.21.0, 2026-05-16), and assumed."""


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


CURVES: Mapping[str, Callable[[int, int], float]] = {"dense": time_dense_8b, "moe": time_moe_30b}


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
    curve: Callable[[int, int], float],
    batch: int,
    num_steps: int,
    length: int | None = None,
) -> float:
    """Returns tokens per second of a batch whose rows begin at random positions of the text. With
    ``length`` every step drafts so many tokens, else the controller chooses."""
    rng = np.random.default_rng(batch)
    positions = rng.integers(0, len(num_accepted), batch)
    controller = DraftLengthController(LENGTHS, batch)
    num_tokens, seconds = 0, 0.0
    current = previous = length or 0
    for step in range(num_steps):
        generated = np.minimum(num_accepted[positions], current) + 1
        positions = (positions + generated) % len(num_accepted)
        time = curve(batch, current)
        if step >= FIRST_STEPS:
            num_tokens += int(generated.sum())
            seconds += time
        if length is None:
            following = controller.table[batch]
            controller.observe_schedule(batch, following)
            measured = time * math.exp(rng.normal(0, TIME_DEVIATION))
            controller.observe_step(batch, current, measured if current == previous else None)
            controller.acceptance.observe_verified(current, int(generated.sum()), batch)
            if step % SAMPLE_STEPS == 0:
                sampled = num_accepted[positions[:SAMPLED_REQUESTS]]
                for k in LENGTHS[1:]:
                    tokens = float(np.minimum(sampled, k).sum() + len(sampled))
                    controller.acceptance.observe(k, tokens, len(sampled))
            previous, current = current, following
    return num_tokens / seconds


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("draft_length", __doc__)
    parser.add_argument("--steps", type=int, default=4000, help="steps per simulation")
    options = parser.parse_args(arguments)
    sets = load_sets(find_data(options.data))
    accepted = {name: count_accepted(conversations) for name, conversations in sets.items()}
    results: list[dict[str, Any]] = []
    for curve_name, curve in CURVES.items():
        for batch in BATCHES:
            ratios: dict[str, list[float]] = {"no drafts": [], "always 5": [], "best fixed": []}
            for counts in accepted.values():
                auto = simulate(counts, curve, batch, options.steps)
                fixed = [simulate(counts, curve, batch, options.steps, k) for k in LENGTHS]
                ratios["no drafts"].append(auto / fixed[0])
                ratios["always 5"].append(auto / fixed[-1])
                ratios["best fixed"].append(auto / max(fixed))
            result = {"curve": curve_name, "batch": batch}
            for peer, values in ratios.items():
                result[f"over {peer}"] = round(geometric_mean(values), 3)
                result[f"least over {peer}"] = round(min(values), 3)
            print(*(f"{key}: {value}" for key, value in result.items()), sep="  ", flush=True)
            results.append(result)
    write_result(options.json, arguments, lengths=LENGTHS, steps=options.steps, results=results)


if __name__ == "__main__":
    main(sys.argv[1:])
