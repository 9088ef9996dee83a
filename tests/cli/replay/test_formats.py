"""Tests reading records of every format, skipped records, and fields of wrong types."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import read_conversations
from log_samples import (
    QUESTION,
    SAMPLES,
    Texts,
    format_call,
    insert_number,
    make_body,
    make_choice,
)
from ngram_npu.errors import InputError
from ngram_npu_cli.logs.files import read_batches
from ngram_npu_cli.logs.mapping import convert_batch
from ngram_npu_cli.logs.rows import Row, group_rows
from ngram_npu_cli.logs.tokenization import Tokenization
from ngram_npu_cli.replay import Conversation, Turn, load_inputs

Writer = Callable[..., Path]
FieldPath = tuple[Any, ...]


def read_texts(
    path: Path, map_text: str | None = None
) -> tuple[dict[int, Texts], list[InputError]]:
    """Returns the texts of the conversations by line or item, and the errors of skipped records."""
    errors: list[InputError] = []
    texts: dict[int, Texts] = {}
    tokenization = Tokenization("bytes")
    items = [item for batch in read_batches(path) for item in convert_batch(batch, map_text)]
    rows = [item for item in items if isinstance(item, Row)]
    grouped = [item for _, item in group_rows(rows)]
    for conversation in [item for item in items if not isinstance(item, Row)] + grouped:
        if isinstance(conversation, InputError):
            errors.append(conversation)
            continue
        assert isinstance(conversation, Conversation)
        try:
            requests = tokenization.make_requests(conversation)
        except InputError as error:
            errors.append(error)
            continue
        decoded = [
            (bytes(turn.prompt.tolist()).decode(), bytes(turn.completion.tolist()).decode())
            for request in requests
            for turn in request.turns
        ]
        line = int(re.findall(r"[:\[](\d+)", conversation.where)[0])
        texts.setdefault(line, []).append(decoded)
    return texts, errors


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_is_read_with_and_without_its_preset(write_jsonl: Writer, name: str) -> None:
    sample = SAMPLES[name]
    records = [insert_number(sample.record, number) for number in (1, 2)]
    path = write_jsonl(*(line.encode() for record in records for line in sample.serialize(record)))
    for map_text in (None, sample.preset):
        texts, errors = read_texts(path, map_text)
        assert not errors
        conversations = [conversation for line in texts.values() for conversation in line]
        assert conversations == [c for number in (1, 2) for c in make_expected(name, number)]


# Responses in unusual forms


def make_piece(call_id: str | None, index: int | None = None, **function: str) -> dict[str, Any]:
    return {"id": call_id, "index": index, "function": function}


def make_chunks(*pieces: Any) -> list[Any]:
    return [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in pieces]


FIND_PIECE = make_piece("a", 0, name="find", arguments='{"a": ')
CLOSE_PIECE = make_piece("b", 1, name="close", arguments="{}")
PARALLEL_PIECES = [
    make_piece("a", name="find", arguments='{"a"'),
    make_piece(None, arguments=": 1"),
    make_piece("a", arguments="}"),
    make_piece("b", name="find", arguments=""),
    make_piece("", arguments='{"b": 2}'),
    make_piece("c", name="close", arguments="{}"),
]
FIND_CALL = format_call("find", '{"a": 1}')
THREE_CALLS = "\n".join([FIND_CALL, format_call("find", '{"b": 2}'), format_call("close", "{}")])
RESPONSES: list[tuple[Any, list[str]]] = [
    # These answers are texts that resemble a stream or JSON.
    *(
        (text, [text])
        for text in (
            "data: 3\n\ndata: 4",
            '{"city": "Oslo"}',
            "data: {\nan answer about YAML",
            "[1, 2]",
            "7",
            '[{"content": "one"}, {"content": "two"}]',
            '{"content": "one"}\n{"content": "two"}',
            '{"message": {"text": "hi", "to": "Bob"}}',
            '{"title": "t", "content": ["a", "b"]}',
            '{"choices": ["A", "B"]}',
            '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]',
        )
    ),
    # These characters do not end a line in JSON or in a stream of events.
    (
        'data: {"choices": [{"delta": {"content": "one\u2028two \u0085"}}]}\n\ndata: [DONE]\n\n',
        ["one\u2028two \u0085"],
    ),
    # Gemini and some versions of vLLM and of Dynamo stream parallel calls with one index or none.
    (make_chunks(*PARALLEL_PIECES), [THREE_CALLS]),
    (make_chunks(*({**piece, "index": 0} for piece in PARALLEL_PIECES)), [THREE_CALLS]),
    ([{"choices": [{"delta": {"tool_calls": PARALLEL_PIECES}}]}], [THREE_CALLS]),
    (
        make_chunks(FIND_PIECE, CLOSE_PIECE, make_piece("a", arguments="1}")),
        [f"{FIND_CALL}\n{format_call('close', '{}')}"],
    ),
    (make_chunks(FIND_PIECE, make_piece(None, 1, arguments="1}")), [FIND_CALL]),
    (make_chunks(FIND_PIECE, make_piece(None, 0, name="find", arguments="1}")), [FIND_CALL]),
    (make_chunks(FIND_PIECE, make_piece("b", 0, arguments="1}")), [FIND_CALL]),
    # The choices have no index.
    ({"choices": [{"message": {"content": text}} for text in "ab"]}, ["a", "b"]),
    ({"choices": [{"index": None, "text": text} for text in "ab"]}, ["a", "b"]),
    # Gemini streams candidates; its thoughts are reasoning, and images are left out.
    (
        [
            {"candidates": [{"content": {"role": "model", "parts": [part]}}]}
            for part in (
                {"text": "so", "thought": True},
                {"inlineData": {"data": "="}},
                {"text": "9"},
            )
        ],
        ["<think>\nso\n</think>\n\n9"],
    ),
    # llama.cpp streams the content without choices.
    ('data: {"content": "9", "stop": false}\n\ndata: {"content": "."}\n\n', ["9."]),
]


@pytest.mark.parametrize(("response", "expected"), RESPONSES)
def test_unusual_response_is_read(write_jsonl: Writer, response: Any, expected: list[str]) -> None:
    path = write_jsonl(
        json.dumps({"request": "Hi", "response": response}, ensure_ascii=False).encode()
    )
    assert [item.turns[0].completion for item in read_conversations(path)] == expected


def test_reasoning_of_a_pair_is_part_of_its_answer(write_jsonl: Writer) -> None:
    pair = {"question": "Hi", "answer": "Ho"}
    path = write_jsonl({**pair, "thinking": "so"}, {**pair, "thinking": None})
    texts = [item.turns[0].completion for item in read_conversations(path)]
    assert texts == ["<think>\nso\n</think>\n\nHo", "Ho"]


PROMPT_REQUESTS: list[tuple[Any, list[str], list[str]]] = [
    ({"prompt": ["p"]}, ["a"], ["a"]),
    # An empty answer is omitted.
    ({"prompt": "p", "n": 3}, ["", "b", "c"], ["b", "c"]),
]


@pytest.mark.parametrize(("request_", "choices", "expected"), PROMPT_REQUESTS)
def test_completions_of_one_prompt_are_read(
    write_jsonl: Writer, request_: Any, choices: list[str], expected: list[str]
) -> None:
    record = {"request": request_, "response": {"choices": [{"text": text} for text in choices]}}
    conversations = read_conversations(write_jsonl(record))
    assert [item.turns for item in conversations] == [
        (Turn("p", answer, raw=True),) for answer in expected
    ]


# Records that are not conversations

REQUEST = {"messages": QUESTION}
VALID_RECORD = {"request": REQUEST, "response": make_body(make_choice("one two one two one"))}
EMBEDDING = {"object": "list", "data": [{"object": "embedding", "embedding": [0.5]}]}
TURN = {"prompt": "p", "completion": "c"}


def make_turns(*items: Any) -> dict[str, Any]:
    return {"id": "x", "turns": list(items)}


def make_token_turn(prompt: Any, completion: Any) -> dict[str, Any]:
    return make_turns({"prompt_token_ids": prompt, "completion_token_ids": completion})


def make_log(response: Any, **more: Any) -> dict[str, Any]:
    return {"request": REQUEST, "response": response, **more}


INVALID_RECORDS: list[tuple[Any, str]] = [
    (b"{", "not JSON: .* at column [12]$"),
    (b'{"id": "a"} {}', "not JSON: Extra data at column 13"),
    (b"[2026-08-01] rotated", "not JSON: Expecting"),
    (b"[" * 100_000, "not JSON that can be read"),
    (b'{"id": ' + b"1" * 5000 + b"}", "not JSON that can be read"),
    (b'{"id": "\xff"}', "not UTF-8: invalid start byte at byte 9"),
    (b"[]", "expected an object, got an array"),
    (b"null", "expected an object, got null"),
    (["a", "b"], "expected an object, got an array"),
    (
        EMBEDDING,
        r"data\[0\]: no preset reads this record; complete --map 'prompt=KEY, answer=KEY' with "
        r"the record's keys object, embedding \(tried: turns, token-ids, ",
    ),
    ({"turns": []}, '"turns" is empty; read as turns'),
    (make_turns({"prompt": "p"}), r'turns\[0\]: missing key "completion"'),
    (make_turns({"completion": "p"}), r'turns\[0\]: missing key "prompt"'),
    (make_turns(TURN, {"prompt": 1, "completion": ""}), r"turns\[1\].prompt must be .* 1"),
    (make_turns({"prompt": "\ud800", "completion": ""}), "prompt: lone surrogate at character 1"),
    (make_turns({"prompt_token_ids": [1]}), 'missing key "completion_token_ids"'),
    (make_turns({**TURN, "completion_token_ids": [1]}), 'missing key "prompt_token_ids"'),
    (make_token_turn("1", []), "prompt_token_ids must be an array of integers, got a string"),
    (
        make_token_turn([1, 1.5], []),
        r"prompt_token_ids\[1\] must be an integer, got the number 1.5",
    ),
    (make_token_turn([], [True]), r"completion_token_ids\[0\] must be an integer, got a boolean"),
    (make_token_turn([-1], []), r"prompt_token_ids\[0\] is -1, outside"),
    (make_token_turn([2**31], []), r"prompt_token_ids\[0\] is 2147483648, outside"),
    (
        make_turns(TURN, *make_token_turn([], [])["turns"]),
        "some turns carry token ids and some do not",
    ),
    ({"messages": QUESTION}, r'no message of the role "assistant" \(roles: user\)'),
    ({"messages": [*QUESTION, 3]}, r"messages\[1\] must be an object, got the number 3"),
    ({"messages": QUESTION, "tools": "find"}, "tools must be an array, got a string"),
    (make_log({"status": 503, "body": "gone"}), "HTTP status 503"),
    (make_log("gone", status_code=503), "HTTP status 503"),
    (make_log({"error": {"message": "busy", "code": 503}}), "the response is an error: busy"),
    (make_log(None), "answer: the response must be an object, got null"),
    (make_log(None, error="timeout"), 'the request failed: "timeout"'),
    (make_log({"choices": []}), 'no answer, only "choices"'),
    (make_log({"choices": [{}]}), "the answer is empty"),
    (make_log(make_body(make_choice(""))), "the answer is empty"),
    (make_log(EMBEDDING), 'no answer, only "object", "data"'),
    (
        {"request": {}, "response": make_body(make_choice("a"))},
        '"messages", "input" or one text "prompt"',
    ),
    ({"request": {"prompt": "p", "echo": True}, "response": "p a"}, 'expected no "echo"'),
    (
        {"request": {"prompt": ["p", "q"]}, "response": make_body(*[{"text": "a"}] * 2)},
        r"messages\[0\] must be an object, got a string",
    ),
    (
        make_log([{"choices": [{"index": i, "text": "a"}]} for i in (0, 1, None)]),
        "some choices of the stream have an index and some have none",
    ),
]


@pytest.mark.parametrize(("record", "message"), INVALID_RECORDS, ids=range(len(INVALID_RECORDS)))
def test_invalid_record_is_skipped_or_named_in_the_error(
    write_jsonl: Writer, record: Any, message: str
) -> None:
    path = write_jsonl(VALID_RECORD, b"", record, VALID_RECORD, VALID_RECORD)
    with pytest.raises(InputError, match=message) as caught:
        read_conversations(path)
    error = str(caught.value)
    assert re.match(rf"{path}:3\S*: ", error)
    assert "\n" not in error
    (item,) = load_inputs([path])
    assert [c.where for c in item.conversations] == [f"{path}:{line}" for line in (1, 4, 5)]
    (note,) = item.notes
    assert note.startswith(f"1 of 4 records are skipped (25.0%): {path}:3")
    assert "read as" not in note


def test_preset_rejects_records_of_other_formats(write_jsonl: Writer) -> None:
    path = write_jsonl(TURN)
    with pytest.raises(
        InputError, match=r":1: no preset reads this record; .* \(tried: messages\)"
    ):
        read_conversations(path, map="messages")


# Values of wrong types must not end a run, drop a part of a prompt or join texts of two records.

MISSING = object()
NESTED_VALUE: Any = "x"
for _ in range(200):
    NESTED_VALUE = [NESTED_VALUE]
OTHER_VALUES: list[Any] = [
    *(MISSING, None, True, False, 0, -1, 1, 1.5, 10**30, "", " x ", "\ud800"),
    *([], {}, [None], [[]], {"a": 1}, {"\ud800": "\ud800"}, NESTED_VALUE),
]


def list_paths(value: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """Yields the path of each field; in a list of token ids, only of the first and the last."""
    if path:
        yield path
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
        keys = [0, -1] if keys and isinstance(value[0], int) else keys
    for key in keys:
        yield from list_paths(value[key], (*path, key))


def get_field(value: Any, path: FieldPath) -> Any:
    for key in path:
        value = value[key]
    return value


def change_field(record: Any, path: FieldPath, value: Any) -> Any:
    """Returns a copy of a record with another value, or without a value, at the path."""
    copied, (key, *rest) = record.copy(), path
    if rest:
        copied[key] = change_field(record[key], tuple(rest), value)
    elif value is MISSING:
        del copied[key]
    else:
        copied[key] = value
    return copied


@functools.cache
def make_record(name: str, number: int) -> Any:
    """Returns the record of a sample. All callers share it, so they must not change it."""
    return insert_number(SAMPLES[name].record, number)


@functools.cache
def make_expected(name: str, number: int) -> Texts:
    """Returns the texts that must be read from the record of a sample."""
    texts: Texts = insert_number(SAMPLES[name].expected, number)
    return texts


def list_values(record: Any, path: FieldPath, paths: list[FieldPath]) -> list[Any]:
    """Returns values of other types, nested copies, and values of other fields of the record."""
    old_value, index = get_field(record, path), paths.index(path)
    other_paths = [paths[(index + step) % len(paths)] for step in (-1, 1, len(paths) // 2)]
    field_values = [get_field(record, other_path) for other_path in other_paths]
    return [*OTHER_VALUES, [old_value], {"a": old_value}, [old_value, old_value], *field_values]


def find_words(value: Any) -> set[str]:
    """Returns the words with a record's number, also from token ids and JSON text."""
    if isinstance(value, dict):
        return set().union(*map(find_words, value.keys()), *map(find_words, value.values()))
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(v, int) and 0 <= v < 256 for v in value):
            return find_words(bytes(value).decode("utf-8", "replace"))
        return set().union(*map(find_words, value))
    return set(re.findall(r"[a-z]+_\d+", value)) if isinstance(value, str) else set()


@dataclass(frozen=True)
class FieldChange:
    """A change of a field in a record of a test file. If `path` is empty, nothing is changed."""

    number: int
    path: FieldPath = ()
    value: Any = None
    removed_words: frozenset[str] = frozenset()
    """The words of the field before the change; a reader need not return them."""

    @property
    def is_index(self) -> bool:
        """Whether a piece of a stream now belongs to another answer, which no reader can detect."""
        return "index" in self.path and type(self.value) is int and self.value >= 0

    def __str__(self) -> str:
        value = "missing" if self.value is MISSING else f"{self.value!r:.60}"
        return f"{'.'.join(map(str, self.path))} = {value}" if self.path else "unchanged"


def find_problem(change: FieldChange, expected: Texts, texts: Texts | None, skipped: bool) -> str:
    """Returns the problem of the texts that were read from a record; empty if there is none."""
    if not change.path:
        return "" if texts == expected else f"an unchanged record became {texts!r:.300}"
    if texts is None:
        return "" if skipped else "neither read nor skipped"
    pattern = rf"[a-z]+_{change.number}"
    foreign_words = {word for word in find_words(texts) if not re.fullmatch(pattern, word)}
    if foreign_words:
        return f"text of other records: {sorted(foreign_words)}"
    prompts = [find_words([prompt for prompt, _ in turns]) for turns in expected]
    answers = [find_words([answer for _, answer in turns]) for turns in expected]
    added_words = find_words(change.value) if change.value is not MISSING else set()
    for turns in texts:
        read_words = find_words(turns)
        # All words must be from one recorded request: an answer belongs only to its own prompt.
        allowed_sets = [p | a | added_words for p, a in zip(prompts, answers, strict=True)]
        if not any(read_words <= allowed for allowed in allowed_sets) and not change.is_index:
            return f"texts of several answers in one: {sorted(read_words)}"
        if not any(p - change.removed_words <= read_words for p in prompts):
            return f"a part of the prompt is missing: {sorted(read_words)}"
    missing_words = set().union(*prompts, *answers) - change.removed_words - find_words(texts)
    missing_words = set() if skipped else missing_words  # one of several answers is skipped
    return f"text is missing without a note: {sorted(missing_words)}" if missing_words else ""


def write_file(folder: Path, name: str, changes: list[FieldChange]) -> tuple[Path, dict[int, int]]:
    """Writes a record per change to a file. Returns the path, and the records' numbers by line."""
    sample = SAMPLES[name]
    folder.mkdir(parents=True)
    lines: list[str] = []
    numbers_by_line: dict[int, int] = {}
    for change in changes:
        record = make_record(name, change.number)
        if change.path:
            record = change_field(record, change.path, change.value)
        for line in sample.serialize(record):
            lines.append(line)
            numbers_by_line[len(lines)] = change.number
    path = folder / "talk.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
    return path, numbers_by_line


def make_changes(name: str) -> list[list[FieldChange]]:
    """Returns the changes of each field, with unchanged records before, between and after them."""
    sample = SAMPLES[name]
    paths = list(list_paths(make_record(name, 1)))
    changes_of_fields = []
    for path in paths:
        changes = [FieldChange(1)]
        for i in range(len(list_values(make_record(name, 1), path, paths))):
            if i % 4 == 0:
                changes.append(FieldChange(len(changes) + 1))
            number = len(changes) + 1
            record = make_record(name, number)
            value = list_values(record, path, paths)[i]
            if value is MISSING and path == sample.required_field:
                continue
            removed_words = find_words(get_field(record, path))
            last = sample.last_answer
            if last and path[: len(last)] == last:
                removed_words |= find_words(get_field(record, last[:-1])[last[-1] - 1 :])
            changes.append(FieldChange(number, path, value, frozenset(removed_words)))
        changes.append(FieldChange(len(changes) + 1))
        changes_of_fields.append(changes)
    return changes_of_fields


@pytest.mark.parametrize("name", [n for n, sample in SAMPLES.items() if sample.is_changed])
def test_wrong_type_in_a_field_changes_no_other_record(tmp_path: Path, name: str) -> None:
    problems: list[str] = []
    for i, changes in enumerate(make_changes(name)):
        path, numbers_by_line = write_file(tmp_path / str(i), name, changes)
        field = ".".join(map(str, changes[2].path))
        try:
            by_line, errors = read_texts(path)
        except Exception as error:  # any exception would end a run
            problems.append(f"{field}: the run ends: {error!r:.200}")
            continue
        by_number: dict[int, Texts] = {}
        for line, conversations in by_line.items():
            by_number.setdefault(numbers_by_line[line], []).extend(conversations)
        skipped = set()
        for error in errors:
            location = re.match(rf"{re.escape(str(path))}:(\d+)\S*: ", str(error))
            if location is None:
                problems.append(f"{field}: no file and line: {error!s:.200}")
            else:
                skipped.add(numbers_by_line[int(location[1])])
        for change in changes:
            number, texts = change.number, by_number.get(change.number)
            expected = make_expected(name, number)
            problem = find_problem(change, expected, texts, number in skipped)
            if problem:
                problems.append(f"{change}: {problem}")
    assert not problems, "\n".join(problems)
