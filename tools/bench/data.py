"""Rows of tokens, and the steps by which they grow."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu_cli.logs.files import find_files
from ngram_npu_cli.replay import load_tokenizer, read_conversations, stdlib_conversations

from tools.bench.options import BenchError, Options, Size

Int32Array = npt.NDArray[np.int32]

MAX_NEW_TOKENS = 3
"""A row gains 1 to this many tokens per step, as if drafts were accepted now and then."""

VOCAB_SIZE = 32_000
PERIOD = 61
SEED = 20_240_607
_NOMATCH_FIRST_ID = 1 << 24
_DEFAULT_DATA = Path(__file__).parents[3] / "shared" / "data" / "replay"


@dataclass
class Workload:
    """Contexts of one size and the steps that follow, the same for every contestant.

    A row's buffer already holds the text that its steps will append; only its length says where
    the context ends. A contestant that appends rewrites the same tokens, one that does not append
    finds them in place, and so all of them can share one buffer.

    Attributes:
        token_ids: [B, S].
        lengths: [steps + 1, B], live lengths before each step and after the last.
        sampled: [steps, B, M], the tokens each step appends, padded with -1.
        describes: kind and source of the data, for the record.
    """

    size: Size
    token_ids: Int32Array
    lengths: Int32Array
    sampled: Int32Array
    describes: dict[str, Any]

    @property
    def steps(self) -> int:
        return len(self.sampled)

    @property
    def capacity(self) -> int:
        return int(self.token_ids.shape[1])


def default_data(path: Path | None) -> Path:
    """The folder given, else the recorded sets beside the repository.

    Raises:
        BenchError: The folder is missing.
    """
    if path is None and not _DEFAULT_DATA.is_dir():
        raise BenchError("no recorded sets here: --data says where they are")
    return path or _DEFAULT_DATA


@functools.cache
def load_corpus(path: Path | None) -> tuple[Int32Array, str]:
    """Recorded conversations as one run of tokens, and a description of their source (for the
    record, without private paths).

    Args:
        path: a file or folder of conversations; None: the recorded sets if they lie beside the
            repository, else the sources of the Python standard library.
    """
    if path is None and _DEFAULT_DATA.is_dir():
        path = _DEFAULT_DATA
    if path is None:
        conversations, _ = stdlib_conversations()
        name = "sources of the Python standard library"
    else:
        files = find_files(path)
        conversations = [talk for file in files for talk in read_conversations(file)]
        name = ", ".join(file.name for file in files)
    tokenizer = load_tokenizer()
    ids: list[int] = []
    for conversation in conversations:
        for turn in conversation.turns:
            ids += turn.prompt_token_ids or tokenizer.encode(f"USER: {turn.prompt} ASSISTANT:")
            ids += turn.completion_token_ids or tokenizer.encode(str(turn.completion))
    if len(ids) < 2:
        raise BenchError(f"{name}: too little text")
    return np.array(ids, dtype=np.int32), f"{name}; {tokenizer.source}; {len(ids)} tokens"


def make_workload(size: Size, options: Options) -> Workload:
    """Deterministic: the same size and options give the same tokens and steps in every process."""
    rng = np.random.default_rng(SEED)
    steps = lap_steps(size.context)
    most = min(MAX_NEW_TOKENS, options.k + 1)
    counts = rng.integers(1, most + 1, size=(steps, size.batch), dtype=np.int32)
    base = np.full(size.batch, size.context, np.int32)
    lengths = np.concatenate([base[None], base + counts.cumsum(0)]).astype(np.int32)
    # Rows of a real buffer are as wide as the longest context the server admits. An odd number of
    # cache lines keeps the starts of the rows out of the same cache sets.
    width = size.context + steps * MAX_NEW_TOKENS + MAX_NEW_TOKENS + options.k
    lines = -(-width // 16) | 1
    rows, source = _rows(base, lines * 16, options, rng)

    places = np.arange(options.k + 1)
    sampled = np.full((steps, size.batch, options.k + 1), -1, np.int32)
    for step in range(steps):
        at = lengths[step][:, None] + places[None, :most]
        new = np.take_along_axis(rows, at.astype(np.int64), axis=1)
        sampled[step, :, :most] = np.where(places[None, :most] < counts[step][:, None], new, -1)
    describes = {"kind": options.data_kind, "source": source}
    return Workload(size, rows, lengths, sampled, describes)


def lap_steps(context: int) -> int:
    """Steps from the base length to the reset: contexts may grow by at most an eighth, else the
    figures would belong to another size."""
    return max(12, min(256, context // 8 // 2))


def _rows(
    lengths: Int32Array, width: int, options: Options, rng: np.random.Generator
) -> tuple[Int32Array, str]:
    batch = len(lengths)
    shape = (batch, width)
    if options.data_kind == "zipf":
        ids = (VOCAB_SIZE ** rng.random(shape, np.float32)).astype(np.int32)
        return ids, f"{VOCAB_SIZE} ids, each as rare as its number is high (Zipf)"
    if options.data_kind == "random":
        return rng.integers(0, VOCAB_SIZE, shape, np.int32), f"uniform over {VOCAB_SIZE} ids"
    if options.data_kind == "periodic":
        place = (np.arange(batch)[:, None] * 7 + np.arange(width)[None]) % PERIOD
        return place.astype(np.int32), f"the ids 0 to {PERIOD - 1} over and over"
    if options.data_kind == "nomatch":
        rows = rng.integers(0, VOCAB_SIZE, shape, np.int32)
        # Near the end of the context, every id is new to its row: no suffix occurred before.
        for row, fresh in zip(rows, np.maximum(0, lengths - options.max_n), strict=True):
            row[fresh:] = _NOMATCH_FIRST_ID + np.arange(width - fresh, dtype=np.int32)
        return rows, f"uniform over {VOCAB_SIZE} ids, then ids that never occurred before"
    corpus, source = load_corpus(options.data)
    if corpus.size < width:
        source += ", repeating within a row"
    rows = np.empty(shape, np.int32)
    for row in range(batch):
        start = row * corpus.size // batch
        rows[row] = np.take(corpus, np.arange(start, start + width), mode="wrap")
    return rows, source
