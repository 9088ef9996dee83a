"""Makes conversations from the fields of a record: messages or a request, and its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.answers import (
    Record,
    check_text,
    check_token_ids,
    check_type,
    get_first,
    may_be_encoded,
    normalize_message,
    parse_answers,
    parse_message,
)
from ngram_npu_cli.logs.chat_template import render_completion
from ngram_npu_cli.logs.conversations import Conversation, Message, Turn
from ngram_npu_cli.logs.json_values import decode_json, is_empty
from ngram_npu_cli.logs.presets import CONVERSATION_KEYS, ROLES, is_conversation, is_message

_IDS_KEYS = ("prompt_token_ids", "completion_token_ids")
_MESSAGES_KEYS = ("messages", "input", "contents")
_WHOLE_KEYS = ("prompt", "prompts", "inputText")
"""Keys of a request with the model's whole input, template included."""
_QUESTION_KEYS = ("text", "question", "query", "instruction", "user_input", "content")
_PARENT_KEYS = ("parentId", "parent_id", "parentMessageId", "parent_message_uuid")
_SYSTEM_KEYS = ("system", "instructions", "systemInstruction", "system_instruction")
_TYPED_MESSAGE_KEYS = {"content", "data", "kwargs", "from", "message", "author", "sender"}


class _Request(NamedTuple):
    """The input of a model: messages, or one text. If `is_whole`, the text has its template."""

    text: str
    messages: list[Any] | None = None
    is_whole: bool = False
    system: Any = None
    tools: Any = None

    def list_messages(self) -> list[Any]:
        return self.messages or [{"role": "user", "content": self.text}]


def make_conversations(fields: Mapping[str, Any], location: str, number: str) -> list[Conversation]:
    """Returns the conversation of a record's fields; one per answer if there are several."""
    ident = number if fields.get("id") is None else fields["id"]
    text = ident if isinstance(ident, str) else json.dumps(ident, default=str)
    ident = text.encode("utf-8", "backslashreplace").decode()
    if "turns" in fields:
        all_turns = [_parse_turns(decode_json(fields["turns"]), location)]
    elif "answer" in fields:
        all_turns = _parse_exchange(fields, location)
    else:
        request = _read_request(fields, f"{location}: messages")
        if request.messages is None:
            raise RecordError(f"{location}: messages must be an array, got a string")
        _check_one_conversation(request.messages, location)
        all_turns = [_make_turns(request, request.messages, location)]
    return [Conversation(ident, turns, location, fields.get("scope")) for turns in all_turns]


def _check_one_conversation(items: list[Any], location: str) -> None:
    """Raises RecordError if messages are rows of several conversations, or branches of one."""
    messages = [item for item in items if isinstance(item, dict)]
    for key in CONVERSATION_KEYS:
        if len({str(message[key]) for message in messages if message.get(key)}) > 1:
            raise RecordError(
                f'{location}: the messages have different values of "{key}"; use --map '
                f"'records=..., role=role, content=content, conversation={key}'"
            )
    parents = [str(m[key]) for m in messages for key in _PARENT_KEYS if m.get(key)]
    if len(set(parents)) < len(parents):
        raise RecordError(f"{location}: several messages have the same parent; use thread(...)")
    ids = [m["id"] for m in messages if isinstance(m.get("id"), (str, int))]
    if len(set(ids)) < len(ids):
        raise RecordError(
            f"{location}: several messages have the same id; if it is that of a conversation, "
            "use --map 'role=role, content=content, conversation=id'"
        )


def _parse_turns(value: Any, location: str) -> tuple[Turn, ...]:
    """Returns the turns of this project's format: a list of turns, or one turn."""
    turns = [value] if isinstance(value, dict) else check_type(value, list, f"{location}: turns")
    if not turns:
        raise RecordError(f'{location}: "turns" is empty')
    parsed = tuple(_parse_turn(turn, f"{location}: turns[{i}]") for i, turn in enumerate(turns))
    if len({turn.has_token_ids for turn in parsed}) > 1:
        raise InputError(f"{location}: some turns carry token ids and some do not")
    return parsed


def _parse_turn(data: Any, location: str) -> Turn:
    check_type(data, dict, location)
    keys = ("prompt", "completion")
    texts: Record = {key: check_text(data[key], f"{location}.{key}") for key in keys if key in data}
    ids: Record = {
        key: check_token_ids(data[key], f"{location}.{key}") for key in _IDS_KEYS if key in data
    }
    for key in _IDS_KEYS if ids else keys:
        if key not in data:
            raise RecordError(f'{location}: missing key "{key}"')
    return Turn(**texts, **ids)


def _parse_exchange(fields: Mapping[str, Any], location: str) -> list[tuple[Turn, ...]]:
    """Returns a turn for each answer to a request. Earlier answers in the request's messages are
    context, because they have separate records."""
    answer = fields["answer"]
    decoded = decode_json(answer) if isinstance(answer, str) and answer[:1] == "[" else answer
    is_answer = is_conversation(decoded) and normalize_message(decoded[0])["role"] == "assistant"
    if is_answer and all(map(is_message, decoded)):
        request = _read_request(fields, f"{location}: prompt")
        messages = request.list_messages()
        return [_make_turns(request, [*messages, *decoded], location, len(messages))]
    if isinstance(answer, str) and not may_be_encoded(answer):
        text = check_text(answer, f"{location}: answer")
        answer_messages: list[Message] = [{"role": "assistant", "content": text}]
    else:
        answers = parse_answers(answer, f"{location}: answer")
        if all(answer.has_ids for answer in answers):  # token ids need no request
            _check_echo(decode_json(fields["messages"]), location)
            return [(Turn(None, None, a.prompt_token_ids, tuple(a.token_ids)),) for a in answers]
        answer_messages = [answer.make_message() for answer in answers]
    request = _read_request(fields, f"{location}: prompt")
    if request.messages is None and is_empty(request.system) and is_empty(request.tools):
        completions = map(render_completion, answer_messages)
        return [(Turn(request.text, c, raw=request.is_whole),) for c in completions]
    messages = request.list_messages()
    last = messages[-1].get("content") if isinstance(messages[-1], dict) else None
    if last and last in [message["content"] for message in answer_messages]:
        raise RecordError(f"{location}: the messages end with the answer; use --map messages=...")
    return [
        _make_turns(request, [*messages, message], location, len(messages))
        for message in answer_messages
    ]


def _read_request(fields: Mapping[str, Any], location: str) -> _Request:
    """Returns the request of a record, with system text and tools of other fields."""
    value = fields["messages"]
    decoded = decode_json(value)
    if isinstance(value, str) and (decoded is value or not _is_request(decoded)):
        request = _Request(check_text(value, location))
    else:
        request = _parse_request(decoded, location)
    for name in ("system", "tools"):
        if not is_empty(fields.get(name)):
            request = request._replace(**{name: fields[name]})
    return request


def _is_request(value: dict[str, Any] | list[Any]) -> bool:
    """Whether the JSON of a text is a request or messages, and not itself a question."""
    if isinstance(value, list):
        return all(isinstance(item, (dict, list)) for item in value)
    keys = {*_MESSAGES_KEYS, *_WHOLE_KEYS, *_QUESTION_KEYS, "body"} & value.keys()
    return any(
        key in _QUESTION_KEYS or len(value) > 1 or not isinstance(value[key], str) for key in keys
    )


def _parse_request(value: Any, location: str) -> _Request:
    """Returns the request of a text, of messages, or of the body of a request."""
    if isinstance(value, list):
        if not value:
            raise RecordError(f"{location} is empty")
        if len(value) == 1 and isinstance(value[0], (str, list)):  # of LangChain
            return _parse_request(value[0], location)
        return _Request("", [_convert_item(item) for item in value])
    if not isinstance(value, dict):
        return _Request(check_text(value, location))
    if "body" in value:
        return _parse_request(decode_json(value["body"]), location)
    _check_echo(value, location)
    if is_message(value):
        return _Request("", [value])
    keys = [key for key in (*_MESSAGES_KEYS, *_WHOLE_KEYS) if key in value]
    keys = keys or [key for key in value if key in _QUESTION_KEYS and len(value) == 1]
    if not keys:
        names = ", ".join(f'"{key}"' for key in list(value)[:8]) or "nothing"
        raise RecordError(
            f'{location} must have "messages", "input" or one text "prompt", got {names}'
        )
    content = decode_json(value[keys[0]])
    if keys[0] == "messages":
        check_type(content, list, f"{location}.messages")
    request = _parse_request(content, f"{location}.{keys[0]}")
    config = value.get("toolConfig")
    return request._replace(
        is_whole=keys[0] in _WHOLE_KEYS,
        system=get_first(value, *_SYSTEM_KEYS),
        tools=value.get("tools") or (config.get("tools") if isinstance(config, dict) else None),
    )


def _check_echo(request: Any, location: str) -> None:
    if isinstance(request, dict) and request.get("echo"):
        raise RecordError(f'{location}: expected no "echo", which repeats the prompt in the answer')


def _convert_item(item: Any) -> Any:
    """Returns an item of the Responses API as a message."""
    if not isinstance(item, dict) or "role" in item:
        return item
    if "output" in item:
        return {"role": "tool", "content": item["output"]}
    if item.get("type") in (None, "message") or _TYPED_MESSAGE_KEYS & item.keys():
        return item
    return {"role": "assistant", "content": [item]}


def _make_turns(
    request: _Request, items: list[Any], location: str, first_answer: int = 0
) -> tuple[Turn, ...]:
    """Returns a turn for every assistant message from number `first_answer` on. Messages before
    this number are context."""
    system: tuple[Message, ...] = ()
    if not is_empty(request.system):
        text = {"role": "system", "content": request.system}
        system = (parse_message(text, f"{location}: system"),)
    tools = decode_json(request.tools)
    tools = () if is_empty(tools) else tuple(check_type(tools, list, f"{location}: tools"))
    turns: list[Turn] = []
    context: list[Message] = []
    for i, item in enumerate(items):
        message = parse_message(item, f"{location}: messages[{i}]")
        if i == 0 and (message,) != system:  # some records repeat the system message
            context += system
        if message["role"] == "assistant" and i >= first_answer:
            answer = check_text(render_completion(message), f"{location}: messages[{i}]")
            turns.append(Turn(None, answer, messages=tuple(context), answer=message, tools=tools))
            tools = ()
            context = []
        else:
            context.append(message)
    if not turns:
        names = [m["role"] if m["role"] in ROLES else "other" for m in context[:6]]
        roles = ", ".join(names) or "none"
        raise RecordError(f'{location}: no message of the role "assistant" (roles: {roles:.80})')
    return tuple(turns)
