"""What is no conversation is skipped and counted; with `--strict` it is an error."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import InputError, ReplayOptions, load_inputs, replay
from ngram_npu_cli.tune.traffic import TuneOptions, read_traffic
from replay_helpers import DATA

Write = Callable[..., Path]

ASKED = {"model": "m", "messages": [{"role": "user", "content": "say one two one two"}]}
SAID = {"choices": [{"message": {"role": "assistant", "content": "one two one two one"}}]}
GOOD = {"request": ASKED, "response": SAID}
SHOWN = [
    {"type": "text", "text": "say one two one two"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
]
STREAM = [
    {"choices": [{"index": 0, "delta": {"content": "one two one two one"}}]},
    {"choices": [], "usage": {"completion_tokens": 5}},
]
EMBEDDING = {"object": "list", "data": [{"object": "embedding", "embedding": [0.5]}]}


def answer(content: Any) -> dict[str, Any]:
    return {
        "request": ASKED,
        "response": {"choices": [{"message": {"role": "assistant", "content": content}}]},
    }


SKIPPED: list[tuple[Any, str]] = [
    (
        {"request": ASKED, "response": {"status": 503, "body": "upstream is gone"}},
        "HTTP status 503",
    ),
    ({"request": ASKED, "status_code": 503, "response": "upstream is gone"}, "HTTP status 503"),
    ({"request": ASKED, "response": {"error": {"message": "busy", "code": 503}}}, "error: busy"),
    ({"request": ASKED, "response": 'data: {"error": {"message": "busy"}}\n\n'}, "error: busy"),
    ({"request": ASKED, "response": None}, "must be an object, got null"),
    ({"request": ASKED, "response": None, "error": "timeout"}, 'the request failed: "timeout"'),
    ({"request": ASKED, "response": {"choices": []}}, 'no answer, only "choices"'),
    ({"request": ASKED, "response": {"choices": None}}, 'no answer, only "choices"'),
    (answer(""), "the answer is empty"),
    (answer(None), "the answer is empty"),
    ({"request": {"input": ["a"]}, "response": EMBEDDING}, 'no answer, only "object", "data"'),
    ({"request": {"input": "a"}, "response": {"id": "modr-1", "results": []}}, '"id", "results"'),
    ({"request": {}, "response": {"object": "list", "data": []}}, 'only "object", "data"'),
    (EMBEDDING, 'no format has these keys: "object", "data"'),
    ({"request": {}, "response": SAID}, 'must have "messages", "input" or a text "prompt"'),
    (b'{"request": {"messages": [{"role": "us', "not JSON: Unterminated string"),
    (b'{"prompt": "\xff", "completion": "a"}', "not UTF-8: invalid start byte"),
    (b"[2026-08-01] rotated", "not JSON: Expecting"),
    (3, "expected an object, got the number 3"),
]

READ: list[Any] = [
    {**GOOD, "id": {"$oid": "66b"}},
    {**GOOD, "id": 1.5},
    {**GOOD, "id": "same"},
    {**GOOD, "id": "same"},
    b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    {"request": {"messages": [{"role": "user", "content": SHOWN}]}, "response": SAID},
    {"request": ASKED, "response": STREAM},
]


def count(path: Path, **options: Any) -> tuple[int, int, int]:
    total = replay([path], ReplayOptions(tokenizer="bytes", **options)).total
    return total.num_requests, total.num_tokens, total.num_steps


@pytest.mark.parametrize(("record", "reason"), SKIPPED, ids=range(len(SKIPPED)))
@pytest.mark.parametrize("at", ["first", "between", "last"])
def test_one_odd_record_changes_no_figure(
    write_jsonl: Write, record: Any, reason: str, at: str
) -> None:
    lines = [GOOD, GOOD, GOOD]
    lines.insert({"first": 0, "between": 1, "last": 3}[at], record)
    path = write_jsonl(*lines, name="odd.jsonl")
    assert count(path) == count(write_jsonl(GOOD, GOOD, GOOD))
    (item,) = load_inputs([path])
    (note,) = item.notes
    assert note.startswith("1 of 4 records are skipped (25.0%): ")
    assert reason in note
    assert "of which this works" not in note
    with pytest.raises(InputError) as caught:
        count(path, strict=True)
    assert reason in str(caught.value)
    assert read_traffic([path], TuneOptions(tokenizer="bytes")).notes == (f"odd: {note}",)


@pytest.mark.parametrize("record", READ, ids=range(len(READ)))
def test_what_is_odd_and_yet_a_conversation(write_jsonl: Write, record: Any) -> None:
    path = write_jsonl(GOOD, record, name="odd.jsonl")
    assert count(path, strict=True) == count(write_jsonl(GOOD, GOOD))


def test_what_vllm_answers_when_it_refuses(write_jsonl: Write) -> None:
    failed = (DATA / "failed.jsonl").read_bytes().split(b"\n")[:-1]
    path = write_jsonl(GOOD, GOOD, GOOD, *failed, name="odd.jsonl")
    assert count(path) == count(write_jsonl(GOOD, GOOD, GOOD))
    (item,) = load_inputs([path])
    (note,) = item.notes
    assert note.startswith("3 of 6 records are skipped (50.0%): ")
    for reason in ("max_tokens=100000", "The model `no`", 'only "object", "data"'):
        assert reason in note


def test_more_than_half_is_an_error(write_jsonl: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(GOOD, b"x", b"x y", answer(""), answer(None), name="odd.jsonl")
    assert cli.main(["replay", str(path), "--tokenizer", "bytes"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "odd.jsonl:2: not JSON" in error
    assert "4 of 5 records are skipped (80.0%), which is more than half" in error


def test_the_command_says_it_beside_the_report(
    write_jsonl: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = [b"x", answer(""), b"y", answer(None), {"request": ASKED, "response": None}, 3]
    path = write_jsonl(*[GOOD] * 8, *odd, name="odd.jsonl")
    note = (
        f"6 of 14 records are skipped (42.9%): {path}:9: not JSON: Expecting value at column 1; "
        f"{path}:10: response: the answer is empty; {path}:13: response: the response must be an "
        "object, got null\n"
    )
    assert cli.main(["replay", str(path), "--tokenizer", "bytes", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"ngram-npu replay: note: odd: {note}")
    assert f"note (odd): {note}" in err
    assert json.loads(out)["inputs"][0]["notes"] == [note.rstrip()]
    assert cli.main(["tune", str(path), "--tokenizer", "bytes", "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    assert f"ngram-npu tune: note: odd: {note}" in err
    assert f"Note: odd: {note}" in out
    for command in ("replay", "tune"):
        assert cli.main([command, str(path), "--tokenizer", "bytes", "--strict"]) == 2
        assert "odd.jsonl:9: not JSON" in capsys.readouterr().err


def test_a_folder_without_its_other_files(write_jsonl: Write, tmp_path: Path) -> None:
    write_jsonl(GOOD, GOOD, name="logs/talk.jsonl")
    write_jsonl({"version": 3}, name="logs/config.json")
    (tmp_path / "logs/tsconfig.json").write_text("{\n  // not JSON\n}\n")
    (tmp_path / "logs/nginx.log").write_text('1.2.3.4 - "GET / HTTP/1.1" 200\n' * 3)
    (tmp_path / "logs/empty.jsonl").write_text("")
    (item,) = load_inputs([tmp_path / "logs"])
    assert (item.name, len(item.conversations)) == ("talk", 2)
    assert [note.partition(": ")[0] for note in item.notes] == ["no log, left out"] * 4
    assert [Path(note.split(": ")[1].partition(":")[0]).name for note in item.notes] == [
        "config.json",
        "empty.jsonl",
        "nginx.log",
        "tsconfig.json",
    ]
    assert len(read_traffic([tmp_path / "logs"], TuneOptions(tokenizer="bytes")).notes) == 4
    for name in ("config.json", "tsconfig.json", "nginx.log", "empty.jsonl"):
        with pytest.raises(InputError, match=name):
            load_inputs([tmp_path / "logs" / name])
    with pytest.raises(InputError, match=r"config.json:1"):
        load_inputs([tmp_path / "logs"], strict=True)
    # A log that is damaged is no other file.
    (tmp_path / "logs/cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 9)[:-9])
    with pytest.raises(InputError, match=r"cut.jsonl.gz:.*the file ends before the data does"):
        load_inputs([tmp_path / "logs"])


def test_a_folder_of_nothing_else(write_jsonl: Write) -> None:
    path = write_jsonl({"version": 3}, name="logs/config.json")
    for read in (load_inputs, read_traffic):
        with pytest.raises(InputError, match=r"no log, left out: .*config.json"):
            read([path.parent])


def test_what_follows_packed_data(write_jsonl: Write) -> None:
    path = write_jsonl(GOOD, GOOD, name="talk.jsonl.gz")
    packed = path.read_bytes()
    path.write_bytes(packed + bytes(2000))  # as tapes pad
    assert load_inputs([path])[0].notes == ()
    path.write_bytes(packed + b"garbage\n" * 300)
    (item,) = load_inputs([path])
    assert len(item.conversations) == 2
    assert item.notes[0].endswith("talk.jsonl.gz:2: what follows the gzip data is not")
    with pytest.raises(InputError, match="what follows the gzip data is not"):
        load_inputs([path], strict=True)


def test_a_cut_first_line_makes_no_document(write_jsonl: Write) -> None:
    """As `tail -c` and the rotation of logs leave it."""
    path = write_jsonl(b'{"role": "user"}, {"role"', GOOD, GOOD, name="odd.jsonl")
    assert count(path) == count(write_jsonl(GOOD, GOOD))
    path = write_jsonl(b'[{"role": "user"}, {"role": "assis', GOOD, GOOD, name="odd.jsonl")
    assert count(path) == count(write_jsonl(GOOD, GOOD))
    path = write_jsonl(b'sponse": null}', GOOD, GOOD, name="odd.jsonl")
    assert count(path) == count(write_jsonl(GOOD, GOOD))


def test_a_record_of_100_mb_is_skipped_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    good = json.dumps(GOOD).encode() + b"\n"
    with path.open("wb") as file:
        file.write(good)
        file.write(b'{"request": {"messages": [{"role": "user", "content": "')
        for _ in range(100):
            file.write(b"a" * (1 << 20))
        file.write(b'"}]}, "response": "b"}\n')
        file.write(good)
    tracemalloc.start()
    try:
        (item,) = load_inputs([path])
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert len(item.conversations) == 2
    assert "1 of 3 records are skipped" in item.notes[0]
    assert "large.jsonl:2: the line is longer than 64 MiB" in item.notes[0]
