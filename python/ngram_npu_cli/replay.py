"""Replays conversations with a drafter's drafts, without a model: the recorded answers take the
place of the model's output. A step drafts, accepts the leading drafts that equal the recording, and
yields one token more."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from ngram_npu.config import MAX_DRAFT_TOKENS, MAX_NGRAM, NgramConfig
from ngram_npu.errors import InputError
from ngram_npu.proposer import NgramProposer
from ngram_npu.store import NgramStore

from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.progress import make_bar
from ngram_npu_cli.tokenization import Int32Array, Tokenization, TokenRequest, read_requests

Int64Array = npt.NDArray[np.int64]

COMPARE_WORDS = "lookup=L k=K store padded trimmed"
BATCH_SIZE = 32
"""Number of conversations that are replayed together, as by a server."""
_MIN_PROBABILITY = 0.12
"""The plugin's default `min_draft_probability`, with which trimmed drafts end early."""


@dataclass(frozen=True)
class Setting:
    """A setting of the plugin.

    Attributes:
        lookup: "auto": n-grams of 1 to 16 tokens; "ngram": vLLM's, of 2 to 5; or "MIN-MAX".
        k: Draft tokens per step.
        store: Whether requests draft from each other's text.
        drafts: "padded": K tokens are verified in every step (V2, `ngram_gpu`). "trimmed": only
            those that were drafted (V1's `ngram`, the custom class, transformers).
    """

    lookup: str = "auto"
    k: int = 5
    store: bool = False
    drafts: str = "padded"

    @property
    def is_padded(self) -> bool:
        return self.drafts == "padded"

    def make_config(self) -> NgramConfig:
        """Returns the settings of the lookup. Raises an InputError for an option out of range."""
        bounds: dict[str, Any] = {}
        if self.lookup == "ngram":  # V2 takes the latest match
            policy = "latest" if self.is_padded else "earliest"
            bounds = {"min_n": 2, "max_n": 5, "match_policy": policy, "overlap": False}
        elif numbers := re.fullmatch(r"(\d{1,2})-(\d{1,2})", self.lookup):
            bounds = {"min_n": int(numbers[1]), "max_n": int(numbers[2])}
        elif self.lookup != "auto":
            raise InputError(f"--lookup: expected auto, ngram or MIN-MAX, got {self.lookup}")
        elif not self.is_padded:
            bounds = {"min_draft_probability": _MIN_PROBABILITY}
        if not 1 <= self.k <= MAX_DRAFT_TOKENS:
            raise InputError(f"--k: expected 1 to {MAX_DRAFT_TOKENS}, got {self.k}")
        try:
            return NgramConfig(k=self.k, **bounds)
        except ValueError as error:
            raise InputError(
                f"--lookup: expected MIN-MAX with 1 <= MIN <= MAX <= {MAX_NGRAM}, got {self.lookup}"
            ) from error

    def __str__(self) -> str:
        parts = [f"lookup={self.lookup}", f"k={self.k}", *(["store"] if self.store else [])]
        return " ".join(parts if self.is_padded else [*parts, "trimmed"])


def parse_setting(text: str, base: Setting) -> Setting:
    """Returns a setting such as "lookup=ngram k=3 store", with the other values of `base`, which
    must be valid.

    Raises:
        InputError: A word is unknown, a value is out of range, or the setting equals `base`.
    """
    changes: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if name in ("store", "padded", "trimmed"):
            if equals:
                raise InputError(f'--compare: "{name}" takes no value, got "{word}"')
            changes |= {"store": True} if name == "store" else {"drafts": name}
        elif name == "lookup":
            changes["lookup"] = value
        elif name == "k" and value.isdecimal():
            changes["k"] = int(value)
        else:
            raise InputError(f'--compare: expected words of "{COMPARE_WORDS}", got "{word}"')
    setting = replace(base, **changes)
    if setting == base:
        raise InputError(f'--compare: expected another setting than the first, "{base}"')
    try:
        setting.make_config()
    except InputError as error:
        raise InputError(f"--compare: {str(error).removeprefix('--')}") from error
    return setting


# Replay


class Drafter(Protocol):
    """What is replayed, such as `NgramProposer`.

    A step appends the sampled tokens `[B, K+1]` to their rows, adds their number to `num_tokens`,
    and returns `draft_token_ids` `[B, K]`, padded with -1, and `num_draft_tokens` `[B]`. A
    method `reset(rows)`, if there is one, is called for rows that now have another conversation.
    """

    @property
    def step(self) -> Any:
        """`step(token_ids, num_tokens, sampled_token_ids, row_indices=..., advance=True)`."""


class SettingDrafter:
    """Drafts as the plugin does with a setting."""

    def __init__(self, setting: Setting, store_tokens: int = 1 << 20) -> None:
        config = setting.make_config()
        self._store = NgramStore(store_tokens) if setting.store else None
        self.step = NgramProposer(config, store=self._store).step

    def reset(self, rows: Int64Array) -> None:
        if self._store is not None:
            self._store.reserve_slots(int(rows.max()) + 1)
            self._store.begin_requests(rows)


@dataclass(frozen=True)
class Figures:
    """The counts of a replay.

    Attributes:
        steps, drafted, tokens: For each request, its steps, its draft tokens, and the tokens that
            its steps yielded, `[R]`.
        accepted_lengths: Number of steps by number of accepted tokens, `[K+1]`.
        num_drafts: Number of steps with a draft.
        num_calls, draft_time_ns: Calls of the drafter, and their time.
        is_complete: Whether everything was replayed; false after Ctrl-C.
    """

    steps: Int64Array
    drafted: Int64Array
    tokens: Int64Array
    accepted_lengths: Int64Array
    num_drafts: int = 0
    num_calls: int = 0
    draft_time_ns: int = 0
    is_complete: bool = True

    @property
    def tokens_per_step(self) -> float:
        return int(self.tokens.sum()) / max(1, int(self.steps.sum()))

    @property
    def drafted_per_step(self) -> float:
        return int(self.drafted.sum()) / max(1, int(self.steps.sum()))

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures that the command prints."""
        accepted = self.accepted_lengths[::-1].cumsum()[::-1][1:]
        return {
            "requests": len(self.steps),
            "tokens": int(self.tokens.sum()),
            "steps": int(self.steps.sum()),
            "tokens_per_step": self.tokens_per_step,
            "drafted_per_step": self.drafted_per_step,
            "accepted_by_position": (accepted / max(1, self.num_drafts)).tolist(),
            "us_per_call": self.draft_time_ns / 1000 / max(1, self.num_calls),
            "is_complete": self.is_complete,
        }


def simulate(
    requests: Sequence[TokenRequest],
    drafter: Drafter,
    *,
    k: int,
    batch_size: int = BATCH_SIZE,
    padded: bool = True,
    advance: Callable[[int], object] = lambda _: None,
) -> Figures:
    """Replays requests in batches, as a server does: a row that ends is taken by the next request.

    Args:
        requests: The conversations, started in this order.
        drafter: A drafter with `k` draft tokens per step.
        padded: Whether `k` tokens are verified in every step; missing ones are the newest token.
        advance: Called with the number of tokens after each step.
    """
    batch = _Batch(requests, max(1, min(batch_size, len(requests))), k, padded)
    steps, drafted, tokens = np.zeros((3, len(requests)), np.int64)
    accepted_lengths = np.zeros(k + 1, np.int64)
    num_drafts = num_calls = draft_time_ns = 0
    is_complete = True
    reset = getattr(drafter, "reset", None)
    try:
        while len(rows := batch.find_active_rows()):
            sampled = batch.read_sampled(rows)
            row_indices = None if len(rows) == len(batch.num_tokens) else rows.astype(np.int32)
            if reset is not None and len(new_rows := batch.pop_new_rows()):
                reset(new_rows)
            start = time.perf_counter_ns()
            step = drafter.step(
                batch.token_ids, batch.num_tokens, sampled, row_indices=row_indices, advance=True
            )
            draft_time_ns += time.perf_counter_ns() - start
            num_calls += 1
            num_drafts += int((np.asarray(step.num_draft_tokens) > 0).sum())
            num_drafted, num_accepted, num_yielded = batch.verify(rows, step)
            numbers = batch.request_of_row[rows]
            steps[numbers] += 1
            drafted[numbers] += num_drafted
            tokens[numbers] += num_yielded
            accepted_lengths += np.bincount(num_accepted, minlength=k + 1)
            batch.advance(rows, num_yielded)
            advance(int(num_yielded.sum()))
    except KeyboardInterrupt:
        is_complete = False
    return Figures(
        *(steps, drafted, tokens, accepted_lengths),
        *(num_drafts, num_calls, draft_time_ns, is_complete),
    )


class _Batch:
    """The rows of a model runner, and the recordings from which the model's tokens are read.

    Attributes:
        request_of_row: Number of each row's request.
        _num_due: Tokens of each row that have been sampled, but not yet passed to the drafter; 0 in
            an idle row.
        _end: Position in each row at which the current answer ends.
    """

    def __init__(self, requests: Sequence[TokenRequest], rows: int, k: int, padded: bool) -> None:
        self._k, self._padded = k, padded
        texts = [request.tokens() for request in requests]
        capacity = max(map(len, texts), default=0)
        self.token_ids: Int32Array = np.zeros((rows, capacity), np.int32)
        self._recorded: Int32Array = np.zeros((rows, capacity), np.int32)
        self.num_tokens: Int32Array = np.zeros(rows, np.int32)
        self._num_due: Int64Array = np.zeros(rows, np.int64)
        self._end: Int64Array = np.zeros(rows, np.int64)
        self.request_of_row: Int64Array = np.zeros(rows, np.int64)
        self._new_rows: list[int] = []
        self._waiting = iter(enumerate(zip(requests, texts, strict=True)))
        self._spans: list[Iterator[tuple[int, int]]] = [iter(()) for _ in range(rows)]
        for row in range(rows):
            self._start_turn(row)

    def find_active_rows(self) -> Int64Array:
        return np.flatnonzero(self._num_due).astype(np.int64, copy=False)

    def pop_new_rows(self) -> Int64Array:
        """Returns the rows that got another conversation since the last call."""
        rows, self._new_rows = self._new_rows, []
        return np.unique(np.array(rows, np.int64))

    def read_sampled(self, rows: Int64Array) -> Int32Array:
        """Returns the tokens that the model sampled last, `[B, K+1]`, padded with -1."""
        return self._read_recorded(rows, self._num_due[rows], self._k + 1)

    def verify(self, rows: Int64Array, step: Any) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Returns the numbers of drafted, accepted and yielded tokens, each `[B]`."""
        draft = np.asarray(step.draft_token_ids)
        num_drafted = np.asarray(step.num_draft_tokens).astype(np.int64)
        if self._padded:
            newest = self.token_ids[rows, self.num_tokens[rows] - 1]
            draft = np.where(np.arange(self._k) < num_drafted[:, None], draft, newest[:, None])
            num_drafted = np.full_like(num_drafted, self._k)
        num_left = self._end[rows] - self.num_tokens[rows]
        recorded = self._read_recorded(rows, np.minimum(num_drafted, num_left), self._k)
        is_equal = (recorded >= 0) & (draft == recorded)
        num_accepted = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1, dtype=np.int64)
        return num_drafted, num_accepted, np.minimum(num_accepted + 1, num_left)

    def advance(self, rows: Int64Array, num_yielded: Int64Array) -> None:
        """Makes the yielded tokens due. Rows whose answer ends start their next turn."""
        self._num_due[rows] = num_yielded
        for row in rows[self.num_tokens[rows] + num_yielded == self._end[rows]].tolist():
            self._start_turn(row)

    def _read_recorded(self, rows: Int64Array, counts: Int64Array, width: int) -> Int32Array:
        """Returns the next `counts` recorded tokens of each row, `[B, width]`, padded with -1."""
        columns = np.arange(width)
        has_token = columns < counts[:, None]
        positions = np.where(has_token, self.num_tokens[rows][:, None] + columns, 0)
        return np.where(has_token, self._recorded[rows[:, None], positions], np.int32(-1))

    def _start_turn(self, row: int) -> None:
        """Starts the row's next answer; after the last, the next waiting conversation."""
        while (span := next(self._spans[row], None)) is None:
            waiting = next(self._waiting, None)
            if waiting is None:
                self._num_due[row] = 0
                return
            self.request_of_row[row], (request, text) = waiting
            # Tokens of the previous conversation stay beyond the new length, as in a runner.
            self._recorded[row, : len(text)] = text
            self.num_tokens[row] = 0
            self._new_rows.append(row)
            self._spans[row] = iter(request.spans())
        start, self._end[row] = span
        # The prompt, and also the last tokens of the answer before, which no step has appended.
        written = int(self.num_tokens[row])
        self.token_ids[row, written:start] = self._recorded[row, written:start]
        self.num_tokens[row] = start
        self._num_due[row] = 1


# Command


@dataclass(frozen=True)
class ReplayReport:
    """The figures of one or two settings, and notes."""

    figures: dict[Setting, Figures]
    notes: list[str]
    tokenizer: str

    @property
    def is_complete(self) -> bool:
        return all(figures.is_complete for figures in self.figures.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer,
            "settings": {str(s): figures.to_dict() for s, figures in self.figures.items()},
            "notes": self.notes,
        }


def replay(
    reader: LogReader, tokenization: Tokenization, settings: Sequence[Setting], store_tokens: int
) -> ReplayReport:
    """Replays all conversations with each setting.

    Raises:
        InputError: The options or the input cannot be used.
    """
    drafters = {setting: SettingDrafter(setting, store_tokens) for setting in settings}
    requests = [request for _, listed in read_requests(reader, tokenization) for request in listed]
    total = sum(request.num_generated for request in requests) * len(drafters)
    figures: dict[Setting, Figures] = {}
    with make_bar("replay", total, "token") as bar:
        for setting, drafter in drafters.items():
            figures[setting] = simulate(
                requests, drafter, k=setting.k, padded=setting.is_padded, advance=bar.update
            )
            if not figures[setting].is_complete:
                break
    return ReplayReport(figures, reader.list_notes(), tokenization.describe())


def format_replay(report: ReplayReport) -> str:
    """Returns a table of a report."""
    width = max(len(str(setting)) for setting in report.figures)
    head = f"{'setting':{width}}  requests    tokens  tokens/step  drafted/step  us/call"
    rows, accepted = [], []
    for setting, figures in report.figures.items():
        values = figures.to_dict()
        rows.append(
            f"{setting!s:{width}}  {values['requests']:8}  {values['tokens']:8}  "
            f"{values['tokens_per_step']:11.3f}  {values['drafted_per_step']:12.2f}  "
            f"{values['us_per_call']:7.1f}"
        )
        rates = " ".join(f"{rate:.2f}" for rate in values["accepted_by_position"])
        accepted.append(f"{setting!s:{width}}  accepted by position: {rates}")
    lines = [f"tokenizer: {report.tokenizer}", "", head, *rows, "", *accepted]
    if not report.is_complete:
        lines.append("interrupted: the figures are those of the part that was replayed")
    elif len(report.figures) == 2:
        (_, first), (compared, second) = report.figures.items()
        if first.tokens_per_step:
            gain = second.tokens_per_step / first.tokens_per_step - 1
            lines.append(f"{compared}: {gain:+.1%} tokens per step")
    return "\n".join(lines)
