"""Reads recorded conversations, and replays them with a drafter's drafts.

The replay is independent of ``ngram-npu replay``, so that a fault of one of them shows.
"""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramConfig, NgramStore

BATCH = 32
"""Number of conversations that are replayed at the same time."""
STORE_TOKENS = 1 << 20
_DEFAULT_DATA = Path(__file__).parents[3] / "shared" / "data"
_MODULES = ("argparse", "ast", "configparser", "csv", "difflib", "enum", "inspect", "pickle")

Int32Array = npt.NDArray[np.int32]
Conversation = list[tuple[Int32Array, Int32Array]]
"""Prompt and completion of each turn."""
Sets = dict[str, list[Conversation]]


def find_data(folder: Path | None) -> Path | None:
    """Returns the folder of recorded data: the given one, NGRAM_NPU_DATA, or ../shared/data beside
    the project. None if there is none, as on a user's machine."""
    named = folder or os.environ.get("NGRAM_NPU_DATA")
    if named:
        return Path(named)
    return _DEFAULT_DATA if _DEFAULT_DATA.is_dir() else None


def load_sets(data: Path | None, pattern: str = "replay/*.jsonl.gz") -> Sets:
    """Returns the conversations by set: those of the files in the folder that match the pattern.
    Without a folder, the set is the bytes of some sources of Python's standard library, whose
    second halves are the completions."""
    sets: Sets = {}
    if data is None:
        files = [Path(sysconfig.get_path("stdlib"), f"{module}.py") for module in _MODULES]
        texts = [np.frombuffer(file.read_bytes(), np.uint8).astype(np.int32) for file in files]
        return {"stdlib": [[(t[: len(t) // 2], t[len(t) // 2 :][:12_000])] for t in texts]}
    encode = load_tokenizer()
    for path in sorted(data.glob(pattern)):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            records = [json.loads(line)["turns"] for line in file]
        sets[path.name.partition(".")[0]] = [
            [(encode(f"USER: {t['prompt']} ASSISTANT:"), encode(t["completion"])) for t in turns]
            for turns in records
        ]
    return sets


def load_tokenizer() -> Any:
    """Returns a function from text to token ids of the tokenizer in mistral-common (32k ids)."""
    import mistral_common
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    folder = Path(mistral_common.__file__).parent / "data"
    tokenizer = SentencePieceTokenizer(folder / "tokenizer.model.v1")
    return lambda text: np.array(tokenizer.encode(text, bos=False, eos=False), np.int32)


def join_tokens(conversation: Conversation) -> Int32Array:
    return np.concatenate([part for turn in conversation for part in turn])


class Counts(NamedTuple):
    """Results of a replay."""

    tokens_per_step: float
    drafted_per_step: float

    def compute_speedup(self, cost: float) -> float:
        """Returns the speed-up if a drafted token takes ``cost`` of a step's time to verify."""
        return self.tokens_per_step / (1 + cost * self.drafted_per_step)


def replay(conversations: Sequence[Conversation], drafter: Any, k: int, *, padded: bool) -> Counts:
    """Replays conversations in order, `BATCH` at a time, each in one row for all of its turns. The
    recorded completions replace the target model, and prefill yields the first token of each.

    Args:
        drafter: An object with `step`, as `NgramProposer` has, and optionally with `reset`, which
            gets the rows that another conversation begins in.
        padded: Whether all k draft tokens are verified.
    """
    num_rows = min(BATCH, len(conversations))
    capacity = max(len(join_tokens(c)) for c in conversations)
    token_ids, num_tokens = np.zeros((num_rows, capacity), np.int32), np.zeros(num_rows, np.int32)
    waiting = iter(conversations)
    rows = [_Row(waiting) for _ in range(num_rows)]
    reset = getattr(drafter, "reset", None)
    num_steps = num_generated = num_drafted = 0
    while active := [i for i, row in enumerate(rows) if row.begin_turn(token_ids[i])]:
        new = [i for i in active if rows[i].pop_is_new()]
        if new and reset is not None:
            reset(np.array(new, np.int32))
        sampled = np.full((len(active), k + 1), -1, np.int32)
        for i, row in zip(range(len(active)), (rows[i] for i in active), strict=True):
            sampled[i, : row.num_due] = row.text[row.length : row.length + row.num_due]
            num_tokens[active[i]] = row.length
        indices = np.array(active, np.int32)
        result = drafter.step(token_ids, num_tokens, sampled, row_indices=indices, advance=True)
        for i, row_number in enumerate(active):
            row = rows[row_number]
            row.length += row.num_due
            assert num_tokens[row_number] == row.length
            num = k if padded else int(result.num_draft_tokens[i])
            rest = row.text[row.length : row.end]
            draft = result.draft_token_ids[i, : min(num, len(rest))]
            is_wrong = draft != rest[: len(draft)]
            num_accepted = int(is_wrong.argmax()) if is_wrong.any() else len(draft)
            row.num_due = min(num_accepted + 1, len(rest))
            num_steps += 1
            num_generated += row.num_due
            num_drafted += num
    return Counts(num_generated / num_steps, num_drafted / num_steps)


class _Row:
    """A row of the batch: a conversation, and the tokens that were sampled in the last step."""

    def __init__(self, waiting: Iterator[Conversation]) -> None:
        self._waiting = waiting
        self._spans: list[tuple[int, int]] = []
        self._is_new = False
        self.text = np.zeros(0, np.int32)
        self.length = self.num_due = self.end = 0

    def pop_is_new(self) -> bool:
        is_new, self._is_new = self._is_new, False
        return is_new

    def begin_turn(self, tokens: Int32Array) -> bool:
        """If the turn has ended, writes the next turn's prompt to the row, whose first completion
        token is then due. Returns False if no conversation is waiting."""
        if self.length + self.num_due < self.end:
            return True
        while not self._spans:
            conversation = next(self._waiting, None)
            if conversation is None:
                return False
            self.text, self._is_new, self.length = join_tokens(conversation), True, 0
            ends = np.cumsum([len(part) for turn in conversation for part in turn])
            pairs = zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True)
            self._spans = [(start, end) for start, end in pairs if end - start >= 2]
        start, self.end = self._spans.pop(0)
        tokens[:start] = self.text[:start]
        self.length, self.num_due = start, 1
        return True


class PaddingDrafter:
    """Drafts as an asynchronous runner does: drafts are padded with the text that follows, and the
    newest step's tokens are not in the store yet."""

    def __init__(self, k: int, has_store: bool) -> None:
        self._k = k
        self._arguments = NgramConfig(k=k).lookup_arguments
        del self._arguments["k"]
        self._store = make_store() if has_store else None

    def reset(self, rows: Any) -> None:
        """Marks the rows as those of new requests."""
        if self._store is not None:
            self._store.begin_requests(rows.astype(np.int64))

    def step(
        self, token_ids: Any, num_tokens: Any, sampled: Any, *, row_indices: Any, advance: bool
    ) -> Any:
        """Appends the sampled tokens to the rows and drafts; the replay always advances."""
        rows = np.arange(len(token_ids), dtype=np.int32) if row_indices is None else row_indices
        num_sampled = (sampled >= 0).sum(axis=1, dtype=np.int32)
        for row, new, number in zip(rows, sampled, num_sampled, strict=True):
            token_ids[row, num_tokens[row] : num_tokens[row] + number] = new[:number]
        num_tokens[rows] += num_sampled
        drafts = {
            "draft_token_ids": np.empty((len(rows), self._k), np.int32),
            "num_draft_tokens": np.empty(len(rows), np.int32),
            "match_len": np.empty(len(rows), np.int32),
        }
        step = {"row_indices": rows, "num_sampled": num_sampled}
        _C.ngram_propose_(token_ids, num_tokens, **step, **drafts, fill=True, **self._arguments)
        if self._store is not None:
            rows_and_counts = token_ids, num_tokens, num_sampled
            self._store.begin_step(len(rows), self._k + 1)
            self._store.append(
                *rows_and_counts, row_indices=rows, slot_indices=rows, max_new=self._k + 1
            )
            agreement = np.empty(len(rows), np.int32)
            self._store.propose(
                *rows_and_counts, row_indices=rows, agreement=agreement, fill=True, **drafts
            )
        drafts["num_draft_tokens"] = np.full(len(rows), self._k)
        return SimpleNamespace(**drafts)


def make_store() -> NgramStore:
    return NgramStore(STORE_TOKENS, num_slots=BATCH, max_batch=BATCH)


def compute_mean(values: Any) -> float:
    """Returns the geometric mean over sets, rounded."""
    return round(geometric_mean(values), 4)


@dataclass(frozen=True)
class Steps:
    """Rows of recorded text, and steps that each append two tokens to every row."""

    rows: Int32Array
    """[B, S]; a row already contains the text of all steps."""
    lengths: list[Int32Array]
    """[B] for each step: the rows' lengths with the step's tokens."""
    sampled: list[list[list[int]]]
    """The tokens that each step appends."""


def make_steps(sets: Sets, size: str, count: int = 12) -> Steps:
    """Returns steps for a batch such as "128x32k" (k: 1024 tokens). The rows begin at different
    places of the text of all sets; they are a few tokens wider than the steps need."""
    batch, context = (int(n.removesuffix("k")) * (1024 if "k" in n else 1) for n in size.split("x"))
    text = np.concatenate(
        [join_tokens(c) for conversations in sets.values() for c in conversations]
    )
    starts = np.arange(batch) * len(text) // batch
    # An odd number of cache lines per row, so that the rows begin in different cache sets.
    width = ((context + 2 * count + 16) // 16 | 1) * 16
    rows = np.take(text, starts[:, None] + np.arange(width), mode="wrap").astype(np.int32)
    ends = [context + 2 * (step + 1) for step in range(count + 1)]
    return Steps(
        rows,
        [np.full(batch, end, np.int32) for end in ends],
        [rows[:, end - 2 : end].tolist() for end in ends],
    )
