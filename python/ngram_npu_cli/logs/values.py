"""Conversations, and checks of the values from which they are made."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ngram_npu.errors import RecordError

Record = dict[str, Any]

Message = dict[str, Any]
"""A message for chat templates: the texts "role" and "content", and optionally "reasoning_content",
"tool_calls", "name" and "tool_call_id"."""


class Turn(NamedTuple):
    """The input that a turn adds to the context, and the model's answer.

    Attributes:
        messages: The messages since the last turn: system, user, results of tools.
        answer: The answer as a message; None if it is recorded as token ids.
        prompt: Instead of messages, the model's whole input, template included.
        prompt_token_ids, answer_token_ids: Token ids, which are used as they are.
    """

    messages: tuple[Message, ...] = ()
    answer: Message | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    answer_token_ids: tuple[int, ...] | None = None


class Conversation(NamedTuple):
    """Turns that share one growing context.

    Attributes:
        where: File and line for error messages, such as "file.jsonl:3".
        tools: Definitions of the tools that the model may call.
        session: The record's session or conversation; empty if it has none.
        salt: Value of the record's salt field; None without a salt field.
    """

    turns: tuple[Turn, ...]
    where: str
    tools: tuple[Any, ...] = ()
    session: str = ""
    salt: str | None = None


def decode_json(value: Any) -> Any:
    """Returns the value of a text that is a JSON object, array or null; others unchanged."""
    if isinstance(value, str) and (value.lstrip()[:1] in ("{", "[") or value.strip() == "null"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def is_empty(value: Any) -> bool:
    """Whether a value is null, false, an empty text or container, or the JSON text of one."""
    if isinstance(value, str):
        return not value or (len(value) < 8 and not decode_json(value))
    return value is None or value is False or (isinstance(value, (list, dict)) and not value)


def list_keys(record: Record) -> str:
    """Returns the keys of a record for messages. Its values are never shown."""
    keys = [f'"{key:.40}"' for key in map(str, record)]
    return ", ".join(keys[:12]) + (" ..." if len(keys) > 12 else "") or "none"


def get_only(record: Record, keys: tuple[str, ...], what: str) -> tuple[str, Any]:
    """Returns the only one of the keys that has a value, and the value; ("", None) if none has.

    Raises:
        RecordError: Several keys have values, so that the record may mean something else.
    """
    found = [key for key in keys if record.get(key) not in (None, "", [], {})]
    if len(found) > 1:
        raise RecordError(f"several keys may be the {what}: {', '.join(found)}")
    return (found[0], record[found[0]]) if found else ("", None)


def check_text(value: Any, name: str) -> str:
    """Returns the value if it is a text."""
    if not isinstance(value, str):
        raise RecordError(f"{name} must be a text, got {type(value).__name__}")
    return value


def check_list(value: Any, name: str) -> list[Any]:
    """Returns the value if it is a list of objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RecordError(f"{name} must be a list of objects, got {type(value).__name__}")
    return value


def check_token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Returns the value if it is a list of token ids."""
    is_list = isinstance(value, list)
    if not is_list or not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise RecordError(f"{name} must be a list of integers in [0, 2**31)")
    return tuple(value)
