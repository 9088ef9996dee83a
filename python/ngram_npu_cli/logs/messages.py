"""Converts messages of OpenAI, Anthropic, Gemini, OpenTelemetry and ShareGPT to one form.

An answer contains only what the model generated. A part that is not known is refused, because a
prompt or answer without it would be wrong. Images and sound are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ngram_npu.errors import RecordError

from ngram_npu_cli.logs.values import (
    Message,
    Record,
    Turn,
    check_text,
    describe_type,
    get_only,
    is_empty,
    list_keys,
)

_ROLE_NAMES = {
    "user": "human",
    "assistant": "ai gpt model bot chatbot function_call",
    "system": "",
    "developer": "",
    "tool": "function observation",
}
_ROLES = {name: role for role, names in _ROLE_NAMES.items() for name in (role, *names.split())}
_CONTENT_KEYS = ("content", "value", "parts")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
_REASONING_PARTS = {"thinking", "reasoning", "reasoning_text"}
_CALL_PARTS = {
    *("tool_use", "server_tool_use", "mcp_tool_use", "function_call", "custom_tool_call"),
    *("tool_call", "mcp_call"),
}
_RESULT_PARTS = re.compile(r"\w*tool_result|\w+_call_(output|response)")
_HIDDEN_PARTS = {"redacted_thinking", "summary_text"}
"""Parts that stand for reasoning whose text is not in the log."""
_MEDIA_PARTS = {
    *("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video"),
    *("video_url", "inlineData", "inline_data"),
}
_GEMINI_PARTS = {"functionCall": "tool_call", "functionResponse": "tool_result"}
_OTHER_OBJECTS = {
    *("annotations", "metadata", "usage", "logprobs", "reasoning_details", "extra", "childrenIds"),
    *("provider_specific_fields", "safetyRatings", "cache_control", "routed_experts"),
}
"""Keys of messages whose objects and lists are not text for the model."""
_RENDERED = re.compile(r'<details type="(reasoning|tool_calls|code_interpreter)"')


class _Builder:
    """Collects the parts of one recorded message. The results of tools in it become messages."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.messages: list[Message] = []
        self._start()

    def _start(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Any] = []

    def finish(self, **other: Any) -> list[Message]:
        """Ends a message, and returns all messages. A message without text and calls is left out,
        except one of the user or of a tool."""
        # Blocks of an answer follow each other as they were generated.
        content = ("" if self.role == "assistant" else "\n").join(self._texts)
        message = {"role": self.role, "content": content, **other}
        if any(self._reasoning):
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        if self.role == "assistant" and _RENDERED.search(content):
            raise RecordError("an answer contains HTML of a user interface, which no model wrote")
        if len(message) > 2 or self._texts:
            self.messages.append(message)
        self._start()
        return self.messages

    def add_content(self, content: Any) -> None:
        if isinstance(content, str):
            self._texts.append(content)
        elif isinstance(content, list):
            for part in content:
                self.add_part(part)
        elif content is not None:
            raise RecordError(f"the content must be a text or a list, got {describe_type(content)}")

    def add_part(self, part: Any) -> None:
        """Adds a part of a message, or an item of the Responses API."""
        if isinstance(part, str):
            self._texts.append(part)
            return
        if not isinstance(part, dict):
            raise RecordError(f"a part of the content is {describe_type(part)}")
        kind = part.get("type")
        for key, gemini_kind in _GEMINI_PARTS.items():
            if kind is None and isinstance(part.get(key), dict):
                part, kind = part[key], gemini_kind
        if kind is None and _MEDIA_PARTS & part.keys():
            return
        if kind is None and "text" in part:
            kind = "thinking" if part.get("thought") else "text"
        if not isinstance(kind, str):
            raise RecordError(f"a part of the content has no type, but the keys {list_keys(part)}")
        if kind in _TEXT_PARTS:
            _, text = get_only(part, ("text", "content", "refusal"), "text of a part")
            self._texts.append(check_text("" if text is None else text, f'a part "{kind}"'))
        elif kind in _REASONING_PARTS:
            self._add_reasoning(get_only(part, ("thinking", "content", "text"), "reasoning")[1])
        elif kind in _CALL_PARTS:
            self.add_call(part)
            if not is_empty(part.get("output")):  # of a tool that the server has called
                self._add_result(part)
        elif _RESULT_PARTS.fullmatch(kind):
            self._add_result(part)
        elif kind not in _HIDDEN_PARTS and kind not in _MEDIA_PARTS:
            raise RecordError(f'a part of the type "{kind:.40}" cannot be read')

    def _add_reasoning(self, value: Any) -> None:
        if isinstance(value, list):
            for part in value:
                self.add_part(part)
        elif value is not None:
            self._reasoning.append(check_text(value, "the reasoning"))

    def add_reasoning(self, item: Record) -> None:
        """Adds the reasoning of a message, which some servers repeat under a second key."""
        values = [item[key] for key in _REASONING_KEYS if not is_empty(item.get(key))]
        for value in values[:1]:
            self._add_reasoning(value)
        if any(value != values[0] for value in values):
            raise RecordError("several keys contain different reasoning")

    def add_call(self, call: Any) -> None:
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError("a tool call has no name")
        _, arguments = get_only(function, ("arguments", "input", "args"), "arguments of a call")
        if not isinstance(arguments, (str, dict, type(None))):
            raise RecordError(f"the arguments of a call are {describe_type(arguments)}")
        # A call without arguments has an empty object in every template.
        made = {"name": function["name"], "arguments": arguments or {}}
        self._calls.append({"type": "function", "function": made})

    def _add_result(self, part: Record) -> None:
        """Adds the result of a tool as a separate message, which ends the message before it."""
        _, value = get_only(part, ("content", "output", "response", "result"), "result of a tool")
        result = _Builder("tool")
        result.add_result(value)
        role, messages = self.role, self.finish()
        messages += result.finish() or [{"role": "tool", "content": ""}]
        self.role = role

    def add_result(self, value: Any) -> None:
        """Adds a result: a text, parts of a message, or any other value, whose JSON is the text."""
        is_parts = isinstance(value, list) and all(
            isinstance(part, dict) and part.get("type") in _TEXT_PARTS | _MEDIA_PARTS
            for part in value
        )
        if is_parts or isinstance(value, str):
            self.add_content(value)
        elif value is not None:
            self._texts.append(json.dumps(value, ensure_ascii=False, default=str))


def parse_message(item: Any) -> list[Message]:
    """Returns a recorded message: one message, or several if results of tools are within it.

    Raises:
        RecordError: The message has a part that cannot be read.
    """
    if not isinstance(item, dict):
        raise RecordError(f"a message is {describe_type(item)}")
    role = item.get("role")
    if len(item) == 2 and role in ("user", "assistant", "system") and "content" in item:
        content = item["content"]
        if isinstance(content, str) and not (role == "assistant" and "<details" in content):
            return [item] if content or role != "assistant" else []
    if role is None and "from" not in item:
        return _parse_item(item)
    name = item["from"] if role is None else role
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise RecordError(f"the role of a message is {describe_type(name)} that is not known")
    builder = _Builder(role)
    _check_other_keys(item)
    builder.add_reasoning(item)
    if role != "assistant" and builder.finish():
        raise RecordError("a message that is not the model's has reasoning")
    key, content = get_only(item, _CONTENT_KEYS, "content of a message")
    if not key and not any(key in item for key in (*_CONTENT_KEYS, "tool_calls", "refusal")):
        raise RecordError(f"a message has no content, but the keys {list_keys(item)}")
    if role == "tool" and not (key == "parts" or isinstance(content, str)):
        builder.add_result(content)
    else:  # a text may be empty JSON
        builder.add_content(item.get("content", content) if content is None else content)
    builder.add_content(item.get("refusal"))
    calls = item.get("tool_calls") or []
    calls = [*calls, item["function_call"]] if item.get("function_call") else calls
    for call in calls if isinstance(calls, list) else [calls]:
        builder.add_call(call)
    other = {key: item[key] for key in ("name", "tool_call_id") if isinstance(item.get(key), str)}
    return builder.finish(**(other if role == "tool" else {}))


def _parse_item(item: Record) -> list[Message]:
    """Returns an item of the Responses API that is not a message: reasoning, a call, a result."""
    if "type" not in item:
        raise RecordError(f"a message has no role, but the keys {list_keys(item)}")
    builder = _Builder("assistant")
    builder.add_part(item)
    return builder.finish()


def _check_other_keys(item: Record) -> None:
    known = {*_CONTENT_KEYS, *_REASONING_KEYS, "tool_calls", "function_call", *_OTHER_OBJECTS}
    for key, value in item.items():
        if isinstance(value, (list, dict)) and value and key not in known:
            raise RecordError(f'a message has the key "{key!s:.40}", which cannot be read')


def parse_messages(items: Iterable[Any]) -> list[Message]:
    """Returns the messages of a conversation. Items of one answer of the Responses API are one
    message."""
    messages: list[Message] = []
    is_after_item = False
    for item in items:
        parsed = parse_message(item)
        is_item = isinstance(item, dict) and "role" not in item and "from" not in item
        is_part = is_item or is_after_item
        if parsed and messages and is_part and parsed[0]["role"] == "assistant":
            parsed = merge_answer(messages, parsed)
        messages += parsed
        is_after_item = is_item and (not parsed or parsed[-1]["role"] == "assistant")
    return messages


def merge_answer(messages: list[Message], parsed: list[Message]) -> list[Message]:
    """Adds the beginning of `parsed` to the last message, if both are the model's; returns the
    rest."""
    last, first = messages[-1], parsed[0]
    if last["role"] != "assistant" or first["role"] != "assistant":
        return parsed
    merged = {**last, "content": last["content"] + first["content"]}
    for key in ("reasoning_content", "tool_calls"):
        values = [message[key] for message in (last, first) if key in message]
        if values:
            merged[key] = values[0] + values[1] if len(values) == 2 else values[0]
    messages[-1] = merged
    return parsed[1:]


def make_turns(messages: list[Message], first_answer: int = 0) -> tuple[Turn, ...]:
    """Returns a turn for every answer from message number `first_answer` on."""
    turns: list[Turn] = []
    context: list[Message] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= first_answer:
            turns.append(Turn(tuple(context), message))
            context = []
        else:
            context.append(message)
    if not turns:
        raise RecordError("the record has no answer")
    return tuple(turns)
