"""Creates rows of tokens, and the steps by which the rows grow."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu_cli.logs.files import find_files
from ngram_npu_cli.options import ReadingOptions
from ngram_npu_cli.replay import load_inputs, load_tokenizer, stdlib_conversations

from tools.bench.options import BenchError, Options, Size

Int32Array = npt.NDArray[np.int32]

MAX_NEW_TOKENS = 3
"""A step appends 1 to MAX_NEW_TOKENS tokens to a row, as if some drafts were accepted."""

VOCAB_SIZE = 32_000
PERIOD = 61
"""Period of the data kind ``periodic``, in tokens."""
SEED = 20_240_607
_NOMATCH_FIRST_ID = 1 << 24
_DEFAULT_DATA = Path(__file__).parents[3] / "shared" / "data" / "replay"


@dataclass
class Workload:
    """The contexts of one size and the steps that extend them, shared by all implementations.

    A row already contains the text that the steps append; its length marks where the context ends.
    An implementation that appends writes the same tokens again, so implementations share one
    buffer.

    Attributes:
        token_ids: [B, S], the rows.
        lengths: [steps + 1, B], the rows' lengths before each step and after the last step.
        sampled: [steps, B, M], the tokens that each step appends, padded with -1.
        description: Kind and source of the data, for the results file.
    """

    size: Size
    token_ids: Int32Array
    lengths: Int32Array
    sampled: Int32Array
    description: dict[str, Any]

    @property
    def steps(self) -> int:
        return len(self.sampled)

    @property
    def capacity(self) -> int:
        return int(self.token_ids.shape[1])


def find_data(path: Path | None) -> Path:
    """Returns the given folder or, without one, the recorded sets next to the repository.

    Raises:
        BenchError: No folder is given, and there is none next to the repository.
    """
    if path is None and not _DEFAULT_DATA.is_dir():
        raise BenchError(f"{_DEFAULT_DATA} does not exist: pass a folder of recorded sets (--data)")
    return path or _DEFAULT_DATA


@functools.cache
def load_corpus(path: Path | None) -> tuple[Int32Array, str]:
    """Returns recorded conversations as one sequence of tokens, and a description of their source
    without private paths. Without a path, reads the recorded sets next to the repository or, if
    there are none, the sources of the Python standard library."""
    if path is None and _DEFAULT_DATA.is_dir():
        path = _DEFAULT_DATA
    if path is None:
        conversations, _ = stdlib_conversations()
        name = "sources of the Python standard library"
    else:
        inputs = load_inputs([path], ReadingOptions(strict=True))
        conversations = [conversation for item in inputs for conversation in item.conversations]
        name = ", ".join(file.name for file in find_files(path))
    tokenizer = load_tokenizer()
    ids: list[int] = []
    for conversation in conversations:
        for turn in conversation.turns:
            ids += turn.prompt_token_ids or tokenizer.encode(f"USER: {turn.prompt} ASSISTANT:")
            ids += turn.completion_token_ids or tokenizer.encode(str(turn.completion))
    if len(ids) < 2:
        raise BenchError(f"{name}: expected at least 2 tokens of text, got {len(ids)}")
    return np.array(ids, dtype=np.int32), f"{name}; {tokenizer.source}; {len(ids)} tokens"


def make_workload(size: Size, options: Options) -> Workload:
    """Creates a workload; the same size and options give the same workload in every process."""
    rng = np.random.default_rng(SEED)
    steps = count_workload_steps(size.context)
    max_new = min(MAX_NEW_TOKENS, options.k + 1)
    counts = rng.integers(1, max_new + 1, size=(steps, size.batch), dtype=np.int32)
    initial_lengths = np.full(size.batch, size.context, np.int32)
    lengths = np.cumsum([initial_lengths, *counts], axis=0, dtype=np.int32)
    # A server's rows are as wide as the longest context that it admits. These rows are as wide as
    # the steps need, rounded up to an odd number of cache lines (16 tokens each), so that the rows
    # start in different cache sets.
    width = size.context + steps * MAX_NEW_TOKENS + MAX_NEW_TOKENS + options.k
    num_lines = -(-width // 16) | 1
    rows, source = _make_rows(initial_lengths, num_lines * 16, options, rng)

    offsets = np.arange(options.k + 1)
    sampled = np.full((steps, size.batch, options.k + 1), -1, np.int32)
    for step in range(steps):
        positions = lengths[step][:, None] + offsets[None, :max_new]
        tokens = np.take_along_axis(rows, positions.astype(np.int64), axis=1)
        is_sampled = offsets[None, :max_new] < counts[step][:, None]
        sampled[step, :, :max_new] = np.where(is_sampled, tokens, -1)
    return Workload(size, rows, lengths, sampled, {"kind": options.data_kind, "source": source})


def count_workload_steps(context: int) -> int:
    """Returns the number of steps until the rows are reset to their initial lengths. A context
    grows by at most an eighth or by 12 steps, so that times belong to the stated context length."""
    return max(12, min(256, context // 8 // 2))


def _make_rows(
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
        ids = (np.arange(batch)[:, None] * 7 + np.arange(width)[None]) % PERIOD
        return ids.astype(np.int32), f"the ids 0 to {PERIOD - 1}, repeated"
    if options.data_kind == "nomatch":
        rows = rng.integers(0, VOCAB_SIZE, shape, np.int32)
        # The last max_n tokens of a context and all later tokens occur once in their row, so no
        # suffix has an earlier occurrence.
        for row, start in zip(rows, np.maximum(0, lengths - options.max_n), strict=True):
            row[start:] = _NOMATCH_FIRST_ID + np.arange(width - start, dtype=np.int32)
        return rows, f"uniform over {VOCAB_SIZE} ids, then ids that never occurred before"
    corpus, source = load_corpus(options.data)
    if corpus.size < width:
        source += ", repeating within a row"
    rows = np.empty(shape, np.int32)
    for row in range(batch):
        start = row * corpus.size // batch
        rows[row] = np.take(corpus, np.arange(start, start + width), mode="wrap")
    return rows, source
