"""Converts recorded JSON values of several formats to conversations.

The value's keys determine the format; docs/guides/replay.md describes each format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ngram_npu.errors import RecordError, ReplayError
from ngram_npu.replay.answers import (
    Record,
    answers_of,
    checked_text,
    kind,
    message_of,
    token_ids_of,
)
from ngram_npu.replay.chat_template import completion_text
from ngram_npu.replay.files import QUESTIONS, STDIN, SUFFIXES, values
from ngram_npu.replay.records import Conversation, Message, Turn

_ID_KEYS = ("id", "conversation_id", "custom_id", "request_id", "question_id")
_IDS_KEYS = ("prompt_token_ids", "completion_token_ids")
_ANSWER_KEYS = ("completion", "response", "output")
_REQUEST_KEYS = ("request", "request_body")
_RESPONSE_KEYS = ("response", "response_body", "completion", "output")
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


def read_conversations(
    path: Path, limit: int | None = None, format_name: str | None = None
) -> list[Conversation]:
    """Read a file of conversations, in any of `FORMATS`.

    Args:
        path: the file, possibly compressed by gzip or zstd; "-" for standard input.
        limit: stop after this many conversations; the rest of the file is not read.
        format_name: one of `FORMATS`; None: detected from the content of each record.

    Raises:
        ReplayError: a record is not a conversation (the message names file and line), or the file
            cannot be opened or has no conversation.
    """
    conversations = list(islice(iter_conversations(path, format_name), limit))
    if not conversations:
        raise ReplayError(f"{path}: empty, no conversation in this file")
    return conversations


def iter_conversations(
    path: Path,
    format_name: str | None = None,
    skip: Callable[[ReplayError], None] | None = None,
    scope_field: str | None = None,
) -> Iterator[Conversation]:
    """`read_conversations` as an iterator, for files that do not fit into memory. `skip` is told of
    each record that is not a conversation; without it, one of them is an error. `scope_field` is
    the field of each record that becomes the conversation's scope, with dots between the keys."""
    name = "stdin" if path == STDIN else str(path)
    for number, (line, data) in enumerate(values(path), start=1):
        try:
            if isinstance(data, ReplayError):
                raise data
            found = conversations_of(data, f"{name}:{line}", number, format_name)
            if scope_field is not None:
                scope = _scope_of(data, scope_field, f"{name}:{line}")
                found = [replace(conversation, scope=scope) for conversation in found]
        except ReplayError as error:
            if skip is None:
                raise
            skip(error)
        else:
            yield from found


def conversations_of(
    data: object, where: str, number: int, insisted: str | None = None
) -> list[Conversation]:
    """The conversations of one value of a file; `number` is the id of a record without one."""
    if isinstance(data, list) and data and isinstance(data[0], dict):
        data = {"conversations" if "from" in data[0] else "messages": data}
    if not isinstance(data, dict):
        raise ReplayError(f"{where}: expected an object, got {kind(data)}")
    chosen = insisted or next((name for name, f in FORMATS.items() if f.matches(data)), None)
    if chosen is None:
        keys = ", ".join(f'"{key}"' for key in list(data)[:8]) or "none"
        raise ReplayError(
            f"{where}: no format has these keys: {keys}; this would work: "
            f"{FORMATS['messages'].example} or {FORMATS['pairs'].example}"
        )
    ident = next((data[key] for key in _ID_KEYS if data.get(key) is not None), number)
    if isinstance(ident, dict) and len(ident) == 1:  # MongoDB's {"$oid": ...}
        (ident,) = ident.values()
    if not isinstance(ident, str):
        ident = json.dumps(ident)
    try:
        return [Conversation(ident, turns, where) for turns in FORMATS[chosen].turns(data, where)]
    except RecordError as error:
        example = FORMATS[chosen].example
        raise ReplayError(f"{error}; read as {chosen}, of which this works: {example}") from error


def _scope_of(data: object, field: str, where: str) -> str | int:
    """Never a default: text whose owner is not known would be everybody's."""
    for key in field.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    if isinstance(data, str):
        return data
    if isinstance(data, int) and not isinstance(data, bool) and 0 <= data < 1 << 62:
        return data
    raise ReplayError(
        f'{where}: scope field "{field}": expected a string or an integer below 2**62, got '
        f"{kind(data)}"
    )


# ngram_npu's own format


def _own(data: Record, where: str) -> list[tuple[Turn, ...]]:
    turns = _array(data, "turns", where)
    parsed = tuple(_turn(turn, f"{where}: turns[{i}]") for i, turn in enumerate(turns))
    if len({turn.has_token_ids for turn in parsed}) > 1:
        raise ReplayError(f"{where}: some turns carry token ids and some do not")
    return [parsed]


def _turn(data: object, where: str) -> Turn:
    if not isinstance(data, dict):
        raise RecordError(f"{where} must be an object, got {kind(data)}")
    keys = ("prompt", "completion")
    texts: Record = {key: checked_text(data[key], f"{where}.{key}") for key in keys if key in data}
    ids: Record = {
        key: token_ids_of(data[key], f"{where}.{key}") for key in _IDS_KEYS if key in data
    }
    if len(ids) == 1:
        missing = next(key for key in _IDS_KEYS if key not in ids)
        raise RecordError(f'{where}: missing key "{missing}" (the other token ids are there)')
    if not ids and len(texts) < 2:
        missing = next(key for key in keys if key not in texts)
        raise RecordError(f'{where}: missing key "{missing}"')
    return Turn(**texts, **ids)


# Prompt and answer


def _pair(data: Record, where: str) -> list[tuple[Turn, ...]]:
    if all(key in data for key in _IDS_KEYS):
        return [(_turn({key: data[key] for key in _IDS_KEYS}, where),)]
    if "prompt" not in data:
        raise RecordError(f'{where}: missing key "prompt"')
    key = next((key for key in _ANSWER_KEYS if key in data), None)
    if key is None:
        raise RecordError(f'{where}: missing key "completion"')
    if isinstance(data["prompt"], list) or isinstance(data[key], list):
        prompt, answer = data["prompt"], data[key]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        answers = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        return [_turns([*messages, *answers], where, since=len(messages))]
    return [
        (
            Turn(
                checked_text(data["prompt"], f"{where}: prompt"),
                checked_text(data[key], f"{where}: {key}"),
            ),
        )
    ]


# Messages


def _messages(data: Record, where: str) -> list[tuple[Turn, ...]]:
    key = "conversation" if "conversation" in data else "messages"
    return [_turns(_array(data, key, where), where, key=key, tools=data.get("tools"))]


def _sharegpt(data: Record, where: str) -> list[tuple[Turn, ...]]:
    items = _array(data, "conversations", where)
    messages = []
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise RecordError(f"{where}: conversations[{i}] must be an object, got {kind(item)}")
        if "from" not in item:
            messages.append(item)
            continue
        role = item["from"]
        messages.append({"role": _SHAREGPT_ROLES.get(role, role), "content": item.get("value")})
    return [_turns(messages, where, key="conversations", tools=data.get("tools"))]


def _turns(
    items: list[Any], where: str, since: int = 0, key: str = "messages", tools: object = None
) -> tuple[Turn, ...]:
    """A turn for every assistant message from number `since` on; earlier messages are context."""
    turns: list[Turn] = []
    offered = tuple(tools) if isinstance(tools, list) else ()
    context: list[Message] = []
    for i, item in enumerate(items):
        message = message_of(item, f"{where}: {key}[{i}]")
        if message["role"] == "assistant" and i >= since:
            answer = checked_text(completion_text(message), f"{where}: {key}[{i}]")
            turns.append(Turn(None, answer, messages=tuple(context), answer=message, tools=offered))
            offered = ()
            context = []
        else:
            context.append(message)
    if not turns:
        roles = ", ".join(str(message["role"]) for message in context[:6]) or "none"
        raise RecordError(f'{where}: no message of the role "assistant" (roles: {roles})')
    return tuple(turns)


# Requests with their responses


def _log(data: Record, where: str) -> list[tuple[Turn, ...]]:
    """Earlier answers in the request's messages are context: a log has them as records too."""
    _refuse_failure(data, where)
    key = next((key for key in _RESPONSE_KEYS if key in data), None)
    at = where if key is None else f"{where}: {key}"
    answers, prompt_ids = answers_of(data if key is None else data[key], at)
    if prompt_ids is not None and all(answer.token_ids for answer in answers):
        ids = [token_ids_of(answer.token_ids, f"{at}: token_ids") for answer in answers]
        return [(Turn(prompt_token_ids=prompt_ids, completion_token_ids=of),) for of in ids]
    if "custom_id" in data and not any(key in data for key in (*_REQUEST_KEYS, "messages")):
        request = _request({"request": _batch_request(data["custom_id"], where)}, where)
    else:
        request = _request(data, where)
    messages = _request_messages(request, where)
    if messages is not None:
        tools = request.get("tools")
        return [
            _turns([*messages, answer.message()], where, since=len(messages), tools=tools)
            for answer in answers
        ]
    prompts = request.get("prompt", request.get("text"))
    prompts = prompts if isinstance(prompts, list) else [prompts]
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        found = ", ".join(f'"{key}"' for key in list(request)[:8]) or "nothing"
        raise RecordError(
            f'{where}: the request must have "messages", "input" or a text "prompt", got {found}'
        )
    # The completions endpoint: the prompt is the model's whole input, template included. With
    # several prompts the answers are in their order.
    return [
        (
            Turn(
                checked_text(prompts[i * len(prompts) // len(answers)], f"{where}: prompt"),
                completion_text(answer.message()),
                raw="prompt" in request,
            ),
        )
        for i, answer in enumerate(answers)
    ]


def _refuse_failure(data: Record, where: str) -> None:
    """A record that says itself that its request failed."""
    status = data.get("status_code", data.get("status"))
    if isinstance(status, int) and status >= 400:
        raise RecordError(f"{where}: the response is an error: HTTP status {status}")
    if data.get("error"):
        raise RecordError(f"{where}: the request failed: {json.dumps(data['error']):.100}")


def _request(data: Record, where: str) -> Record:
    """The request: an object, possibly as JSON text, possibly within "body". A plain text is
    returned under the key "text"."""
    key = next((key for key in _REQUEST_KEYS if key in data), None)
    value: Any = data if key is None else data[key]
    for _ in range(2):
        if isinstance(value, str):
            text = checked_text(value, f"{where}: {key}")
            with suppress(ValueError, RecursionError):
                value = json.loads(text)
            if not isinstance(value, dict):
                return {"text": text}
        if isinstance(value, dict) and "body" in value:
            value = value["body"]
    if not isinstance(value, dict):
        raise RecordError(f"{where}: {key} must be an object, got {kind(value)}")
    return value


def _request_messages(request: Record, where: str) -> list[Any] | None:
    """The messages of a request, with its system's text; None for one with a prompt."""
    if "messages" in request:
        messages = [*_array(request, "messages", where)]
    elif "input" in request:  # the Responses API
        given = request["input"]
        items = given if isinstance(given, list) else [{"role": "user", "content": given}]
        messages = [_as_message(item) for item in items]
    else:
        return None
    system = request.get("system") or request.get("instructions")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _as_message(item: Any) -> Any:
    """An item of the Responses API as a message."""
    if not isinstance(item, dict) or "role" in item:
        return item
    if "output" in item:
        return {"role": "tool", "content": item["output"]}
    return {"role": "assistant", "content": [item]}


def _batch_request(ident: Any, where: str) -> Any:
    """The request of a batch's answer, from the batch's input in the same folder."""
    answers = Path(where.rpartition(":")[0])
    if not answers.is_file():  # stdin has no folder
        raise RecordError(f"{where}: a batch's output needs its input: pass the file, not a pipe")
    requests = _requests_beside(answers)
    if ident not in requests:
        raise RecordError(
            f"{where}: the request {ident!r} is not here: put the batch's input into the same "
            "folder"
        )
    return requests[ident]


@lru_cache(1)
def _requests_beside(answers: Path) -> dict[Any, Any]:
    """By id, from the other files in the folder."""
    found = {}
    for file in sorted(answers.parent.iterdir()):
        if file != answers and file.name.endswith(SUFFIXES) and file.is_file():
            for _, item in values(file):
                if not (isinstance(item, dict) and "body" in item and "custom_id" in item):
                    break  # another kind of file
                found[item["custom_id"]] = item
    return found


# FastChat's and Spec-Bench's answers


def _fastchat(data: Record, where: str) -> list[tuple[Turn, ...]]:
    ident = data.get("question_id")
    questions = _questions(Path(where.rpartition(":")[0]), where).get(ident)
    if questions is None:
        raise ReplayError(f"{where}: {QUESTIONS} has no question {ident!r}")
    parsed = []
    for i, choice in enumerate(_array(data, "choices", where)):
        answers = _array(choice, "turns", f"{where}: choices[{i}]")
        if len(answers) > len(questions):
            raise ReplayError(
                f"{where}: {len(answers)} answers to question {ident!r} of {len(questions)} turns"
            )
        at = f"{where}: choices[{i}].turns"
        parsed.append(
            tuple(
                Turn(question, checked_text(answer, f"{at}[{j}]"))
                for j, (question, answer) in enumerate(zip(questions, answers, strict=False))
            )
        )
    return parsed


def _questions(answers: Path, where: str) -> dict[Any, list[str]]:
    """Turns by question id, from the answers' folder or the one above it."""
    for folder in (answers.parent, answers.resolve().parent.parent):
        file = folder / QUESTIONS
        if file.is_file():
            return _questions_in(file)
    raise ReplayError(
        f"{where}: FastChat's answers are without their questions: put {QUESTIONS} beside the "
        "file or into the folder above it"
    )


@lru_cache(1)
def _questions_in(file: Path) -> dict[Any, list[str]]:
    return {
        item["question_id"]: [checked_text(turn, f"{file}:{line}") for turn in item["turns"]]
        for line, item in values(file)
        if isinstance(item, dict) and "question_id" in item and "turns" in item
    }


# Detecting the format


@dataclass(frozen=True)
class _Format:
    matches: Callable[[Record], bool]
    turns: Callable[[Record, str], list[tuple[Turn, ...]]]
    example: str


def _looks_like_log(data: Record) -> bool:
    asked = "messages" in data or any(key in data for key in _REQUEST_KEYS)
    if "choices" in data:
        return asked or "prompt" in data or "object" in data
    # A batch's output names its request, which is in another file.
    return any(key in data for key in _RESPONSE_KEYS) and (asked or "custom_id" in data)


FORMATS: dict[str, _Format] = {
    "turns": _Format(
        lambda data: "turns" in data,
        _own,
        '{"turns": [{"prompt": "Hello", "completion": "Hi"}]}',
    ),
    "log": _Format(
        _looks_like_log,
        _log,
        '{"request": {"messages": [{"role": "user", "content": "Hello"}]}, "response": '
        '{"choices": [{"message": {"role": "assistant", "content": "Hi"}}]}}',
    ),
    "fastchat": _Format(
        lambda data: "choices" in data and "question_id" in data,
        _fastchat,
        '{"question_id": 81, "choices": [{"turns": ["Hi"]}]}',
    ),
    "messages": _Format(
        lambda data: "messages" in data or "conversation" in data,
        _messages,
        '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": '
        '"Hi"}]}',
    ),
    "sharegpt": _Format(
        lambda data: "conversations" in data,
        _sharegpt,
        '{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}',
    ),
    "pairs": _Format(
        lambda data: (
            ("prompt" in data or _IDS_KEYS[0] in data)
            and any(key in data for key in (*_ANSWER_KEYS, _IDS_KEYS[1]))
        ),
        _pair,
        '{"prompt": "Hello", "completion": "Hi"}',
    ),
}
"""Formats by name, in the order in which they are tried."""


# Checked access to values


def _array(data: Record, key: str, where: str) -> list[Any]:
    """The non-empty list under a key."""
    if not isinstance(data, dict) or key not in data:
        raise RecordError(f'{where}: missing key "{key}"')
    value = data[key]
    if not isinstance(value, list):
        raise RecordError(f'{where}: "{key}" must be an array, got {kind(value)}')
    if not value:
        raise RecordError(f'{where}: "{key}" is empty')
    return value
