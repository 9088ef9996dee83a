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
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}


def read_answers(path: Path) -> list[list[str]]:
    return [[answer for _, answer in turns] for turns in read(path)]


# Rows of one response, parents, and rows beside the calls


def test_rows_of_one_response_are_one_answer(write_jsonl: Any) -> None:
    path = write_jsonl(
        claude_row(1, {"role": "user", "content": "fix"}),
        claude_row(2, claude_answer("", "m1", type="thinking", thinking="hm", signature="s")),
        claude_row(3, claude_answer("I read a.py.", "m1")),
        claude_row(4, claude_answer("", "m1", **CALL)),
        claude_row(5, RESULT),
        claude_row(6, claude_answer("Done.", "m2")),
    )
    first = f"<think>\nhm\n</think>\n\nI read a.py.\n{CALL_TEXT}"
    assert read(path) == [[("user:fix", first), ("tool:x", "Done.")]]


def test_results_of_parallel_calls_stay_in_the_prompt(write_jsonl: Any) -> None:
    second = {"role": "user", "content": [{"type": "tool_result", "content": "y"}]}
    path = write_jsonl(
        claude_row(1, {"role": "user", "content": "fix"}),
        claude_row(2, claude_answer("", "m1", **CALL)),
        claude_row(3, claude_answer("", "m1", **CALL)),
        claude_row(4, RESULT, parent=2),
        claude_row(5, second, parent=3),
        claude_row(6, claude_answer("Done.", "m2"), parent=5),
    )
    assert read(path) == [[("user:fix", f"{CALL_TEXT}\n{CALL_TEXT}"), ("tool:x tool:y", "Done.")]]
    other_path = write_jsonl(
        claude_row(1, {"role": "user", "content": "fix"}),
        claude_row(2, claude_answer("", "m1", **CALL)),
        claude_row(4, RESULT, parent=2),
        claude_row(3, claude_answer("", "m1", **CALL), parent=2),
        claude_row(5, second, parent=3),
        claude_row(6, claude_answer("Done.", "m2"), parent=4),
    )
    assert read(other_path) == read(path)


def test_branch_that_was_left_is_in_no_prompt(write_jsonl: Any) -> None:
    path = write_jsonl(
        claude_row(1, {"role": "user", "content": "q1"}),
        claude_row(2, claude_answer("one", "m1")),
        claude_row(3, {"role": "user", "content": "q2"}),
        claude_row(4, claude_answer("two", "m2")),
        claude_row(5, {"role": "user", "content": "q3"}, parent=2),
        claude_row(6, claude_answer("three", "m3")),
    )
    assert read(path) == [[("user:q1", "one"), ("user:q3", "three")]]


def test_row_that_was_written_again_counts_once(write_jsonl: Any) -> None:
    rows = [claude_row(1, {"role": "user", "content": "q1"}), claude_row(2, claude_answer("one"))]
    more = [
        claude_row(3, {"role": "user", "content": "q2"}),
        claude_row(4, claude_answer("two", "n")),
    ]
    assert read_answers(write_jsonl(*rows, rows[1], *rows, *more)) == [["one", "two"]]
    changed = claude_row(2, claude_answer("other"))
    with pytest.raises(InputError, match="same id and different contents"):
        read(write_jsonl(*rows, changed))


@pytest.mark.parametrize("parent", [7, 3])
def test_row_whose_parent_is_missing_or_below_it_is_refused(parent: int, write_jsonl: Any) -> None:
    rows = [
        claude_row(2, {"role": "user", "content": "q"}, parent),
        claude_row(3, claude_answer("a")),
    ]
    with pytest.raises(InputError, match="parent of a row is not in the log"):
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
            claude_row(i, {"role": "user", "content": f"q{i}"}, parent=0),
            claude_row(i + 1, claude_answer(f"a{i}", f"m{i}")),
        )
    ]
    (tmp_path / "a").mkdir()
    write_container(tmp_path, rows, "jsonl")
    write_container(tmp_path / "a", [*notes, *rows[:2]], "jsonl")
    reader = LogReader([tmp_path])
    assert len(list(reader)) == 13
    assert reader.list_notes() == ["3 records are not calls of a model"]


def test_message_of_the_client_is_no_answer(write_jsonl: Any) -> None:
    failure = claude_row(2, claude_answer("API Error", "e")) | {"isApiErrorMessage": True}
    rows = [claude_row(1, {"role": "user", "content": "q"}), failure]
    path = write_jsonl(*rows, claude_row(3, claude_answer("one", "m2")))
    assert read_answers(path) == [["one"]]


# Items of the Responses API


def responses_record(*items: Any) -> dict[str, Any]:
    output = [{"type": "message", **MESSAGES[1]}]
    return {"request": {"input": list(items)}, "response": {"object": "response", "output": output}}


ITEM_CALL = {"type": "function_call", "name": "Read", "arguments": '{"f": "a.py"}', "call_id": "c"}


def test_items_of_one_answer_are_one_message(write_jsonl: Any) -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix"}]},
        {"type": "message", **claude_answer("I read."), "id": "1"},
        ITEM_CALL,
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Done."}],
        },
    ]
    lines = [{"at": i, "payload": item} for i, item in enumerate(items)]
    turns = read(write_jsonl(*lines), map="content=payload, conversation=`1`, time=at")
    call = CALL_TEXT.replace('{"f"', '{"f"')
    assert turns == [[("user:fix", f"I read.\n{call}"), ("tool:x", "Done.")]]


@pytest.mark.parametrize(
    ("item", "prompt"),
    [
        ({"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}, ""),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}]}, ""),
        (
            {"type": "mcp_call", "name": "w", "arguments": "{}", "output": "page"},
            " assistant: tool:page",
        ),
    ],
)
def test_item_of_the_input_is_part_of_the_prompt(item: Any, prompt: str, write_jsonl: Any) -> None:
    path = write_jsonl(responses_record({"role": "user", "content": USER}, item))
    assert read(path) == [[(f"user:{USER}{prompt}", ANSWER)]]


def test_result_of_a_server_tool_is_in_no_answer(write_jsonl: Any) -> None:
    record = responses_record({"role": "user", "content": USER})
    call = {"type": "mcp_call", "name": "Read", "arguments": '{"f": "a.py"}', "output": "page"}
    record["response"]["output"].insert(0, call)
    assert read(write_jsonl(record)) == [[(f"user:{USER}", CALL_TEXT), ("tool:page", ANSWER)]]
    blocks = [
        {"type": "server_tool_use", "name": "Read", "input": {"f": "a.py"}},
        {"type": "web_search_tool_result", "content": [{"title": "page"}]},
        {"type": "text", "text": ANSWER},
    ]
    response = {"role": "assistant", "content": blocks}
    turns = read(write_jsonl({"request": REQUEST, "response": response}))
    assert turns == [[(f"user:{USER}", CALL_TEXT), ('tool:[{"title": "page"}]', ANSWER)]]


# Answers


@pytest.mark.parametrize("container", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("text", ["[]", "{}", "null", '["Ann"]', '{"choices": ["a", "b"]}', "0"])
def test_answer_that_is_json_is_a_text(text: str, container: str, tmp_path: Path) -> None:
    records = [{"prompt": f"names {i}", "completion": text} for i in range(3)]
    assert read_answers(write_container(tmp_path, records, container)) == [[text]] * 3
    records = [{"messages": MESSAGES[:1], "response": text}]
    assert read_answers(write_container(tmp_path, records, container)) == [[text]]


def test_blocks_of_an_answer_follow_each_other(write_jsonl: Any) -> None:
    blocks = [{"type": "text", "text": text} for text in ("The grass ", "is green", ".")]
    blocks[1]["citations"] = [{"cited_text": "g"}]  # type: ignore[assignment]
    path = write_jsonl({"request": REQUEST, "response": {"role": "assistant", "content": blocks}})
    assert read_answers(path) == [["The grass is green."]]


def test_answer_may_repeat_the_last_message(write_jsonl: Any) -> None:
    messages = [{"role": "system", "content": "Correct."}, {"role": "user", "content": ANSWER}]
    path = write_jsonl({"request": {"messages": messages}, "response": RESPONSE})
    assert read(path) == [[(f"system:Correct. user:{ANSWER}", ANSWER)]]


def test_reasoning_and_calls_are_part_of_an_answer(write_jsonl: Any) -> None:
    function = {"name": "Read", "arguments": '{"f": "a.py"}'}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "id": "c", "function": function}],
    }
    whole = {"request": REQUEST, "response": {"choices": [{"message": message}]}}
    call = [{"index": 0, "id": "c", "function": function | {"arguments": ""}}]
    more = {
        "choices": [
            {
                "index": 0,
                "delta": {
                    "tool_calls": [{"index": 0, "function": {"arguments": function["arguments"]}}]
                },
            }
        ]
    }
    chunks = [*make_chunks(reasoning="hm!", tool_calls=call), more]
    stream = {"request": REQUEST, "response": to_events(chunks)}
    answers = read_answers(write_jsonl(whole, stream))
    call_text = CALL_TEXT
    assert answers[0] == [f"<think>\nhm\n</think>\n\n{call_text}"]
    assert answers[1] == [f"<think>\nhm!\n</think>\n\n{call_text}"]


@pytest.mark.parametrize("keys", [("index", "id"), ("index",), ("id",), ()])
def test_pieces_of_calls_are_joined_with_and_without_index_and_id(
    keys: tuple[str, ...], write_jsonl: Any
) -> None:
    calls = [{"name": "Read", "arguments": '{"f": 1}'}, {"name": "Stop", "arguments": "{}"}]
    whole = {"role": "assistant", "tool_calls": [{"function": call} for call in calls]}
    pieces = []
    for number, call in enumerate(calls):
        marks = {key: {"index": number, "id": f"c{number}"}[key] for key in keys}
        first, rest = call["arguments"][:1], call["arguments"][1:]
        pieces.append({**marks, "function": {"name": call["name"], "arguments": first}})
        pieces.append({**marks, "function": {"arguments": rest}})
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]} for piece in pieces]
    answers = read_answers(
        write_jsonl(
            {"request": REQUEST, "response": {"choices": [{"message": whole}]}},
            {"request": REQUEST, "response": chunks},
        )
    )
    assert answers[0] == answers[1]


def test_choices_are_separate_conversations(write_jsonl: Any) -> None:
    choices = [
        {"index": i, "message": {"role": "assistant", "content": t}} for i, t in enumerate("ab")
    ]
    chunks = [{"choices": [{"index": i, "delta": {"content": t}}]} for i, t in ((1, "b"), (0, "a"))]
    path = write_jsonl(
        {"request": REQUEST, "response": {"choices": choices}},
        {"request": REQUEST, "response": chunks},
    )
    assert read_answers(path) == [["a"], ["b"], ["a"], ["b"]]


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
    answer = [{"role": "assistant", "parts": [{"type": "text", "content": ANSWER}]}]
    one = span(
        operation__name="chat", input__messages=messages, output__messages=json.dumps(answer)
    )
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


def test_no_message_of_the_user_is_invented(write_jsonl: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "b"}]
    assert read(write_jsonl({"messages": messages})) == [[(f"user:{USER}", ANSWER), ("", "b")]]


def test_system_text_and_tools_of_a_record_are_context(write_jsonl: Any) -> None:
    tools = [{"type": "function", "function": {"name": "Read"}}]
    records = [
        {"messages": MESSAGES, "system": "Be brief.", "tools": tools},
        {"request": REQUEST | {"system": "Be brief.", "tools": tools}, "response": RESPONSE},
        {"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES], "tools": tools},
    ]
    path = write_jsonl(*records)
    assert read(path) == [[(f"system:Be brief. user:{USER}", ANSWER)]] * 3
    assert [conversation.tools for _, conversation in LogReader([path])] == [tuple(tools)] * 3


def test_images_are_left_out_and_texts_kept(write_jsonl: Any) -> None:
    parts = [{"type": "image_url", "image_url": {}}, {"type": "text", "text": USER}]
    messages = [{"role": "user", "content": parts}, MESSAGES[1]]
    assert read(write_jsonl({"messages": messages})) == [[(f"user:{USER}", ANSWER)]]


def test_prompt_of_the_completions_endpoint_is_whole(write_jsonl: Any) -> None:
    response = {"choices": [{"index": 0, "text": ANSWER}]}
    record = {"request": {"prompt": f"user: {USER}"}, "response": response}
    assert read(write_jsonl(record)) == [[(f"user: {USER}", ANSWER)]]


def test_shapes_are_equal_with_null_for_missing_keys(write_jsonl: Any) -> None:
    keys = {key for records in SHAPES.values() for r in records if isinstance(r, dict) for key in r}
    for name, records in SHAPES.items():
        if isinstance(records[0], dict) and name not in ("turns", "openai-response"):
            known = keys - {"turns", "custom_id", "choices"}
            filled = [dict.fromkeys(known) | record for record in records]
            assert read(write_jsonl(*filled)) == [[(f"user:{USER}", ANSWER)]], name
