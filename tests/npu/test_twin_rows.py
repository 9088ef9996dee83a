"""Many rows on the twins, compared with the CPU kernels, which the parity suite checks.

Rows of few different tokens, around every edge of a device's vectors and tiles, and of real text.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from backends import in_place_of_the_cpu
from ngram_npu.config import UNLIMITED
from on_device import torch_op
from ops.specs import Args
from twins import TWINS, Twin

pytestmark = pytest.mark.slow

Rows = npt.NDArray[np.int32]

BATCH, CALLS, CHUNKS = 250, 1200, 60
NS = (*range(1, 9), 33, 64)
EDGES = (32, 64, 256, 512, 1024, 2048)
CAPACITY = EDGES[-1] + 70


def _text() -> Rows:
    """Bytes of the standard library's sources."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))
    return np.frombuffer(text, np.uint8).astype(np.int32)


def _rows(rng: np.random.Generator, text: Rows) -> Rows:
    kind = rng.integers(4)
    if kind == 0:
        start = rng.integers(0, text.size - CAPACITY, BATCH)
        return text[start[:, None] + np.arange(CAPACITY)]
    rows = rng.integers(0, (2, 3, 50)[kind - 1], (BATCH, CAPACITY), np.int32)
    if kind == 3:  # long matches: each row repeats a piece of itself
        period = int(rng.integers(40, CAPACITY // 2))
        rows = rows[:, np.arange(CAPACITY) % period]
        rows[rng.random(rows.shape) < 0.003] = 51
    return rows


def _lengths(rng: np.random.Generator) -> Rows:
    edges = rng.choice(EDGES, BATCH) * rng.integers(1, 4, BATCH) + rng.integers(-2, 70, BATCH)
    lengths = np.where(rng.random(BATCH) < 0.6, edges, rng.integers(0, CAPACITY + 1, BATCH))
    return np.clip(lengths, 0, CAPACITY).astype(np.int32)


def _calls(rng: np.random.Generator, text: Rows, first: int) -> Iterator[tuple[str, Args]]:
    for call in range(first, first + CALLS // CHUNKS):
        max_n = NS[call % len(NS)]
        rows, lengths = _rows(rng, text), _lengths(rng)
        look = (
            int(rng.integers(1, max_n + 1)), max_n, int(rng.choice((1, 4, 16))),
            int(rng.integers(2)), bool(rng.integers(2)), UNLIMITED,
        )  # fmt: skip
        if call % 3:
            yield "ngram_propose", (rows, lengths, None, None, *look, None, 40, call % 2 == 1)
        else:
            # The tokens that follow, so that what is appended may match too.
            at = np.minimum(lengths[:, None] + np.arange(5), CAPACITY - 1)
            sampled = np.take_along_axis(rows, at, axis=1)
            sampled[rng.random(sampled.shape) < 0.1] = -1
            step = (rows, lengths, sampled, None, None, bool(rng.integers(2)), 1 << 20)
            yield "ngram_step_", (*step, *look, None, 40, call % 2 == 1, None, None)


def _run(op: str, args: Args) -> list[torch.Tensor]:
    """The results, and what the operator wrote."""
    tensors = tuple(torch.from_numpy(a.copy()) if isinstance(a, np.ndarray) else a for a in args)
    return [*torch_op(op)(*tensors), tensors[0], tensors[1]]


# The 910B's alone: a model of single threads would take too long, and other chips differ in types.
@pytest.mark.parametrize(
    "twin", [twin for twin in TWINS if twin.name == "ascendc_twin"], ids=lambda twin: twin.name
)
def test_lookups(twin: Twin) -> None:
    rng, text, drafted = np.random.default_rng(2026), _text(), 0
    for chunk in range(CHUNKS):
        calls = list(_calls(rng, text, chunk * (CALLS // CHUNKS)))
        expected = [_run(op, args) for op, args in calls]
        drafted += sum(int((truth[-4] > 0).sum()) for truth in expected)  # num_draft_tokens
        with in_place_of_the_cpu(twin):
            for (op, args), truth in zip(calls, expected, strict=True):
                for mine, right in zip(_run(op, args), truth, strict=True):
                    assert torch.equal(mine, right), (op, args[4:])
    assert BATCH * CALLS // 4 < drafted < BATCH * CALLS
