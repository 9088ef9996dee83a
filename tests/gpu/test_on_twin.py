"""The programs of `make gpu` on the host twin of the CUDA kernels, in place of the CPU kernels,
with the index in the GPU layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from backends import in_place_of_the_cpu
from ngram_npu import DeviceNgramIndex
from twins import FAST_CUDA

from gpu.host import Host
from gpu.rows import Rows
from gpu.test_steps import check_building, check_steps
from tools.bench.data import make_workload
from tools.bench.gpu import ops, ours
from tools.bench.gpu.ops import GPU_OPS, LATEST, SCAN
from tools.bench.options import Options, Size
from tools.gpu import rows, watched


@pytest.fixture(autouse=True)
def indexes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceNgramIndex]]:
    """Indexes made by the test: a step that cannot use its index scans without notice."""
    made: list[DeviceNgramIndex] = []

    def keep(slots: int, tokens: int, *, min_n: int, max_n: int, **_: Any) -> DeviceNgramIndex:
        made.append(DeviceNgramIndex(slots, tokens, min_n=min_n, max_n=max_n, device="cpu"))
        return made[-1]

    monkeypatch.setattr(ours, "NgramIndex", keep)
    monkeypatch.setattr(ops, "runtime_of", lambda op, device: Host())
    with in_place_of_the_cpu(FAST_CUDA):
        yield made


def rows_indexed(indexes: list[DeviceNgramIndex]) -> list[int]:
    return [index.statistics.rows_indexed for index in indexes]


def test_the_million_rows(indexes: list[DeviceNgramIndex]) -> None:
    for number in range(1, 4):
        rows.check_batch(rows.make_batch(number, 24), "cpu")
    assert min(rows_indexed(indexes)) > 0


@pytest.mark.parametrize("growing", [True, False])
def test_steps(indexes: list[DeviceNgramIndex], growing: bool) -> None:
    mine, truth = Rows("cpu", 7, True, seed=1), Rows("cpu", 7, False, seed=1)
    check_steps(mine, truth, "cpu", 12, growing)
    assert min(rows_indexed(indexes)) > 0


def test_building() -> None:
    check_building(Rows("cpu", 4, True, seed=6), "cpu", 1)


def test_the_calls_that_are_profiled(indexes: list[DeviceNgramIndex]) -> None:
    seen: list[int] = []
    assert watched.lookups(("3x300",), "cpu", lambda call: seen.append(len(call()[0]))) == 2
    assert seen == [3, 3]
    assert rows_indexed(indexes) == [6]


@pytest.mark.parametrize("size", ["1x300", "5x900-ragged", "4x2k-one-long"])
@pytest.mark.parametrize("kind", ["nomatch", "zipf"])
def test_the_bench(indexes: list[DeviceNgramIndex], size: str, kind: str) -> None:
    sizes = (Size.parse(size),)
    options = Options(sizes=sizes, rounds=1, data_kind=kind, peers=(SCAN, LATEST))
    (result,), skipped = GPU_OPS["ngram_index_step_"].run(options, lambda _: None)
    assert (result["size"], skipped) == (size, {})
    assert result["same_drafts"] is True
    assert min(rows_indexed(indexes)) > 0


def test_the_building_of_prompts(indexes: list[DeviceNgramIndex]) -> None:
    options = Options(sizes=(Size.parse("4x900-ragged"),), rounds=1, data_kind="zipf")
    GPU_OPS["index-build"].run(options, lambda _: None)
    (index,) = indexes
    workload = make_workload(options.sizes[0], options)
    rows = zip(workload.token_ids, workload.lengths[0], strict=True)
    index.check_integrity({slot: row[:length] for slot, (row, length) in enumerate(rows)})
