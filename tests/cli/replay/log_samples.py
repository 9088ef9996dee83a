"""Defines records of every log format, each with the texts that must be read from it.

`#` in a sample is replaced by the record's number. Each text has a unique word with this number
(such as `user_12`), which identifies the field and the record from which the text was read. A text
that begins with `ids:` is replaced by token ids of the tokenizer `bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Texts = list[list[tuple[str, str]]]
"""(prompt, completion) of each turn of each conversation."""


def serialize_as_json(record: Any) -> list[str]:
    return [json.dumps(record)]


def serialize_as_events(record: Any) -> list[str]:
    """Serializes the response as the text of a stream, and the request as text."""
    serialized = dict(record)
    if isinstance(serialized.get("response"), list):
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in serialized["response"]]
        serialized["response"] = "".join([*lines, "data: [DONE]\n\n"])
    if "request" in serialized:
        serialized["request"] = json.dumps(serialized["request"])
    return [json.dumps(serialized)]


@dataclass(frozen=True)
class Sample:
    """A record, and what is read from it.

    Attributes:
        preset: Name of the preset for `--map`.
        record: The record, with `#` in place of its number.
        expected: The texts that are read from the record, with `#`.
        serialize: Returns the lines of a record.
        last_answer: Path of the last answer in a list of messages. If a change makes this message
            something else than an answer, the message before it may not be read either.
        required_field: Path of a field without which the record has another format.
        is_changed: Whether tests change each field of the record.
    """

    preset: str
    record: Any
    expected: Texts
    serialize: Callable[[Any], list[str]] = serialize_as_json
    last_answer: tuple[Any, ...] = ()
    required_field: tuple[Any, ...] = ()
    is_changed: bool = True


def insert_number(value: Any, number: int) -> Any:
    """Returns a value of a sample with the number in place of `#` and with token ids."""
    if isinstance(value, dict):
        return {insert_number(k, number): insert_number(v, number) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(insert_number(item, number) for item in value)
    if not isinstance(value, str):
        return value
    text = value.replace("#", str(number))
    return list(text[4:].encode()) if text.startswith("ids:") else text


def format_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def make_message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def make_part(kind: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "text": text, **fields}


def make_call(name: str) -> dict[str, Any]:
    function = {"name": f"{name}_#", "arguments": f'{{"a": "{name}arg_#"}}'}
    return {"id": f"id-{name}", "type": "function", "function": function}


def make_choice(text: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    answer = make_message("assistant", text, **fields)
    return {"index": index, "message": answer, "logprobs": None, "finish_reason": "stop"}


def make_body(*choices: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion", "choices": list(choices), **fields}


def make_delta(index: int, **fields: Any) -> dict[str, Any]:
    return make_body({"index": index, "delta": fields, "finish_reason": None})


def make_call_delta(index: int, **call: Any) -> dict[str, Any]:
    return make_delta(0, tool_calls=[{"index": index, "type": "function", **call}])


def make_id_chunk(index: int, text: str, prompt: str | None) -> dict[str, Any]:
    ids = {"token_ids": f"ids: {text} ", "prompt_token_ids": prompt}
    return make_body({"index": index, "text": text, **ids})


def make_call_item(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": f"{name}_#", "arguments": "{}"}


def make_event(kind: str, index: int, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "output_index": index, **fields}


def make_block(kind: str, index: int, **fields: Any) -> dict[str, Any]:
    return {"type": f"content_block_{kind}", "index": index, **fields}


ONE_CALL, TWO_CALL = (format_call(f"{n}_#", f'{{"a": "{n}arg_#"}}') for n in ("one", "two"))
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALLS = [make_call("one"), make_call("two")]
EARLY_MESSAGE = make_message("assistant", "early_#", refusal=None, tool_calls=CALLS)
EARLY_MESSAGE["function_call"] = None
MESSAGES = [
    make_message("system", "sys_#"),
    make_message("user", [make_part("text", "user_#"), IMAGE], name="n"),
    {**EARLY_MESSAGE, "reasoning_content": "why_#"},
    make_message("tool", "result_#", tool_call_id="c"),
    make_message("assistant", [make_part("text", "late_#")]),
]
THINK_TEXT, STREAMED_THINK_TEXT = "<think>\nwhy_#\n</think>\n\n", "<think>\n why_# \n</think>\n\n"
EARLY_TEXT = f"early_#\n{ONE_CALL}\n{TWO_CALL}"
TOOLS = [{"type": "function", "function": {"name": "tool_#", "parameters": {}}}]
TOOLS_TEXT = json.dumps(TOOLS)


def make_message_texts(begin: str) -> Texts:
    prompt = f"{begin} USER: user_# ASSISTANT:"
    later_prompt = f"{prompt}{EARLY_TEXT}TOOL: result_# ASSISTANT:"
    return [[(prompt, f"{THINK_TEXT}{EARLY_TEXT}"), (later_prompt, "late_#")]]


EARLIER_MESSAGES = [*MESSAGES[:2], EARLY_MESSAGE, *MESSAGES[3:], make_message("user", "ask_#")]
"""The messages of a request, without the reasoning of earlier turns."""
EARLIER_TEXT = (
    f"{TOOLS_TEXT} sys_# USER: user_# ASSISTANT: {EARLY_TEXT} TOOL: result_# ASSISTANT: late_# "
    "USER: ask_# ASSISTANT:"
)
QUESTION = [make_message("user", "ask_#")]
ASK_TEXT = "USER: ask_# ASSISTANT:"
STREAM = [
    make_delta(0, role="assistant", content=None, reasoning=" why_# "),
    make_delta(0, content=" said_# "),
    make_call_delta(0, id="id-one", function={"name": "one_#", "arguments": ""}),
    make_call_delta(0, function={"arguments": '{"a": "onearg_#"}'}),
    make_call_delta(1, id="id-two", function={"name": "two_#", "arguments": "{}"}),
    make_body({"index": 0, "delta": {}, "finish_reason": "tool_calls"}),
    make_body(usage={"completion_tokens": 9}),
]
TWO_STREAMS = [
    *(make_delta(i, role="assistant", content="") for i in (0, 1)),
    *(make_delta(i, content=f" said{'ab'[i]}_# ") for i in (0, 1)),
    *(make_delta(i, content=f" again{'ab'[i]}_# ") for i in (0, 1)),
]
TWO_TEXTS = [[(ASK_TEXT, " saida_#  againa_# ")], [(ASK_TEXT, " saidb_#  againb_# ")]]
ITEMS_REQUEST = {
    "instructions": "sys_#",
    "input": [
        make_message("user", [make_part("input_text", "user_#")], type="message"),
        make_call_item("two"),
        {"type": "function_call_output", "call_id": "c", "output": "result_#"},
    ],
    "tools": TOOLS,
}
ITEMS_TEXT = (
    f"{TOOLS_TEXT} sys_# USER: user_# ASSISTANT: {format_call('two_#', '{}')} "
    "TOOL: result_# ASSISTANT:"
)
ITEMS = [
    {"type": "reasoning", "summary": [make_part("summary_text", "why_#")]},
    make_message("assistant", [make_part("output_text", "said_#", annotations=[])], type="message"),
    make_call_item("one"),
]
ITEMS_ANSWER = f"{THINK_TEXT}said_#\n{format_call('one_#', '{}')}"
ITEMS_STREAM = [
    {"type": "response.created", "response": {"output": []}},
    make_event("output_item.added", 0, item=make_message("assistant", [], type="message")),
    make_event("output_text.delta", 0, content_index=0, delta=" said_# "),
    make_event("output_text.delta", 0, content_index=0, delta=" again_# "),
    make_event("output_item.added", 1, item={**make_call_item("one"), "arguments": ""}),
    make_event("function_call_arguments.delta", 1, delta='{"a": "onearg_#"}'),
]
CLAUDE_CALL = {"type": "tool_use", "id": "t", "name": "one_#", "input": {"a": "onearg_#"}}
CLAUDE_RESULT = {
    "type": "tool_result",
    "tool_use_id": "t",
    "content": [make_part("text", "result_#")],
}
CLAUDE_REQUEST = {
    "system": [make_part("text", "sys_#")],
    "messages": [
        make_message("user", "user_#"),
        make_message("assistant", [make_part("text", "early_#"), CLAUDE_CALL]),
        make_message("user", [CLAUDE_RESULT]),
    ],
    "tools": [{"name": "tool_#", "input_schema": {}}],
}
CLAUDE_TEXT = (
    f'[{{"name": "tool_#", "input_schema": {{}}}}] sys_# USER: user_# ASSISTANT: early_#\n'
    f"{ONE_CALL} USER: result_# ASSISTANT:"
)
CLAUDE_PARTS = [
    {"type": "thinking", "thinking": "why_#", "signature": "s"},
    {"type": "text", "text": "said_#"},
    {"type": "tool_use", "id": "t", "name": "two_#", "input": {}},
]
CLAUDE_STREAM = [
    {"type": "message_start", "message": make_message("assistant", [], type="message")},
    make_block("start", 0, content_block={"type": "thinking", "thinking": ""}),
    make_block("delta", 0, delta={"type": "thinking_delta", "thinking": " why_# "}),
    make_block("delta", 0, delta={"type": "signature_delta", "signature": "s"}),
    make_block("start", 1, content_block={"type": "text", "text": ""}),
    make_block("delta", 1, delta={"type": "text_delta", "text": " said_# "}),
    make_block("delta", 1, delta={"type": "text_delta", "text": " again_# "}),
    make_block("start", 2, content_block={**CLAUDE_CALL, "input": {}}),
    make_block("delta", 2, delta={"type": "input_json_delta", "partial_json": '{"a": "onearg_#"}'}),
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}},
]
OLLAMA_CALL = {"function": {"name": "one_#", "arguments": {"a": "onearg_#"}}}
OLLAMA_STREAM = [
    {"model": "m", "message": make_message("assistant", " said_# "), "done": False},
    {"model": "m", "message": make_message("assistant", " again_# ", tool_calls=[OLLAMA_CALL])},
]
ID_CHUNKS = [
    make_id_chunk(0, "saida_#", "ids: p_# "),
    make_id_chunk(1, "saidb_#", "ids: q_# "),
    make_id_chunk(0, "againa_#", None),
    make_id_chunk(1, "againb_#", None),
]
SHAREGPT_MESSAGES = [
    {"from": "human", "value": "user_#"},
    {"from": "gpt", "value": "said_#"},
    {"from": "observation", "value": "result_#"},
    {"from": "gpt", "value": "again_#"},
]
SAID_BODY = make_body(make_choice("said_#"))
USER_TEXT = "USER: user_# ASSISTANT:"
PAIR_TEXTS: Texts = [[(USER_TEXT, "said_#")]]
ASK_TEXTS: Texts = [[(ASK_TEXT, "said_#")]]
PAIR = {"prompt": "user_#", "completion": "said_#"}
ID_TURN = {"prompt_token_ids": "ids: user_# ", "completion_token_ids": "ids: said_# "}


def make_log(request: Any, response: Any, expected: Texts, **fields: Any) -> Sample:
    return Sample(
        "request-response", {"request": request, "response": response}, expected, **fields
    )


def make_unchanged(format_name: str, record: Any, expected: Texts) -> Sample:
    return Sample(format_name, record, expected, is_changed=False)


SAMPLES: dict[str, Sample] = {
    "turns": Sample(
        "turns",
        {"id": "i", "turns": [PAIR, {"prompt": "ask_#", "completion": "again_#"}]},
        [[(USER_TEXT, "said_#"), (ASK_TEXT, "again_#")]],
    ),
    "turns-ids": Sample("turns", {"turns": [ID_TURN]}, [[(" user_# ", " said_# ")]]),
    "messages": Sample(
        "messages",
        {"id": {"a": "i"}, "messages": MESSAGES, "tools": TOOLS},
        make_message_texts(f"{TOOLS_TEXT} sys_#"),
        last_answer=("messages", 4),
    ),
    "messages-system": Sample(
        "messages",
        {"system": "top_#", "conversation_id": "ab", "conversation": MESSAGES[1:]},
        make_message_texts("top_#"),
        last_answer=("conversation", 3),
    ),
    "messages-tools-text": make_unchanged(
        "messages",
        {"instructions": [make_part("text", "sys_#")], "messages": MESSAGES, "tools": TOOLS_TEXT},
        make_message_texts(f"{TOOLS_TEXT} sys_#"),  # some records have the system text twice
    ),
    "sharegpt": Sample(
        "sharegpt",
        {"id": "i", "system": "sys_#", "tools": TOOLS_TEXT, "conversations": SHAREGPT_MESSAGES},
        [[(f"{TOOLS_TEXT} sys_# {USER_TEXT}", "said_#"), ("TOOL: result_# ASSISTANT:", "again_#")]],
        last_answer=("conversations", 3),
    ),
    "pairs": Sample(
        "pairs",
        {"system": "sys_#", **PAIR},
        [[(f"sys_# {USER_TEXT}", "said_#")]],
    ),
    "pairs-ids": Sample("token-ids", ID_TURN, [[(" user_# ", " said_# ")]]),
    "pairs-response": make_unchanged(
        "pairs", {"prompt": "user_#", "response": "said_#", "score": 1}, PAIR_TEXTS
    ),
    "pairs-messages": make_unchanged(
        "pairs",
        {"prompt": MESSAGES[:2], "completion": [make_message("assistant", "said_#")]},
        [[(f"sys_# {USER_TEXT}", "said_#")]],
    ),
    "chat-n2": make_log(
        {"model": "m", "messages": EARLIER_MESSAGES, "tools": TOOLS, "n": 2},
        make_body(make_choice("saida_#"), make_choice("saidb_#", 1, tool_calls=[make_call("one")])),
        [[(EARLIER_TEXT, "saida_#")], [(EARLIER_TEXT, f"saidb_#\n{ONE_CALL}")]],
    ),
    "chat-body": make_log(
        {"body": {"messages": QUESTION}}, {"status": 200, "body": SAID_BODY}, ASK_TEXTS
    ),
    "chat-json": make_unchanged(
        "request-response",
        {"request": json.dumps({"messages": QUESTION}), "response": json.dumps(SAID_BODY)},
        ASK_TEXTS,
    ),
    "chat-messages": Sample(
        "openai-response",
        {**SAID_BODY, "messages": QUESTION},
        ASK_TEXTS,
        required_field=("choices",),
    ),
    "text-messages": Sample(
        "messages-response",
        {"messages": EARLIER_MESSAGES[:2], "output": "said_#"},
        [[(f"sys_# {USER_TEXT}", "said_#")]],
    ),
    "text-response": make_unchanged(
        "messages-response", {"messages": QUESTION, "completion": "said_#"}, ASK_TEXTS
    ),
    "chat-stream": make_log(
        {"messages": QUESTION},
        STREAM,
        [[(ASK_TEXT, f"{STREAMED_THINK_TEXT} said_# \n{ONE_CALL}\n{format_call('two_#', '{}')}")]],
    ),
    "chat-stream-n2": make_log(
        {"messages": QUESTION}, TWO_STREAMS, TWO_TEXTS, serialize=serialize_as_events
    ),
    "completions": make_log(
        {"prompt": "user_#", "n": 2},
        make_body(*({"index": i, "text": f"said{'ab'[i]}_#"} for i in (0, 1))),
        [[("user_#", "saida_#")], [("user_#", "saidb_#")]],
    ),
    "completions-stream": make_log(
        {"prompt": " user_# ", "stream": True},
        [make_body({"index": 0, "text": text}) for text in (" said_# ", "again_#")],
        [[(" user_# ", " said_# again_#")]],
        serialize=serialize_as_events,
    ),
    "responses": make_log(ITEMS_REQUEST, {"output": ITEMS}, [[(ITEMS_TEXT, ITEMS_ANSWER)]]),
    "responses-stream": make_log(
        ITEMS_REQUEST, ITEMS_STREAM, [[(ITEMS_TEXT, f" said_#  again_# \n{ONE_CALL}")]]
    ),
    "responses-stream-whole": make_log(
        {"input": "user_#"},
        [*ITEMS_STREAM[:2], {"type": "response.completed", "response": {"output": ITEMS}}],
        [[(USER_TEXT, ITEMS_ANSWER)]],
    ),
    "anthropic": make_log(
        CLAUDE_REQUEST,
        make_message("assistant", CLAUDE_PARTS, type="message"),
        [[(CLAUDE_TEXT, f"{THINK_TEXT}said_#\n{format_call('two_#', '{}')}")]],
    ),
    "anthropic-stream": make_log(
        CLAUDE_REQUEST,
        CLAUDE_STREAM,
        [[(CLAUDE_TEXT, f"{STREAMED_THINK_TEXT} said_#  again_# \n{ONE_CALL}")]],
        serialize=serialize_as_events,
    ),
    "ollama": make_log(
        {"messages": QUESTION}, OLLAMA_STREAM, [[(ASK_TEXT, f" said_#  again_# \n{ONE_CALL}")]]
    ),
    "llama.cpp": make_log("user_#", {"content": "said_#", "stop": True}, PAIR_TEXTS),
    "chat-ids": make_log(
        {"messages": [make_message("user", "user_#")]},
        make_body(
            {**make_choice("saida_#"), "token_ids": "ids: saida_# "},
            {**make_choice("saidb_#", 1), "token_ids": "ids: saidb_# "},
            prompt_token_ids="ids: user_# ",
        ),
        [[(" user_# ", " saida_# ")], [(" user_# ", " saidb_# ")]],
    ),
    "completions-ids-stream": make_log(
        {"prompt": ["p_#", "q_#"], "return_token_ids": True},
        ID_CHUNKS,
        [[(" p_# ", " saida_#  againa_# ")], [(" q_# ", " saidb_#  againb_# ")]],
    ),
    "run-batch": Sample(
        "openai-batch",
        {
            "id": "v",
            "custom_id": "r-#",
            "url": "/v1/chat",
            "body": {"messages": QUESTION},
            "response": {"status_code": 200, "body": SAID_BODY},
            "error": None,
        },
        ASK_TEXTS,
    ),
}
