"""Converts messages of OpenAI, Anthropic, OpenTelemetry and ShareGPT to one form.

An answer contains only what the model generated. A part that is not known is refused, because a
prompt or answer without it would be wrong. Images and sound are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ngram_npu.errors import RecordError

from ngram_npu_cli.logs.values import (
    Message,
    Record,
    Turn,
    check_text,
    decode_json,
    get_only,
    list_keys,
)

_ROLE_NAMES = {
    "user": "human",
    "assistant": "gpt ai function_call",
    "system": "",
    "developer": "",
    "tool": "function observation",
}
_ROLES = {name: role for role, names in _ROLE_NAMES.items() for name in (role, *names.split())}
_CONTENT_KEYS = ("content", "value", "parts")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
_REASONING_PARTS = {"thinking", "reasoning"}
_PART_KEYS = ("text", "content", "refusal", "thinking", "reasoning")
_CALL_PARTS = {"tool_use", "tool_call"}
_RESULT_PARTS = {"tool_result", "tool_call_response"}
_HIDDEN_PART = "redacted_thinking"
"""A part that stands for reasoning whose text is not in the log."""
_MEDIA_PARTS = re.compile(r"(input_)?(image|audio|video)(_url)?")
_OTHER_OBJECTS = {
    *("annotations", "metadata", "usage", "logprobs", "reasoning_details", "extra"),
    *("cache_control", "provider_specific_fields", "routed_experts"),
}
"""Keys of messages whose objects and lists are not text for the model."""
_RENDERED = '<details type="'


class _Builder:
    """Collects the parts of one recorded message. The results of tools in it become messages."""

    def __init__(self, role: str, reasoning: Iterable[str]) -> None:
        self._role = role
        self._messages: list[Message] = []
        self._texts: list[str] = []
        self._reasoning = list(reasoning)
        self._calls: list[Any] = []

    def finish(self, **other: Any) -> list[Message]:
        """Ends a message, and returns all. A message without text and calls is left out."""
        # Blocks of an answer follow each other as they were generated.
        content = ("" if self._role == "assistant" else "\n").join(self._texts)
        message = {"role": self._role, "content": content, **other}
        if any(self._reasoning):
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        if self._role == "assistant" and _RENDERED in content:
            raise RecordError("an answer contains HTML of a user interface, which no model wrote")
        if len(message) > 2 or self._texts:
            self._messages.append(message)
        self._texts, self._reasoning, self._calls = [], [], []
        return self._messages

    def add_content(self, content: Any) -> None:
        """Adds a text, or a list of parts."""
        if isinstance(content, str):
            self._texts.append(content)
        elif isinstance(content, list):
            for part in content:
                self.add_part(part)
        elif content is not None:
            raise RecordError(f"a content must be a text or a list, got {type(content).__name__}")

    def add_part(self, part: Any) -> None:
        """Adds a part of a message."""
        if isinstance(part, str):
            self._texts.append(part)
            return
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RecordError("a part of a content has no type")
        if kind in _TEXT_PARTS or kind in _REASONING_PARTS:
            if part.keys().isdisjoint(_PART_KEYS):
                raise RecordError(f'a part "{kind}" has no text, but the keys {list_keys(part)}')
            _, text = get_only(part, _PART_KEYS, "text of a part")
            texts = self._texts if kind in _TEXT_PARTS else self._reasoning
            texts.append(check_text("" if text is None else text, f'a part "{kind}"'))
        elif kind in _CALL_PARTS:
            self.add_call(part)
        elif kind in _RESULT_PARTS and self._role != "assistant":
            self._add_result(part)
        elif kind != _HIDDEN_PART and not _MEDIA_PARTS.fullmatch(kind):
            raise RecordError(f'a part of the type "{kind:.40}" cannot be read')

    def add_call(self, call: Any) -> None:
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError("a tool call has no name")
        _, arguments = get_only(function, ("arguments", "input"), "arguments of a call")
        arguments = decode_json(arguments)  # a text in APIs, an object in templates
        if not isinstance(arguments, (str, dict, type(None))):
            raise RecordError("the arguments of a call must be a text or an object")
        # A call without arguments has an empty object in every template.
        made = {"name": function["name"], "arguments": arguments or {}}
        self._calls.append({"type": "function", "function": made})

    def _add_result(self, part: Record) -> None:
        """Adds the result of a tool as a separate message, which ends the message before it."""
        _, value = get_only(part, ("content", "response", "result"), "result of a tool")
        self.finish()
        self._messages.append({"role": "tool", "content": read_result(value)})


def read_result(value: Any) -> str:
    """Returns the text of a tool's result: a text, parts with text, or the JSON of a value."""
    if isinstance(value, list) and any(_is_text_part(part) for part in value):
        texts = [part["text"] for part in value if _is_text_part(part)]
        others = [part for part in value if not _is_text_part(part)]
        if not all(
            isinstance(p, dict) and _MEDIA_PARTS.fullmatch(str(p.get("type"))) for p in others
        ):
            raise RecordError("a part of the result of a tool cannot be read")
        return "\n".join(texts)
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _is_text_part(part: Any) -> bool:
    has_type = isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
    return has_type and isinstance(part.get("text"), str)


def parse_message(item: Any) -> list[Message]:
    """Returns a recorded message: one message, or several if results of tools are within it.

    Raises:
        RecordError: The message has a part that cannot be read.
    """
    if not isinstance(item, dict):
        raise RecordError(f"a message must be an object, got {type(item).__name__}")
    content, role = item.get("content"), item.get("role")
    if len(item) == 2 and isinstance(content, str) and role in ("user", "assistant", "system"):
        if not content and role == "assistant":
            return []
        if _RENDERED not in content:
            return [item]
    name = item.get("from") if role is None else role
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RecordError(f"a message has no role that is known, but the keys {list_keys(item)}")
    for key, value in item.items():
        is_known = key in (*_CONTENT_KEYS, "tool_calls") or key in _OTHER_OBJECTS
        if isinstance(value, (list, dict)) and value and not is_known:
            raise RecordError(f'a message has the key "{key!s:.40}", which cannot be read')
    reasoning = {item[key] for key in _REASONING_KEYS if isinstance(item.get(key), str)}
    if len(reasoning) > 1:
        raise RecordError("several keys contain different reasoning")
    builder = _Builder(role, reasoning)
    key, content = get_only(item, _CONTENT_KEYS, "content of a message")
    if not key and not {*_CONTENT_KEYS, "tool_calls", "refusal"} & item.keys():
        raise RecordError(f"a message has no content, but the keys {list_keys(item)}")
    is_result = role == "tool" and key != "parts"
    builder.add_content(read_result(content) if is_result else content)
    builder.add_content(item.get("refusal"))
    for call in item.get("tool_calls") or ():
        builder.add_call(call)
    names = ("name", "tool_call_id") if role == "tool" else ()
    other = {key: item[key] for key in names if isinstance(item.get(key), str)}
    messages = builder.finish(**other)
    if role != "assistant" and any("reasoning_content" in m or "tool_calls" in m for m in messages):
        raise RecordError("a message that is not the model's has reasoning or calls")
    return messages or ([{"role": role, "content": ""}] if role != "assistant" else [])


def parse_messages(items: Iterable[Any]) -> list[Message]:
    """Returns the messages of a conversation."""
    return [message for item in items for message in parse_message(item)]


def make_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Returns a turn for every answer."""
    turns: list[Turn] = []
    context: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(Turn(tuple(context), message))
            context = []
        else:
            context.append(message)
    if not turns:
        raise RecordError("the record has no answer")
    return tuple(turns)
