"""Records of every format: what is read from them, which are skipped, and wrong types in fields."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from log_samples import ASK, SAMPLES, Texts, as_json, body, call_text, choice, number
from ngram_npu.errors import InputError
from ngram_npu_cli import command as cli
from ngram_npu_cli.logs.formats import FORMATS, iter_conversations
from ngram_npu_cli.logs.reader import Tokenization
from ngram_npu_cli.replay import Turn, load_inputs, read_conversations

Write = Callable[..., Path]
Path_ = tuple[Any, ...]


def read(path: Path, format_name: str | None = None) -> tuple[dict[int, Texts], list[InputError]]:
    """Returns the conversations by line or item, as texts, and the errors of skipped records."""
    errors: list[InputError] = []
    texts: dict[int, Texts] = {}
    tokenization = Tokenization("bytes")
    for conversation in iter_conversations(path, format_name, errors.append):
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
        place = int(re.findall(r"\d+", conversation.where)[-1])
        texts.setdefault(place, []).append(decoded)
    return texts, errors


FORMS = [
    (name, form)
    for name, sample in SAMPLES.items()
    for form in ("lines", "array", "pretty", "--format")
    if sample.write is as_json or form == "lines"
]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_sample_is_read_from_lines_and_documents(tmp_path: Path, name: str, form: str) -> None:
    path = tmp_path / "traffic.json"
    sample = SAMPLES[name]
    records = [number(sample.record, t) for t in (1, 2)]
    if form == "array":
        path.write_text(json.dumps(records))
    elif form == "pretty":
        path.write_text("\n" + json.dumps(records, indent=2) + "\n")
    else:
        lines = [line for record in records for line in sample.write(record)]
        path.write_text("".join(f"{line}\n" for line in lines))
    texts, errors = read(path, sample.format if form == "--format" else None)
    assert not errors
    conversations = [conversation for line in texts.values() for conversation in line]
    assert conversations == number([*sample.expected], 1) + number([*sample.expected], 2)


def test_help_lists_all_formats(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["replay", "--help"])
    listed = capsys.readouterr().out.replace("\n", "").partition("--format {")[2].partition("}")[0]
    assert set(FORMATS) == set(listed.split(","))


# Responses in unusual forms


def piece(ident: str | None, index: int | None = None, **function: str) -> dict[str, Any]:
    return {"id": ident, "index": index, "function": function}


def calls(*pieces: Any) -> list[Any]:
    return [{"choices": [{"delta": {"tool_calls": [one]}}]} for one in pieces]


FIND = piece("a", 0, name="find", arguments='{"a": ')
PARALLEL = [
    piece("a", name="find", arguments='{"a"'),
    piece(None, arguments=": 1"),
    piece("a", arguments="}"),
    piece("b", name="find", arguments=""),
    piece("", arguments='{"b": 2}'),
    piece("c", name="close", arguments="{}"),
]
FOUND = call_text("find", '{"a": 1}')
THREE_CALLS = "\n".join([FOUND, call_text("find", '{"b": 2}'), call_text("close", "{}")])
RESPONSES: list[tuple[Any, list[str]]] = [
    # Texts that resemble a stream or JSON.
    *(
        (text, [text])
        for text in (
            "data: 3\n\ndata: 4",
            '{"city": "Oslo"}',
            "data: {\nan answer about YAML",
            "[1, 2]",
            "7",
        )
    ),
    # Neither JSON nor events end lines at these characters.
    (
        'data: {"choices": [{"delta": {"content": "one\u2028two \u0085"}}]}\n\ndata: [DONE]\n\n',
        ["one\u2028two \u0085"],
    ),
    # Gemini and some versions of vLLM and of Dynamo stream parallel calls with one index or none.
    (calls(*PARALLEL), [THREE_CALLS]),
    (calls(*({**one, "index": 0} for one in PARALLEL)), [THREE_CALLS]),
    ([{"choices": [{"delta": {"tool_calls": PARALLEL}}]}], [THREE_CALLS]),
    (
        calls(FIND, piece("b", 1, name="close", arguments="{}"), piece("a", arguments="1}")),
        [f"{FOUND}\n{call_text('close', '{}')}"],
    ),
    (calls(FIND, piece(None, 1, arguments="1}")), [FOUND]),
    (calls(FIND, piece(None, 0, name="find", arguments="1}")), [FOUND]),
    (calls(FIND, piece("b", 0, arguments="1}")), [FOUND]),
    # Choices without an index.
    ({"choices": [{"message": {"content": text}} for text in "ab"]}, ["a", "b"]),
    ({"choices": [{"index": None, "text": text} for text in "ab"]}, ["a", "b"]),
    # llama.cpp's stream.
    ('data: {"content": "9", "stop": false}\n\ndata: {"content": "."}\n\n', ["9."]),
]


@pytest.mark.parametrize(("response", "expected"), RESPONSES)
def test_unusual_response_is_read(write_jsonl: Write, response: Any, expected: list[str]) -> None:
    path = write_jsonl(
        json.dumps({"request": "Hi", "response": response}, ensure_ascii=False).encode()
    )
    assert [item.turns[0].completion for item in read_conversations(path)] == expected


REQUESTS: list[tuple[Any, list[str], list[str]]] = [
    ({"prompt": ["p"]}, ["a"], ["a"]),
    # An empty answer is left out.
    ({"prompt": "p", "n": 3}, ["", "b", "c"], ["b", "c"]),
]


@pytest.mark.parametrize(("request_", "choices", "expected"), REQUESTS)
def test_completions_of_one_prompt_are_read(
    write_jsonl: Write, request_: Any, choices: list[str], expected: list[str]
) -> None:
    record = {"request": request_, "response": {"choices": [{"text": text} for text in choices]}}
    conversations = read_conversations(write_jsonl(record))
    assert [item.turns for item in conversations] == [
        (Turn("p", answer, raw=True),) for answer in expected
    ]


# Records that are not conversations

GOOD = {"request": {"messages": ASK}, "response": body(choice("one two one two one"))}
MESSAGES = {"messages": ASK}
EMBEDDING = {"object": "list", "data": [{"object": "embedding", "embedding": [0.5]}]}
TURN = {"prompt": "p", "completion": "c"}


def turns(*items: Any) -> dict[str, Any]:
    return {"id": "x", "turns": list(items)}


def token_turn(prompt: Any, completion: Any) -> dict[str, Any]:
    return turns({"prompt_token_ids": prompt, "completion_token_ids": completion})


def answered(response: Any, **more: Any) -> dict[str, Any]:
    return {"request": MESSAGES, "response": response, **more}


INVALID: list[tuple[Any, str]] = [
    (b"{", "not JSON: .* at column [12]$"),
    (b'{"id": "a"} {}', "not JSON: Extra data at column 13"),
    (b"[2026-08-01] rotated", "not JSON: Expecting"),
    (b"[" * 100_000, "not JSON that can be read"),
    (b'{"id": ' + b"1" * 5000 + b"}", "not JSON that can be read"),
    (b'{"id": "\xff"}', "not UTF-8: invalid start byte at byte 9"),
    (b"[]", "expected an object, got an array"),
    (b"null", "expected an object, got null"),
    (["a", "b"], "expected an object, got an array"),
    (EMBEDDING, 'no format has these keys: "object", "data"; this would work: {"messages": '),
    ({"turns": []}, '"turns" is empty; read as turns, of which this works: {"turns": '),
    (turns({"prompt": "p"}), r'turns\[0\]: missing key "completion"'),
    (turns({"completion": "p"}), r'turns\[0\]: missing key "prompt"'),
    (turns(TURN, {"prompt": 1, "completion": ""}), r"turns\[1\].prompt must be .* 1"),
    (turns({"prompt": "\ud800", "completion": ""}), "prompt: lone surrogate at character 1"),
    (turns({"prompt_token_ids": [1]}), 'missing key "completion_token_ids"'),
    (turns({**TURN, "completion_token_ids": [1]}), 'missing key "prompt_token_ids"'),
    (token_turn("1", []), "prompt_token_ids must be an array of integers, got a string"),
    (token_turn([1, 1.5], []), r"prompt_token_ids\[1\] must be an integer, got the number 1.5"),
    (token_turn([], [True]), r"completion_token_ids\[0\] must be an integer, got a boolean"),
    (token_turn([-1], []), r"prompt_token_ids\[0\] is -1, outside"),
    (token_turn([2**31], []), r"prompt_token_ids\[0\] is 2147483648, outside"),
    (turns(TURN, *token_turn([], [])["turns"]), "some turns carry token ids and some do not"),
    ({"messages": ASK}, r'no message of the role "assistant" \(roles: user\)'),
    ({"messages": [*ASK, 3]}, r"messages\[1\] must be an object, got the number 3"),
    ({"messages": ASK, "tools": "find"}, "tools must be an array, got a string"),
    (answered({"status": 503, "body": "gone"}), "HTTP status 503"),
    (answered("gone", status_code=503), "HTTP status 503"),
    (answered({"error": {"message": "busy", "code": 503}}), "the response is an error: busy"),
    (answered(None), "response must be an object, got null"),
    (answered(None, error="timeout"), 'the request failed: "timeout"'),
    (answered({"choices": []}), 'no answer, only "choices"'),
    (answered({"choices": [{}]}), "the answer is empty"),
    (answered(body(choice(""))), "the answer is empty"),
    (answered(EMBEDDING), 'no answer, only "object", "data"'),
    ({"request": {}, "response": body(choice("a"))}, '"messages", "input" or one text "prompt"'),
    ({"request": {"prompt": "p", "echo": True}, "response": "p a"}, 'expected no "echo"'),
    (
        {"request": {"prompt": ["p", "q"]}, "response": body(*[{"text": "a"}] * 2)},
        'one text "prompt", got "prompt"',
    ),
    (
        answered([{"choices": [{"index": i, "text": "a"}]} for i in (0, 1, None)]),
        "some choices of the stream have an index and some have none",
    ),
]


@pytest.mark.parametrize(("record", "message"), INVALID, ids=range(len(INVALID)))
def test_invalid_record_is_skipped_or_named_in_the_error(
    write_jsonl: Write, record: Any, message: str
) -> None:
    path = write_jsonl(GOOD, b"", record, GOOD, GOOD)
    with pytest.raises(InputError, match=message) as caught:
        read_conversations(path)
    error = str(caught.value)
    assert error.startswith(f"{path}:3: ")
    assert "\n" not in error
    (item,) = load_inputs([path])
    assert [c.where for c in item.conversations] == [f"{path}:{line}" for line in (1, 4, 5)]
    (note,) = item.notes
    assert note.startswith(f"1 of 4 records are skipped (25.0%): {path}:3: ")
    assert "of which this works" not in note
    # The example in the message is valid.
    example = error.partition("this works: ")[2] or error.partition("would work: ")[2]
    if example:
        assert read_conversations(write_jsonl(json.loads(example.partition(" or {")[0])))


def test_format_option_rejects_other_formats(write_jsonl: Write) -> None:
    path = write_jsonl(TURN)
    with pytest.raises(InputError, match=r':1: missing key "messages"; read as messages, of wh'):
        read_conversations(path, format_name="messages")


# Wrong types. No value may end a run, drop a part of a prompt or join texts of different records.

MISSING = object()
DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(MISSING, None, True, False, 0, -1, 1, 1.5, 10**30, "", " x ", "\ud800"),
    *([], {}, [None], [[]], {"a": 1}, {"\ud800": "\ud800"}, DEEP),
]


def list_paths(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Yields each field; of a list of token ids the first and the last."""
    if at:
        yield at
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
        keys = [0, -1] if keys and isinstance(value[0], int) else keys
    for key in keys:
        yield from list_paths(value[key], (*at, key))


def get(value: Any, path: Path_) -> Any:
    for key in path:
        value = value[key]
    return value


def change_field(record: Any, path: Path_, value: Any) -> Any:
    copied = copy.deepcopy(record)
    parent = get(copied, path[:-1])
    if value is MISSING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return copied


def list_values(record: Any, path: Path_, paths: list[Path_]) -> list[Any]:
    """Returns values of other types, nested copies, and values of other fields of the record."""
    old = get(record, path)
    place = paths.index(path)
    others = [get(record, paths[(place + step) % len(paths)]) for step in (-1, 1, len(paths) // 2)]
    return [*VALUES, [old], {"a": old}, [old, old], *others]


def words(value: Any) -> set[str]:
    """Returns the words with a record's number, also from token ids and JSON text."""
    if isinstance(value, dict):
        return set().union(*map(words, value.keys()), *map(words, value.values()))
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(v, int) and 0 <= v < 256 for v in value):
            return words(bytes(value).decode("utf-8", "replace"))
        return set().union(*map(words, value))
    return set(re.findall(r"[a-z]+_\d+", value)) if isinstance(value, str) else set()


@dataclass(frozen=True)
class Case:
    """A record in a file, with a changed field unless `path` is empty."""

    number: int
    path: Path_ = ()
    value: Any = None
    removed: frozenset[str] = frozenset()

    @property
    def is_index(self) -> bool:
        """Whether a piece of a stream is now that of another answer, which nothing contradicts."""
        return "index" in self.path and type(self.value) is int and self.value >= 0

    def __str__(self) -> str:
        value = "missing" if self.value is MISSING else f"{self.value!r:.60}"
        return f"{'.'.join(map(str, self.path))} = {value}" if self.path else "unchanged"


def describe_problem(case: Case, expected: Texts, texts: Texts | None, skipped: bool) -> str | None:
    """Returns what is wrong with the texts that were read from a record; None if nothing is."""
    if not case.path:
        return None if texts == expected else f"an unchanged record became {texts!r:.300}"
    if texts is None:
        return None if skipped else "neither read nor skipped"
    foreign = {word for word in words(texts) if not re.fullmatch(rf"[a-z]+_{case.number}", word)}
    if foreign:
        return f"text of other records: {sorted(foreign)}"
    prompts = [words([prompt for prompt, _ in turns]) for turns in expected]
    answers = [words([answer for _, answer in turns]) for turns in expected]
    added = words(case.value) if case.value is not MISSING else set()
    for turns in texts:
        read_words = words(turns)
        # Which of the recorded requests this is: an answer belongs to its own prompt only.
        allowed_sets = [p | a | added for p, a in zip(prompts, answers, strict=True)]
        if not any(read_words <= allowed for allowed in allowed_sets) and not case.is_index:
            return f"texts of several answers in one: {sorted(read_words)}"
        if not any(p - case.removed <= read_words for p in prompts):
            return f"a part of the prompt is missing: {sorted(read_words)}"
    lost = set().union(*prompts, *answers) - case.removed - words(texts)
    lost = set() if skipped else lost  # one of several answers
    return f"text is missing without a note: {sorted(lost)}" if lost else None


def write(folder: Path, name: str, cases: list[Case]) -> tuple[Path, dict[int, int]]:
    """Writes a file of the cases; returns its path and the record's number of each line."""
    sample = SAMPLES[name]
    folder.mkdir(parents=True)
    lines: list[str] = []
    number_of: dict[int, int] = {}
    for case in cases:
        record = number(sample.record, case.number)
        if case.path:
            record = change_field(record, case.path, case.value)
        for line in sample.write(record):
            lines.append(line)
            number_of[len(lines)] = case.number
    path = folder / "talk.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
    return path, number_of


def make_cases(name: str) -> list[list[Case]]:
    """Returns the cases of each field, with unchanged records before, between and after them."""
    sample = SAMPLES[name]
    paths = list(list_paths(number(sample.record, 1)))
    all_cases = []
    for path in paths:
        cases = [Case(1)]
        for i in range(len(list_values(number(sample.record, 1), path, paths))):
            if i % 4 == 0:
                cases.append(Case(len(cases) + 1))
            t = len(cases) + 1
            record = number(sample.record, t)
            value = list_values(record, path, paths)[i]
            if value is MISSING and path == sample.needed:
                continue
            removed = words(get(record, path))
            if sample.last and path[: len(sample.last)] == sample.last:
                removed |= words(get(record, sample.last[:-1])[sample.last[-1] - 1 :])
            cases.append(Case(t, path, value, frozenset(removed)))
        cases.append(Case(len(cases) + 1))
        all_cases.append(cases)
    return all_cases


@pytest.mark.parametrize("name", [n for n, sample in SAMPLES.items() if sample.is_changed])
def test_wrong_type_in_a_field_changes_no_other_record(tmp_path: Path, name: str) -> None:
    wrong: list[str] = []
    for i, cases in enumerate(make_cases(name)):
        path, number_of = write(tmp_path / str(i), name, cases)
        shown = ".".join(map(str, cases[2].path))
        try:
            by_line, errors = read(path)
        except Exception as error:  # any exception would end a run
            wrong.append(f"{shown}: the run ends: {error!r:.200}")
            continue
        by_number: dict[int, Texts] = {}
        for line, conversations in by_line.items():
            by_number.setdefault(number_of[line], []).extend(conversations)
        skipped = set()
        for error in errors:
            at_line = re.match(rf"{re.escape(str(path))}:(\d+): ", str(error))
            if at_line is None:
                wrong.append(f"{shown}: no file and line: {error!s:.200}")
            else:
                skipped.add(number_of[int(at_line[1])])
        for case in cases:
            texts, expected = (
                by_number.get(case.number),
                number(SAMPLES[name].expected, case.number),
            )
            problem = describe_problem(case, expected, texts, case.number in skipped)
            if problem is not None:
                wrong.append(f"{case}: {problem}")
    assert not wrong, "\n".join(wrong)
