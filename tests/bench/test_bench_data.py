"""The data: the same every time, growing as said, and of the kind asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ngram_npu import reference

from tools.bench.data import MAX_NEW_TOKENS, lap_steps, make_workload
from tools.bench.options import DATA_KINDS, BenchError, Options, Size

SIZE = Size(5, 300)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    file = tmp_path / "talk.jsonl"
    turns = [{"prompt": f"Say {i} again and again.", "completion": f"{i} " * 40} for i in range(9)]
    file.write_text(json.dumps({"id": "talk", "turns": turns}) + "\n")
    return file


@pytest.mark.parametrize("kind", DATA_KINDS, indirect=True)
def test_same_again(kind: str, recorded: Path) -> None:
    options = Options(data_kind=kind, data=recorded)
    one, other = make_workload(SIZE, options), make_workload(SIZE, options)
    for name in ("token_ids", "lengths", "sampled"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.describes == other.describes


@pytest.mark.parametrize("kind", DATA_KINDS, indirect=True)
@pytest.mark.parametrize("k", [1, 4])
def test_steps_are_the_text_that_follows(kind: str, k: int, recorded: Path) -> None:
    work = make_workload(SIZE, Options(data_kind=kind, data=recorded, k=k))
    assert (work.lengths[0] == SIZE.context).all()
    assert work.sampled.shape == (lap_steps(SIZE.context), SIZE.batch, k + 1)
    grown = np.diff(work.lengths, axis=0)
    assert grown.min() == 1
    assert grown.max() == min(MAX_NEW_TOKENS, k + 1)
    for step, sampled in enumerate(work.sampled):
        for row, new in enumerate(sampled):
            before, after = work.lengths[step : step + 2, row]
            assert new[new >= 0].tolist() == work.token_ids[row, before:after].tolist()
    assert work.lengths.max() + k <= work.capacity


def test_rows_begin_at_different_places(recorded: Path) -> None:
    pytest.importorskip("sentencepiece")
    work = make_workload(SIZE, Options(data=recorded))
    assert len({tuple(row[:32]) for row in work.token_ids}) == SIZE.batch


@pytest.mark.parametrize(
    ("kind", "drafted"), [("nomatch", False), ("periodic", True)], indirect=["kind"]
)
def test_kind_is_what_it_says(kind: str, drafted: bool) -> None:
    work = make_workload(SIZE, Options(data_kind=kind))
    for lengths in work.lengths:
        _, counts, _ = reference.ngram_propose(
            work.token_ids, lengths, None, None, 2, 4, 4, 0, False, work.capacity
        )
        assert (np.asarray(counts) > 0).all() == drafted
        assert (np.asarray(counts) > 0).any() == drafted


def test_contexts_stay_near_their_size() -> None:
    for context in (1 << 10, 1 << 15, 1 << 17):
        assert lap_steps(context) * 2 <= context / 8


@pytest.mark.parametrize(
    ("text", "batch", "context"), [("1x1k", 1, 1024), ("128X32K", 128, 1 << 15), ("3x77", 3, 77)]
)
def test_size(text: str, batch: int, context: int) -> None:
    assert Size.parse(text) == Size(batch, context)
    assert str(Size.parse(text)) == text.lower()


@pytest.mark.parametrize("text", ["", "128", "x1k", "0x1k", "1x", "1x1g", "-1x5"])
def test_size_that_is_none(text: str) -> None:
    with pytest.raises(BenchError, match="size"):
        Size.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [{"min_n": 5}, {"k": 0}, {"match": "first"}, {"threads": 0}, {"cache": "warm"}, {"rounds": 0}],
)
def test_wrong_options(wrong: dict[str, object]) -> None:
    with pytest.raises(BenchError, match="expected"):
        Options(**wrong)  # type: ignore[arg-type]


def test_changed_options() -> None:
    changed = Options().changed("threads=3,match=latest")
    assert (changed.threads, changed.match) == (3, "latest")
    for text in ("threads=x", "json=a", "rounds=3"):
        with pytest.raises(BenchError, match="peer"):
            Options().changed(text)
