"""Converts a model's response of any format to chunks, and the chunks to answers.

A complete response is one chunk, a streamed response has many. Each chunk adds text, reasoning,
tool calls or token ids to one of the answers, so that a stream results in the same answers as the
complete response.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.conversations import Message
from ngram_npu_cli.logs.expressions import compile_expression
from ngram_npu_cli.logs.json_values import decode_json
from ngram_npu_cli.logs.presets import RESPONSES, ROLES

Record = Mapping[str, Any]

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_REASONING_PARTS = ("reasoning", "reasoning_text", "summary_text", "thinking")
_CALL_PARTS = ("tool_use", "server_tool_use", "function_call", "tool_call")
_PART_TYPES = {
    "toolUse": "tool_use",
    "functionCall": "tool_use",
    "toolResult": "tool_result",
    "functionResponse": "tool_result",
    "reasoningContent": "reasoning",
    **dict.fromkeys(("image", "video", "inlineData", "inline_data", "fileData"), "image"),
    "cachePoint": "cache_point",
}
"""For Bedrock and Gemini: by the key of a part's only object, the part's type elsewhere."""
_PART_KEYS = ("content", "text", "refusal", "result", "response", "json")
_OPENAI_ROLES = ("user", "assistant", "system", "tool")
_ROLE_KEYS = ("role", "from", "author", "sender", "speaker")
_CONTENT_KEYS = ("content", "value", "text", "parts", "message", "body")
_ANSWER_KEYS = ("output", "answer", "text", "content", "response", "completion", "generated_text")
_get_function = compile_expression("function || @")
_get_response_error = compile_expression("response.error")
_get_response_output = compile_expression("response.output")
EMPTY: tuple[Any, ...] = (None, "", [])
_MAX_TOKEN_ID = 2**31 - 1
_EVENT_LINE = re.compile(r"(data|event|id|retry)?:")
_DELTAS = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "text",
    "response.reasoning_text.delta": "thinking",
    "response.reasoning_summary_text.delta": "thinking",
    "response.function_call_arguments.delta": "arguments",
}
"""For the Responses API: by event type, the key of the streamed part that a delta continues."""
_BLOCK_DELTAS = {"text": "text", "thinking": "thinking", "partial_json": "input"}
"""For Anthropic's streams: by the delta's key, the key of the streamed part."""
_DELTA_KEYS = {*_DELTAS.values(), *_BLOCK_DELTAS.values()}
_RESPONSE_KEYS = {
    *("body", "candidates", "choices", "content", "delta", "error", "generations", "message"),
    *("object", "output"),
}
"""Every response, and at least one chunk of every stream, has one of these keys."""
_RESPONSE_MARKERS = {
    *("choices", "candidates", "generations", "error", "model", "object", "usage", "done"),
    *("stop_reason", "stopReason", "status_code"),
}
"""An object with none of these keys is the text of an answer, even if it has a response's key."""
_CHUNK_KEYS = {
    *("choices", "candidates", "generations", "object", "type", "stop", "done", "delta", "error"),
}
"""An item of a list or line with none of these keys is the text of an answer."""


@dataclass
class _Call:
    """A tool call, to which pieces are added."""

    ident: Any
    index: int | None
    name: str
    arguments: str | dict[str, Any] = ""


@dataclass
class Answer:
    """An answer, to which chunks are added.

    Attributes:
        text, reasoning: The pieces of the text and of the reasoning.
        calls: Tool calls, in the order in which they began.
        token_ids, prompt_token_ids: Token ids of answer and prompt, if the server logs them.
        is_missing_ids: Whether a piece of text has no token ids.
    """

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] | None = None
    is_missing_ids: bool = False

    def add(self, part: Record, location: str, *, is_delta: bool = False) -> None:
        """Adds a message, or the delta of a message."""
        self._add_reasoning(get_first(part, *_REASONING_KEYS), f"{location}.reasoning")
        self._add_text(get_first(part, "content", "text"), f"{location}.content")
        self._add_text(get_first(part, "refusal"), f"{location}.refusal")
        if part.get("toolInvocations"):
            raise RecordError(f"{location}: toolInvocations of the AI SDK 4 are not read")
        calls = check_type(part.get("tool_calls"), list, f"{location}.tool_calls", optional=True)
        for i, call in enumerate(calls or ()):
            self._add_call(call, f"{location}.tool_calls[{i}]", is_delta)
        if part.get("function_call") is not None:
            self._add_call(part["function_call"], f"{location}.function_call", is_delta)

    def add_choice(self, choice: Record, location: str) -> None:
        """Adds a choice of a response: a text, a message or its delta; and its token ids."""
        key = next((key for key in ("delta", "message") if choice.get(key) not in (None, {})), None)
        part = choice if key is None else choice[key]
        check_type(part, dict, f"{location}.{key}")
        old_sizes = len(self.text), len(self.reasoning), len(self.calls)
        part = normalize_message(part) if key == "message" else part
        self.add(part, location, is_delta=key == "delta")
        if choice.get("token_ids") is not None:
            self.token_ids += check_token_ids(choice["token_ids"], f"{location}.token_ids")
        else:
            new_sizes = len(self.text), len(self.reasoning), len(self.calls)
            self.is_missing_ids |= old_sizes != new_sizes
        if choice.get("prompt_token_ids") not in EMPTY:
            ids = check_token_ids(choice["prompt_token_ids"], f"{location}.prompt_token_ids")
            if self.prompt_token_ids not in (None, ids):
                raise RecordError(
                    f"{location}.prompt_token_ids differ from those of earlier chunks"
                )
            self.prompt_token_ids = ids

    @property
    def is_empty(self) -> bool:
        """Whether nothing was generated."""
        return not (any(self.text) or any(self.reasoning) or self.calls or self.token_ids)

    @property
    def has_ids(self) -> bool:
        """Whether the token ids of answer and prompt are complete."""
        return (
            bool(self.token_ids) and not self.is_missing_ids and self.prompt_token_ids is not None
        )

    def make_message(self, role: str = "assistant") -> dict[str, Any]:
        """Returns the answer as a message: role, content, reasoning and tool calls."""
        message: dict[str, Any] = {"role": role, "content": "".join(self.text)}
        if any(self.reasoning):
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            # A call without arguments has an empty object in every template.
            functions = [{"name": c.name, "arguments": c.arguments or {}} for c in self.calls]
            message["tool_calls"] = [{"type": "function", "function": f} for f in functions]
        return message

    def _add_text(self, value: Any, location: str) -> None:
        if value is not None:
            self.text.append(self.join_parts(value, location))

    def join_parts(self, parts: Any, location: str) -> str:
        """Returns the text of a message's content: a text, or a list of parts.

        Adds the reasoning and the tool calls of the list. Other parts, such as images, are left
        out.
        """
        if not isinstance(parts, list):
            return check_text(parts, location)
        texts = []
        for i, part in enumerate(parts):
            part_location = f"{location}[{i}]"
            if not isinstance(part, dict):
                texts.append(check_text(part, part_location))
                continue
            part = _unwrap_part(part)
            part_type = check_type(part.get("type"), str, f"{part_location}.type", optional=True)
            content = get_first(part, *_PART_KEYS)
            if part_type in _CALL_PARTS or {"input", "arguments", "args"} & part.keys():
                self._add_call({"function": part}, part_location)
            elif part_type in _REASONING_PARTS or {"thinking", "summary"} & part.keys():
                self._add_reasoning(
                    get_first(part, "thinking", "content", "summary", "text"), part_location
                )
            elif content is not None:
                texts.append(self.join_parts(content, part_location))
            elif part_type is None and not set(_PART_KEYS) & part.keys():
                raise RecordError(f'{part_location} must have a "type" or a "text"')
        return "\n".join(text for text in texts if text)

    def _add_reasoning(self, reasoning: Any, location: str) -> None:
        if isinstance(reasoning, list):
            parts = Answer()
            text = parts.join_parts(reasoning, location)
            reasoning = "".join([*parts.reasoning, text])
        if reasoning is not None:
            self.reasoning.append(check_text(reasoning, location))

    def _add_call(self, call: Any, location: str, is_delta: bool = False) -> None:
        """Adds a tool call, or the delta of a tool call."""
        function = _get_function(call)
        check_type(function, dict, location)
        name = get_first(function, "name", "toolName")
        name = None if name is None else check_text(name, f"{location}: name")
        arguments = get_first(function, "arguments", "input", "args")
        if not isinstance(arguments, (str, dict, type(None))):
            raise RecordError(
                f"{location}: arguments must be a string or object, got {describe_type(arguments)}"
            )
        ident, index = get_first(call, "id"), None
        current_call = None
        if is_delta:
            index = _get_index(call, f"{location}.index", "index")
            current_call = self._find_continued_call(ident, index, name)
        if current_call is None:
            if name is None:
                raise RecordError(f"{location}: name must be a string, got {describe_type(name)}")
            current_call = _Call(ident, index, name)
            self.calls.append(current_call)
        if isinstance(arguments, dict) and not current_call.arguments:
            current_call.arguments = arguments
        elif isinstance(arguments, str) and isinstance(current_call.arguments, str):
            current_call.arguments += arguments
        elif arguments is not None:
            raise RecordError(f"{location}: arguments are both text and an object")

    def _find_continued_call(self, ident: Any, index: int | None, name: str | None) -> _Call | None:
        """Returns the call that a delta continues: by id, else by index, else the last call.

        Some servers give all calls of an answer the same index or none, or the pieces of one call
        different ids or indices. Usually only the first piece of a call has a name.
        """
        same_id = [call for call in self.calls if ident is not None and call.ident == ident]
        same_index = [call for call in self.calls if index is not None and call.index == index]
        candidates = same_id or same_index or self.calls
        if not candidates:
            return None
        last = candidates[-1]
        has_same_keys = ident in (None, last.ident) and index in (None, last.index)
        has_key = ident is not None or index is not None
        is_same = has_same_keys and has_key and (bool(same_id) or name == last.name)
        return last if is_same or not name else None


def _unwrap_part(part: Record) -> Record:
    """Returns a part of Bedrock or Gemini as a part with a type."""
    if isinstance(part.get("text"), dict):  # of OpenAI's Assistants
        return {**part, "text": part["text"].get("value")}
    if part.get("thought") is True:  # of Gemini
        return {**part, "type": "reasoning"}
    key = next((key for key in _PART_TYPES if isinstance(part.get(key), dict)), None)
    if key is None:
        return part
    inner = part[key].get("reasoningText", part[key])
    return {**check_type(inner, dict, key), "type": _PART_TYPES[key]}


def normalize_message(item: Record) -> Record:
    """Returns a message of ShareGPT, LangChain, OpenInference and other formats with the keys of
    OpenAI's."""
    if len(item) == 1 and (name := next(iter(item))) in ROLES:  # {"user": "Hi"}
        return {"role": ROLES[name], "content": item[name]}
    if item.get("role") in _OPENAI_ROLES and isinstance(item.get("content"), (str, list)):
        return item
    for key in ("kwargs", "data", "message"):
        if isinstance(item.get(key), dict) and "role" not in item:
            names = item["id"] if isinstance(item.get("id"), list) else [item.get("type")]
            item = {"type": names[-1] if names else None, **item[key]}
    role = next((item[key] for key in _ROLE_KEYS if item.get(key) is not None), item.get("type"))
    role = role.get("role") if isinstance(role, dict) else role
    if isinstance(role, str):
        role = ROLES.get(role.lower(), None if role == item.get("type") else role)
    content = next((item[key] for key in _CONTENT_KEYS if item.get(key) is not None), None)
    content = content.get("parts") if isinstance(content, dict) else content
    return {**item, "role": role, "content": content}


def parse_message(data: Any, location: str) -> Message:
    """Returns a message with its content as text and the keys that chat templates may use."""
    data = normalize_message(check_type(data, dict, location))
    role = check_type(data.get("role"), str, f"{location}.role")
    answer = Answer()
    answer.add(data, location)
    if answer.reasoning and role != "assistant":
        raise RecordError(f'{location}: reasoning in a message of the role "{role:.40}"')
    other_keys = {key: data[key] for key in ("name", "tool_call_id") if data.get(key) is not None}
    return {**answer.make_message(role), **other_keys}


def parse_answers(response: object, location: str) -> list[Answer]:
    """Returns the answers of a response that are not empty, ordered by number; at least one."""
    chunks = list(_split_chunks(response, location))
    answers: defaultdict[int, Answer] = defaultdict(Answer)
    blocks: dict[int, dict[str, Any]] = {}
    prompt_ids: tuple[int, ...] | None = None
    failure: Any = None
    has_index: set[bool] = set()
    for i, chunk in enumerate(chunks):
        part_location = f"{location}[{i}]" if len(chunks) > 1 else location
        failure = failure or chunk.get("error") or _get_response_error(chunk)
        if chunk.get("prompt_token_ids") not in EMPTY:
            ids = check_token_ids(chunk["prompt_token_ids"], f"{part_location}: prompt_token_ids")
            prompt_ids = prompt_ids or ids
        choices = decode_json(chunk.get("choices"))
        check_type(choices, list, f"{part_location}: choices", optional=True)
        message = chunk.get("message")
        if chunk.get("role") in ("user", "human", "system", "developer", "tool"):
            raise RecordError(f"{part_location}: the answer contains a message of another role")
        # This is a text alone, or a chunk of llama.cpp's server. Events have a type.
        is_text = "type" not in chunk and bool({"content", "text"} & chunk.keys())
        if choices is not None:
            seen_numbers: set[int] = set()
            for j, choice in enumerate(choices):
                choice_at = f"{part_location}: choices[{j}]"
                check_type(choice, dict, choice_at)
                index = _get_index(choice, f"{choice_at}.index", "index")
                has_index.add(index is not None)
                number = j if index is None else index
                if number in seen_numbers and choice.get("delta") is None:
                    raise RecordError(f"{choice_at}.index is {number}, as for another choice")
                seen_numbers.add(number)
                is_whole = choice.get("message") is not None and "candidates" not in chunk
                if is_whole and not answers[number].is_empty:
                    raise RecordError(f"{choice_at}: a second complete answer")
                answers[number].add_choice(choice, choice_at)
        elif message is not None:  # from Ollama, or Anthropic's message_start
            check_type(message, dict, f"{part_location}: message")
            answers[0].add(message, part_location)
        elif isinstance(chunk.get("output"), list):
            answers[0].text.append(
                answers[0].join_parts(chunk["output"], f"{part_location}: output")
            )
        elif chunk.get("role") == "assistant" or is_text:
            if chunk.get("role") and not answers[0].is_empty:
                raise RecordError(f"{part_location}: a second complete answer")
            answers[0].add(chunk, part_location)
        else:
            _apply_event(chunk, blocks, part_location)
    if len(chunks) > 1 and len(answers) > 1 and len(has_index) > 1:
        raise RecordError(
            f"{location}: some choices of the stream have an index and some have none"
        )
    if blocks:
        parts = [_parse_input(block) for _, block in sorted(blocks.items())]
        answers[0].text.append(answers[0].join_parts(parts, location))
    if all(answer.is_empty for answer in answers.values()):
        if failure:
            message = failure.get("message", failure) if isinstance(failure, dict) else failure
            raise RecordError(f"{location}: the response is an error: {message!s:.100}")
        keys = ", ".join(f'"{key}"' for chunk in chunks[:1] for key in list(chunk)[:6])
        reason = "the answer is empty" if answers else f"the response has no answer, only {keys}"
        raise RecordError(f"{location}: {reason}")
    for answer in answers.values():
        answer.prompt_token_ids = answer.prompt_token_ids or prompt_ids
    return [answer for _, answer in sorted(answers.items()) if not answer.is_empty]


def _apply_event(event: Record, blocks: dict[int, dict[str, Any]], location: str) -> None:
    """Applies an event of Anthropic's streams or of the Responses API to a part."""
    name = check_type(event.get("type"), str, f"{location}: type", optional=True)
    output = _get_response_output(event)
    if isinstance(output, list) and output:
        blocks.clear()
        for number, item in enumerate(output):
            blocks[number] = check_type(item, dict, f"{location}: response.output[{number}]")
    part = next((event[key] for key in ("content_block", "item") if event.get(key)), None)
    if part is not None:
        number = _get_part_number(event, location)
        previous = blocks.get(number)
        blocks[number] = dict(check_type(part, dict, f"{location}: the part"))
        is_end = (name or "").endswith("done")
        is_same = previous and all(part.get(k) == previous.get(k) for k in ("id", "type"))
        if previous and not (is_end and is_same):
            raise RecordError(f"{location}: part {number} has already begun")
    delta = event.get("delta")
    if delta is None:
        return
    if isinstance(delta, str):
        if not (name or "").startswith("response."):
            raise RecordError(f"{location}: a delta of an unknown event")
        key, added = _DELTAS.get(name or ""), delta
    else:
        check_type(delta, dict, f"{location}: delta")
        delta_key = next((key for key in _BLOCK_DELTAS if delta.get(key)), "")
        key, added = _BLOCK_DELTAS.get(delta_key), delta.get(delta_key)
    if key is not None:
        block = blocks.setdefault(_get_part_number(event, location), {})
        if any(block.get(other) for other in _DELTA_KEYS if other != key):
            raise RecordError(f"{location}: the delta continues a part of another kind")
        previous_text = block.get(key)
        prefix = previous_text if isinstance(previous_text, str) else ""
        block[key] = prefix + check_text(added, location)
        if key == "text":  # part of a message, whose content is empty at first
            block.pop("content", None)


def _get_part_number(event: Record, location: str) -> int:
    number = _get_index(event, f"{location}: index", "index", "output_index")
    if number is None:
        raise RecordError(f"{location}: missing the index of the part")
    return number


def get_first(data: Record, *keys: str) -> Any:
    """Returns the first value under one of the keys that is not empty; None if all are."""
    for key in keys:
        value = data.get(key)
        if value not in EMPTY:
            return value
    return None


def _get_index(data: Record, location: str, *keys: str) -> int | None:
    """Returns the number under the first key that has a value; None if no key has a value."""
    value = next((data[key] for key in keys if data.get(key) is not None), None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise RecordError(f"{location} must be 0 or more, got {describe_type(value)}")
    return value


def _parse_input(block: dict[str, Any]) -> dict[str, Any]:
    """Parses a tool's streamed input to the object that a complete response has."""
    if isinstance(block.get("input"), str):
        with suppress(ValueError):
            return {**block, "input": json.loads(block["input"])}
    return block


def _split_chunks(response: Any, location: str) -> Iterable[Record]:
    """Returns the chunks of a response: an object, a list of chunks, or a text of these."""
    if isinstance(response, str):
        check_text(response, location)
        decoded = _decode(response)
        if decoded is None:
            return [{"text": response}]
        response = decoded
    if isinstance(response, list):
        for i, item in enumerate(response):
            if not isinstance(item, dict):
                raise RecordError(f"{location}[{i}] must be a chunk, got {describe_type(item)}")
        return [_convert_choices(item) for item in response]
    check_type(response, dict, f"{location}: the response")
    check_success(response, location)
    if "choices" in response:
        return [response]
    if "body" in response:
        return _split_chunks(response["body"], location)
    if isinstance(response.get("output"), dict):  # of Bedrock's Converse
        return _split_chunks(response["output"], location)
    response = _convert_choices(response)
    if len(response) == 1 and isinstance(text := next(iter(response.values())), str):
        return [{"text": text}] if next(iter(response)) in _ANSWER_KEYS else [response]
    return [response]


def _convert_choices(response: Record) -> Record:
    """Returns a response or chunk that is not OpenAI's with choices like OpenAI's."""
    key = next((key for key in RESPONSES if key in response), None)
    if key is None or "choices" in response:
        return response
    return {**response, "choices": compile_expression(RESPONSES[key])(response)}


def _decode(text: str) -> dict[str, Any] | list[Any] | None:
    """Decodes JSON, lines of JSON, or server-sent events; returns None for other text."""
    parsers: tuple[Callable[[str], list[Any]], ...] = (
        lambda text: [json.loads(text)],
        _parse_events,
        lambda text: [json.loads(line) for line in text.split("\n") if line.strip()],
    )
    for parse in parsers:
        with suppress(ValueError, RecursionError):
            values = parse(text)
            if len(values) == 1 and isinstance(values[0], list):
                values = values[0]
            # The text of an answer may itself be JSON, if the request has a schema.
            is_stream = len(values) > 1 or text.lstrip()[:1] != "{"
            if any(_is_response(value, is_stream) for value in values):
                return values[0] if len(values) == 1 else values
    return None


def may_be_encoded(text: str) -> bool:
    """Whether a text may contain JSON or a stream, so that it has to be parsed."""
    start = text[:64].lstrip("\ufeff \r\n\t")
    is_json = start[:1] in ("{", "[") and any(f'"{key}"' in text for key in _RESPONSE_KEYS)
    return is_json or _EVENT_LINE.match(start) is not None


def _is_response(value: Any, is_chunk: bool) -> bool:
    """Whether an object is a response, or a chunk of a stream, and not the text of an answer."""
    if not isinstance(value, dict):
        return False
    if is_chunk:
        return bool(_RESPONSE_KEYS & value.keys() and _CHUNK_KEYS & value.keys())
    if value.get("role") in ("assistant", "model"):
        return True
    parts = [value[key] for key in _RESPONSE_KEYS & value.keys()]
    return bool(_RESPONSE_MARKERS & value.keys()) and any(
        isinstance(part, dict)
        or (isinstance(part, list) and all(isinstance(item, (dict, list)) for item in part))
        for part in parts
    )


def _parse_events(text: str) -> list[Any]:
    """Returns the data of server-sent events."""
    # Not `splitlines`, which also ends lines at U+2028.
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
    if not all(_EVENT_LINE.match(line) for line in lines[:-1] if line):
        raise ValueError("a line is not part of an event")
    joined: list[list[str]] = [[]]
    for line in lines:
        if not line:
            joined.append([])
        elif line.startswith("data:"):
            joined[-1].append(line[5:])
    data = ["\n".join(parts).strip() for parts in joined if parts]
    values: list[Any] = []
    for i, item in enumerate(data):
        if item == "[DONE]":
            continue
        try:
            values.append(json.loads(item))
        except ValueError:
            if i < len(data) - 1:  # the client may have disconnected during the last event
                raise
    return values


# Checked values


def check_success(data: Record, location: str) -> None:
    """Raises RecordError if a record or response is that of a failed request."""
    status = data.get("status_code", data.get("status"))
    if isinstance(status, int) and status >= 400:
        raise RecordError(f"{location}: the response is an error: HTTP status {status}")


_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}


def check_type(value: Any, expected: type, location: str, *, optional: bool = False) -> Any:
    """Returns the value if it has the type, or is None and `optional`."""
    if not isinstance(value, expected) and not (optional and value is None):
        raise RecordError(f"{location} must be {_TYPE_NAMES[expected]}, got {describe_type(value)}")
    return value


def check_text(value: object, location: str) -> str:
    """Returns the value if it is text that a tokenizer accepts."""
    text: str = check_type(value, str, location)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON allows half of a surrogate pair, which is not valid text: tokenizers reject it.
        raise InputError(f"{location}: lone surrogate at character {error.start + 1}") from error
    return text


def check_token_ids(value: object, location: str) -> tuple[int, ...]:
    """Returns the value if it is a list of token ids."""
    if not isinstance(value, list):
        raise RecordError(f"{location} must be an array of integers, got {describe_type(value)}")
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RecordError(f"{location}[{i}] must be an integer, got {describe_type(token)}")
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise InputError(f"{location}[{i}] is {token}, outside [0, 2**31)")
    return tuple(value)


def describe_type(value: object) -> str:
    """Returns the JSON name of a value's type."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"the number {value!r:.40}"
    return _TYPE_NAMES.get(type(value), type(value).__name__)  # tables have more types
