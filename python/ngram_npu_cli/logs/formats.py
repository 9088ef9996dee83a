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

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.answers import (
    Answer,
    Record,
    answers_of,
    checked_text,
    kind,
    message_of,
    token_ids_of,
)
from ngram_npu_cli.logs.chat_template import completion_text
from ngram_npu_cli.logs.files import QUESTIONS, STDIN, SUFFIXES, values
from ngram_npu_cli.logs.records import Conversation, Message, Turn

_ID_KEYS = ("id", "conversation_id", "custom_id", "request_id", "question_id")
_IDS_KEYS = ("prompt_token_ids", "completion_token_ids")
_ANSWER_KEYS = ("completion", "response", "output")
_REQUEST_KEYS = ("request", "request_body")
_RESPONSE_KEYS = ("response", "response_body", "completion", "output")
_LINES_BEFORE_INPUT = 100
"""Lines of a file that are no requests, after which it is not a batch's input."""
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
        InputError: a record is not a conversation (the message names file and line), or the file
            cannot be opened or has no conversation.
    """
    conversations = list(islice(iter_conversations(path, format_name), limit))
    if not conversations:
        raise InputError(f"{path}: empty, no conversation in this file")
    return conversations


def iter_conversations(
    path: Path,
    format_name: str | None = None,
    skip: Callable[[InputError], None] | None = None,
    scope_field: str | None = None,
) -> Iterator[Conversation]:
    """`read_conversations` as an iterator, for files that do not fit into memory. `skip` is told of
    each record that is not a conversation; without it, one of them is an error. `scope_field` is
    the field of each record that becomes the conversation's scope, with dots between the keys."""
    name = "stdin" if path == STDIN else str(path)
    for number, (line, data) in enumerate(values(path), start=1):
        try:
            if isinstance(data, InputError):
                raise data
            found = conversations_of(data, f"{name}:{line}", number, format_name)
            if scope_field is not None:
                scope = _scope_of(data, scope_field, f"{name}:{line}")
                found = [replace(conversation, scope=scope) for conversation in found]
        except InputError as error:
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
        raise InputError(f"{where}: expected an object, got {kind(data)}")
    chosen = insisted or next((name for name, f in FORMATS.items() if f.matches(data)), None)
    if chosen is None:
        keys = ", ".join(f'"{key}"' for key in list(data)[:8]) or "none"
        raise InputError(
            f"{where}: no format has these keys: {keys}; this would work: "
            f"{FORMATS['messages'].example} or {FORMATS['pairs'].example}"
        )
    try:
        ident = _ident_of(data, number)
        return [Conversation(ident, turns, where) for turns in FORMATS[chosen].turns(data, where)]
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply to be read") from error
    except RecordError as error:
        example = FORMATS[chosen].example
        raise InputError(f"{error}; read as {chosen}, of which this works: {example}") from error


def _ident_of(data: Record, number: int) -> str:
    ident = next((data[key] for key in _ID_KEYS if data.get(key) is not None), number)
    if isinstance(ident, dict) and len(ident) == 1:  # MongoDB's {"$oid": ...}
        (ident,) = ident.values()
    text = ident if isinstance(ident, str) else json.dumps(ident)
    return text.encode("utf-8", "backslashreplace").decode()


def _scope_of(data: object, field: str, where: str) -> str | int:
    """Never a default: text whose owner is not known would be everybody's."""
    for key in field.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    if isinstance(data, str):
        return checked_text(data, f'{where}: scope field "{field}"')
    if isinstance(data, int) and not isinstance(data, bool) and 0 <= data < 1 << 62:
        return data
    raise InputError(
        f'{where}: scope field "{field}": expected a string or an integer below 2**62, got '
        f"{kind(data)}"
    )


# ngram_npu's own format


def _own(data: Record, where: str) -> list[tuple[Turn, ...]]:
    turns = _array(data, "turns", where)
    parsed = tuple(_turn(turn, f"{where}: turns[{i}]") for i, turn in enumerate(turns))
    if len({turn.has_token_ids for turn in parsed}) > 1:
        raise InputError(f"{where}: some turns carry token ids and some do not")
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
        prompt, answer = (token_ids_of(data[key], f"{where}: {key}") for key in _IDS_KEYS)
        return [(Turn(prompt_token_ids=prompt, completion_token_ids=answer),)]
    if "prompt" not in data:
        raise RecordError(f'{where}: missing key "prompt"')
    key = next((key for key in _ANSWER_KEYS if key in data), None)
    if key is None:
        raise RecordError(f'{where}: missing key "completion"')
    system = _system_of(data, where)
    if isinstance(data["prompt"], list) or isinstance(data[key], list) or system:
        prompt, answer = data["prompt"], data[key]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        answers = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        return [_turns([*messages, *answers], where, since=len(messages), system=system)]
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
    system, tools = _system_of(data, where), _tools_of(data, where)
    return [_turns(_array(data, key, where), where, key=key, system=system, tools=tools)]


def _sharegpt(data: Record, where: str) -> list[tuple[Turn, ...]]:
    items = _array(data, "conversations", where)
    messages = []
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise RecordError(f"{where}: conversations[{i}] must be an object, got {kind(item)}")
        if "from" not in item:
            messages.append(item)
            continue
        role, content = item["from"], item["value"] if "value" in item else item.get("content")
        role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        messages.append({**item, "role": role, "content": content})
    system, tools = _system_of(data, where), _tools_of(data, where)
    return [_turns(messages, where, key="conversations", system=system, tools=tools)]


def _turns(
    items: list[Any],
    where: str,
    since: int = 0,
    key: str = "messages",
    system: tuple[Message, ...] = (),
    tools: tuple[Any, ...] = (),
) -> tuple[Turn, ...]:
    """A turn for every assistant message from number `since` on; earlier messages are context."""
    turns: list[Turn] = []
    context: list[Message] = []
    for i, item in enumerate(items):
        message = message_of(item, f"{where}: {key}[{i}]")
        if i == 0 and (message,) != system:  # some records have the system's message twice
            context += system
        if message["role"] == "assistant" and i >= since:
            answer = checked_text(completion_text(message), f"{where}: {key}[{i}]")
            turns.append(Turn(None, answer, messages=tuple(context), answer=message, tools=tools))
            tools = ()
            context = []
        else:
            context.append(message)
    if not turns:
        roles = ", ".join(str(message["role"]) for message in context[:6]) or "none"
        raise RecordError(f'{where}: no message of the role "assistant" (roles: {roles})')
    return tuple(turns)


def _system_of(data: Record, where: str) -> tuple[Message, ...]:
    """The message of a system's text that is beside the messages or the prompt."""
    key = "system" if data.get("system") not in (None, "", []) else "instructions"
    if data.get(key) in (None, "", []):
        return ()
    return (message_of({"role": "system", "content": data[key]}, f"{where}: {key}"),)


def _tools_of(data: Record, where: str) -> tuple[Any, ...]:
    """The definitions of tools, some datasets have them as JSON text."""
    tools = data.get("tools")
    if isinstance(tools, str) and tools:
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    if tools in (None, ""):
        return ()
    if not isinstance(tools, list):
        raise RecordError(f"{where}: tools must be an array, got {kind(tools)}")
    return tuple(tools)


# Requests with their responses


def _log(data: Record, where: str) -> list[tuple[Turn, ...]]:
    """Earlier answers in the request's messages are context: a log has them as records too."""
    _refuse_failure(data, where)
    key = next((key for key in _RESPONSE_KEYS if key in data), None)
    at = where if key is None else f"{where}: {key}"
    answers = answers_of(data if key is None else data[key], at)
    if all(answer.has_ids for answer in answers.values() if not answer.is_empty):
        with suppress(RecordError):  # ids need no request
            if _request(data, where).get("echo"):
                _remove_echoes(answers, dict.fromkeys(answers, ""), at)
        return [
            (Turn(prompt_token_ids=of.prompt_token_ids, completion_token_ids=tuple(of.token_ids)),)
            for of in answers.values()
            if not of.is_empty
        ]
    if "custom_id" in data and not any(key in data for key in (*_REQUEST_KEYS, "messages")):
        request = _request({"request": _batch_request(data["custom_id"], where)}, where)
    else:
        request = _request(data, where)
    messages = _request_messages(request, where)
    if messages is not None:
        system, tools = _system_of(request, where), _tools_of(request, where)
        if request.get("echo"):  # of a message that the answer continues
            last = message_of(messages[-1], f"{where}: messages[{len(messages) - 1}]")
            begun = last["content"] if last["role"] == "assistant" else ""
            _remove_echoes(answers, dict.fromkeys(answers, begun), at)
        return [
            _turns([*messages, of.message()], where, len(messages), system=system, tools=tools)
            for of in answers.values()
            if not of.is_empty
        ]
    prompts = request.get("prompt", request.get("text"))
    prompts = prompts if isinstance(prompts, list) else [prompts]
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        found = ", ".join(f'"{key}"' for key in list(request)[:8]) or "nothing"
        raise RecordError(
            f'{where}: the request must have "messages", "input" or a text "prompt", got {found}'
        )
    # The completions endpoint: the prompt is the model's whole input, template included. With
    # several prompts the answers are in their order, as many to each.
    count, n = len(answers), request.get("n")
    too_many = isinstance(n, int) and not isinstance(n, bool) and count > n * len(prompts)
    in_order = count % len(prompts) == 0 and [*answers] == [*range(count)]
    if too_many or (len(prompts) > 1 and not in_order):
        raise RecordError(
            f"{at}: expected {'as many' if n is None else n} choices for each of {len(prompts)} "
            f"prompts, numbered from 0, got {', '.join(map(str, answers)):.80}"
        )
    prompt_of = {
        number: checked_text(prompts[i * len(prompts) // count], f"{where}: prompt")
        for i, number in enumerate(answers)
    }
    if request.get("echo"):
        _remove_echoes(answers, prompt_of, at)
    return [
        (Turn(prompt_of[number], completion_text(of.message()), raw="prompt" in request),)
        for number, of in answers.items()
        if not of.is_empty
    ]


def _remove_echoes(answers: dict[int, Answer], prompt_of: dict[int, str], where: str) -> None:
    for number, answer in answers.items():
        answer.remove_echo(prompt_of[number])
    if all(answer.is_empty for answer in answers.values()):
        raise InputError(f"{where}: the answer is empty without the prompt that it repeats")


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
    """The messages of a request; None for one with a prompt that is the model's whole input."""
    if "messages" in request:
        return _array(request, "messages", where)
    if "input" in request:  # the Responses API
        given = request["input"]
        items = given if isinstance(given, list) else [{"role": "user", "content": given}]
        return [_as_message(item) for item in items]
    if isinstance(request.get("prompt"), str) and _system_of(request, where):
        return [{"role": "user", "content": request["prompt"]}]
    return None


def _as_message(item: Any) -> Any:
    """An item of the Responses API as a message."""
    if not isinstance(item, dict) or "role" in item:
        return item
    if "output" in item:
        return {"role": "tool", "content": item["output"]}
    if item.get("type") in (None, "message"):  # without its role
        return item
    return {"role": "assistant", "content": [item]}


def _batch_request(ident: Any, where: str) -> Any:
    """The request of a batch's answer, from the batch's input in the same folder."""
    answers = Path(where.rpartition(":")[0])
    if not answers.is_file():  # stdin has no folder
        raise RecordError(f"{where}: a batch's output needs its input: pass the file, not a pipe")
    found = _requests_beside(answers).get(ident, ()) if isinstance(ident, str) else ()
    if not found:
        raise RecordError(
            f"{where}: the request {ident!r:.80} is not here: put the batch's input into the same "
            "folder"
        )
    if any(request != found[0] for request in found):
        raise RecordError(f"{where}: several requests of this folder are {ident!r:.80}")
    return found[0]


@lru_cache(1)
def _requests_beside(answers: Path) -> dict[str, list[Any]]:
    """By id, from the other files in the folder."""
    found: dict[str, list[Any]] = {}
    for file in sorted(answers.parent.iterdir()):
        if file != answers and file.name.endswith(SUFFIXES) and file.is_file():
            with suppress(InputError):  # a file that is no batch's input may be anything
                is_input = False
                for number, (_, item) in enumerate(values(file)):
                    ident = item.get("custom_id") if isinstance(item, dict) else None
                    if isinstance(ident, str) and "body" in item:
                        found.setdefault(ident, []).append(item)
                        is_input = True
                    elif not is_input and number >= _LINES_BEFORE_INPUT:
                        break
    return found


# FastChat's and Spec-Bench's answers


def _fastchat(data: Record, where: str) -> list[tuple[Turn, ...]]:
    ident = data.get("question_id")
    if isinstance(ident, bool) or not isinstance(ident, (str, int)):
        raise RecordError(f"{where}: question_id must be a number or string, got {kind(ident)}")
    asked = _questions(Path(where.rpartition(":")[0]), where).get(ident, [])
    if len(asked) != 1:
        number = "several questions" if asked else "no question"
        raise InputError(f"{where}: {QUESTIONS} has {number} {ident!r:.80}")
    questions = [
        checked_text(turn, f"{where}: {QUESTIONS}: turns[{i}]")
        for i, turn in enumerate(_array(asked[0], "turns", f"{where}: {QUESTIONS}"))
    ]
    parsed = []
    for i, choice in enumerate(_array(data, "choices", where)):
        answers = _array(choice, "turns", f"{where}: choices[{i}]")
        if len(answers) != len(questions):
            raise InputError(
                f"{where}: {len(answers)} answers to question {ident!r:.80} of {len(questions)} "
                "turns"
            )
        at = f"{where}: choices[{i}].turns"
        parsed.append(
            tuple(
                Turn(question, checked_text(answer, f"{at}[{j}]"))
                for j, (question, answer) in enumerate(zip(questions, answers, strict=False))
            )
        )
    return parsed


def _questions(answers: Path, where: str) -> dict[str | int, list[Any]]:
    """Questions by id, from the answers' folder or the one above it."""
    for folder in (answers.parent, answers.resolve().parent.parent):
        file = folder / QUESTIONS
        if file.is_file():
            return _questions_in(file)
    raise InputError(
        f"{where}: FastChat's answers are without their questions: put {QUESTIONS} beside the "
        "file or into the folder above it"
    )


@lru_cache(1)
def _questions_in(file: Path) -> dict[str | int, list[Any]]:
    found: dict[str | int, list[Any]] = {}
    for _, item in values(file):
        ident = item.get("question_id") if isinstance(item, dict) else None
        if isinstance(ident, (str, int)) and not isinstance(ident, bool):
            found.setdefault(ident, []).append(item)
    return found


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
