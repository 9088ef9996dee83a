"""Counts the instructions of the AscendC lookup on the host twin, and models its time on a 910B.

    make twins && python -m tools.npu.lookup_costs [128x8k 128x32k ...]

Nothing here was measured on an NPU. The twin (docs/design/kernels.md) runs the kernels and
counts bytes, instructions and accesses per pipe and core; ``MODEL`` converts the counts to times.
The parameters of vector instructions and copies are Huawei's figures for the A2 and A3, published
in the cost model of pto-isa (include/pto/costmodel, commit 3186c381bd49 of 21 August 2026).
Latencies and scalar costs have no public figure and are assumptions.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ngram_npu import _library

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from twins import FOLDER, load_kernels  # noqa: E402

CLOCK_HZ = 1.85e9
GM_BYTES_PER_SECOND = 1.6e12
CORES = 48
# The members of CostModel (tests/twins/ascendc/core.h), in order. The unit is cycles unless stated.
MODEL = {
    "copy_bytes_per_cycle": 100.9 * 2**30 / CLOCK_HZ,  # of one core; Huawei: 100.9 GiB/s to UB
    "gm_bytes_per_cycle": GM_BYTES_PER_SECOND / CLOCK_HZ,  # of all cores; published bandwidth
    "copy_latency": 1000,  # assumption
    "vector_startup": 40,  # Huawei: 24 before and after an Add, 16 for calls with a count
    "vector_repeat": 2,  # per 256 bytes; Huawei
    "gather_repeat": 12.8,  # per 256 bytes; the devkit's guide: 5 elements per cycle
    "issue": 20,  # of the scalar unit, per instruction; assumption
    "scalar_ub": 4,  # per access; assumption
    "scalar_gm": 4,  # per load from the cache; assumption
    "scalar_gm_miss": 500,  # assumption
    "sync": 20,  # per flag; assumption
    "same_line": 16,  # per copy to the most contended 512 bytes; assumption
}
COUNT_NAMES = (
    "gm_to_ub_bytes", "ub_to_gm_bytes", "copies", "vector_instructions", "vector_repeats",
    "scalar_ub", "scalar_gm", "scalar_gm_misses", "syncs", "cycles", "launches", "blocks",
)  # fmt: skip
KINDS = ("no hit", "no match", "zipf", "periodic", "one token")
VOCAB_SIZE = 128_000


def make_rows(kind: str, batch: int, context: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns rows of `context` tokens.

    - no hit: random ids; the last token occurs nowhere else.
    - no match: each tile has the last token, but the last two tokens occur nowhere else.
    - zipf: each id is as rare as its number is high, as words in a text.
    - periodic: 61 ids, repeated; every row has a match of max_n tokens.
    - one token: all tokens are equal except the 16th from the end, so that 15 tokens match at
      almost every position and 16 nowhere.
    """
    rng = np.random.default_rng(2026)
    rows = rng.integers(0, VOCAB_SIZE, (batch, context), np.int32)
    if kind == "zipf":
        rows = (VOCAB_SIZE ** rng.random((batch, context), np.float32)).astype(np.int32)
    elif kind == "periodic":
        rows = ((np.arange(batch)[:, None] * 7 + np.arange(context)) % 61).astype(np.int32)
    elif kind == "one token":
        rows[:] = 5
        rows[:, -16] = 6
    else:
        rows[:, -2:] = VOCAB_SIZE + np.arange(2)
        if kind == "no match":
            rows[:, 100:-100:1000] = rows[:, -1:]
    return rows


@contextmanager
def use_twin() -> Iterator[ctypes.CDLL]:
    """Runs the operators on the twin of an NPU with ``CORES`` cores within a `with` block."""
    path = FOLDER / "libngram_npu_ascendc_twin.so"
    load_kernels("ascendc", "cpu", path)
    library = ctypes.CDLL(str(path))
    library.ngram_npu_ascendc_twin_set_cores(ctypes.c_int64(CORES))
    library.ngram_npu_ascendc_twin_set_model((ctypes.c_double * len(MODEL))(*MODEL.values()))
    try:
        yield library
    finally:
        library.ngram_npu_ascendc_twin_set_cores(ctypes.c_int64(0))
        library.ngram_npu_ascendc_twin_set_model((ctypes.c_double * len(MODEL))(1e9, 1e9))
        load_kernels("cpu", "cpu", _library.cpu_library_path())


def count_costs(
    library: ctypes.CDLL, rows: np.ndarray[Any, Any], min_n: int = 1, max_n: int = 16
) -> dict[str, float]:
    """Returns the counts of an ngram_propose call and ``model_us``, without launch times."""
    batch, context = rows.shape
    lengths = torch.full((batch,), context, dtype=torch.int32)
    counts = (ctypes.c_double * len(COUNT_NAMES))()
    library.ngram_npu_ascendc_twin_take_cost(counts)  # resets the counts
    torch.ops.ngram_npu.ngram_propose(
        torch.from_numpy(rows), lengths, min_n=min_n, max_n=max_n, k=5, match_policy=1, overlap=True
    )
    library.ngram_npu_ascendc_twin_take_cost(counts)
    result = dict(zip(COUNT_NAMES, counts, strict=True))
    return {**result, "model_us": result["cycles"] / CLOCK_HZ * 1e6}


def main() -> None:
    print("| rows | tokens | n | vector instructions | repeats of 256 bytes | model | floor |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with use_twin() as library:
        for size in sys.argv[1:] or ("128x8k", "128x32k"):
            batch, context = (int(x) for x in re.findall(r"\d+", size))
            for kind in KINDS:
                rows = make_rows(kind, batch, context * 1024)
                floor_us = rows.size * 4 / GM_BYTES_PER_SECOND * 1e6
                for min_n, max_n in ((1, 16), (2, 5)):
                    cost = count_costs(library, rows, min_n, max_n)
                    print(
                        f"| {size} | {kind} | {min_n} to {max_n} "
                        f"| {cost['vector_instructions']:,.0f} | {cost['vector_repeats']:,.0f} "
                        f"| {cost['model_us']:.1f} us | {floor_us:.1f} us |"
                    )


if __name__ == "__main__":
    main()
