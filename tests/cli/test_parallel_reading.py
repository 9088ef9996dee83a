"""Tests that results do not depend on the number of processes, and that the shares of the files are
together the same as all files."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import SETTINGS, Turns, make_conversations, make_token_request
from ngram_npu.store import NgramStore
from ngram_npu_cli.learn import LearnOptions, learn
from ngram_npu_cli.logs import files
from ngram_npu_cli.logs.tokenizers import load_tokenizer
from ngram_npu_cli.replay import InputError, ReplayOptions, replay
from ngram_npu_cli.tune import TuneOptions, share_of_a_step, tune

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of logs with several batches each: lines, compressed lines, a document, text, broken
    records, and a file that is not a log."""
    monkeypatch.setattr(files, "BATCH_BYTES", 500)
    folder = tmp_path / "logs"
    folder.mkdir()
    a, b, c = (
        [json.dumps(record) for record in make_conversations(12, seed, f"{seed}-")]
        for seed in range(3)
    )
    broken = ["{", '{"turns": []}', "[1]", '{"turns": [{"prompt": "no answer"}]}']
    mixed = [line for pair in zip(a, broken * 3, strict=True) for line in pair][:-1]
    (folder / "a.jsonl").write_text("\n\n".join(mixed))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(b).encode()))
    (folder / "c.json").write_text(f"[{','.join(c)}]")
    (folder / "d.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 30)
    (folder / "settings.json").write_text('{"theme": "dark"}')
    return folder


def remove_run(report: dict[str, Any]) -> dict[str, Any]:
    """Returns a report without the fields that differ between two runs."""
    figures = [report.get("total", {}), *report["inputs"]] if "total" in report else []
    for names in figures:
        for name in [name for name in names if name.startswith("draft_") and "_us" in name]:
            del names[name]
        del names["draft_time_ns"]
    return {k: v for k, v in report.items() if k not in ("date", "seconds", "jobs", "output")}


@pytest.mark.parametrize("turns", [[], [([], [])], [([1, 2], [3]), ([], [4, 5, 6])]])
def test_pickled_request_has_the_same_turns(turns: Turns) -> None:
    request = make_token_request(turns)
    copy = pickle.loads(pickle.dumps(request))
    assert [(t.prompt.tolist(), t.completion.tolist()) for t in copy.turns] == turns
    assert all(t.prompt.dtype == t.completion.dtype == np.int32 for t in copy.turns)


@pytest.mark.parametrize("limit", [None, 5])
def test_learn_saves_the_same_store_with_any_number_of_jobs(
    folder: Path, tmp_path: Path, limit: int | None
) -> None:
    reports, stores = [], []
    for jobs in (1, 2, 3):
        output = tmp_path / f"{jobs}.store"
        options = LearnOptions(tokenizer="bytes", jobs=jobs, limit=limit)
        reports.append(remove_run(learn([folder], output, options).to_dict()))
        stores.append(output.read_bytes())
    assert reports[0]["conversations"] == (4 * 5 if limit else 3 * 12 + 30)
    skipped = "a: 4 of 9 records" if limit else "a: 11 of 23 records"
    assert any(skipped in note for note in reports[0]["notes"])
    assert reports[1:] == reports[:1] * 2
    assert stores[1:] == stores[:1] * 2


def test_replay_reports_the_same_with_any_number_of_jobs(folder: Path) -> None:
    reports = [
        remove_run(replay([folder], ReplayOptions(tokenizer="bytes", jobs=jobs)).to_dict())
        for jobs in (1, 2, 3)
    ]
    assert [item["name"] for item in reports[0]["inputs"]] == ["a", "b", "c", "d"]
    assert "not read" in reports[0]["inputs"][0]["notes"][-1]
    assert reports[1:] == reports[:1] * 2


def test_tune_reports_the_same_with_any_number_of_jobs(folder: Path) -> None:
    cost = share_of_a_step(0.05)
    reports = []
    for jobs in (1, 2):
        # The sample has about half of the conversations.
        options = TuneOptions(tokenizer="bytes", jobs=jobs, sample=12_000, runner="host")
        report = tune([folder], cost, options, candidates=SETTINGS).to_dict()
        reports.append(remove_run(report))
    assert reports[0]["traffic"]["is_sample"]
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    ("damage", "strict", "message"),
    [
        ("line", True, r"b\.jsonl\.gz:6: not JSON"),
        ("gzip", False, r"b\.jsonl\.gz:\d+: damaged gzip data"),
        ("tokenizer", True, r'd\.jsonl:1: missing key "prompt_token_ids"'),
        ("tokenizer", False, r"d\.jsonl:1: .* 30 of 30 records are skipped"),
        ("empty", False, r"b\.jsonl\.gz: empty, no conversation"),
    ],
)
def test_error_is_the_same_with_several_jobs(
    folder: Path, damage: str, strict: bool, message: str
) -> None:
    path = folder / "b.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines()
    if damage == "line":
        lines.insert(5, b"{")
    elif damage == "empty":
        lines.clear()
    path.write_bytes(gzip.compress(b"\n".join(lines))[: -20 if damage == "gzip" else None])
    tokenizer = "ids" if damage == "tokenizer" else "bytes"
    paths = [folder / "c.json", path, folder / "d.jsonl"]
    errors = []
    for jobs in (1, 2):
        with pytest.raises(InputError, match=message) as error_info:
            replay(paths, ReplayOptions(tokenizer=tokenizer, strict=strict, jobs=jobs))
        errors.append(str(error_info.value))
    assert errors[0] == errors[1]


def test_records_after_the_limit_are_not_read(folder: Path) -> None:
    path = folder / "a.jsonl"
    path.write_text("\n".join([json.dumps(CHAT)] * 100 + ["{"] * 1000))
    for jobs in (1, 2):
        options = ReplayOptions(tokenizer="bytes", jobs=jobs, limit=50, strict=True)
        assert replay([path], options).total.num_requests == 50


def test_merged_shares_are_the_store_of_all_files(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for seed, name in enumerate("abcde"):
        records = make_conversations(8, seed, name)
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    shares = [tmp_path / f"{index}.store" for index in (1, 2, 3)]
    for index, share in enumerate(shares, start=1):
        learn([folder], share, LearnOptions(shard=f"{index}/3"))
    assert [len(NgramStore.load(share).texts()) for share in shares] == [16, 32, 32]
    learn(shares, tmp_path / "merged.store")
    learn([folder], tmp_path / "all.store")
    assert (tmp_path / "merged.store").read_bytes() == (tmp_path / "all.store").read_bytes()


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "1/0", "-1/2", "a/b", "1/2/3"])
def test_invalid_share_is_an_error(folder: Path, shard: str) -> None:
    with pytest.raises(InputError, match=f"shard: expected I/N with 1 <= I <= N, got {shard}"):
        replay([folder], ReplayOptions(shard=shard))


def test_share_without_a_file_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match=r"N of at most 1, one per file, got 1/2"):
        replay([folder / "d.jsonl"], ReplayOptions(shard="1/2"))
    with pytest.raises(InputError, match="shard: expected none for the standard library"):
        replay([], ReplayOptions(shard="1/2"))


def test_invalid_number_of_jobs_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match="jobs: expected at least 1, got 0"):
        learn([folder], options=LearnOptions(jobs=0))
    with pytest.raises(InputError, match="jobs: expected 1 with a tokenizer that is an object"):
        replay([folder], ReplayOptions(jobs=2), tokenizer=load_tokenizer("bytes"))
