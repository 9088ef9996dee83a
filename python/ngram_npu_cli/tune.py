"""Chooses a setting: replays eleven of them in one pass, and weighs the tokens that they yield
against the time of verifying their drafts."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError, import_optional, to_one_line

from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.logs.values import Conversation
from ngram_npu_cli.progress import make_bar
from ngram_npu_cli.replay import Setting, SettingDrafter, simulate
from ngram_npu_cli.tokenization import Tokenization, TokenRequest, read_requests

FloatArray = npt.NDArray[np.float64]

SETTINGS = (
    *(Setting("auto", k) for k in (1, 2, 3, 5, 8)),
    *(Setting("ngram", k) for k in (3, 5)),
    *(Setting("auto", k, store=True) for k in (2, 3, 5, 8)),
)
_BATCH_SIZES = (1, 4, 16, 64, 256)
_MIN_OPENING = 32
"""Characters of a beginning that are enough to recognize a conversation that continues."""
_MIN_GROUPS = 20
_STORE_GUIDE = "docs/security.md#text-shared-through-a-store"


# Cost


@dataclass(frozen=True)
class StepTimes:
    """The time of a model's step by the number of tokens that it computes, of all requests.

    Attributes:
        name: Origin of the times, for the report.
        times: By number of tokens, ascending, the time in any unit; None: `share` is used.
        share: The time to verify one more token of a request, as a share of a step, at any number
            of requests.
    """

    name: str
    times: dict[int, float] | None = None
    share: float = 0.0

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The numbers of requests for which there are times of enough tokens."""
        largest = 4 if self.times is None else max(self.times)
        return tuple(b for b in _BATCH_SIZES if 4 * b <= largest) or (1,)

    def compute_relative(self, batch: int, drafted: FloatArray) -> FloatArray:
        """Returns the time of a step of `batch` requests with `drafted` tokens per request,
        relative to a step without drafts."""
        if self.times is None:
            return 1 + self.share * drafted
        tokens, times = (
            np.array(column, float) for column in zip(*self.times.items(), strict=True)
        )
        verified = batch * (1 + drafted)
        slope = max(0.0, (times[-1] - times[-2]) / (tokens[-1] - tokens[-2]))
        seconds = np.interp(verified, tokens, times)
        seconds += np.maximum(0, verified - tokens[-1]) * slope
        relative: FloatArray = seconds / np.interp(batch, tokens, times)
        return relative


def load_cost(text: str | None) -> StepTimes:
    """Returns the step times of the option `--cost`: a number, or a file of step times.

    Raises:
        InputError: The value is neither.
    """
    if text is None:
        # 8B parameters in bf16 on an H100, at half of its data sheet's rates.
        times = {n: 0.002 + max(0.00955, 0.0000323 * n) for n in (1, 64, 296, 512, 1024, 4096)}
        return StepTimes("an EXAMPLE, computed for an 8B model on an H100; use --cost", times)
    try:
        share = float(text)
    except ValueError:
        return StepTimes(f"step times of {Path(text).name}", _read_times(Path(text)))
    if not 0 <= share < 10:
        raise InputError(f"--cost: expected 0 to 10, got {text}")
    return StepTimes(f"{share:g} of a step per verified token", share=share)


def _read_times(path: Path) -> dict[int, float]:
    """Reads a JSON object such as {"1": 0.0102, "64": 0.0131}: seconds of a step by tokens."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise TypeError(f"got {type(data).__name__}")
        times = {int(key): float(value) for key, value in data.items()}
        if 1 not in times or len(times) < 2:
            raise ValueError("got no times for 1 and one more number of tokens")
        if not all(0 < n < 1 << 24 and 1e-9 < s < 1e9 for n, s in times.items()):
            raise ValueError("got a number out of range")
    except FileNotFoundError as error:
        raise InputError(
            "--cost: expected a number such as 0.05 or a file with step times; there is no file "
            f'"{path}"'
        ) from error
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(
            f'--cost: {path}: expected seconds by tokens per step, such as {{"1": 0.0102, '
            f'"64": 0.0131}}: {to_one_line(error):.200}'
        ) from error
    return dict(sorted(times.items()))


# Sample


@dataclass(frozen=True)
class Sample:
    """Requests by conversation, in an order that does not depend on that of the records.

    Attributes:
        halves: The requests on which a setting is chosen, and those on which it is measured.
        groups: For each request of a half, the number of its conversation.
    """

    halves: tuple[list[TokenRequest], list[TokenRequest]]
    groups: tuple[list[int], list[int]]


def make_sample(requests: Sequence[tuple[str, bytes, TokenRequest]]) -> Sample:
    """Groups requests by conversation and divides the conversations by a hash of their beginning.

    Args:
        requests: For each request, its session (or ""), the beginning of its prompt, its tokens.
    """
    keys: dict[bytes, list[TokenRequest]] = {}
    root = b""
    for session, opening, request in sorted(requests, key=lambda item: (item[1], item[0])):
        if not (len(root) >= _MIN_OPENING and opening.startswith(root)):
            root = opening
        key = session.encode("utf-8", "surrogatepass") if session else root
        keys.setdefault(hashlib.blake2b(key, digest_size=8).digest(), []).append(request)
    sample = Sample(([], []), ([], []))
    for number, (digest, group) in enumerate(sorted(keys.items())):
        half = digest[-1] & 1
        for request in sorted(group, key=lambda r: (len(r.tokens()), r.tokens().tobytes())):
            if request.spans():
                sample.halves[half].append(request)
                sample.groups[half].append(number)
    return sample


def find_opening(conversation: Conversation) -> bytes:
    """Returns what later requests of a conversation begin with too: the messages up to the first of
    the user, a prompt that is a text, or token ids."""
    turn = conversation.turns[0]
    if turn.prompt_token_ids is not None:
        return np.array(turn.prompt_token_ids, np.int32).tobytes()
    if turn.prompt is not None:
        return turn.prompt.encode("utf-8", "surrogatepass")
    roles = [message["role"] for message in turn.messages]
    end = roles.index("user") + 1 if "user" in roles else len(roles)
    texts = [(message["role"], message["content"]) for message in turn.messages[:end]]
    return json.dumps(texts).encode()


# Measurement


@dataclass(frozen=True)
class Counts:
    """For each conversation of a half, its tokens, steps and draft tokens with a setting."""

    tokens: FloatArray
    steps: FloatArray
    drafted: FloatArray

    def compute_speedup(self, cost: StepTimes, batch: int) -> tuple[float, FloatArray]:
        """Returns the speed-up over no speculation, and the residual of each conversation, whose
        root of the sum of squares is the standard error."""
        if not self.steps.sum():
            return 1.0, np.zeros(1)
        per_step = self.drafted / np.maximum(self.steps, 1)
        times = self.steps * cost.compute_relative(batch, per_step)
        speedup = float(self.tokens.sum() / times.sum())
        residuals: FloatArray = (self.tokens - speedup * times) / times.sum()
        return speedup, residuals


def measure(
    sample: Sample, settings: Sequence[Setting], store_tokens: int
) -> dict[Setting, tuple[Counts, Counts]]:
    """Replays the sample with each setting. Each half has its own store.

    Returns:
        The counts of both halves, for the settings that were replayed before Ctrl-C.
    """
    counts: dict[Setting, tuple[Counts, Counts]] = {}
    num_tokens = sum(r.num_generated for half in sample.halves for r in half)
    with make_bar("tune", num_tokens * len(settings), "token") as bar:
        for s in settings:
            halves = []
            for requests, groups in zip(sample.halves, sample.groups, strict=True):
                drafter = SettingDrafter(s, store_tokens)
                figures = simulate(requests, drafter, k=s.k, padded=s.is_padded, advance=bar.update)
                if not figures.is_complete:
                    return counts
                per_request = figures.tokens, figures.steps, figures.drafted
                halves.append(Counts(*(_sum_groups(groups, values) for values in per_request)))
            counts[s] = halves[0], halves[1]
    return counts


def _sum_groups(groups: Sequence[int], values: npt.NDArray[np.int64]) -> FloatArray:
    _, numbers = np.unique(np.array(groups, np.int64), return_inverse=True)
    sums: FloatArray = np.bincount(numbers, values).astype(np.float64)
    return sums


# Choice


@dataclass(frozen=True)
class TuneReport:
    """The setting to use, and the speed-ups of all.

    Attributes:
        speedups: For each setting, the measured speed-up by batch size.
        lengths: The number of draft tokens by batch size; 0: do not speculate.
        choice: The setting to use, with the highest of these numbers; None: do not speculate.
        sample, notes: Lines about the sample, and about what was not read.
    """

    cost: StepTimes
    speedups: dict[Setting, dict[int, float]]
    lengths: dict[int, int]
    choice: Setting | None
    sample: str
    notes: list[str]
    is_complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {
            "cost": self.cost.name,
            "speedups": {str(s): by_batch for s, by_batch in self.speedups.items()},
            "lengths": self.lengths,
            "choice": None if self.choice is None else str(self.choice),
            "command": self.format_command(),
            "sample": self.sample,
            "notes": self.notes,
        }

    def format_command(self) -> str:
        """Returns the command that serves a model with the chosen setting; "" if there is none."""
        if self.choice is None:
            return ""
        speculative: dict[str, Any] = {
            "method": "ngram_gpu" if self.choice.is_padded else "ngram",
            # vLLM cuts the lengths by batch size off at this number.
            "num_speculative_tokens": max(self.lengths.values()),
        }
        plugin: dict[str, Any] = {"lookup": self.choice.lookup}
        if len({*self.lengths.values()}) > 1:
            speculative["num_speculative_tokens_per_batch_size"] = list_ranges(self.lengths)
        if self.choice.lookup == "ngram":
            speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        if self.choice.store:
            plugin |= {"store": True, "scope": "shared"}
        return (
            f"NGRAM_NPU_VLLM=1 vllm serve MODEL --speculative-config "
            f"{shlex.quote(json.dumps(speculative))} --additional-config "
            f"{shlex.quote(json.dumps({'ngram_npu': plugin}))}"
        )


def list_ranges(lengths: dict[int, int]) -> list[list[int]]:
    """Returns vLLM's ranges of batch sizes with their numbers of draft tokens. A batch size between
    two measured ones gets the number of the larger one."""
    ranges: list[list[int]] = []
    for batch, length in lengths.items():
        if ranges and ranges[-1][2] == length:
            ranges[-1][1] = batch
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, batch, length])
    return ranges


def tune(
    reader: LogReader,
    tokenization: Tokenization,
    cost: StepTimes,
    *,
    drafts: str,
    allow_store: bool,
    store_tokens: int,
) -> TuneReport:
    """Replays the settings, chooses one on half of the conversations, and measures the other half.

    Raises:
        InputError: The options or the input cannot be used.
    """
    settings = [replace(setting, drafts=drafts) for setting in SETTINGS]
    requests = [
        (conversation.session, find_opening(conversation), request)
        for conversation, tokenized in read_requests(reader, tokenization)
        for request in tokenized
    ]
    sample = make_sample(requests)
    numbers = [len({*groups}) for groups in sample.groups]
    if min(numbers) < 1:
        raise InputError(
            f"expected conversations in both halves, got {numbers[0]} and {numbers[1]}"
        )
    counts = measure(sample, settings, store_tokens)
    if len(counts) < 2:
        raise KeyboardInterrupt
    choice, lengths = choose(counts, cost, allow_store)
    speedups = {
        s: {b: halves[1].compute_speedup(cost, b)[0] for b in cost.batch_sizes}
        for s, halves in counts.items()
    }
    line = _describe_sample(counts, cost, numbers)
    is_complete = len(counts) == len(settings)
    line += "" if is_complete else f" Interrupted: {len(counts)} settings were replayed."
    return TuneReport(cost, speedups, lengths, choice, line, reader.list_notes(), is_complete)


def choose(
    counts: dict[Setting, tuple[Counts, Counts]], cost: StepTimes, allow_store: bool
) -> tuple[Setting | None, dict[int, int]]:
    """Returns the setting that is best over all batch sizes on the first half, and its number of
    draft tokens by batch size. The number is 0 where the other half does not confirm a gain of more
    than twice the standard error."""
    families: dict[tuple[str, bool, int], list[Setting]] = {}
    for s in counts:
        if allow_store or not s.store:
            # V1, which verifies trimmed drafts, has one number for all batch sizes.
            families.setdefault((s.lookup, s.store, 0 if s.is_padded else s.k), []).append(s)
    best_score, best = 0.0, dict[int, Setting]()
    for members in families.values():
        by_batch, score = {}, 0.0
        for b in cost.batch_sizes:
            values = {s: counts[s][0].compute_speedup(cost, b)[0] for s in members}
            by_batch[b] = max(values, key=values.__getitem__)
            score += math.log(max(1.0, values[by_batch[b]]))
        if score > best_score:
            best_score, best = score, by_batch
    lengths = dict.fromkeys(cost.batch_sizes, 0)
    for b, s in best.items():
        speedup, residuals = counts[s][1].compute_speedup(cost, b)
        if speedup - 2 * math.sqrt((residuals**2).sum()) > 1:
            lengths[b] = s.k
    if not any(lengths.values()):
        return None, lengths
    return replace(best[cost.batch_sizes[0]], k=max(lengths.values())), lengths


def _describe_sample(
    counts: dict[Setting, tuple[Counts, Counts]], cost: StepTimes, numbers: Sequence[int]
) -> str:
    batch = cost.batch_sizes[0]
    measured = {s: halves[1].compute_speedup(cost, batch) for s, halves in counts.items()}
    first, second = sorted(measured, key=lambda s: -measured[s][0])[:2]
    tokens = int(counts[first][1].tokens.sum())
    difference = measured[first][0] - measured[second][0]
    spread = 2 * math.sqrt(((measured[first][1] - measured[second][1]) ** 2).sum())
    few = " TOO FEW for a sure choice." if min(numbers) < _MIN_GROUPS else ""
    return (
        f"Chosen on {numbers[0]} conversations, measured on {numbers[1]} others ({tokens} tokens). "
        f"The best two at {batch}, {first} and {second}, differ by {difference:.3f} "
        f"+- {spread:.3f}.{few}"
    )


def format_tune(report: TuneReport) -> str:
    """Returns the recommendation, its command, and the table of all settings."""
    batches = report.cost.batch_sizes
    off = [str(b) for b in batches if report.lengths[b] == 0]
    any_batch = report.cost.times is None
    if report.choice is None:
        lines = ["Do not speculate: no setting is surely faster on this traffic.", ""]
    else:
        gains = []
        for b in batches:
            used = replace(report.choice, k=report.lengths[b])
            if report.lengths[b]:
                place = "" if any_batch else f" at {b}"
                gains.append(f"{report.speedups[used][b]:.2f}x{place} (k={used.k})")
        # The gains are not those of one row of the table, so the setting is named without its k.
        name = str(report.choice).replace(f" k={report.choice.k}", "")
        lines = [f"Use {name} with up to {report.choice.k} draft tokens: {', '.join(gains)}."]
        lines += [f"Do not speculate with {', '.join(off)} requests at once."] if off else []
        lines += ["", f"  {report.format_command()}", ""]
        if report.choice.store:
            lines += [
                'The command is for one tenant. With several tenants, leave "scope" out and set a '
                "cache_salt for each; the store then helps less than predicted "
                f"({_STORE_GUIDE}).",
                "",
            ]
    title = "speed-up by requests at once"
    width = max(len(title), *(len(str(s)) + 2 for s in report.speedups))
    heads = ["any"] if any_batch else batches
    lines.append(f"{title:{width}}" + "".join(f"{h:>8}" for h in heads))
    for setting, by_batch in report.speedups.items():
        cells = "".join(f"{by_batch[b]:8.2f}" for b in batches)
        lines.append(f"{setting!s:{width}}{cells}")
    cells = "".join(f"{report.lengths[b]:8}" for b in batches)
    lines.append(f"{'K to use':{width}}{cells}")
    lines += ["", report.sample, f"Cost: {report.cost.name}."]
    best = max(report.speedups, key=lambda s: report.speedups[s][batches[0]])
    if best.store and not (report.choice and report.choice.store):
        lines.append(
            f"With --store, {best} may be chosen. Requests that share text can detect it by timing "
            f"({_STORE_GUIDE})."
        )
    return "\n".join(lines)


def plot_tune(report: TuneReport, path: Path, image_format: str) -> None:
    """Draws the speed-up by batch size, one line per setting."""
    figure_module = import_optional("matplotlib.figure", "--plot", "plot")
    figure = figure_module.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for setting, by_batch in report.speedups.items():
        style = "--" if setting.store else ":" if setting.lookup == "ngram" else "-"
        axes.plot(by_batch.keys(), by_batch.values(), style, marker="o", label=str(setting))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.cost.batch_sizes, [str(b) for b in report.cost.batch_sizes])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("speed-up over no speculation")
    axes.set_title(report.cost.name, fontsize="small")
    axes.legend(fontsize="small")
    figure.savefig(path, format=image_format)
