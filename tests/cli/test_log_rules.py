"""Tests the rules by which an answer, a prompt and a conversation are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from log_samples import (
    ANSWER,
    MESSAGES,
    REQUEST,
    RESPONSE,
    SHAPES,
    USER,
    claude_answer,
    claude_row,
    make_chunks,
    read,
    span,
    to_events,
    write_container,
)
from ngram_npu.errors import InputError
from ngram_npu_cli.logs.reader import LogReader

CALL = {"type": "tool_use", "id": "t", "name": "Read", "input": {"f": "a.py"}}
CALL_TEXT = '<tool_call>\n{"name": "Read", "arguments": {"f": "a.py"}}\n</tool_call>'
TWO_CALLS = f"{CALL_TEXT}\n{CALL_TEXT}"
REASONED = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": ANSWER}]
CITED = [
    {"type": "text", "text": "The grass "},
    {"type": "text", "text": "is green", "citations": [{"cited_text": "g"}]},
]
IMAGE = [{"type": "image_url", "image_url": {}}, {"type": "text", "text": USER}]
CHOICES = [
    {"index": i, "message": {"role": "assistant", "content": text}} for i, text in enumerate("ab")
]
DELTAS = [
    {"choices": [{"index": i, "delta": {"content": text}}]} for i, text in ((1, "b"), (0, "a"))
]
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "content": text}]}


def read_answers(path: Path) -> list[list[str]]:
    return [[answer for _, answer in turns] for turns in read(path)]


# Rows of one response, parents, and rows beside the calls


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            [
                claude_row(1, user("fix")),
                claude_row(2, claude_answer("", "m1", type="thinking", thinking="hm")),
                claude_row(3, claude_answer("I read a.py.", "m1")),
                claude_row(4, claude_answer("", "m1", **CALL)),
                claude_row(5, result("x")),
                claude_row(6, claude_answer("Done.", "m2")),
            ],
            [
                ("user:fix", f"<think>\nhm\n</think>\n\nI read a.py.\n{CALL_TEXT}"),
                ("tool:x", "Done."),
            ],
            id="rows of one response are one answer",
        ),
        pytest.param(
            [
                claude_row(1, user("fix")),
                claude_row(2, claude_answer("", "m1", **CALL)),
                claude_row(3, claude_answer("", "m1", **CALL)),
                claude_row(4, result("x"), parent=2),
                claude_row(5, result("y"), parent=3),
                claude_row(6, claude_answer("Done.", "m2"), parent=5),
            ],
            [("user:fix", TWO_CALLS), ("tool:x tool:y", "Done.")],
            id="results of parallel calls stay in the prompt",
        ),
        pytest.param(
            [
                claude_row(1, user("fix")),
                claude_row(2, claude_answer("", "m1", **CALL)),
                claude_row(4, result("x"), parent=2),
                claude_row(3, claude_answer("", "m1", **CALL), parent=2),
                claude_row(5, result("y"), parent=3),
                claude_row(6, claude_answer("Done.", "m2"), parent=4),
            ],
            [("user:fix", TWO_CALLS), ("tool:x tool:y", "Done.")],
            id="calls between results are of the same answer",
        ),
        pytest.param(
            [
                claude_row(1, user("q1")),
                claude_row(2, claude_answer("one", "m1")),
                claude_row(3, user("q2")),
                claude_row(4, claude_answer("two", "m2")),
                claude_row(5, user("q3"), parent=2),
                claude_row(6, claude_answer("three", "m3")),
            ],
            [("user:q1", "one"), ("user:q3", "three")],
            id="branch that was left is in no prompt",
        ),
        pytest.param(
            [
                *[claude_row(1, user("q1")), claude_row(2, claude_answer("one"))] * 2,
                claude_row(2, claude_answer("one")),
                claude_row(3, user("q2")),
                claude_row(4, claude_answer("two", "n")),
            ],
            [("user:q1", "one"), ("user:q2", "two")],
            id="row that was written again counts once",
        ),
        pytest.param(
            [
                claude_row(1, user("q")),
                claude_row(2, claude_answer("API Error", "e")) | {"isApiErrorMessage": True},
                claude_row(3, claude_answer("one", "m2")),
            ],
            [("user:q", "one")],
            id="message of the client is no answer",
        ),
    ],
)
def test_rows_of_a_session_give_its_turns(rows: Any, expected: Any, write_jsonl: Any) -> None:
    assert read(write_jsonl(*rows)) == [expected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (claude_row(2, claude_answer("other"), 1), "same id and different contents"),
        (claude_row(4, claude_answer("b"), parent=7), "parent of a row is not in the log"),
        (claude_row(4, claude_answer("b"), parent=4), "parent of a row is not in the log"),
    ],
)
def test_tree_with_a_wrong_row_is_refused(row: Any, message: str, write_jsonl: Any) -> None:
    rows = [claude_row(1, user("q")), claude_row(2, claude_answer("a")), row]
    with pytest.raises(InputError, match=message):
        read(write_jsonl(*rows))


def test_root_begins_a_conversation_and_notes_are_no_damage(tmp_path: Path) -> None:
    notes = [
        {"type": "queue-operation", "operation": "enqueue", "sessionId": "s", "content": "q1"},
        {"type": "ai-title", "aiTitle": "t", "sessionId": "s"},
        {"type": "last-prompt", "lastPrompt": "q1", "leafUuid": "a1", "sessionId": "s"},
    ]
    rows = [
        row
        for i in range(1, 24, 2)
        for row in (
            claude_row(i, user(f"q{i}"), parent=0),
            claude_row(i + 1, claude_answer(f"a{i}", f"m{i}")),
        )
    ]
    (tmp_path / "a").mkdir()
    write_container(tmp_path, rows, "jsonl")
    write_container(tmp_path / "a", [*notes, *rows[:2]], "jsonl")
    reader = LogReader([tmp_path])
    assert len(list(reader)) == 13
    assert reader.list_notes() == ["3 records are not calls of a model"]


# Answers


@pytest.mark.parametrize("container", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", '["Ann"]', '{"choices": ["a", "b"]}', "data: 0"]
)
def test_answer_that_is_json_is_a_text(text: str, container: str, tmp_path: Path) -> None:
    records = [{"prompt": f"names {i}", "completion": text} for i in range(3)]
    assert read_answers(write_container(tmp_path, records, container)) == [[text]] * 3
    records = [{"messages": MESSAGES[:1], "response": text}]
    assert read_answers(write_container(tmp_path, records, container)) == [[text]]


EVENTS = to_events(make_chunks(content=ANSWER))


@pytest.mark.parametrize(
    "response",
    [
        EVENTS[:-40],
        f": comment\n\n{EVENTS[:100]}",
        json.dumps(RESPONSE)[:-5],
        'data: {"candidates": []}',
        'event: message_start\ndata: {"type": "message_start", "message": {}}',
        json.dumps({"object": "response", "output": [{"type": "message", **MESSAGES[1]}]}),
        "\n".join(json.dumps({"message": MESSAGES[1], "done": d}) for d in (False, True)),
        [{"type": "response.created", "response": {}}],
    ],
)
def test_damaged_or_unknown_response_is_not_read_as_a_text(response: Any, write_jsonl: Any) -> None:
    with pytest.raises(InputError, match=r"log\.jsonl:1: "):
        read(write_jsonl({"request": REQUEST, "response": response}))


def test_reasoning_and_calls_are_part_of_an_answer(write_jsonl: Any) -> None:
    calls = [{"name": "Read", "arguments": '{"f":"a.py"}'}] * 2
    message = {"role": "assistant", "content": None, "reasoning_content": "hm!"}
    message["tool_calls"] = [{"type": "function", "id": "c", "function": call} for call in calls]
    pieces = []
    for i, call in enumerate(calls):
        first, rest = call["arguments"][:4], call["arguments"][4:]
        pieces.append({"index": i, "id": f"c{i}", "function": call | {"arguments": first}})
        pieces.append({"index": i, "function": {"arguments": rest}})
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]} for piece in pieces]
    stream = to_events([*make_chunks(reasoning="hm!"), *chunks])
    path = write_jsonl(
        {"request": REQUEST, "response": {"choices": [{"message": message}]}},
        {"request": REQUEST, "response": stream},
    )
    assert read_answers(path) == [[f"<think>\nhm!\n</think>\n\n{TWO_CALLS}"]] * 2


@pytest.mark.parametrize("marks", [{"index": 0}, {"id": "c"}, {"index": 0, "id": "b"}])
def test_calls_of_a_stream_that_cannot_be_told_apart_are_refused(
    marks: dict[str, Any], write_jsonl: Any
) -> None:
    pieces = [{"index": 0, "id": "a"}, marks]
    calls = [{**piece, "function": {"name": "f", "arguments": "{}"}} for piece in pieces]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls]
    with pytest.raises(InputError, match=r"a tool call of a chunk|same index"):
        read(write_jsonl({"request": REQUEST, "response": chunks}))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param(
            {"request": REQUEST, "response": {"role": "assistant", "content": CITED}},
            [[(f"user:{USER}", "The grass is green")]],
            id="blocks of an answer follow each other",
        ),
        pytest.param(
            {"request": REQUEST, "response": {"role": "assistant", "content": REASONED}},
            [[(f"user:{USER}", f"<think>\nhm\n</think>\n\n{ANSWER}")]],
            id="reasoning as a part of the content is in the answer",
        ),
        pytest.param(
            {"request": {"messages": [SYSTEM, user(ANSWER)]}, "response": RESPONSE},
            [[(f"system:Be brief. user:{ANSWER}", ANSWER)]],
            id="answer may repeat the last message",
        ),
        pytest.param(
            {"request": REQUEST, "response": {"choices": CHOICES}},
            [[(f"user:{USER}", "a")], [(f"user:{USER}", "b")]],
            id="choices are separate conversations",
        ),
        pytest.param(
            {"request": REQUEST, "response": DELTAS},
            [[(f"user:{USER}", "a")], [(f"user:{USER}", "b")]],
            id="choices of a stream are separate conversations",
        ),
        pytest.param(
            {"messages": [*MESSAGES, {"role": "assistant", "content": "b"}]},
            [[(f"user:{USER}", ANSWER), ("", "b")]],
            id="no message of the user is invented",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": IMAGE}, MESSAGES[1]]},
            [[(f"user:{USER}", ANSWER)]],
            id="images are left out and texts kept",
        ),
        pytest.param(
            {"request": {"prompt": USER}, "response": {"choices": [{"index": 0, "text": ANSWER}]}},
            [[(USER, ANSWER)]],
            id="prompt of the completions endpoint is whole",
        ),
    ],
)
def test_record_gives_its_conversations(record: Any, expected: Any, write_jsonl: Any) -> None:
    assert read(write_jsonl(record)) == expected


# Prompts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"sky": "rainy", "temp": 14}, '{"sky": "rainy", "temp": 14}'),
        ([{"sky": "rainy"}], '[{"sky": "rainy"}]'),
        ([{"type": "text", "text": "rainy"}], "rainy"),
        ("rainy", "rainy"),
    ],
)
def test_result_of_a_tool_may_be_any_value(value: Any, text: str, write_jsonl: Any) -> None:
    call = {"type": "tool_call", "id": "c", "name": "w", "arguments": {}}
    messages = [
        {"role": "user", "parts": [{"type": "text", "content": USER}]},
        {"role": "assistant", "parts": [call]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": value}]},
    ]
    answer = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": ANSWER}]}])
    one = span(operation__name="chat", input__messages=messages, output__messages=answer)
    block = {"type": "tool_result", "content": value}
    chat = {"messages": [MESSAGES[0], {"role": "user", "content": [block]}, MESSAGES[1]]}
    plain = {"messages": [MESSAGES[0], {"role": "tool", "content": value}, MESSAGES[1]]}
    turns = read(write_jsonl(one, chat, plain))
    assert turns[0] == [(f"user:{USER} assistant: tool:{text}", ANSWER)]
    assert turns[1] == turns[2] == [(f"user:{USER} tool:{text}", ANSWER)]


@pytest.mark.parametrize("empty", ["{}", "[]", "null", "", None, [], {}])
def test_empty_json_is_no_prompt_and_no_history(empty: Any, write_jsonl: Any) -> None:
    litellm = {"call_type": "acompletion", "messages": empty, "response": json.dumps(RESPONSE)}
    litellm["proxy_server_request"] = json.dumps(REQUEST)
    pair = {"prompt": USER, "completion": ANSWER, "history": empty, "system": empty, "tools": empty}
    chat = {"messages": MESSAGES, "prompt": empty}
    assert read(write_jsonl(litellm, pair, chat)) == [[(f"user:{USER}", ANSWER)]] * 3


def test_system_text_and_tools_of_a_record_are_context(write_jsonl: Any) -> None:
    tools = [{"type": "function", "function": {"name": "Read"}}]
    records = [
        {"messages": MESSAGES, "system": "Be brief.", "tools": tools},
        {"request": REQUEST | {"system": "Be brief.", "tools": tools}, "response": RESPONSE},
        {"messages": [SYSTEM, *MESSAGES], "tools": tools},
    ]
    path = write_jsonl(*records)
    assert read(path) == [[(f"system:Be brief. user:{USER}", ANSWER)]] * 3
    assert [conversation.tools for conversation in LogReader([path])] == [tuple(tools)] * 3


def test_shapes_are_equal_with_null_for_missing_keys(write_jsonl: Any) -> None:
    keys = {key for records in SHAPES.values() for r in records if isinstance(r, dict) for key in r}
    for name, records in SHAPES.items():
        if isinstance(records[0], dict) and name not in ("turns", "openai-response"):
            known = keys - {"turns", "custom_id", "choices"}
            filled = [dict.fromkeys(known) | record for record in records]
            assert read(write_jsonl(*filled)) == [[(f"user:{USER}", ANSWER)]], name
