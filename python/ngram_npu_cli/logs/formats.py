"""Converts recorded JSON values of several formats to conversations.

The keys of a value determine its format. docs/guides/replay.md describes each format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.answers import (
    EMPTY,
    Record,
    check_success,
    check_text,
    check_token_ids,
    check_type,
    describe_type,
    parse_answers,
    parse_message,
)
from ngram_npu_cli.logs.chat_template import render_completion
from ngram_npu_cli.logs.conversations import Conversation, Message, Turn
from ngram_npu_cli.logs.files import Batch, parse_batch, read_batches

_ID_KEYS = ("id", "conversation_id", "custom_id", "request_id")
_IDS_KEYS = ("prompt_token_ids", "completion_token_ids")
_ANSWER_KEYS = ("response", "completion", "output")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


def iter_conversations(
    path: Path,
    format_name: str | None = None,
    skip: Callable[[InputError], None] | None = None,
    scope_field: str | None = None,
) -> Iterator[Conversation]:
    """Yields the conversations of a file, which need not fit into memory.

    Args:
        path: The file, possibly compressed by gzip; "-" for standard input.
        format_name: One of `FORMATS`; None: detected from the content of each record.
        skip: Called with the error of a record that is no conversation; None: raise the error.
        scope_field: Field of each record that contains the conversation's scope, with dots between
            nested keys.
    """
    for batch in read_batches(path):
        for item in convert_batch(batch, format_name, scope_field):
            if isinstance(item, Conversation):
                yield item
            elif skip is None:
                raise item
            else:
                skip(item)


def convert_batch(
    batch: Batch, format_name: str | None = None, scope_field: str | None = None
) -> Iterator[Conversation | InputError]:
    """Yields the conversations of a part of a file, and an error for each record that is none."""
    for number, location, data in parse_batch(batch):
        try:
            if isinstance(data, InputError):
                raise data
            conversations = parse_record(data, location, number, format_name)
            if scope_field is not None:
                scope = _get_scope(data, scope_field, location)
                conversations = [replace(c, scope=scope) for c in conversations]
        except InputError as error:
            yield error
        else:
            yield from conversations


def parse_record(
    data: object, location: str, number: int, format_name: str | None = None
) -> list[Conversation]:
    """Returns the conversations of one record; `number` is its id if it has none."""
    if isinstance(data, list) and data and isinstance(data[0], dict):
        data = {"conversations" if "from" in data[0] else "messages": data}
    if not isinstance(data, dict):
        raise InputError(f"{location}: expected an object, got {describe_type(data)}")
    if format_name is None:
        format_name = next((name for name, f in FORMATS.items() if f.matches(data)), None)
    if format_name is None:
        keys = ", ".join(f'"{key}"' for key in list(data)[:8]) or "none"
        raise InputError(
            f"{location}: no format has these keys: {keys}; this would work: "
            f"{FORMATS['messages'].example} or {FORMATS['pairs'].example}"
        )
    try:
        record_id = _get_id(data, number)
        all_turns = FORMATS[format_name].parse(data, location)
        return [Conversation(record_id, turns, location) for turns in all_turns]
    except RecursionError as error:
        raise InputError(f"{location}: nested too deeply to be read") from error
    except RecordError as error:
        example = FORMATS[format_name].example
        raise InputError(
            f"{error}; read as {format_name}, of which this works: {example}"
        ) from error


def _get_id(data: Record, number: int) -> str:
    record_id = next((data[key] for key in _ID_KEYS if data.get(key) is not None), number)
    text = record_id if isinstance(record_id, str) else json.dumps(record_id)
    return text.encode("utf-8", "backslashreplace").decode()


def _get_scope(data: object, field: str, location: str) -> str | int:
    """Returns the scope of a record. A record without a scope is an error: with a default scope,
    its text would be shared with all requests of that scope."""
    for key in field.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    if isinstance(data, str):
        return check_text(data, f'{location}: scope field "{field}"')
    if isinstance(data, int) and not isinstance(data, bool) and 0 <= data < 1 << 62:
        return data
    raise InputError(
        f'{location}: scope field "{field}": expected a string or an integer below 2**62, got '
        f"{describe_type(data)}"
    )


# Records in the format of this project


def _parse_turns_record(data: Record, location: str) -> list[tuple[Turn, ...]]:
    turns = _get_array(data, "turns", location)
    parsed = tuple(_parse_turn(turn, f"{location}: turns[{i}]") for i, turn in enumerate(turns))
    if len({turn.has_token_ids for turn in parsed}) > 1:
        raise InputError(f"{location}: some turns carry token ids and some do not")
    return [parsed]


def _parse_turn(data: Any, location: str) -> Turn:
    check_type(data, dict, location)
    keys = ("prompt", "completion")
    texts: Record = {key: check_text(data[key], f"{location}.{key}") for key in keys if key in data}
    ids: Record = {
        key: check_token_ids(data[key], f"{location}.{key}") for key in _IDS_KEYS if key in data
    }
    if len(ids) == 1:
        missing_key = next(key for key in _IDS_KEYS if key not in ids)
        raise RecordError(
            f'{location}: missing key "{missing_key}" (the other token ids are there)'
        )
    if not ids and len(texts) < 2:
        missing_key = next(key for key in keys if key not in texts)
        raise RecordError(f'{location}: missing key "{missing_key}"')
    return Turn(**texts, **ids)


# Records with a prompt and an answer


def _parse_pair(data: Record, location: str) -> list[tuple[Turn, ...]]:
    if all(key in data for key in _IDS_KEYS):
        ids: Record = {key: check_token_ids(data[key], f"{location}: {key}") for key in _IDS_KEYS}
        return [(Turn(**ids),)]
    key = next((key for key in _ANSWER_KEYS if key in data), "completion")
    for required in ("prompt", key):
        if required not in data:
            raise RecordError(f'{location}: missing key "{required}"')
    prompt, answer = data["prompt"], data[key]
    if isinstance(prompt, list) or isinstance(answer, list) or _get_system(data, location):
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        answers = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        return [_make_turns(data, [*messages, *answers], location, first_answer=len(messages))]
    return [
        (Turn(check_text(prompt, f"{location}: prompt"), check_text(answer, f"{location}: {key}")),)
    ]


# Records with messages


def _parse_messages(
    data: Record, location: str, keys: tuple[str, ...] = ("conversation", "messages")
) -> list[tuple[Turn, ...]]:
    key = next((key for key in keys if key in data), keys[-1])
    messages = [_convert_sharegpt(item) for item in _get_array(data, key, location)]
    return [_make_turns(data, messages, location, key=key)]


def _convert_sharegpt(item: Any) -> Any:
    """Returns an item of ShareGPT as a message."""
    if not isinstance(item, dict) or "from" not in item:
        return item
    role = item["from"]
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {**item, "role": role, "content": item.get("value", item.get("content"))}


def _make_turns(
    data: Record, items: list[Any], location: str, *, first_answer: int = 0, key: str = "messages"
) -> tuple[Turn, ...]:
    """Returns a turn for every assistant message from number `first_answer` on.

    Messages before this number are context. `data` may contain a system text and tools outside of
    the messages.
    """
    system, tools = _get_system(data, location), _get_tools(data, location)
    turns: list[Turn] = []
    context: list[Message] = []
    for i, item in enumerate(items):
        message = parse_message(item, f"{location}: {key}[{i}]")
        if i == 0 and (message,) != system:  # some records repeat the system message
            context += system
        if message["role"] == "assistant" and i >= first_answer:
            answer = check_text(render_completion(message), f"{location}: {key}[{i}]")
            turns.append(Turn(None, answer, messages=tuple(context), answer=message, tools=tools))
            tools = ()
            context = []
        else:
            context.append(message)
    if not turns:
        roles = ", ".join(str(message["role"]) for message in context[:6]) or "none"
        raise RecordError(f'{location}: no message of the role "assistant" (roles: {roles})')
    return tuple(turns)


def _get_system(data: Record, location: str) -> tuple[Message, ...]:
    """Returns the message of a system text that is stored separately from messages or prompt."""
    key = next((key for key in ("system", "instructions") if data.get(key) not in EMPTY), None)
    if key is None:
        return ()
    return (parse_message({"role": "system", "content": data[key]}, f"{location}: {key}"),)


def _get_tools(data: Record, location: str) -> tuple[Any, ...]:
    """Returns the definitions of tools, which some datasets have as JSON text."""
    tools = data.get("tools")
    if isinstance(tools, str) and tools:
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    if tools in (None, ""):
        return ()
    return tuple(check_type(tools, list, f"{location}: tools"))


# Records with a request and its response


def _parse_log(data: Record, location: str) -> list[tuple[Turn, ...]]:
    """Returns a turn for each answer to a request. Earlier answers in the request's messages are
    context, because they have separate records."""
    check_success(data, location)
    if data.get("error"):
        raise RecordError(f"{location}: the request failed: {json.dumps(data['error']):.100}")
    key = next((key for key in _ANSWER_KEYS if key in data), None)
    part_location = location if key is None else f"{location}: {key}"
    answers = parse_answers(data if key is None else data[key], part_location)
    has_ids = all(answer.has_ids for answer in answers)
    try:
        request = _get_request(data, location)
    except RecordError:
        if not has_ids:  # token ids need no request
            raise
        request = {}
    if request.get("echo"):
        raise RecordError(f'{location}: expected no "echo", which repeats the prompt in the answer')
    if has_ids:
        return [
            (Turn(None, None, answer.prompt_token_ids, tuple(answer.token_ids)),)
            for answer in answers
        ]
    messages = _get_request_messages(request, location)
    if messages is None:
        prompt = _get_whole_prompt(request, location)
        return [
            (Turn(prompt, render_completion(answer.make_message()), raw="prompt" in request),)
            for answer in answers
        ]
    return [
        _make_turns(
            request, [*messages, answer.make_message()], location, first_answer=len(messages)
        )
        for answer in answers
    ]


def _get_whole_prompt(request: Record, location: str) -> str:
    """Returns the model's whole input, template included, of the completions endpoint."""
    prompt = request.get("prompt", request.get("text"))
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        keys = ", ".join(f'"{key}"' for key in list(request)[:8]) or "nothing"
        raise RecordError(
            f'{location}: the request must have "messages", "input" or one text "prompt", got '
            f"{keys}"
        )
    return check_text(prompt, f"{location}: prompt")


def _get_request(data: Record, location: str) -> Record:
    """Returns the request, which may be JSON text or be nested in "body". Plain text is returned
    under the key "text"."""
    value: Any = data.get("request", data)
    for _ in range(2):
        if isinstance(value, str):
            text = check_text(value, f"{location}: request")
            with suppress(ValueError, RecursionError):
                value = json.loads(text)
            if not isinstance(value, dict):
                return {"text": text}
        if isinstance(value, dict) and "body" in value:
            value = value["body"]
    request: Record = check_type(value, dict, f"{location}: request")
    return request


def _get_request_messages(request: Record, location: str) -> list[Any] | None:
    """Returns the messages of a request; None if its prompt is the model's whole input."""
    if "messages" in request:
        return _get_array(request, "messages", location)
    if "input" in request:  # the Responses API
        items = request["input"]
        if not isinstance(items, list):
            items = [{"role": "user", "content": items}]
        return [_convert_item(item) for item in items]
    if isinstance(request.get("prompt"), str) and _get_system(request, location):
        return [{"role": "user", "content": request["prompt"]}]
    return None


def _convert_item(item: Any) -> Any:
    """Returns an item of the Responses API as a message."""
    if not isinstance(item, dict) or "role" in item:
        return item
    if "output" in item:
        return {"role": "tool", "content": item["output"]}
    if item.get("type") in (None, "message"):  # is reported as a message without a role
        return item
    return {"role": "assistant", "content": [item]}


# Detecting the format


@dataclass(frozen=True)
class _Format:
    matches: Callable[[Record], bool]
    parse: Callable[[Record, str], list[tuple[Turn, ...]]]
    example: str


def _looks_like_log(data: Record) -> bool:
    has_request = "messages" in data or "request" in data
    if "choices" in data:
        return has_request or "prompt" in data or "object" in data
    # The output of a batch, joined with its input, has the request under "body".
    return any(key in data for key in _ANSWER_KEYS) and (has_request or "custom_id" in data)


FORMATS: dict[str, _Format] = {
    "turns": _Format(
        lambda data: "turns" in data,
        _parse_turns_record,
        '{"turns": [{"prompt": "Hello", "completion": "Hi"}]}',
    ),
    "log": _Format(
        _looks_like_log,
        _parse_log,
        '{"request": {"messages": [{"role": "user", "content": "Hello"}]}, "response": '
        '{"choices": [{"message": {"role": "assistant", "content": "Hi"}}]}}',
    ),
    "messages": _Format(
        lambda data: "messages" in data or "conversation" in data,
        _parse_messages,
        '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": '
        '"Hi"}]}',
    ),
    "sharegpt": _Format(
        lambda data: "conversations" in data,
        lambda data, location: _parse_messages(data, location, ("conversations",)),
        '{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}',
    ),
    "pairs": _Format(
        lambda data: (
            ("prompt" in data or _IDS_KEYS[0] in data)
            and any(key in data for key in (*_ANSWER_KEYS, _IDS_KEYS[1]))
        ),
        _parse_pair,
        '{"prompt": "Hello", "completion": "Hi"}',
    ),
}
"""Formats by name. A record has the first format that matches."""


# Checked access to values


def _get_array(data: Record, key: str, location: str) -> list[Any]:
    """Returns the non-empty list under a key."""
    if not isinstance(data, dict) or key not in data:
        raise RecordError(f'{location}: missing key "{key}"')
    value: list[Any] = check_type(data[key], list, f'{location}: "{key}"')
    if not value:
        raise RecordError(f'{location}: "{key}" is empty')
    return value
