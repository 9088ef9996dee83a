"""`ngram-npu generate`: text for a file of prompts, with and without speculation."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from ngram_npu import NgramConfig
from ngram_npu.replay.errors import printable
from transformers import AutoTokenizer, PreTrainedModel

from .paged_model import IMPLEMENTATION, load
from .runner import Runner, RunnerConfig
from .sampling import Sampling

Prompt = str | list[int]
WITHOUT, WITH = "no speculation", "speculation"
_WARM_UP_TOKENS = 8


class GenerateError(Exception):
    """The generation is not possible; one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@dataclass(frozen=True)
class GenerateOptions:
    model: Path
    """A local folder, as `save_pretrained` writes it."""
    prompts: Path
    """One prompt per line; in a .jsonl, one object with `prompt` or `prompt_token_ids`, or a
    conversation as for `ngram-npu replay`, whose first prompt is used."""
    ngram: NgramConfig
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


@dataclass(frozen=True)
class Run:
    """One run over all prompts."""

    tokens_per_second: float
    seconds: float
    tokens: int
    steps: int
    drafts: int
    accepted: int
    neural_drafts: int
    """Of these drafts, those that the draft model began."""
    neural_accepted: int
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
        GenerateError: the model or the prompts do not exist, a prompt is too long for the model, or
            an option is out of its range or not supported on the device.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    prompts_or_ids = read_prompts(options.prompts)
    model, tokenizer = _load(options)
    draft_model = _load_draft_model(options)
    prompts = [
        tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts_or_ids
    ]
    longest = max(map(len, prompts)) + options.max_tokens
    limit = getattr(model.config, "max_position_embeddings", longest)
    if min(map(len, prompts)) < 1 or longest > limit:
        raise GenerateError(
            f"{options.prompts}: expected prompts of 1 to {limit - options.max_tokens} tokens, "
            f"got {min(map(len, prompts))} to {longest - options.max_tokens}"
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
            beside = draft_model if chosen.ngram is not None else None
            runner = Runner(model, chosen, draft_model=beside)
            outputs[name], runs[name] = _run(runner, prompts, options.max_tokens)
    except (ValueError, NotImplementedError) as error:
        raise GenerateError(str(error)) from error
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


def _load_draft_model(options: GenerateOptions) -> PreTrainedModel | None:
    folder = options.draft_model
    return None if folder is None else _load_model(folder, options, attention="sdpa")


def _load_model(
    folder: Path, options: GenerateOptions, attention: str = IMPLEMENTATION
) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise GenerateError(f"{folder}: expected a model's folder, found no config.json")
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    try:
        return load(str(folder), device=options.device, dtype=dtype, attention=attention)
    except (OSError, ValueError, RuntimeError) as error:
        raise _cannot_be_loaded(folder, error) from error


def _cannot_be_loaded(folder: Path, error: Exception) -> GenerateError:
    reason = str(error).strip().splitlines()[0]
    return GenerateError(f"{folder}: cannot be loaded: {reason}")


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
        tokens_per_second=figures.tokens / seconds,
        seconds=seconds,
        tokens=figures.tokens,
        steps=figures.steps,
        drafts=figures.drafts,
        accepted=figures.accepted,
        neural_drafts=figures.neural_drafts,
        neural_accepted=figures.neural_accepted,
        step_ms={
            name: 1e3 * spent / figures.steps for name, spent in runner.trace.seconds().items()
        },
    )


def read_prompts(path: Path) -> list[Prompt]:
    """
    Raises:
        GenerateError: the file cannot be read or is empty, or a line is not a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GenerateError(f"{path}: cannot be read: {error}") from error
    found = [
        line if path.suffix != ".jsonl" else _prompt(line, f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise GenerateError(f"{path}: expected a prompt per line, got none")
    return found


def _prompt(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise GenerateError(f"{where}: expected JSON: {error.msg}") from None
    if isinstance(entry, dict) and isinstance(entry.get("turns"), list) and entry["turns"]:
        entry = entry["turns"][0]
    given = entry if isinstance(entry, dict) else {}
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids):
        return ids
    if isinstance(text, str):
        return text
    raise GenerateError(f"{where}: expected an object with a prompt or prompt_token_ids")


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
