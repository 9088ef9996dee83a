"""Tokens per second of the example runner and of transformers, with and without drafts."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ngram_npu import NgramConfig
from ngram_npu.replay import read_conversations

from tools.bench import stats
from tools.bench.data import default_data
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.ops.vllm_end_to_end import INTERMEDIATE_SIZE, ROOT, prompts_of, widened
from tools.bench.options import Options, Size, UnavailableError

OUTPUT_TOKENS = 96
AGENT = "tau-bench-airline"
_BLOCK = 16
_MIN_PROBABILITY = 0.177

Texts = list[list[int]]
Generate = Callable[[Texts], Texts]
RUNNER: Mapping[str, dict[str, Any]] = {
    "none": {"ngram": None, "asynchronous": False},
    "none-async": {"ngram": None},
    "sync": {"asynchronous": False, "padded": False},
    "async": {},
    "async-unpadded": {"padded": False},
    "ladder": {"asynchronous": False, "padded": False, "engine": "index"},
}
"""The runner's contestants: differences from its defaults (asynchronous, padded)."""
CONTESTANTS = {
    "none": "the runner without speculation, synchronous",
    "none-async": "the same, asynchronous",
    "sync": "the runner with drafts, synchronous, what was found is verified",
    "async": "asynchronous, always k drafts",
    "async-unpadded": "asynchronous, what was found is verified",
    "ladder": f"synchronous, drafts by cost, k = 8, min_draft_probability {_MIN_PROBABILITY}",
    "hf": "transformers' generate without speculation",
    "hf-lookup": "transformers' prompt_lookup_num_tokens, n-grams of 2 or 1; batch 1 only",
    "hf-ours": "transformers' generate with ngram_npu.transformers.drafting; batch 1 only",
    "hf-ladder": "the same with drafts by cost as in ladder; batch 1 only",
    "hf-batched": "ngram_npu.transformers.generate",
}


DESCRIBES = {
    "model": "the engine tests' Llama (2 layers, hidden size 128, trained here on the sources of "
    f"Python's standard library), its MLPs widened to {INTERMEDIATE_SIZE} neurons that add "
    "nothing; float32",
    "prompts": f"code: those sources; agent: {AGENT}, recorded; one passage per request",
    "output": f"{OUTPUT_TOKENS} tokens per request, greedy; the time includes the prompts'",
    "contestants": CONTESTANTS,
}


class GenerateOp(Op):
    name = "generate"
    help = "tokens per second of the example runner and of transformers, with and without drafts"
    sizes = ("1x256", "16x128")
    unused_settings = frozenset(
        {"match_policy", "frontend", "threads", "cache", "idle_ms", "data_kind", "device"}
    )

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            folder, texts = self.prepared(options)
            for kind, corpus in texts.items():
                for size in self.sizes_of(options):
                    prompts = prompts_of(size, corpus)
                    contestants = self.contestants(folder, size, options)
                    found = _compared(contestants, prompts, options.rounds)
                    yield {"size": str(size), "text": kind, "data": DESCRIBES} | found
        finally:
            torch.set_num_threads(threads)

    def prepared(self, options: Options) -> tuple[str, dict[str, list[int]]]:
        """The model's folder, and the source texts of the prompts."""
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise UnavailableError(f"transformers is not installed here: {error}") from None
        from tests.vllm.engine import tiny_model

        folder = ROOT / "build" / "vllm"
        folder.mkdir(parents=True, exist_ok=True)
        tiny = tiny_model.cached(folder)
        encode = AutoTokenizer.from_pretrained(tiny).encode
        talks = read_conversations(default_data(options.data) / f"{AGENT}.jsonl.gz")
        agent = "\n".join(f"{turn.prompt}\n{turn.completion}" for t in talks for turn in t.turns)
        texts = {"code": tiny_model.corpus()[1_000_000:1_200_000], "agent": agent[:200_000]}
        return str(widened(tiny)), {kind: encode(text) for kind, text in texts.items()}

    def contestants(self, folder: str, size: Size, options: Options) -> dict[str, Any]:
        import ngram_npu.transformers as ours
        import torch
        from ngram_npu.runner import Runner, RunnerConfig, load
        from transformers import AutoModelForCausalLM

        lookup = {"min_n": options.min_n, "max_n": options.max_n, "k": options.k}
        ngram = NgramConfig(**lookup)
        ladder = NgramConfig(sizes="ladder", min_draft_probability=_MIN_PROBABILITY)
        paged = load(folder, dtype=torch.float32)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        plain.generation_config.eos_token_id = None  # all requests have the same length
        plain.generation_config.pad_token_id = 0
        found: dict[str, Any] = {}
        for name, changes in RUNNER.items():
            settings = {"ngram": ladder if name == "ladder" else ngram, "engine": "scan"} | changes
            found[name] = RunnerContestant(
                Runner(
                    paged,
                    RunnerConfig(
                        **settings,
                        max_rows=size.batch,
                        row_capacity=size.context + OUTPUT_TOKENS,
                        block_size=_BLOCK,
                        max_step_tokens=2048,
                        trace=True,
                    ),
                ),
                shown=name == "async",
            )
        found["hf"] = Contestant(lambda asked: _generated(plain, asked))
        if size.batch == 1:
            found["hf-lookup"] = Contestant(lambda asked: _generated(plain, asked, options.k))

            def drafted(config: NgramConfig, asked: Texts) -> Texts:
                with ours.drafting(plain, config):
                    return _generated(plain, asked)

            found["hf-ours"] = Contestant(functools.partial(drafted, ngram))
            found["hf-ladder"] = Contestant(functools.partial(drafted, ladder))

        def batched(asked: Texts) -> Texts:
            out = ours.generate(
                plain, torch.tensor(asked), max_new_tokens=OUTPUT_TOKENS, ngram=ngram
            )
            texts: Texts = out[:, size.context :].tolist()
            return texts

        found["hf-batched"] = Contestant(batched)
        return found


class Contestant:
    """Transformers, as users call it."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def run(self, prompts: Texts) -> tuple[Texts, float]:
        """The texts, and tokens per second."""
        start = time.perf_counter()
        texts = self._generate(prompts)
        return texts, len(prompts) * OUTPUT_TOKENS / (time.perf_counter() - start)

    def details(self) -> dict[str, Any]:
        """Of the last run."""
        return {}


class RunnerContestant(Contestant):
    def __init__(self, runner: Any, shown: bool) -> None:
        self._runner, self._shown = runner, shown

    def run(self, prompts: Texts) -> tuple[Texts, float]:
        self._runner.reset_figures()
        self._generate = lambda asked: self._runner.generate(asked, OUTPUT_TOKENS)
        return super().run(prompts)

    def details(self) -> dict[str, Any]:
        figures = self._runner.figures
        found: dict[str, Any] = {
            "steps": figures.steps,
            "step_ms": {
                name: stats.rounded(1e3 * seconds / figures.steps)
                for name, seconds in self._runner.trace.seconds().items()
            },
        }
        if self._shown:
            found["timeline"] = _timeline(self._runner.trace, figures.steps // 2)
        if figures.drafts:
            found["accepted_share"] = stats.rounded(figures.accepted / figures.drafts)
        return found


def _timeline(trace: Any, first: int) -> list[dict[str, Any]]:
    """The host's events in two steps, in milliseconds since it began to schedule the first."""
    from ngram_npu.runner.trace import HOST

    spans = [span for span in trace.spans() if span[2] == HOST]
    names = [(name, step) for name, step, *_ in spans]
    begin, end = names.index(("schedule", first)), names.index(("schedule", first + 2))
    origin = spans[begin][3]
    return [
        {
            "name": name,
            "step": step - first,
            "at_ms": stats.rounded(1e3 * (start - origin)),
            "ms": stats.rounded(1e3 * (stop - start)),
        }
        for name, step, _, start, stop in spans[begin:end]
    ]


def _generated(model: Any, prompts: Texts, lookup: int | None = None) -> Texts:
    import torch

    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=OUTPUT_TOKENS,
        do_sample=False,
        prompt_lookup_num_tokens=lookup,
    )
    texts: Texts = out[:, ids.shape[1] :].tolist()
    return texts


def _compared(contestants: dict[str, Contestant], prompts: Texts, rounds: int) -> Result:
    texts = {name: one.run(prompts)[0] for name, one in contestants.items()}  # also warms up
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    names, order = list(contestants), random.Random(0)
    for _ in range(rounds):
        # The order varies, so that one's state of caches and allocator burdens no fixed other.
        for name in order.sample(names, len(names)):
            speeds[name].append(contestants[name].run(prompts)[1])
    pairs = [(name, "none") for name in RUNNER if name != "none"]
    pairs += [(name, "hf") for name in names if name.startswith("hf-")]
    pairs += [("async", "async-unpadded"), ("async-unpadded", "sync"), ("none-async", "none")]
    return {
        "tokens_per_second": {name: stats.spread(of) for name, of in speeds.items()},
        "ratio": {
            f"{name} over {peer}": stats.spread(
                [a / b for a, b in zip(speeds[name], speeds[peer], strict=True)]
            )
            for name, peer in dict.fromkeys(pairs)
        },
        "runner": {name: one.details() for name, one in contestants.items() if one.details()},
        "requests_with_other_text": {
            name: sum(a != b for a, b in zip(text, texts["none"], strict=True))
            for name, text in texts.items()
        },
    }
