"""`ngram-npu generate`: text for a file of prompts, with and without speculation."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, PreTrainedModel

from ngram_npu import NgramConfig
from ngram_npu.errors import printable
from ngram_npu.replay import ReplayError
from ngram_npu.replay.answers import checked_text, token_ids_of
from ngram_npu.replay.files import SUFFIXES, values
from ngram_npu.replay.formats import conversations_of
from ngram_npu.replay.records import Conversation
from ngram_npu.replay.replaying import request_maker
from ngram_npu.replay.tokenizers import ReplayTokenizer

from .paged_model import IMPLEMENTATION, load
from .runner import Figures, Runner, RunnerConfig
from .sampling import Sampling

Prompt = str | list[int] | Conversation
WITHOUT, WITH = "no speculation", "speculation"
_WARM_UP_TOKENS = 8
_ANSWERED = {
    "choices",
    "completion",
    "completion_token_ids",
    "conversation",
    "conversations",
    "output",
    "response",
    "response_body",
    "turns",
}
"""A record with one of these is a recorded conversation; others are requests without an answer."""


@dataclass(frozen=True)
class GenerateOptions:
    model: Path
    """A local folder, as `save_pretrained` writes it."""
    prompts: Path | str
    """A prompt, or a file of them, as `read_prompts` reads it."""
    ngram: NgramConfig
    chat_template: Literal["auto", "default", "none"] = "auto"
    """Of conversations, as in `ReplayOptions`. A text alone is the model's whole input."""
    draft_model: Path | None = None
    """A smaller model of the same vocabulary, beside the n-grams."""
    engine: Literal["index", "scan", "auto"] = "auto"
    max_tokens: int = 128
    """New tokens per prompt."""
    batch_size: int = 16
    asynchronous: bool = True
    padded: bool = True
    temperature: float = 0.0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    baseline: bool = True
    """Whether to run without speculation too."""
    threads: int | None = None
    """torch's threads on the CPU; None: its default."""
    trace: Path | None = None


@dataclass(kw_only=True)
class Run(Figures):
    """One run over all prompts."""

    tokens_per_second: float
    seconds: float
    step_ms: dict[str, float]
    """Mean time per step of each phase; time outside all phases is missing."""


@dataclass(frozen=True)
class GenerateReport:
    texts: list[str]
    token_ids: list[list[int]]
    runs: dict[str, Run]
    other_texts: int | None
    """Number of prompts whose text differs without speculation; None without such a run."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def generate(options: GenerateOptions) -> GenerateReport:
    """
    Raises:
        ReplayError: the model does not exist, the prompts cannot be read or do not fit it, or an
            option is out of its range or not supported on the device.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    given = options.prompts
    read: list[Prompt] = [given] if isinstance(given, str) else read_prompts(given)
    model, tokenizer = _load(options)
    beside = options.draft_model
    draft_model = None if beside is None else _load_model(beside, options, attention="sdpa")
    prompts = _token_ids(read, tokenizer, options)
    longest = max(map(len, prompts)) + options.max_tokens
    limit = getattr(model.config, "max_position_embeddings", longest)
    if options.max_tokens >= limit:
        raise ReplayError(
            f"max_tokens: expected less than the model's context of {limit} tokens, got "
            f"{options.max_tokens}"
        )
    if min(map(len, prompts)) < 1 or longest > limit:
        raise ReplayError(
            f"prompts: expected 1 to {limit - options.max_tokens} tokens, "
            f"got {min(map(len, prompts))} to {longest - options.max_tokens}"
        )
    vocabulary = model.config.get_text_config().vocab_size
    if (highest := max(map(max, prompts))) >= vocabulary:
        raise ReplayError(
            f"prompts: expected token ids below the model's vocabulary of {vocabulary}, "
            f"got {highest}"
        )
    outputs, runs = {}, {}
    try:
        config = RunnerConfig(
            ngram=options.ngram,
            engine=options.engine,
            asynchronous=options.asynchronous,
            padded=options.padded,
            max_rows=options.batch_size,
            row_capacity=longest,
            sampling=Sampling(options.temperature, options.seed),
            trace=True,
        )
        configs = {WITHOUT: replace(config, ngram=None)} if options.baseline else {}
        for name, chosen in {**configs, WITH: config}.items():
            drafter = draft_model if chosen.ngram is not None else None
            runner = Runner(model, chosen, draft_model=drafter)
            outputs[name], runs[name] = _run(runner, prompts, options.max_tokens)
    except (ValueError, NotImplementedError) as error:
        raise ReplayError(str(error)) from error
    if options.trace is not None:
        runner.trace.write(options.trace)
    texts = [tokenizer.decode(output) for output in outputs[WITH]]
    other = None
    if options.baseline:
        pairs = zip(outputs[WITHOUT], outputs[WITH], strict=True)
        other = sum(without != found for without, found in pairs)
    return GenerateReport(texts, outputs[WITH], runs, other)


def _load(options: GenerateOptions) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer."""
    model = _load_model(options.model, options)
    try:
        return model, AutoTokenizer.from_pretrained(str(options.model), local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise _cannot_be_loaded(options.model, error) from error


def _load_model(
    folder: Path, options: GenerateOptions, attention: str = IMPLEMENTATION
) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise ReplayError(f"{folder}: expected a model's folder, found no config.json")
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    try:
        return load(str(folder), device=options.device, dtype=dtype, attention=attention)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # torch without CUDA
        raise _cannot_be_loaded(folder, error) from error


def _cannot_be_loaded(folder: Path, error: Exception) -> ReplayError:
    reason = str(error).strip().splitlines()[0]
    return ReplayError(f"{folder}: cannot be loaded: {reason}")


def _run(runner: Runner, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], Run]:
    """Runs the prompts, after a short run for the work that only a first run does."""
    stops = runner.model.model.generation_config.eos_token_id
    stop_token_ids = [] if stops is None else [stops] if isinstance(stops, int) else stops
    runner.generate(prompts[:1], min(_WARM_UP_TOKENS, max_tokens))
    if runner.state.store is not None:
        runner.state.store.clear()
    runner.reset_figures()
    start = time.perf_counter()
    outputs = runner.generate(prompts, max_tokens, stop_token_ids=stop_token_ids)
    seconds = time.perf_counter() - start
    figures = runner.figures
    return outputs, Run(
        **vars(figures),
        tokens_per_second=figures.tokens / seconds,
        seconds=seconds,
        step_ms={
            name: 1e3 * spent / figures.steps for name, spent in runner.trace.seconds().items()
        },
    )


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file in one of the formats of `ngram-npu replay`, answered or not; in any
    other file, each line is one. Of a recorded conversation the first prompt is used.

    Raises:
        ReplayError: the file cannot be read or is empty, or something in it is not a prompt.
    """
    plain = not path.name.endswith(SUFFIXES)
    found = [
        _prompt(value, f"{path}:{line}", number)
        for number, (line, value) in enumerate(values(path, plain=plain), 1)
    ]
    if not found:
        raise ReplayError(f"{path}: empty, no prompt in this file")
    return found


def _prompt(value: Any, where: str, number: int) -> Prompt:
    if isinstance(value, ReplayError):
        raise value
    if isinstance(value, str):
        return checked_text(value, where)
    if isinstance(value, dict) and not _is_answered(value):
        if "prompt_token_ids" in value:
            return list(token_ids_of(value["prompt_token_ids"], f"{where}: prompt_token_ids"))
        value = {"request": value, "response": "to come"}
    conversation = conversations_of(value, where, number)[0]
    first = conversation.turns[0]
    return (first.prompt or "") if first.raw else conversation


def _is_answered(record: dict[str, Any]) -> bool:
    messages = record.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    said = isinstance(last, dict) and last.get("role") == "assistant"
    return said or not _ANSWERED.isdisjoint(record)


def _token_ids(prompts: list[Prompt], tokenizer: Any, options: GenerateOptions) -> list[list[int]]:
    # A model's own template writes the special tokens.
    special = options.chat_template != "auto" or tokenizer.chat_template is None
    like = ReplayTokenizer(
        name=str(options.model),
        source="transformers",
        vocab_size=len(tokenizer),
        encode=functools.partial(tokenizer.encode, add_special_tokens=special),
        folder=options.model,
    )
    requests_of = request_maker(like, options.chat_template)

    def ids_of(prompt: Prompt) -> list[int]:
        if isinstance(prompt, Conversation):
            return [int(token) for token in requests_of(prompt)[0].turns[0].prompt]
        return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    return [ids_of(prompt) for prompt in prompts]


def format_report(report: GenerateReport) -> str:
    """Each text on one line with control characters escaped, then a table of the runs."""
    lines = [f"{number}: {printable(text)}" for number, text in enumerate(report.texts)]
    phases = list(dict.fromkeys(name for run in report.runs.values() for name in run.step_ms))
    heads = ["tokens/s", "tokens", "steps", "drafts", "accepted", *phases]
    lines += ["", " " * 66 + "  mean ms per step:"]
    lines.append(" " * 16 + "".join(f"{head:>10}" for head in heads))
    for name, run in report.runs.items():
        share = f"{run.accepted / run.drafts:.1%}" if run.drafts else "-"
        cells = [f"{run.tokens_per_second:.1f}", run.tokens, run.steps, run.drafts, share]
        cells += [f"{run.step_ms.get(phase, 0.0):.2f}" for phase in phases]
        lines.append(f"{name:<16}" + "".join(f"{cell:>10}" for cell in cells))
    if neural := report.runs[WITH].neural_drafts:
        lines.append(
            f"draft model: {neural} of these drafts, "
            f"{report.runs[WITH].neural_accepted / neural:.1%} accepted"
        )
    if WITHOUT in report.runs:
        ratio = report.runs[WITH].tokens_per_second / report.runs[WITHOUT].tokens_per_second
        same = (
            "all texts the same"
            if not report.other_texts
            else (
                f"{report.other_texts} of {len(report.texts)} texts differ (by rounding, where two "
                "tokens are nearly as likely)"
            )
        )
        lines.append(f"{ratio:.2f}x with speculation; {same}")
    return "\n".join(lines)
