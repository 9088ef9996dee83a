"""Tests that logs are read: shapes, presets, mappings, files and refusals."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from log_samples import (
    ANSWER,
    CONTAINERS,
    MESSAGES,
    PRESET_RECORDS,
    REQUEST,
    RESPONSE,
    SHAPES,
    USER,
    read,
    write_container,
)
from ngram_npu.errors import InputError
from ngram_npu_cli.logs import mapping
from ngram_npu_cli.logs.mapping import PRESETS
from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.tokenization import Tokenization

EXPECTED = [[(f"user:{USER}", ANSWER)]]
RECORDED = Path(__file__).parent / "data" / "recorded.jsonl"
TABLES = ("csv", "parquet")
PAIR = {"prompt": USER, "completion": ANSWER}
TOOL_RESULT = {"type": "tool_result", "content": "a page"}
SUMMARY = {"type": "reasoning", "summary": ["Boxes hold things."]}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", [*SHAPES, *PRESET_RECORDS])
def test_record_of_each_shape_and_preset_gives_the_same_conversation(
    name: str, container: str, tmp_path: Path
) -> None:
    records = (SHAPES | PRESET_RECORDS)[name]
    if name in ("list", "opentelemetry, from OTLP", "claude-code") and container in TABLES:
        pytest.skip("it is no table")
    assert read(write_container(tmp_path, records, container)) == EXPECTED


def test_table_has_at_most_12_presets_and_each_has_a_sample() -> None:
    assert len(PRESETS) <= 12
    assert PRESETS.keys() <= {*PRESET_RECORDS, "claude-code-notes"}


def test_records_of_all_kinds_in_one_folder_are_read(tmp_path: Path) -> None:
    for name, records in (SHAPES | PRESET_RECORDS).items():
        (tmp_path / name).mkdir()
        write_container(tmp_path / name, records, "jsonl")
    # The two batches have the same custom_id, so they cannot be joined.
    reader = LogReader([tmp_path])
    conversations = list(reader)
    assert len(conversations) == len(SHAPES | PRESET_RECORDS) - 2
    assert len(reader.list_notes()) <= 5


def recorded_logs() -> dict[str, bytes]:
    lines = RECORDED.read_text(encoding="utf-8").splitlines()
    return {record["file"]: record["text"].encode() for record in map(json.loads, lines)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("chat", 75), ("stream", 75), ("anthropic", 75), ("chat-token-ids", 69)),
        *(("stream-token-ids", 23), ("completions-stream-token-ids", 23), ("anthropic-stream", 0)),
    ],
)
def test_log_recorded_from_vllm_gives_its_tokens(name: str, expected: int, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(recorded_logs()[path.name])
    tokenization = Tokenization("mistral-v1")
    if not expected:
        with pytest.raises(InputError, match="format of the stream is not known"):
            read(path)
        return
    requests = [r for c in LogReader([path], strict=True) for r in tokenization.tokenize(c)]
    assert sum(r.num_generated for r in requests) == expected


def test_batch_in_two_files_is_joined_and_failed_requests_are_counted(tmp_path: Path) -> None:
    for name, text in recorded_logs().items():
        if name.startswith("run-batch/"):
            (tmp_path / name.partition("/")[2]).write_bytes(text)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert len(list(LogReader([tmp_path]))) == len(list(LogReader(files))) == 3


def test_failed_requests_are_skipped_with_a_reason(write_jsonl: Any) -> None:
    failures = {"error": {"message": "no"}}, {"status_code": 500, "body": RESPONSE}
    responses = [*failures, RESPONSE, RESPONSE]
    reader = LogReader([write_jsonl(*({"request": REQUEST, "response": r} for r in responses))])
    assert len(list(reader)) == 2
    (note,) = reader.list_notes()
    assert "2 of 4 records are skipped" in note
    assert ":1: the request failed (2x)" in note


# Mappings


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("prompt=a.b, answer=c", {"a": {"b": USER}, "c": ANSWER}),
        ("prompt=a, answer=c[0]", {"a": json.dumps(MESSAGES[:1]), "c": [ANSWER]}),
        ("prompt=x[?role]", {"x": [*MESSAGES, {"note": 1}]}),
        ("keep=ok, prompt=q, answer=a", {"ok": True, "q": USER, "a": ANSWER}),
        ('prompt=a, answer=b."c, d=e"', {"a": USER, "b": {"c, d=e": ANSWER}}),
    ],
)
def test_mapping_selects_fields(text: str, record: Any, write_jsonl: Any) -> None:
    assert read(write_jsonl(record), map=text) == EXPECTED


ROWS = [
    {"id": number, "by": role, "text": text}
    for text, role, number in (("a", "user", 1), ("c", "user", 2), ("b", "assistant", 1))
]
ROW_MAP = "content={role: by, content: text}, conversation=id"


def test_mapped_rows_are_grouped_in_the_order_of_the_file(write_jsonl: Any) -> None:
    path = write_jsonl(*ROWS, {"id": 2, "by": "assistant", "text": "d"})
    assert read(path, map=ROW_MAP) == [[("user:a", "b")], [("user:c", "d")]]


@pytest.mark.parametrize("bad", [b"{", {"id": None, "by": "user", "text": "x"}])
def test_conversation_that_may_lack_a_row_is_refused(bad: Any, write_jsonl: Any) -> None:
    reader = LogReader([write_jsonl(*ROWS, bad)], map=ROW_MAP)
    with pytest.raises(InputError, match="4 of 4 records"):
        list(reader)


UNKNOWN_FIELD = 'unknown field "answers"; did you mean "answer"? (prompt, answer, '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(("prompt", "expected FIELD=EXPRESSION"), ("x", "expected FIELD=EXPRESSION")),
        ("prompt=a, prompt=b", "expected FIELD=EXPRESSION"),
        ("prompt=a[", '"a[" is not JMESPath'),
        *(("question=a", 'unknown field "question"'), ("answers=b, prompt=a", UNKNOWN_FIELD)),
        ('prompt=join(`", b=c"`, a), answers=b', UNKNOWN_FIELD),
    ],
)
def test_wrong_mapping_is_an_error_before_reading(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"--map: {re.escape(message)}"):
        read(tmp_path / "missing", map=text)


def test_missing_jmespath_names_the_format_after_wrong_fields(
    write_jsonl: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "jmespath", None)
    mapping._find_preset.cache_clear()
    path = write_jsonl(*PRESET_RECORDS["claude-code"])
    with pytest.raises(InputError, match="the format claude-code needs jmespath: pip install"):
        read(path)
    with pytest.raises(InputError, match=re.escape(UNKNOWN_FIELD)):
        read(path, map="prompt=a, answers=b")


def test_failing_expression_skips_the_record(write_jsonl: Any) -> None:
    path = write_jsonl({"a": 1, "b": ANSWER}, PAIR | {"a": "x", "b": ANSWER})
    reader = LogReader([path], map="prompt=join('', a), answer=b")
    with pytest.raises(InputError, match=r"jsonl:1: an expression fails"):
        list(reader)


# Refusals


@pytest.mark.parametrize(
    "record",
    [
        {"a": 1, "b": 2},
        PAIR | {"context": "It is a box."},
        PAIR | {"history": [["a", "b"]]},
        PAIR | {"reasoning": "Boxes hold things."},
        PAIR | {"output": "In the bag."},
        {"prompt": USER, "chosen": ANSWER, "rejected": "No."},
        {"messages": MESSAGES, "answer": "42"},
        {"messages": MESSAGES[:1]},
        {"messages": MESSAGES, "prompt": USER},
        {"prompt": USER, "completion": ""},
        {"request": REQUEST | {"previous_response_id": "r"}, "response": RESPONSE},
        {"request": {"prompt": USER, "echo": True}, "response": ANSWER},
        {"request": {"contents": []}, "response": RESPONSE},
        {"messages": [*MESSAGES[:1], {**MESSAGES[1], "parts": [{"type": "text", "text": "x"}]}]},
        {"messages": [*MESSAGES, {"role": "user", "content": "x", "attachments": [{"text": "y"}]}]},
        {"messages": [*MESSAGES, {"role": "critic", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}, MESSAGES[1]]},
        {"messages": [MESSAGES[0], {"role": "assistant", "content": '<details type="reasoning">'}]},
        {"request": REQUEST, "response": {"choices": [{"message": MESSAGES[0]}]}},
        {"request": REQUEST, "response": {"role": "assistant", "content": [TOOL_RESULT]}},
        {"request": REQUEST, "response": {"role": "assistant", "content": [SUMMARY]}},
        {"custom_id": "a", "body": REQUEST},
    ],
)
def test_record_that_may_mean_something_else_is_refused(record: Any, write_jsonl: Any) -> None:
    with pytest.raises(InputError, match=r"log\.jsonl:1: "):
        read(write_jsonl(record))


def test_refusal_names_file_line_keys_and_guide_but_no_value(write_jsonl: Any) -> None:
    path = write_jsonl(PAIR, {"secret key": "secret value", "b": 2})
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value) == (
        f'{path}:2: the record has the keys "secret key", "b"; see docs/guides/logs.md for what is '
        "read, and --map"
    )


def test_more_refused_than_read_records_are_an_error(write_jsonl: Any) -> None:
    with pytest.raises(InputError, match="2 of 3 records"):
        list(LogReader([write_jsonl(PAIR, {"a": 1}, {"b": 1})]))


def test_custom_id_that_occurs_twice_is_refused(write_jsonl: Any) -> None:
    with pytest.raises(InputError, match="has 2 requests and 1 results"):
        read(write_jsonl(SHAPES["batch"][0], *SHAPES["batch"]))


def test_salt_field_is_read_and_a_record_without_it_is_skipped(write_jsonl: Any) -> None:
    salts = [{"salt": "ann"}, {}, {"salt": 7}, {"salt": "bo"}]
    lines = [PAIR | {"user": user} for user in salts]
    reader = LogReader([write_jsonl(*lines)], salt_field="user.salt")
    assert [conversation.salt for conversation in reader] == ["ann", "bo"]
    (note,) = reader.list_notes()
    assert note.startswith("2 of 4 records")
    assert ':2: the record has no salt field "user.salt"' in note
    assert ':3: the salt field "user.salt" is not a text' in note


# Files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps(PAIR), 1),
        (json.dumps(PAIR, indent=2), 1),
        (json.dumps([PAIR, PAIR]), 2),
        (json.dumps([PAIR, PAIR], indent=2), 2),
        ("\ufeff" + json.dumps(PAIR) + "\n\n" + json.dumps(PAIR), 2),
        ("\n\n" + json.dumps(PAIR) + "\r\n" + json.dumps(PAIR), 2),
        (json.dumps(PAIR) + "\n" + json.dumps(PAIR)[:-5], 1),
    ],
)
def test_json_document_or_lines_are_read(content: str, expected: int, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(content, encoding="utf-8")
    assert len(list(LogReader([path]))) == expected


def test_line_that_cannot_be_read_is_skipped_with_its_number(write_jsonl: Any) -> None:
    lines = [b"{", b"[1, ", b"\xff{}", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
    path = write_jsonl(*lines, *[PAIR] * 6)
    reader = LogReader([path])
    assert len(list(reader)) == 6
    assert f"5 of 11 records are skipped: {path}:1: not JSON" in reader.list_notes()[0]


def test_zstd_is_read(tmp_path: Path) -> None:
    import pyarrow

    compressed = pyarrow.compress(json.dumps(PAIR).encode(), "zstd", asbytes=True)
    (tmp_path / "log.jsonl.zst").write_bytes(compressed)
    assert read(tmp_path / "log.jsonl.zst") == EXPECTED


BAD_FILES = [
    ("a.txt", b"# Logs", "neither JSON, CSV nor Parquet"),
    ("a.json", b"{", "not JSON"),
    ("a.json", json.dumps([PAIR, PAIR]).encode()[:-1], "not JSON"),
    ("a.jsonl", b"", "no conversation"),
    ("a.jsonl.gz", b"\x1f\x8b\x08broken", "damaged gzip"),
    ("a.parquet", b"PAR1broken", "damaged Parquet"),
    ("a.csv", b"prompt,completion\n\xff,b\n", "not CSV"),
    ("a.csv", b'prompt,completion\n"a,b\n', "not CSV"),
    ("a.csv", b"prompt,completion\na,b,c\n", "3 values for 2 columns"),
    ("a.csv", b"prompt,completion\na,\n", "a.csv:2: the answer is empty"),
]


def test_bad_file_does_not_end_a_folder(tmp_path: Path) -> None:
    write_container(tmp_path, [PAIR, PAIR], "jsonl")
    for number, (name, content, _) in enumerate(BAD_FILES):
        (tmp_path / f"{number}{name}").write_bytes(content)
    (tmp_path / ".hidden.jsonl").write_text(json.dumps(PAIR))
    reader = LogReader([tmp_path])
    assert len(list(reader)) == 2
    assert len(reader.list_notes()) == 2
    assert f"and {len(BAD_FILES) - 1} other files" in reader.list_notes()[1]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_file_that_cannot_be_read_is_an_error(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(LogReader([tmp_path / name]))
    with pytest.raises(InputError, match="no such file"):
        list(LogReader([tmp_path / "missing"]))
