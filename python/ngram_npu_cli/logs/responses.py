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
    is_empty,
    list_keys,
)

_EVENT_LINE = re.compile(r"(data|event|id|retry)?:")
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "input"}
"""For Anthropic's streams: by the type of a delta, the key of the block that it continues."""
_OTHER_DELTAS = ("signature_delta", "citations_delta")


class Answer(NamedTuple):
    """An answer: its messages, more than one if the server called tools; or token ids."""

    messages: list[Message]
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


def parse_answers(response: Any, *, may_be_text: bool) -> list[Answer]:
    """Returns the answers of a response; several if several were requested.

    Args:
        response: A response of OpenAI, Anthropic, Gemini or Ollama, its chunks, messages, or a text.
        may_be_text: Whether a text may be JSON or events of a response, and not the answer itself.

    Raises:
        RecordError: The request failed, or the response cannot be read.
    """
    if isinstance(response, str):
        decoded = _decode_response(response) if may_be_text else None
        if decoded is None:
            return [Answer([{"role": "assistant", "content": response}])]
        response = decoded
    if isinstance(response, list):
        chunks = check_list(response, "the response")
        if chunks and "role" in chunks[0]:
            return [_check_answer(parse_messages(chunks))]
        response = _join_chunks(chunks)
    if not isinstance(response, dict):
        raise RecordError("the response is neither a text nor an object")
    check_success(response)
    if "body" in response:
        return parse_answers(response["body"], may_be_text=True)
    if "choices" in response:
        choices = check_list(response["choices"], "choices")
        if len({choice.get("index", i) for i, choice in enumerate(choices)}) < len(choices):
            raise RecordError("several choices have the same index")
        answers = [_parse_choice(choice, response) for choice in choices]
    elif "candidates" in response:
        candidates = check_list(response["candidates"], "candidates")
        answers = [_check_answer(parse_message(item.get("content"))) for item in candidates]
    elif isinstance(response.get("output"), list):
        answers = [_check_answer(parse_messages(response["output"]))]
    elif isinstance(response.get("message"), dict):
        answers = [_check_answer(parse_message(response["message"]))]
    elif "role" in response:
        answers = [_check_answer(parse_message(response))]
    else:
        raise RecordError(f"the response has no answer, but the keys {list_keys(response)}")
    if not answers:
        raise RecordError("the response has no answer")
    return answers


def check_success(record: Record) -> None:
    """Raises RecordError for a record or a response of a failed request."""
    status = record.get("status_code")
    if isinstance(status, int) and status >= 400:
        raise RecordError(f"the request failed with the HTTP status {status:.3g}")
    error = record.get("error")
    if isinstance(error, (str, dict)) and error:
        raise RecordError("the request failed")


def _check_answer(messages: list[Message]) -> Answer:
    roles = [message["role"] for message in messages]
    if not roles:
        raise RecordError("the answer is empty")
    if {*roles} - {"assistant", "tool"} or "assistant" not in roles:
        raise RecordError("the answer contains a message of another role")
    if any(pair == ("assistant", "assistant") for pair in zip(roles, roles[1:], strict=False)):
        raise RecordError("the response has several answers that are not choices")
    return Answer(messages)


def _parse_choice(choice: Record, response: Record) -> Answer:
    ids = choice.get("token_ids")
    prompt_ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
    if ids and prompt_ids:
        return Answer(
            [], check_token_ids(ids, "token_ids"), check_token_ids(prompt_ids, "prompt_token_ids")
        )
    if choice.get("message") is None:
        return _check_answer(parse_message({"role": "assistant", "content": choice.get("text")}))
    message = choice["message"]
    if isinstance(message, dict) and message.get("role") is None:
        message = {**message, "role": "assistant"}
    return _check_answer(parse_message(message))


def _decode_response(text: str) -> Any:
    """Returns the JSON, the lines of JSON, or the server-sent events of a text that is a response;
    None for another text, which may also be JSON: an answer in a schema of the request."""
    start = text[:64].lstrip("\ufeff \r\n\t")
    try:
        if _EVENT_LINE.match(start):
            value = _parse_events(text)
        elif start[:1] not in ("{", "["):
            return None
        else:
            value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = [json.loads(line) for line in text.split("\n") if line.strip()]
        except (ValueError, RecursionError):
            return None
    items = value if isinstance(value, list) else [value]
    return value if items and all(map(_is_response, items)) else None


def _is_response(value: Any) -> bool:
    """Whether an object is a response or a chunk of one."""
    if not isinstance(value, dict):
        return False
    for key in ("choices", "candidates", "output"):
        items = value.get(key)
        if isinstance(items, list) and all(isinstance(item, dict) for item in items):
            return key != "output" or "object" in value or "model" in value
    has_content = bool({"content", "parts", "tool_calls"} & value.keys())
    is_message = value.get("role") in ("assistant", "model") and has_content
    is_event = isinstance(value.get("type"), str) and len({*value} & _EVENT_KEYS) > 0
    error = value.get("error")
    is_error = isinstance(error, dict) and "message" in error
    return is_message or is_event or is_error or "done" in value or value.get("type") == "ping"


_EVENT_KEYS = {"message", "content_block", "delta", "index", "response", "item", "output_index"}


def _parse_events(text: str) -> list[Any]:
    """Returns the data of server-sent events. The last may be incomplete: a client disconnected."""
    # Not `splitlines`, which also ends lines at U+2028.
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
    events: list[list[str]] = [[]]
    for line in lines:
        if not line:
            events.append([])
        elif line.startswith("data:"):
            events[-1].append(line[5:])
        elif not _EVENT_LINE.match(line):
            raise ValueError("not a line of an event")
    data = [text for lines in events if (text := "\n".join(lines).strip()) not in ("", "[DONE]")]
    return [json.loads(item) for item in data]


def _join_chunks(chunks: list[Record]) -> Record:
    """Returns the complete response of the chunks of a stream."""
    for chunk in chunks:
        check_success(chunk)
    kinds = {str(chunk.get("type")) for chunk in chunks}
    if any(kind.startswith("response.") for kind in kinds):
        ends = ("response.completed", "response.incomplete")
        complete = [chunk.get("response") for chunk in chunks if chunk.get("type") in ends]
        if len(complete) != 1 or not isinstance(complete[0], dict):
            raise RecordError("the stream has no complete response at its end")
        return complete[0]
    if "message_start" in kinds:
        return _join_blocks(chunks)
    if any("choices" in chunk for chunk in chunks):
        return _join_choices(chunks)
    raise RecordError("the stream's format is not known")


def _join_blocks(events: list[Record]) -> Record:
    """Returns the message of a stream of Anthropic."""
    blocks: dict[int, Record] = {}
    for event in events:
        index, kind = event.get("index"), event.get("type")
        if kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            if not isinstance(index, int) or index in blocks:
                raise RecordError("a block of the stream begins twice")
            blocks[index] = {**event["content_block"]}
        elif kind == "content_block_delta":
            delta = event.get("delta")
            kind = delta.get("type") if isinstance(delta, dict) else None
            if kind in _OTHER_DELTAS:
                continue
            if kind not in _DELTAS or not isinstance(index, int) or index not in blocks:
                raise RecordError("a delta of the stream continues nothing that is known")
            key = _DELTAS[kind]
            name = "partial_json" if key == "input" else key
            before = blocks[index].get(key) or ""
            added = check_text(delta.get(name), "a delta")
            blocks[index][key] = check_text(before, "a block") + added
    for block in blocks.values():
        if isinstance(block.get("input"), str):
            try:
                block["input"] = json.loads(block["input"] or "{}")
            except ValueError:
                pass  # the stream ended within the call
    return {"role": "assistant", "content": [block for _, block in sorted(blocks.items())]}


def _join_choices(chunks: list[Record]) -> Record:
    """Returns the response of OpenAI's chunks."""
    choices: dict[int, Record] = {}
    joined: Record = {"choices": []}
    for chunk in chunks:
        if chunk.get("prompt_token_ids"):
            joined["prompt_token_ids"] = chunk["prompt_token_ids"]
        for part in check_list(chunk.get("choices") or [], "choices"):
            index = part.get("index", 0)
            if not isinstance(index, int):
                raise RecordError("the index of a choice is not a number")
            choice = choices.setdefault(
                index, {"index": index, "ids": [], "message": {"content": "", "tool_calls": []}}
            )
            delta = part.get("delta", part)
            if not isinstance(delta, dict) or part.get("message") is not None:
                raise RecordError("a chunk of the stream has no delta")
            has_text = _join_delta(choice["message"], delta)
            ids = part.get("token_ids")
            choice["prompt_token_ids"] = part.get("prompt_token_ids") or choice.get(
                "prompt_token_ids"
            )
            if ids:
                choice["ids"] += check_token_ids(ids, "token_ids")
            choice["is_missing_ids"] = choice.get("is_missing_ids", False) or has_text > bool(ids)
    for _, choice in sorted(choices.items()):
        choice["token_ids"] = None if choice["is_missing_ids"] else choice["ids"]
        joined["choices"].append(choice)
    return joined


def _join_delta(message: Record, delta: Record) -> bool:
    """Adds a delta to a message, and returns whether it contains generated text."""
    has_text = False
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    texts = {
        "content": delta.get("content") or delta.get("text"),
        "reasoning_content": reasoning,
        "refusal": delta.get("refusal"),
    }
    for key, text in texts.items():
        if not is_empty(text) or text:
            message[key] = message.get(key, "") + check_text(text, f"the {key} of a chunk")
            has_text = True
    if delta.get("function_call"):
        raise RecordError("a chunk has the key function_call of an old version of the API")
    for call in check_list(delta.get("tool_calls") or [], "the tool calls of a chunk"):
        _join_call(message["tool_calls"], call)
        has_text = True
    return has_text


def _join_call(calls: list[Record], call: Record) -> None:
    """Adds a piece of a tool call. Some servers give all calls one index, but different ids."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise RecordError("a tool call of a chunk has no function")
    index, ident, name = call.get("index"), call.get("id"), function.get("name")
    known = [c for c in calls if c["index"] == index] if index is not None else calls[-1:]
    is_new = not known or (bool(name) and ident is not None and ident != known[-1]["id"])
    arguments = function.get("arguments")
    arguments = "" if arguments is None else check_text(arguments, "the arguments of a chunk")
    if is_new:
        made = {"name": name, "arguments": arguments}
        calls.append({"index": index, "id": ident, "function": made})
    else:
        known[-1]["function"]["arguments"] += arguments
