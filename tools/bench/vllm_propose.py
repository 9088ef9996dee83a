"""Times `propose()` of vLLM's V1 runner, ours and vLLM's, on one thread with hot caches.

    python -m tools.bench.vllm_propose [--sizes 128x32k ...] [--data FOLDER] [--json FILE]

Needs an environment in which vLLM is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ngram_npu import _C

from tools.bench.measure import make_parser, time_alternately, write_result
from tools.bench.recorded import Sets, Steps, find_data, load_sets, make_steps

K = 5
SIZES = ("1x1k", "32x1k", "128x1k", "128x8k", "128x32k")


def make_vllm_config(steps: Steps, **section: Any) -> Any:
    """Returns the parts of a VllmConfig that drafters of the V1 runner read."""
    batch, capacity = steps.rows.shape
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="ngram",
            prompt_lookup_min=2,
            prompt_lookup_max=5,
            num_speculative_tokens=K,
        ),
        model_config=SimpleNamespace(
            max_model_len=capacity, served_model_name="bench", get_vocab_size=lambda: 32_000
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=batch),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        additional_config={"ngram_npu": section},
    )


def make_ours(steps: Steps, **section: Any) -> Callable[[int], Any]:
    """Returns a step of our drafter with options of the section "ngram_npu"."""
    from ngram_npu.engines.vllm import NgramProposer

    propose = NgramProposer(make_vllm_config(steps, **section)).propose
    return lambda step: propose(steps.sampled[step], steps.lengths[step], steps.rows)


def make_numba(steps: Steps) -> Callable[[int], Any]:
    """Returns a step of vLLM's drafter, which chooses one thread."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    propose = NgramProposer(make_vllm_config(steps)).propose
    return lambda step: propose(K, steps.sampled[step], steps.lengths[step], steps.rows)


def measure(sets: Sets, size: str, rounds: int) -> dict[str, float]:
    """Returns microseconds per step of the whole batch, by drafter."""
    _C.set_num_threads(1)
    steps = make_steps(sets, size)
    drafters = {
        "propose": make_ours(steps),
        "propose, vLLM's n-grams": make_ours(steps, lookup="ngram"),
        "numba": make_numba(steps),
    }
    return time_alternately(drafters, steps=len(steps.lengths) - 1, rounds=rounds)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("vllm_propose", __doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="requests x tokens per request")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    sets, results = load_sets(find_data(options.data)), []
    for size in options.sizes:
        times = measure(sets, size, options.rounds)
        print(f"{size:8}", *(f"{name}: {us} us;" for name, us in times.items()))
        results.append({"size": size, **times})
    write_result(options.json, arguments, k=K, results=results)


if __name__ == "__main__":
    main(sys.argv[1:])
