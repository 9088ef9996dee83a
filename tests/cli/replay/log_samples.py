"""Records of every log format, each with the texts that must be read from it.

`#` in a sample is replaced by the record's number. Each text has a unique word with this number
(`user_12`), which identifies the field and the record of everything that was read. A text that
begins with `ids:` is replaced by token ids of the tokenizer `bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Texts = list[list[tuple[str, str]]]
"""(prompt, completion) of each turn of each conversation."""


def as_json(record: Any) -> list[str]:
    return [json.dumps(record)]


def as_events(record: Any) -> list[str]:
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
        format: Its name for `--format`.
        record: With `#` for its number.
        expected: The texts that are read, with `#`.
        write: Returns the lines of a record.
        last: Path of the last of several answers in a list of messages. If it is no answer any
            more, the messages before it are no prompt either.
        needed: Path of a field without which the record has another format.
        is_changed: Whether tests change each field of the record.
    """

    format: str
    record: Any
    expected: Texts
    write: Callable[[Any], list[str]] = as_json
    last: tuple[Any, ...] = ()
    needed: tuple[Any, ...] = ()
    is_changed: bool = True


def number(value: Any, t: int) -> Any:
    """Returns a sample's value with a number in place of `#`, and token ids."""
    if isinstance(value, dict):
        return {number(key, t): number(item, t) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(number(item, t) for item in value)
    if not isinstance(value, str):
        return value
    text = value.replace("#", str(t))
    return list(text[4:].encode()) if text.startswith("ids:") else text


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def part(kind: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": text, **more}


def call(name: str) -> dict[str, Any]:
    function = {"name": f"{name}_#", "arguments": f'{{"a": "{name}arg_#"}}'}
    return {"id": f"id-{name}", "type": "function", "function": function}


def choice(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    answer = message("assistant", text, **more)
    return {"index": index, "message": answer, "logprobs": None, "finish_reason": "stop"}


def body(*choices: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion", "choices": list(choices), **more}


def delta(index: int, **fields: Any) -> dict[str, Any]:
    return body({"index": index, "delta": fields, "finish_reason": None})


def call_delta(index: int, **call: Any) -> dict[str, Any]:
    return delta(0, tool_calls=[{"index": index, "type": "function", **call}])


def id_chunk(index: int, text: str, prompt: str | None) -> dict[str, Any]:
    ids = {"token_ids": f"ids: {text} ", "prompt_token_ids": prompt}
    return body({"index": index, "text": text, **ids})


def call_item(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": f"{name}_#", "arguments": "{}"}


def event(kind: str, index: int, **more: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "output_index": index, **more}


def block(kind: str, index: int, **more: Any) -> dict[str, Any]:
    return {"type": f"content_block_{kind}", "index": index, **more}


ONE, TWO = (call_text(f"{name}_#", f'{{"a": "{name}arg_#"}}') for name in ("one", "two"))
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALLS = [call("one"), call("two")]
EARLY_MESSAGE = message("assistant", "early_#", refusal=None, tool_calls=CALLS, function_call=None)
MESSAGES = [
    message("system", "sys_#"),
    message("user", [part("text", "user_#"), IMAGE], name="n"),
    {**EARLY_MESSAGE, "reasoning_content": "why_#"},
    message("tool", "result_#", tool_call_id="c"),
    message("assistant", [part("text", "late_#")]),
]
THINK, WHY = "<think>\nwhy_#\n</think>\n\n", "<think>\n why_# \n</think>\n\n"
EARLY = f"early_#\n{ONE}\n{TWO}"
TOOLS = [{"type": "function", "function": {"name": "tool_#", "parameters": {}}}]
TOOLS_TEXT = json.dumps(TOOLS)


def message_texts(begin: str) -> Texts:
    prompt = f"{begin} USER: user_# ASSISTANT:"
    later = f"{prompt}{EARLY}TOOL: result_# ASSISTANT:"
    return [[(prompt, f"{THINK}{EARLY}"), (later, "late_#")]]


EARLIER = [*MESSAGES[:2], EARLY_MESSAGE, *MESSAGES[3:], message("user", "ask_#")]
"""The messages of a request, without the reasoning of earlier turns."""
EARLIER_TEXT = (
    f"{TOOLS_TEXT} sys_# USER: user_# ASSISTANT: {EARLY} TOOL: result_# ASSISTANT: late_# "
    "USER: ask_# ASSISTANT:"
)
ASK = [message("user", "ask_#")]
ASK_TEXT = "USER: ask_# ASSISTANT:"
STREAM = [
    delta(0, role="assistant", content=None, reasoning=" why_# "),
    delta(0, content=" said_# "),
    call_delta(0, id="id-one", function={"name": "one_#", "arguments": ""}),
    call_delta(0, function={"arguments": '{"a": "onearg_#"}'}),
    call_delta(1, id="id-two", function={"name": "two_#", "arguments": "{}"}),
    body({"index": 0, "delta": {}, "finish_reason": "tool_calls"}),
    body(usage={"completion_tokens": 9}),
]
TWO_STREAMS = [
    *(delta(i, role="assistant", content="") for i in (0, 1)),
    *(delta(i, content=f" said{'ab'[i]}_# ") for i in (0, 1)),
    *(delta(i, content=f" again{'ab'[i]}_# ") for i in (0, 1)),
]
TWO_TEXTS = [[(ASK_TEXT, " saida_#  againa_# ")], [(ASK_TEXT, " saidb_#  againb_# ")]]
ITEMS_REQUEST = {
    "instructions": "sys_#",
    "input": [
        message("user", [part("input_text", "user_#")], type="message"),
        call_item("two"),
        {"type": "function_call_output", "call_id": "c", "output": "result_#"},
    ],
    "tools": TOOLS,
}
ITEMS_TEXT = (
    f"{TOOLS_TEXT} sys_# USER: user_# ASSISTANT: {call_text('two_#', '{}')} "
    "TOOL: result_# ASSISTANT:"
)
ITEMS = [
    {"type": "reasoning", "summary": [part("summary_text", "why_#")]},
    message("assistant", [part("output_text", "said_#", annotations=[])], type="message"),
    call_item("one"),
]
ITEMS_ANSWER = f"{THINK}said_#\n{call_text('one_#', '{}')}"
ITEMS_STREAM = [
    {"type": "response.created", "response": {"output": []}},
    event("output_item.added", 0, item=message("assistant", [], type="message")),
    event("output_text.delta", 0, content_index=0, delta=" said_# "),
    event("output_text.delta", 0, content_index=0, delta=" again_# "),
    event("output_item.added", 1, item={**call_item("one"), "arguments": ""}),
    event("function_call_arguments.delta", 1, delta='{"a": "onearg_#"}'),
]
CLAUDE_CALL = {"type": "tool_use", "id": "t", "name": "one_#", "input": {"a": "onearg_#"}}
CLAUDE_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [part("text", "result_#")]}
CLAUDE_REQUEST = {
    "system": [part("text", "sys_#")],
    "messages": [
        message("user", "user_#"),
        message("assistant", [part("text", "early_#"), CLAUDE_CALL]),
        message("user", [CLAUDE_RESULT]),
    ],
    "tools": [{"name": "tool_#", "input_schema": {}}],
}
CLAUDE_TEXT = (
    f'[{{"name": "tool_#", "input_schema": {{}}}}] sys_# USER: user_# ASSISTANT: early_#\n{ONE} '
    "USER: result_# ASSISTANT:"
)
CLAUDE_PARTS = [
    {"type": "thinking", "thinking": "why_#", "signature": "s"},
    {"type": "text", "text": "said_#"},
    {"type": "tool_use", "id": "t", "name": "two_#", "input": {}},
]
CLAUDE_STREAM = [
    {"type": "message_start", "message": message("assistant", [], type="message")},
    block("start", 0, content_block={"type": "thinking", "thinking": ""}),
    block("delta", 0, delta={"type": "thinking_delta", "thinking": " why_# "}),
    block("delta", 0, delta={"type": "signature_delta", "signature": "s"}),
    block("start", 1, content_block={"type": "text", "text": ""}),
    block("delta", 1, delta={"type": "text_delta", "text": " said_# "}),
    block("delta", 1, delta={"type": "text_delta", "text": " again_# "}),
    block("start", 2, content_block={**CLAUDE_CALL, "input": {}}),
    block("delta", 2, delta={"type": "input_json_delta", "partial_json": '{"a": "onearg_#"}'}),
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}},
]
OLLAMA_CALL = {"function": {"name": "one_#", "arguments": {"a": "onearg_#"}}}
OLLAMA = [
    {"model": "m", "message": message("assistant", " said_# "), "done": False},
    {"model": "m", "message": message("assistant", " again_# ", tool_calls=[OLLAMA_CALL])},
]
ID_CHUNKS = [
    id_chunk(0, "saida_#", "ids: p_# "),
    id_chunk(1, "saidb_#", "ids: q_# "),
    id_chunk(0, "againa_#", None),
    id_chunk(1, "againb_#", None),
]
SHAREGPT = [
    {"from": "human", "value": "user_#"},
    {"from": "gpt", "value": "said_#"},
    {"from": "observation", "value": "result_#"},
    {"from": "gpt", "value": "again_#"},
]
USER = "USER: user_# ASSISTANT:"
PAIR_TEXT: Texts = [[(USER, "said_#")]]
ASKED: Texts = [[(ASK_TEXT, "said_#")]]
PAIR = {"prompt": "user_#", "completion": "said_#"}
ID_TURN = {"prompt_token_ids": "ids: user_# ", "completion_token_ids": "ids: said_# "}


def log(request: Any, response: Any, expected: Texts, **more: Any) -> Sample:
    return Sample("log", {"request": request, "response": response}, expected, **more)


def unchanged(format_name: str, record: Any, expected: Texts) -> Sample:
    return Sample(format_name, record, expected, is_changed=False)


SAMPLES: dict[str, Sample] = {
    "turns": Sample(
        "turns",
        {"id": "i", "turns": [PAIR, {"prompt": "ask_#", "completion": "again_#"}]},
        [[(USER, "said_#"), (ASK_TEXT, "again_#")]],
    ),
    "turns-ids": Sample("turns", {"turns": [ID_TURN]}, [[(" user_# ", " said_# ")]]),
    "messages": Sample(
        "messages",
        {"id": {"a": "i"}, "messages": MESSAGES, "tools": TOOLS},
        message_texts(f"{TOOLS_TEXT} sys_#"),
        last=("messages", 4),
    ),
    "messages-system": Sample(
        "messages",
        {"system": "top_#", "conversation_id": "ab", "conversation": MESSAGES[1:]},
        message_texts("top_#"),
        last=("conversation", 3),
    ),
    "messages-tools-text": unchanged(
        "messages",
        {"instructions": [part("text", "sys_#")], "messages": MESSAGES, "tools": TOOLS_TEXT},
        message_texts(f"{TOOLS_TEXT} sys_#"),  # some records have the system text twice
    ),
    "sharegpt": Sample(
        "sharegpt",
        {"id": "i", "system": "sys_#", "tools": TOOLS_TEXT, "conversations": SHAREGPT},
        [[(f"{TOOLS_TEXT} sys_# {USER}", "said_#"), ("TOOL: result_# ASSISTANT:", "again_#")]],
        last=("conversations", 3),
    ),
    "pairs": Sample(
        "pairs",
        {"system": "sys_#", **PAIR},
        [[(f"sys_# {USER}", "said_#")]],
    ),
    "pairs-ids": Sample("pairs", ID_TURN, [[(" user_# ", " said_# ")]]),
    "pairs-response": unchanged(
        "pairs", {"prompt": "user_#", "response": "said_#", "score": 1}, PAIR_TEXT
    ),
    "pairs-messages": unchanged(
        "pairs",
        {"prompt": MESSAGES[:2], "completion": [message("assistant", "said_#")]},
        [[(f"sys_# {USER}", "said_#")]],
    ),
    "chat-n2": log(
        {"model": "m", "messages": EARLIER, "tools": TOOLS, "n": 2},
        body(choice("saida_#"), choice("saidb_#", 1, tool_calls=[call("one")])),
        [[(EARLIER_TEXT, "saida_#")], [(EARLIER_TEXT, f"saidb_#\n{ONE}")]],
    ),
    "chat-body": log(
        {"body": {"messages": ASK}}, {"status": 200, "body": body(choice("said_#"))}, ASKED
    ),
    "chat-json": unchanged(
        "log",
        {"request": json.dumps({"messages": ASK}), "response": json.dumps(body(choice("said_#")))},
        ASKED,
    ),
    "chat-messages": Sample(
        "log", {**body(choice("said_#")), "messages": ASK}, ASKED, needed=("choices",)
    ),
    "text-messages": Sample(
        "log",
        {"messages": EARLIER[:2], "output": "said_#"},
        [[(f"sys_# {USER}", "said_#")]],
    ),
    "text-response": unchanged("log", {"messages": ASK, "completion": "said_#"}, ASKED),
    "chat-stream": log(
        {"messages": ASK},
        STREAM,
        [[(ASK_TEXT, f"{WHY} said_# \n{ONE}\n{call_text('two_#', '{}')}")]],
    ),
    "chat-stream-n2": log({"messages": ASK}, TWO_STREAMS, TWO_TEXTS, write=as_events),
    "completions": log(
        {"prompt": "user_#", "n": 2},
        body(*({"index": i, "text": f"said{'ab'[i]}_#"} for i in (0, 1))),
        [[("user_#", "saida_#")], [("user_#", "saidb_#")]],
    ),
    "completions-stream": log(
        {"prompt": " user_# ", "stream": True},
        [body({"index": 0, "text": text}) for text in (" said_# ", "again_#")],
        [[(" user_# ", " said_# again_#")]],
        write=as_events,
    ),
    "responses": log(ITEMS_REQUEST, {"output": ITEMS}, [[(ITEMS_TEXT, ITEMS_ANSWER)]]),
    "responses-stream": log(
        ITEMS_REQUEST, ITEMS_STREAM, [[(ITEMS_TEXT, f" said_#  again_# \n{ONE}")]]
    ),
    "responses-stream-whole": log(
        {"input": "user_#"},
        [*ITEMS_STREAM[:2], {"type": "response.completed", "response": {"output": ITEMS}}],
        [[(USER, ITEMS_ANSWER)]],
    ),
    "anthropic": log(
        CLAUDE_REQUEST,
        message("assistant", CLAUDE_PARTS, type="message"),
        [[(CLAUDE_TEXT, f"{THINK}said_#\n{call_text('two_#', '{}')}")]],
    ),
    "anthropic-stream": log(
        CLAUDE_REQUEST,
        CLAUDE_STREAM,
        [[(CLAUDE_TEXT, f"{WHY} said_#  again_# \n{ONE}")]],
        write=as_events,
    ),
    "ollama": log({"messages": ASK}, OLLAMA, [[(ASK_TEXT, f" said_#  again_# \n{ONE}")]]),
    "llama.cpp": log("user_#", {"content": "said_#", "stop": True}, PAIR_TEXT),
    "chat-ids": log(
        {"messages": [message("user", "user_#")]},
        body(
            {**choice("saida_#"), "token_ids": "ids: saida_# "},
            {**choice("saidb_#", 1), "token_ids": "ids: saidb_# "},
            prompt_token_ids="ids: user_# ",
        ),
        [[(" user_# ", " saida_# ")], [(" user_# ", " saidb_# ")]],
    ),
    "completions-ids-stream": log(
        {"prompt": ["p_#", "q_#"], "return_token_ids": True},
        ID_CHUNKS,
        [[(" p_# ", " saida_#  againa_# ")], [(" q_# ", " saidb_#  againb_# ")]],
    ),
    "run-batch": Sample(
        "log",
        {
            "id": "v",
            "custom_id": "r-#",
            "url": "/v1/chat",
            "body": {"messages": ASK},
            "response": {"status_code": 200, "body": body(choice("said_#"))},
            "error": None,
        },
        ASKED,
    ),
}
