"""Reads the answers of a model's response: a complete one, or the chunks of a stream."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from ngram_npu.errors import RecordError

from ngram_npu_cli.logs.messages import parse_message, parse_messages
from ngram_npu_cli.logs.values import (
    Message,
    Record,
    check_list,
    check_text,
    check_token_ids,
    decode_json,
    list_keys,
)

_EVENT_LINE = re.compile(r"(data|event|id|retry)?:")
_STREAM_START = re.compile(r"((event|id|retry)?:[^\n]*\n\s*)*data: ?\{")
_CHOICES = re.compile(r'"choices"\s*:\s*\[\s*\{')


class Answer(NamedTuple):
    """An answer: a message, or token ids."""

    message: Message | None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


def parse_answers(response: Any, *, may_be_json: bool) -> list[Answer]:
    """Returns the answers of a response; several if several were requested.

    Args:
        response: A response of Chat Completions, Completions, Anthropic or Ollama, chunks of the
            first two, messages, or a text.
        may_be_json: Whether a text may be JSON or events of a response, and not only the answer.

    Raises:
        RecordError: The request failed, or the response cannot be read.
    """
    if isinstance(response, str):
        decoded = _decode_response(response) if may_be_json else None
        if decoded is None:
            return [Answer({"role": "assistant", "content": response})]
        response = decoded
    if isinstance(response, list):
        chunks = check_list(response, "a response")
        if chunks and "role" in chunks[0]:
            return [_check_answer(parse_messages(chunks))]
        response = _join_chunks(chunks)
    if not isinstance(response, dict):
        raise RecordError(f"a response must be an object, got {type(response).__name__}")
    check_success(response)
    if "body" in response:
        return parse_answers(response["body"], may_be_json=True)
    if "choices" in response:
        choices = check_list(decode_json(response["choices"]), "choices")
        if len({str(choice.get("index", i)) for i, choice in enumerate(choices)}) < len(choices):
            raise RecordError("several choices have the same index")
        answers = [_parse_choice(choice, response) for choice in choices]
    else:
        message = response.get("message", response)
        if not isinstance(message, dict) or "role" not in message:
            raise RecordError(f"the response has no answer, but the keys {list_keys(response)}")
        answers = [_check_answer(parse_message(message))]
    if not answers:
        raise RecordError("the response has no answer")
    return answers


def check_success(record: Record) -> None:
    """Raises RecordError for a record or a response of a failed request."""
    status, error = record.get("status_code"), record.get("error")
    if (isinstance(status, int) and status >= 400) or (error and isinstance(error, (str, dict))):
        raise RecordError("the request failed")


def _check_answer(messages: list[Message]) -> Answer:
    if not messages:
        raise RecordError("the answer is empty")
    if [message["role"] for message in messages] != ["assistant"]:
        raise RecordError("the answer contains other messages than one of the model")
    return Answer(messages[0])


def _parse_choice(choice: Record, response: Record) -> Answer:
    ids = choice.get("token_ids")
    prompt_ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
    if ids and prompt_ids:
        answer_ids, prompt_ids = map(check_token_ids, (ids, prompt_ids), ("token_ids",) * 2)
        return Answer(None, answer_ids, prompt_ids)
    message = choice.get("message")
    if message is None:
        message = {"content": choice.get("text")}
    elif not isinstance(message, dict):
        raise RecordError("the message of a choice must be an object")
    return _check_answer(parse_message({"role": "assistant", **message}))


def _decode_response(text: str) -> Any:
    """Returns the JSON, the lines of JSON, or the server-sent events of a text that is a response;
    None for another text, which may also be JSON: an answer in a schema of the request.

    What resembles a response of any API is never read as the text of an answer."""
    text = text.removeprefix("\ufeff").strip()
    is_stream = _STREAM_START.match(text)
    if not is_stream and text[:1] not in ("{", "["):
        return None
    for parse in (_parse_events,) if is_stream else (json.loads, _parse_lines):
        try:
            value = parse(text)
        except (ValueError, RecursionError):
            continue
        items = value if isinstance(value, list) else [value]
        return value if is_stream or any(map(_is_response, items)) else None
    if is_stream or _CHOICES.search(text):
        raise RecordError("the response is damaged or incomplete")
    return None


def _is_response(value: Any) -> bool:
    """Whether an object is a response or a chunk of one."""
    if not isinstance(value, dict):
        return False
    choices, error = value.get("choices"), value.get("error")
    has_choices = isinstance(choices, list) and all(isinstance(item, dict) for item in choices)
    has_output = isinstance(value.get("output"), list) and "object" in value
    inner = [value.get(key) for key in ("body", "message")]
    is_message = value.get("role") == "assistant" and len(value) > 1
    has_inner = any(isinstance(item, dict) and len(item) > 1 for item in inner)
    is_error = isinstance(error, dict) and "message" in error
    return has_choices or has_output or is_message or has_inner or is_error


def _parse_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _parse_events(text: str) -> list[Any]:
    """Returns the data of server-sent events."""
    # Not `splitlines`, which also ends lines at U+2028.
    lines = re.split(r"\r\n|\n|\r", text)
    if any(line and not _EVENT_LINE.match(line) for line in lines):
        raise ValueError("not a line of an event")
    data = [line[5:].strip() for line in lines if line.startswith("data:")]
    return [json.loads(item) for item in data if item not in ("", "[DONE]")]


def _join_chunks(chunks: list[Record]) -> Record:
    """Returns the complete response of the chunks of a stream of OpenAI."""
    for chunk in chunks:
        check_success(chunk)
    if not any("choices" in chunk for chunk in chunks):
        raise RecordError("the format of the stream is not known")
    choices: dict[int, Record] = {}
    joined: Record = {}
    for chunk in chunks:
        if chunk.get("prompt_token_ids"):
            joined["prompt_token_ids"] = chunk["prompt_token_ids"]
        for part in check_list(chunk.get("choices") or [], "choices"):
            index = part.get("index", 0)
            if not isinstance(index, int):
                raise RecordError("the index of a choice must be a number")
            _join_choice(choices.setdefault(index, {"index": index, "message": {}}), part)
    return {**joined, "choices": [choice for _, choice in sorted(choices.items())]}


def _join_choice(choice: Record, part: Record) -> None:
    """Adds a chunk's choice: a delta of a message, or a text of the completions endpoint."""
    delta, message = part.get("delta", part), choice["message"]
    if not isinstance(delta, dict) or part.get("message") or delta.get("function_call"):
        raise RecordError("a chunk of the stream has no delta that can be read")
    has_text = False
    for key, names in _DELTA_KEYS.items():
        text = next((delta[name] for name in names if delta.get(name)), None)
        if text is not None:
            message[key] = message.get(key, "") + check_text(text, f"the {key} of a chunk")
            has_text = True
    for call in check_list(delta.get("tool_calls") or [], "the tool calls of a chunk"):
        _join_call(message.setdefault("tool_calls", []), call)
        has_text = True
    if part.get("prompt_token_ids"):
        choice["prompt_token_ids"] = part["prompt_token_ids"]
    ids = check_token_ids(part.get("token_ids") or [], "token_ids")
    if has_text and not ids:
        choice["is_missing_ids"] = True
    choice["token_ids"] = [] if "is_missing_ids" in choice else [*choice.get("token_ids", ()), *ids]


_DELTA_KEYS = {
    "content": ("content", "text"),
    "reasoning_content": ("reasoning_content", "reasoning"),
    "refusal": ("refusal",),
}


def _join_call(calls: list[Record], call: Record) -> None:
    """Adds a piece of a tool call. Only its first piece has a name."""
    function, index, ident = call.get("function"), call.get("index"), call.get("id")
    if not isinstance(function, dict) or not isinstance(index, int):
        raise RecordError("a tool call of a chunk has no function or no index")
    arguments = check_text(function.get("arguments") or "", "the arguments of a chunk")
    known = next((c for c in calls if c["index"] == index), None)
    if known is None:
        made = {"name": function.get("name"), "arguments": arguments}
        calls.append({"index": index, "id": ident, "function": made})
    elif function.get("name") or ident not in (None, "", known["id"]):
        raise RecordError("two tool calls of a stream have the same index")
    else:
        known["function"]["arguments"] += arguments
