"""Provides conversations, recorded logs, proposers and settings for the tests of the command."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ngram_npu_cli.learn import LogSample, StoreTokenization, _read_sample
from ngram_npu_cli.logs.reader import ignore_progress
from ngram_npu_cli.options import LearnOptions, ReadingOptions
from ngram_npu_cli.replay import Conversation, TokenRequest, TokenTurn, load_inputs
from ngram_npu_cli.tune import BASELINE, Candidate

Turns = Sequence[tuple[Sequence[int], Sequence[int]]]

_FOLDER = tempfile.TemporaryDirectory(prefix="recorded-")
DATA = Path(_FOLDER.name)
"""The folder with the files of data/recorded.jsonl (data/README.md) while the tests run."""
for _text in (
    (Path(__file__).parent / "replay" / "data" / "recorded.jsonl").read_bytes().splitlines()
):
    _record = json.loads(_text)
    (DATA / _record["file"]).parent.mkdir(exist_ok=True)
    (DATA / _record["file"]).write_bytes(_record["text"].encode())

EXAMPLE: Turns = (
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 20, 21]),
    ([30, 31], [7, 20, 21, 30, 40]),
    ([50], []),
    ([51], [52]),
)
"""Turns of prompt and completion. The counts for the earliest match of 2 to 5 tokens and k=5:

Turn 1: prefill yields 1. `9 1` is new: the step has no draft and yields 2. `1 2` is at the front:
the draft 3 4 5 6 7 is accepted, and the step also yields 20. `7 20` is new: the step has no draft
and yields 21: 8 tokens, 3 steps.

Turn 2: prefill yields 7. `31 7` is new: the step has no draft and yields 20. `7 20` is in turn 1:
two tokens of the draft 21 30 31 7 20 are accepted, and the step also yields 40: 4 tokens, 2 steps.

Turns 3 and 4 have no token after the first, so they have no steps.
"""


def make_record(turns: Turns, name: str = "r") -> dict[str, Any]:
    """Returns a conversation of token ids as a record of a replay file."""
    records = [{"prompt_token_ids": p, "completion_token_ids": c} for p, c in turns]
    return {"id": name, "turns": records}


EXAMPLE_LINE = make_record(EXAMPLE, "example")
"""The example as a line of a replay file."""


def make_token_request(turns: Turns, name: str = "r") -> TokenRequest:
    """Returns a replay request of token ids."""
    return TokenRequest(
        name,
        tuple(TokenTurn(np.array(p, np.int32), np.array(c, np.int32)) for p, c in turns),
    )


def copy_lines(path: Path, lines: slice) -> Path:
    """Copies some lines of a file to a new file."""
    copy = path.with_name("copied-lines.jsonl")
    copy.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[lines]))
    return copy


def read_conversations(path: Path, **options: Any) -> list[Conversation]:
    """Reads a file. Raises the error of the first record that is not a conversation."""
    (item,) = load_inputs([path], ReadingOptions(strict=True, **options))
    return list(item.conversations)


def read_sample(
    paths: Sequence[Path], tokenizer: str, max_blocks: int = 1 << 20, **options: Any
) -> LogSample:
    """Reads logs as `learn` does."""
    sample = LogSample(max_blocks)
    tokenization = StoreTokenization(tokenizer, "auto")
    _read_sample(paths, sample, tokenization, LearnOptions(**options), ignore_progress)
    return sample


class ScriptedProposer:
    """A proposer that appends the sampled tokens. ``draft`` returns the draft for a context."""

    def __init__(self, k: int, draft: Callable[[list[int]], list[int]]) -> None:
        self.k = k
        self.draft = draft
        self.calls: list[SimpleNamespace] = []

    def step(
        self,
        token_ids: Any,
        num_tokens: Any,
        sampled_token_ids: Any,
        discard: Any = None,
        row_indices: Any = None,
        advance: bool = False,
    ) -> Any:
        assert advance, "the proposer must advance the lengths"
        for array in (token_ids, num_tokens, sampled_token_ids):
            assert array.dtype == np.int32
        batch = len(sampled_token_ids)
        rows = list(range(batch)) if row_indices is None else row_indices.tolist()
        drafts = np.full((batch, self.k), -1, np.int32)
        counts = np.zeros(batch, np.int32)
        sampled = [[t for t in row.tolist() if t >= 0] for row in sampled_token_ids]
        contexts = []
        for i, row in enumerate(rows):
            begin = int(num_tokens[row])
            end = begin + len(sampled[i])
            token_ids[row, begin:end] = sampled[i]
            num_tokens[row] = end
            contexts.append(token_ids[row, :end].tolist())
            draft = self.draft(contexts[-1])
            drafts[i, : len(draft)] = draft
            counts[i] = len(draft)
        self.calls.append(
            SimpleNamespace(rows=rows, row_indices=row_indices, sampled=sampled, contexts=contexts)
        )
        return SimpleNamespace(draft_token_ids=drafts, num_draft_tokens=counts)


SETTINGS = (
    BASELINE,
    Candidate.of(min_n=2, max_n=3, k=2, match_policy="latest"),
    Candidate.of(sizes="ladder", k=16, min_draft_probability=0.1),
)
"""Three settings to tune."""


def make_conversations(count: int, seed: int = 0, name: str = "") -> list[dict[str, Any]]:
    """Returns conversations that repeat parts of their own text, some more than others."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        phrase = rng.integers(0, 40, int(rng.integers(20, 60))).tolist()
        noise = rng.integers(0, 40, 30).tolist()
        turn = phrase + noise[: number % 20], phrase[5:] + noise[number % 7 :]
        lines.append(make_record([turn, turn], f"{name}{number}"))
    return lines


def write_similar_conversations(count: int, file: Path) -> Path:
    """Writes conversations of two turns. Answers are parts of one text that no prompt contains."""
    text = np.random.default_rng(7).integers(0, 10**6, 400).tolist()
    lines = []
    for number in range(count):
        begin = 37 * number % 300
        parts = text[begin : begin + 60], text[begin + 60 : begin + 100]
        turns = [([10**6 + number, 10**6 + turn], part) for turn, part in enumerate(parts)]
        lines.append(make_record(turns, f"{number}"))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def write_cost_file(path: Path, *steps: tuple[int, float, float], **fields: Any) -> str:
    entries = [{"batch": b, "verified": v, "seconds": s} for b, v, s in steps]
    path.write_text(json.dumps({"format": "ngram_npu.cost/1", "steps": entries, **fields}))
    return str(path)
