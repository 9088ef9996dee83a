"""Compares the device's lookups with the CPU's on a million random, recorded and adversarial rows.

    python -m tools.gpu.rows [1000000]

Each batch of rows goes through ngram_propose, ngram_step_ and, with an index, ngram_index_step_ on
the device, with different options each time. All results and everything written must equal the
CPU's.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ngram_npu.config import ANY_TOKEN, UNLIMITED
from ngram_npu.replay import stdlib_conversations

from tools.bench import environment
from tools.bench.gpu.ours import make_index, workspace

Int32Array = npt.NDArray[np.int32]
Calls = dict[str, Callable[..., Any]]
"""Operator -> the function called for it on the device; tests pass wrong ones."""

BATCH = 4096
CAPACITY = 768
WIDTH = 4
_EXTREMES = (-(2**31), -1, 2**31 - 1, CAPACITY + 1)


class DifferenceError(AssertionError):
    pass


@dataclass(frozen=True)
class Batch:
    """Rows of one kind, their sampled tokens, and the lookup's options."""

    kind: str
    number: int
    tokens: Int32Array
    lengths: Int32Array
    sampled: Int32Array
    discard: npt.NDArray[np.bool_]
    options: dict[str, Any]
    """min_n, max_n, k, match_policy, overlap, max_len."""


def make_batch(number: int, rows: int) -> Batch:
    """A batch, determined by its number alone."""
    rng = np.random.default_rng(number)
    kind = list(KINDS)[number % len(KINDS)]
    tokens = KINDS[kind](rng, rows)
    lengths = rng.integers(0, CAPACITY + 1, rows, dtype=np.int32)
    bad = rng.random(rows) < 0.01
    lengths[bad] = rng.choice(np.array(_EXTREMES, np.int32), int(bad.sum()))
    at = np.clip(lengths, 0, CAPACITY - WIDTH)[:, None] + np.arange(WIDTH)
    # Half of the rows sample the tokens they already hold there, the others any of their tokens.
    sampled = np.take_along_axis(tokens, at.astype(np.int64), axis=1)
    other = rng.random(rows) < 0.5
    sampled[other] = tokens[other, :WIDTH]
    sampled[np.arange(WIDTH) >= rng.integers(0, WIDTH + 1, (rows, 1))] = -1
    min_n = int(rng.integers(1, 5))
    options = {
        "min_n": min_n,
        "max_n": min_n + int(rng.integers(0, 8)),
        "k": int(rng.integers(1, 9)),
        "match_policy": int(rng.integers(0, 2)),
        "overlap": bool(rng.integers(0, 2)),
        "max_len": int(rng.choice([UNLIMITED, CAPACITY, CAPACITY // 2])),
    }
    return Batch(kind, number, tokens, lengths, sampled, rng.random(rows) < 0.1, options)


def _random(rng: np.random.Generator, rows: int) -> Int32Array:
    alphabet = int(rng.choice([1, 2, 4, 30, 1000, 150_000]))
    return rng.integers(0, alphabet, (rows, CAPACITY), dtype=np.int32)


@functools.cache
def _text() -> Int32Array:
    """Words and signs of the Python standard library, whose sources are on every machine."""
    conversations, _ = stdlib_conversations()
    text = " ".join(str(t.completion) for c in conversations for t in c.turns)
    words = text.replace("(", " ( ").replace(".", " . ").replace(":", " : ").split()
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return np.array([ids[word] for word in words], np.int32)


def _recorded(rng: np.random.Generator, rows: int) -> Int32Array:
    starts = rng.integers(0, len(_text()), (rows, 1))
    return np.take(_text(), starts + np.arange(CAPACITY), mode="wrap")


def _adversarial(rng: np.random.Generator, rows: int) -> Int32Array:
    """Periodic rows with a few changed tokens, and copies of a row's end anywhere in the row: many
    candidates, increasingly long ones, and ties."""
    period = rng.integers(1, 40, (rows, 1))
    tokens = (np.arange(CAPACITY) % period).astype(np.int32)
    broken = rng.random((rows, CAPACITY)) < rng.choice([0.0, 0.002, 0.05], (rows, 1))
    tokens[broken] = rng.integers(0, 40, int(broken.sum()))
    for row in range(0, rows, 2):
        n = int(rng.integers(1, 16))
        at = int(rng.integers(0, CAPACITY - n))
        tokens[row, at : at + n] = tokens[row, CAPACITY - n :]
    return tokens


KINDS = {"random": _random, "recorded": _recorded, "adversarial": _adversarial}


def check_batch(batch: Batch, device: str, calls: Calls | None = None) -> int:
    """
    Returns:
        The number of rows for which ngram_step_ drafted.

    Raises:
        DifferenceError: a result differs; names batch, operator, result and first such row.
    """
    ops: Calls = {name: getattr(torch.ops.ngram_npu, name) for name in _ARGUMENTS} | (calls or {})
    drafted = 0
    for op, arguments in _ARGUMENTS.items():
        mine, truth = _Tensors(batch, device), _Tensors(batch, "cpu")
        given, keywords = arguments(mine, batch)
        got = ops[op](*given, **keywords)
        reference = _SCANNING.get(op, op)
        given, keywords = _ARGUMENTS[reference](truth, batch)
        expected = getattr(torch.ops.ngram_npu, reference)(*given, **keywords)
        pairs = [*zip(got, expected, strict=True), *zip(mine.written, truth.written, strict=True)]
        for place, (result, wanted) in enumerate(pairs):
            differs = (result.cpu() != wanted).flatten(1 if wanted.dim() > 1 else 0)
            rows = differs.any(1) if differs.dim() > 1 else differs
            if rows.any():
                first = int(rows.nonzero()[0])
                raise DifferenceError(
                    f"batch {batch.number} ({batch.kind}, options {batch.options}): {op}: result "
                    f"{place}, row {first} of length {batch.lengths[first]}: got "
                    f"{result[first].tolist()}, expected {wanted[first].tolist()}"
                )
        if op == "ngram_step_":
            drafted = int((expected[3] > 0).sum())
    return drafted


class _Tensors:
    def __init__(self, batch: Batch, device: str) -> None:
        self.device = device
        self.tokens, self.lengths, self.sampled, self.discard = (
            torch.from_numpy(array.copy()).to(device)
            for array in (batch.tokens, batch.lengths, batch.sampled, batch.discard)
        )
        self.written = (self.tokens, self.lengths)

    def workspace(self, op: str) -> torch.Tensor:
        return workspace(op, len(self.lengths), self.device)

    def index(self, batch: Batch, missing: int) -> torch.Tensor:
        """An index of the rows before the call, without each row's last ``missing`` tokens."""
        options = batch.options
        rows, capacity = self.tokens.shape
        min_n, max_n = options["min_n"], options["max_n"]
        index = make_index(rows, rows * capacity, min_n, max_n, self.device)
        lengths = torch.where(self.lengths > missing, self.lengths - missing, self.lengths)
        index.append(self.tokens, lengths, match_policy=options["match_policy"])
        tensor: torch.Tensor = index.tensor
        return tensor


_Arguments = tuple[tuple[torch.Tensor, ...], dict[str, Any]]


def _propose(t: _Tensors, batch: Batch) -> _Arguments:
    counts = t.sampled[:, 0].clamp(max=1)  # 1 if a token was sampled, else below 1
    return (t.tokens, t.lengths), {"num_sampled": counts, **batch.options}


def _index_propose(t: _Tensors, batch: Batch) -> _Arguments:
    rows, keywords = _propose(t, batch)
    return (*rows, t.index(batch, missing=1)), keywords


def _step(t: _Tensors, batch: Batch, op: str = "ngram_step_") -> _Arguments:
    return (t.tokens, t.lengths, t.sampled), {
        "discard": t.discard,
        "vocab_size": ANY_TOKEN if batch.number % 2 else 100,
        "workspace": t.workspace(op),
        **batch.options,
    }


def _index_step(t: _Tensors, batch: Batch) -> _Arguments:
    rows, keywords = _step(t, batch, "ngram_index_step_")
    return (*rows, t.index(batch, missing=0)), keywords


_ARGUMENTS = {
    "ngram_propose": _propose,
    "ngram_step_": _step,
    "ngram_index_propose_": _index_propose,
    "ngram_index_step_": _index_step,
}
_SCANNING = {"ngram_index_propose_": "ngram_propose", "ngram_index_step_": "ngram_step_"}


def run(rows: int, device: str, calls: Calls | None = None) -> dict[str, Any]:
    """Checks at least ``rows`` rows; the first difference raises DifferenceError. Prints what was
    checked after each batch, since a run may be interrupted."""
    checked: Counter[str] = Counter()
    drafted: Counter[str] = Counter()
    number = 0
    while checked.total() < rows:
        batch = make_batch(number, min(BATCH, rows))
        drafted[batch.kind] += check_batch(batch, device, calls)
        checked[batch.kind] += len(batch.lengths)
        number += 1
        print("RESULT", json.dumps({"identical": True, "rows": dict(checked)}), flush=True)
    return {"identical": True, "rows": dict(checked), "drafted": dict(drafted), "device": device}


if __name__ == "__main__":
    rows = int(sys.argv[1]) if sys.argv[1:] else 1_000_000
    found = run(rows, "cuda") | {"machine": environment.machine("cuda")}
    print("RESULT", json.dumps(found))
