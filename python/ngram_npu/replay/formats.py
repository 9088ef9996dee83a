"""Converts recorded JSON values of several formats to conversations.

The value's keys determine the format; docs/guides/replay.md describes each format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ngram_npu.replay.chat_template import completion_text
from ngram_npu.replay.errors import ReplayError
from ngram_npu.replay.files import QUESTIONS, STDIN, values
from ngram_npu.replay.records import Conversation, Message, Turn

__all__ = ["FORMATS", "iter_conversations", "read_conversations"]

Record = Mapping[str, Any]

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
_MAX_TOKEN_ID = 2**31 - 1


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


def iter_conversations(path: Path, format_name: str | None = None) -> Iterator[Conversation]:
    """`read_conversations` as an iterator, for files that do not fit into memory."""
    name = "stdin" if path == STDIN else str(path)
    for number, (line, data) in enumerate(values(path), start=1):
        yield from _conversations_of(data, f"{name}:{line}", number, format_name)


def _conversations_of(
    data: object, where: str, number: int, insisted: str | None
) -> list[Conversation]:
    """The conversations of one value of a file; `number` is the id of a record without one."""
    if isinstance(data, list) and data and isinstance(data[0], dict):
        data = {"conversations" if "from" in data[0] else "messages": data}
    if not isinstance(data, dict):
        raise ReplayError(f"{where}: expected an object, got {_kind(data)}")
    chosen = insisted or next((name for name, f in FORMATS.items() if f.matches(data)), None)
    if chosen is None:
        keys = ", ".join(f'"{key}"' for key in list(data)[:8]) or "none"
        raise ReplayError(
            f"{where}: no format has these keys: {keys}; this would work: "
            f"{FORMATS['messages'].example} or {FORMATS['pairs'].example}"
        )
    ident = next((data[key] for key in _ID_KEYS if data.get(key) is not None), number)
    if isinstance(ident, bool) or not isinstance(ident, (str, int)):
        raise ReplayError(f'{where}: "id" must be a string, got {_kind(ident)}')
    try:
        return [
            Conversation(str(ident), turns, where) for turns in FORMATS[chosen].turns(data, where)
        ]
    except _RecordError as error:
        example = FORMATS[chosen].example
        raise ReplayError(f"{error}; read as {chosen}, of which this works: {example}") from error


class _RecordError(ReplayError):
    """Something is missing or of the wrong type; the reader adds a working example."""


# ngram_npu's own format


def _own(data: Record, where: str) -> list[tuple[Turn, ...]]:
    turns = _array(data, "turns", where)
    parsed = tuple(_turn(turn, f"{where}: turns[{i}]") for i, turn in enumerate(turns))
    if len({turn.has_token_ids for turn in parsed}) > 1:
        raise ReplayError(f"{where}: some turns carry token ids and some do not")
    return [parsed]


def _turn(data: object, where: str) -> Turn:
    if not isinstance(data, dict):
        raise _RecordError(f"{where} must be an object, got {_kind(data)}")
    keys = ("prompt", "completion")
    texts: Record = {key: _text(data[key], f"{where}.{key}") for key in keys if key in data}
    ids: Record = {key: _token_ids(data[key], f"{where}.{key}") for key in _IDS_KEYS if key in data}
    if len(ids) == 1:
        missing = next(key for key in _IDS_KEYS if key not in ids)
        raise _RecordError(f'{where}: missing key "{missing}" (the other token ids are there)')
    if not ids and len(texts) < 2:
        missing = next(key for key in keys if key not in texts)
        raise _RecordError(f'{where}: missing key "{missing}"')
    return Turn(**texts, **ids)


# Prompt and answer


def _pair(data: Record, where: str) -> list[tuple[Turn, ...]]:
    if all(key in data for key in _IDS_KEYS):
        return [(_turn({key: data[key] for key in _IDS_KEYS}, where),)]
    if "prompt" not in data:
        raise _RecordError(f'{where}: missing key "prompt"')
    key = next((key for key in _ANSWER_KEYS if key in data), None)
    if key is None:
        raise _RecordError(f'{where}: missing key "completion"')
    if isinstance(data["prompt"], list) or isinstance(data[key], list):
        prompt, answer = data["prompt"], data[key]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        answers = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        return [_turns([*messages, *answers], where, since=len(messages))]
    return [(Turn(_text(data["prompt"], f"{where}: prompt"), _text(data[key], f"{where}: {key}")),)]


# Messages


def _messages(data: Record, where: str) -> list[tuple[Turn, ...]]:
    key = "conversation" if "conversation" in data else "messages"
    return [_turns(_array(data, key, where), where, key=key, tools=data.get("tools"))]


def _sharegpt(data: Record, where: str) -> list[tuple[Turn, ...]]:
    items = _array(data, "conversations", where)
    messages = []
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise _RecordError(f"{where}: conversations[{i}] must be an object, got {_kind(item)}")
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
        message = _message(item, f"{where}: {key}[{i}]")
        if message["role"] == "assistant" and i >= since:
            answer = _text(completion_text(message), f"{where}: {key}[{i}]")
            turns.append(Turn(None, answer, messages=tuple(context), answer=message, tools=offered))
            offered = ()
            context = []
        else:
            context.append(message)
    if not turns:
        roles = ", ".join(str(message["role"]) for message in context[:6]) or "none"
        raise _RecordError(f'{where}: no message of the role "assistant" (roles: {roles})')
    return tuple(turns)


def _message(data: object, where: str) -> Message:
    """Role and content as text; other keys, which a chat template may use, are kept."""
    if not isinstance(data, dict):
        raise _RecordError(f"{where} must be an object, got {_kind(data)}")
    role = data.get("role")
    if not isinstance(role, str):
        raise _RecordError(f"{where}.role must be a string, got {_kind(role)}")
    kept = {
        key: data[key]
        for key in ("tool_calls", "name", "tool_call_id", "reasoning_content")
        if data.get(key) is not None
    }
    parts = data.get("content")
    used = [
        {"function": {"name": part.get("name"), "arguments": part.get("input")}}
        for part in (parts if isinstance(parts, list) else [])
        if isinstance(part, dict) and part.get("type") == "tool_use"
    ]
    if data.get("function_call"):
        used.append({"function": data["function_call"]})
    if used:
        kept["tool_calls"] = [*kept.get("tool_calls", []), *used]
    return {"role": role, "content": _content(parts, f"{where}.content"), **kept}


def _content(value: object, where: str) -> str:
    """Text of a message: a string, null, or parts. Parts without text, such as images, are left
    out."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return _text(value, where)
    texts = []
    for i, part in enumerate(value):
        if isinstance(part, dict):
            nested = part["content"] if "content" in part else part.get("text")
            texts.append(_content(nested, f"{where}[{i}].text"))
        else:
            texts.append(_text(part, f"{where}[{i}]"))
    return "\n".join(text for text in texts if text)


# Requests with their responses


def _log(data: Record, where: str) -> list[tuple[Turn, ...]]:
    """Earlier answers in the request's messages are context: a log has them as records too."""
    request = _side(data, _REQUEST_KEYS, where)
    response = _side(data, _RESPONSE_KEYS, where)
    answers = _answers(response, where)
    if "messages" in request:
        messages = [*_array(request, "messages", where)]
        if request.get("system"):
            messages.insert(0, {"role": "system", "content": request["system"]})
        tools = request.get("tools")
        return [
            _turns([*messages, answer], where, since=len(messages), tools=tools)
            for answer in answers
        ]
    if "text" in request:
        return [(Turn(request["text"], completion_text(a)),) for a in answers]
    if isinstance(request.get("prompt"), str):
        # The completions endpoint: the prompt is the model's whole input, template included.
        prompt = _text(request["prompt"], f"{where}: prompt")
        return [(Turn(prompt, completion_text(a), raw=True),) for a in answers]
    found = ", ".join(f'"{key}"' for key in list(request)[:8]) or "nothing"
    raise _RecordError(f'{where}: the request must have "messages" or a text "prompt", got {found}')


def _side(data: Record, keys: tuple[str, ...], where: str) -> Record:
    """A request or response: an object, possibly as a JSON string, possibly within "body". A plain
    text is returned under the key "text"."""
    key = next((key for key in keys if key in data), None)
    value = data if key is None else data[key]
    for _ in range(2):
        if isinstance(value, str):
            text = _text(value, f"{where}: {key}")
            try:
                value = json.loads(text)
            except ValueError:
                value = None
            if not isinstance(value, (dict, list)):
                return {"text": text}
        if isinstance(value, dict) and "body" in value:
            value = value["body"]
    if isinstance(value, list):
        return {"chunks": value}
    if not isinstance(value, dict):
        raise _RecordError(f"{where}: {key} must be an object, got {_kind(value)}")
    return value


def _answers(response: Record, where: str) -> list[Message]:
    """A message for each of the response's choices."""
    if "text" in response:
        return [{"role": "assistant", "content": response["text"]}]
    if "chunks" in response:
        return [_joined(response["chunks"], where)]
    if isinstance(response.get("message"), dict):  # Ollama
        return [_message(response["message"], f"{where}: message")]
    if response.get("role") == "assistant":  # Anthropic
        return [_message(response, f"{where}: response")]
    choices = _array(response, "choices", where)
    answers = []
    for i, choice in enumerate(choices):
        at = f"{where}: choices[{i}]"
        if not isinstance(choice, dict):
            raise _RecordError(f"{at} must be an object, got {_kind(choice)}")
        if "message" in choice:
            answers.append(_message(choice["message"], f"{at}.message"))
        else:
            text = _text(choice.get("text"), f"{at}.text")
            answers.append({"role": "assistant", "content": text})
    return answers


def _joined(chunks: list[Any], where: str) -> Message:
    """The text of a streamed answer, from the first choice of its chunks."""
    texts = []
    for i, chunk in enumerate(chunks):
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        if not isinstance(choices, list):
            raise _RecordError(f'{where}: response[{i}] must be a chunk with "choices"')
        if choices and isinstance(choices[0], dict):
            delta = choices[0].get("delta", {"content": choices[0].get("text")})
            texts.append(_content(delta.get("content"), f"{where}: response[{i}]"))
    return {"role": "assistant", "content": "".join(texts)}


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
                Turn(question, _text(answer, f"{at}[{j}]"))
                for j, (question, answer) in enumerate(zip(questions, answers, strict=False))
            )
        )
    return parsed


_asked: dict[Path, dict[Any, list[str]]] = {}


def _questions(answers: Path, where: str) -> dict[Any, list[str]]:
    """Turns by question id, from the answers' folder or the one above it."""
    for folder in (answers.parent, answers.resolve().parent.parent):
        file = folder / QUESTIONS
        if file in _asked:
            return _asked[file]
        if file.is_file():
            _asked.clear()
            _asked[file] = {
                item["question_id"]: [_text(turn, f"{file}:{line}") for turn in item["turns"]]
                for line, item in values(file)
                if isinstance(item, dict) and "question_id" in item and "turns" in item
            }
            return _asked[file]
    raise ReplayError(
        f"{where}: FastChat's answers are without their questions: put {QUESTIONS} beside the "
        "file or into the folder above it"
    )


# Detecting the format


@dataclass(frozen=True)
class _Format:
    matches: Callable[[Record], bool]
    turns: Callable[[Record, str], list[tuple[Turn, ...]]]
    example: str


def _looks_like_log(data: Record) -> bool:
    if "choices" in data:
        return "messages" in data or "prompt" in data or any(key in data for key in _REQUEST_KEYS)
    return any(isinstance(data.get(key), (dict, list, str)) for key in _RESPONSE_KEYS) and (
        any(key in data for key in _REQUEST_KEYS) or "messages" in data
    )


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
        raise _RecordError(f'{where}: missing key "{key}"')
    value = data[key]
    if not isinstance(value, list):
        raise _RecordError(f'{where}: "{key}" must be an array, got {_kind(value)}')
    if not value:
        raise _RecordError(f'{where}: "{key}" is empty')
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _RecordError(f"{where} must be a string, got {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON allows half of a surrogate pair, which is not valid text: tokenizers reject it.
        raise ReplayError(f"{where}: lone surrogate at character {error.start + 1}") from error
    return value


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _RecordError(f"{where} must be an array of integers, got {_kind(value)}")
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise _RecordError(f"{where}[{i}] must be an integer, got {_kind(token)}")
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise ReplayError(f"{where}[{i}] is {token}, outside [0, 2**31)")
    return tuple(value)


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return f"the number {value!r:.40}"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"
