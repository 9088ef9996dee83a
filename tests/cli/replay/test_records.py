"""Tests reading records: accepted forms, errors with file and line, and skipped records."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import DATA, read_conversations
from ngram_npu_cli import command as cli
from ngram_npu_cli.logs import files as files_module
from ngram_npu_cli.options import ReadingOptions
from ngram_npu_cli.replay import (
    Conversation,
    InputError,
    ReplayOptions,
    Turn,
    load_inputs,
    replay,
)
from ngram_npu_cli.tune import TuneOptions
from ngram_npu_cli.tune.traffic import read_traffic

Writer = Callable[..., Path]

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
TEXT_RECORD = {"id": "a", "turns": [{"prompt": "p", "completion": "c"}]}
ID_RECORD = {"id": 7, "turns": [{"prompt_token_ids": [1, 2], "completion_token_ids": []}]}


@pytest.mark.parametrize("name", ["record.jsonl", "record.jsonl.gz", "record.json"])
def test_turns_are_read_from_lines(write_jsonl: Writer, name: str) -> None:
    path = write_jsonl(TEXT_RECORD, b"", ID_RECORD, b"  ", name=name)
    assert read_conversations(path) == [
        Conversation("a", (Turn("p", "c"),), f"{path}:1"),
        Conversation("7", (Turn(prompt_token_ids=(1, 2), completion_token_ids=()),), f"{path}:3"),
    ]


def test_byte_order_mark_and_missing_final_newline_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = '{"id": "ü", "model": "m", "turns": [{"prompt": "", "completion": "", "t": 0}]}'
    # Concatenated files may each begin with a byte order mark.
    path.write_bytes((line + "\n").encode("utf-8-sig") + line.encode("utf-8-sig"))
    assert read_conversations(path) == [
        Conversation("ü", (Turn("", ""),), f"{path}:{number}") for number in (1, 2)
    ]


def test_limit_stops_reading(write_jsonl: Writer) -> None:
    path = write_jsonl(TEXT_RECORD, TEXT_RECORD, b"not JSON")
    assert len(read_conversations(path, limit=2)) == 2
    with pytest.raises(InputError, match=":3: not JSON"):
        read_conversations(path, limit=3)


LINE = json.dumps(TEXT_RECORD).encode() + b"\n"
GZIP = gzip.compress(LINE * 2, mtime=0)  # no time stamp, because test names contain the bytes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINE, r":1: damaged gzip data: Not a gzipped file"),
        # The second gzip member is truncated.
        (GZIP + gzip.compress(LINE, mtime=0)[:-9], r":[34]: damaged gzip data: .*end-of-stream"),
        (GZIP[:-6] + bytes([GZIP[-6] ^ 1]) + GZIP[-5:], ":3: damaged gzip data: CRC check"),
        # All lines are readable, so only a check of the end detects that a byte is missing.
        (GZIP[:-1], r":3: damaged gzip data: .*end-of-stream"),
        (GZIP + b"garbage", r":3: damaged gzip data: Not a gzipped file"),
    ],
)
def test_damaged_gzip_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"x.jsonl.gz{message}"):
        read_conversations(path)
    path.write_bytes(GZIP * 2 + bytes(2000))  # padding with zeros is accepted
    assert len(read_conversations(path)) == 4


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_line_longer_than_the_limit_is_skipped_without_being_stored(
    write_jsonl: Writer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(files_module, "_MAX_LINE_MIB", 1)
    longest = LINE.rstrip().ljust(1 << 20)
    assert len(read_conversations(write_jsonl(longest, longest, name=name))) == 2
    path = write_jsonl(LINE, longest + b" " * (20 << 20), longest + b" ", LINE, LINE, name=name)
    tracemalloc.start()
    try:
        (item,) = load_inputs([path])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert len(item.conversations) == 3
    assert f"2 of 5 records are skipped (40.0%): {path}:3: the line is longer" in item.notes[0]


def test_path_without_replay_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.jsonl: no such file"):
        load_inputs([tmp_path / "nowhere.jsonl"])
    (tmp_path / ".hidden.jsonl").write_text("{}")
    (tmp_path / "sub.jsonl").mkdir()
    with pytest.raises(InputError, match=f"{tmp_path}: no files"):
        load_inputs([tmp_path])


def test_inputs_have_the_names_of_their_files(write_jsonl: Writer) -> None:
    for name in ("one/b.jsonl.gz", "one/a.jsonl", "one/sub/c.txt", "two/a.jsonl"):
        path = write_jsonl(TEXT_RECORD, name=name)
    folder = path.parents[1]
    assert [item.name for item in load_inputs([folder / "one"])] == ["a", "b", "c.txt"]
    # Files with equal names are named by their paths.
    names = [item.name for item in load_inputs([folder / "one", folder / "two"])]
    assert names == [str(folder / "one/a.jsonl"), "b", "c.txt", str(folder / "two/a.jsonl")]


# Files that are one JSON document, not one record per line


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("value", [{"messages": CHAT}, CHAT])
def test_single_record_or_list_of_messages_is_read(
    tmp_path: Path, value: Any, indent: int | None
) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(value, indent=indent))
    (conversation,) = read_conversations(path)
    assert conversation.turns[0].completion == "Ho"


def test_array_of_messages_is_one_conversation_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([CHAT[0], None, CHAT[1]]))
    with pytest.raises(InputError, match=r":1: messages\[1\] must be an object, got null"):
        read_conversations(path)
    # In an array of records, a record that has a role is not a message.
    records = [{"prompt": "Hi", "completion": "Ho"}, {"role": "user", "content": "x"}] * 2
    path.write_text(json.dumps([*records, records[0]], indent=1))
    (item,) = load_inputs([path])
    assert [conversation.turns[0].completion for conversation in item.conversations] == ["Ho"] * 3
    assert item.notes[0].startswith(f"2 of 5 records are skipped (40.0%): {path}[1]: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"prompt": "a", "completion": "b"},\n{"prompt" "c"}\n]', ":3: not JSON: Exp"),
        ('[{"prompt": "a", "completion": "b"}\n{}]', ":2: not JSON: Expecting ',' delimiter"),
        ('[{"prompt": "a", "completion": "b"}]\n{}', ":2: not JSON: Extra data at column 1"),
        ('[\n{"prompt": "a",\n"completion": "b"}', ":3: not JSON: Expecting ',' delimiter"),
        ('[\n{"prompt": "a",\n"comp\n', ":3: not JSON: "),
        (
            '{\n"prompt": "a",\n"completion": 3\n}',
            ":1: answer: the response must be an object, got the nu",
        ),
        ("[]", "empty, no conversation"),
        ("[\n\n3]", "traffic.json[0]: expected an object, got the number 3"),
        (f'[\n{{"prompt": {"9" * 5000}}}]', ":1: not JSON that can be read"),
        (f'[\n{{"prompt": {"[" * 3000}{"]" * 3000}}}]', ":1: not JSON that can be read"),
    ],
    ids=range(10),
)
def test_document_error_names_the_line_or_the_item(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "traffic.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_conversations(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("indent", [None, 1])
def test_document_may_be_longer_than_the_limit_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    monkeypatch.setattr(files_module, "_MAX_LINE_MIB", 1)
    records = [{"id": i, "prompt": "ü€" * 3000, "completion": "b" * i} for i in range(200)]
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=False), encoding="utf-8")
    conversations = read_conversations(path)
    assert [item.turns[0].completion for item in conversations] == ["b" * i for i in range(200)]
    monkeypatch.setattr(files_module, "_MAX_DOCUMENT_MIB", 2)
    with pytest.raises(InputError, match="longer than 2 MiB; write one record per line"):
        read_conversations(path)


def test_stdin_is_read_with_and_without_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (LINE, gzip.compress(LINE)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        (item,) = load_inputs(["-"])
        assert (item.name, item.conversations[0].where) == ("stdin", "stdin:1")


# Files with records that are skipped


REQUEST = {"model": "m", "messages": [{"role": "user", "content": "repeat one two one two"}]}
RESPONSE = {"choices": [{"message": {"role": "assistant", "content": "one two one two one"}}]}
VALID_LOG = {"request": REQUEST, "response": RESPONSE}


def make_answer_log(content: Any) -> dict[str, Any]:
    return {
        "request": REQUEST,
        "response": {"choices": [{"message": {"role": "assistant", "content": content}}]},
    }


def count_replay(path: Path, **options: Any) -> tuple[int, int, int]:
    total = replay([path], ReplayOptions(tokenizer="bytes", **options)).total
    return total.num_requests, total.num_tokens, total.num_steps


def test_failed_vllm_requests_are_skipped(write_jsonl: Writer) -> None:
    failed_lines = (DATA / "failed.jsonl").read_bytes().split(b"\n")[:-1]
    path = write_jsonl(VALID_LOG, VALID_LOG, VALID_LOG, *failed_lines, name="odd.jsonl")
    assert count_replay(path) == count_replay(write_jsonl(VALID_LOG, VALID_LOG, VALID_LOG))
    (item,) = load_inputs([path])
    (note,) = item.notes
    assert note.startswith("3 of 6 records are skipped (50.0%): ")
    for reason in ("max_tokens=100000", "The model `no`", 'only "object", "data"'):
        assert reason in note


def test_command_prints_notes_on_skipped_records(
    write_jsonl: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_answer, null_answer = make_answer_log(""), make_answer_log(None)
    null_response = {"request": REQUEST, "response": None}
    invalid_records = [b"x", empty_answer, b"y", null_answer, null_response, 3]
    path = write_jsonl(*[VALID_LOG] * 8, *invalid_records, name="odd.jsonl")
    note = (
        f"6 of 14 records are skipped (42.9%): {path}:9: not JSON: Expecting value at column 1 "
        f"(2x); {path}:10: answer: the answer is empty (2x); {path}:13: answer: the response must "
        "be an object, got null; other reasons\n"
    )
    assert cli.main(["replay", str(path), "--tokenizer", "bytes", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"ngram-npu replay: note: odd: {note}")
    assert f"note (odd): {note}" in err
    assert json.loads(out)["inputs"][0]["notes"] == [note.rstrip()]
    arguments = ["tune", str(path), "--tokenizer", "bytes", "--jobs", "1", "--runner", "gpu"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert f"ngram-npu tune: note: odd: {note}" in err
    assert f"Note: odd: {note}" in out
    for command in ("replay", "tune"):
        assert cli.main([command, str(path), "--tokenizer", "bytes", "--strict"]) == 2
        assert "odd.jsonl:9: not JSON" in capsys.readouterr().err
    path = write_jsonl(VALID_LOG, b"x", b"x y", empty_answer, null_answer, name="odd.jsonl")
    assert cli.main(["replay", str(path), "--tokenizer", "bytes"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "odd.jsonl:2: not JSON" in error
    assert "4 of 5 records are skipped (80.0%), which is more than half" in error


def test_files_that_are_not_logs_are_skipped(write_jsonl: Writer, tmp_path: Path) -> None:
    write_jsonl(VALID_LOG, VALID_LOG, name="logs/talk.jsonl")
    write_jsonl({"version": 3}, name="logs/config.json")
    (tmp_path / "logs/tsconfig.json").write_text("{\n  // not JSON\n}\n")
    (tmp_path / "logs/nginx.log").write_text('1.2.3.4 - "GET / HTTP/1.1" 200\n' * 3)
    (tmp_path / "logs/empty.jsonl").write_text("")
    (tmp_path / "logs/docs").mkdir()
    (tmp_path / "logs/docs/image.png").write_bytes(b"\x89PNG\r\n" + bytes(100))
    (item,) = load_inputs([tmp_path / "logs"])
    assert (item.name, len(item.conversations)) == ("talk", 2)
    kinds = [note.partition(": ")[2].partition(": ") for note in item.notes]
    names = {kind: re.findall(r"/([\w.]+)[:;]", f"{reasons};") for kind, _, reasons in kinds}
    assert names == {
        "2 files of the kind .json": ["config.json", "tsconfig.json"],
        "1 files of the kind .png": ["image.png"],
        "1 files of the kind .jsonl": ["empty.jsonl"],
        "1 files of the kind .log": ["nginx.log"],
    }
    assert len(read_traffic([tmp_path / "logs"], TuneOptions(tokenizer="bytes")).notes) == 4
    for name in ("config.json", "tsconfig.json", "nginx.log", "empty.jsonl"):
        with pytest.raises(InputError, match=name):
            load_inputs([tmp_path / "logs" / name])
    write_jsonl({"version": 3}, name="other/config.json")
    for read in (load_inputs, read_traffic):
        with pytest.raises(InputError, match=r"not logs, skipped: .*config.json"):
            read([tmp_path / "other"])
    with pytest.raises(InputError, match=r"config.json:1"):
        load_inputs([tmp_path / "logs"], ReadingOptions(strict=True))
    # A damaged log is an error; it is not skipped.
    (tmp_path / "logs/cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 9)[:-9])
    with pytest.raises(InputError, match=r"cut.jsonl.gz:.*file ended before the end-of-stream"):
        load_inputs([tmp_path / "logs"])


def test_incomplete_first_line_is_skipped(write_jsonl: Writer) -> None:
    """`tail -c` and the rotation of logs write files that begin with a part of a line."""
    path = write_jsonl(b'sponse": null}', VALID_LOG, VALID_LOG, name="odd.jsonl")
    assert count_replay(path) == count_replay(write_jsonl(VALID_LOG, VALID_LOG))
