"""What a model answered: a response in any spelling to chunks, and chunks to messages.

A whole response is one chunk, a streamed one has many. Each chunk adds text, reasoning, tool calls
or token ids to one of the answers, so that a stream gives the message that the same response gives
in one piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ngram_npu.errors import RecordError, ReplayError
from ngram_npu.replay.records import Message

Record = Mapping[str, Any]

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_REASONING_PARTS = ("reasoning", "reasoning_text", "summary_text", "thinking")
_CALL_PARTS = ("tool_use", "server_tool_use", "function_call")
_MAX_TOKEN_ID = 2**31 - 1
_EVENT_LINE = re.compile(r"(data|event|id|retry)?:")
_DELTAS = {
    # Anthropic's, by the delta's type
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "input",
    # those of the Responses API, by the event's type
    "response.output_text.delta": "text",
    "response.refusal.delta": "text",
    "response.reasoning_text.delta": "thinking",
    "response.reasoning_summary_text.delta": "thinking",
    "response.function_call_arguments.delta": "arguments",
}
"""The key of a streamed part that a delta continues."""


_RESPONSE_KEYS = {"body", "choices", "content", "delta", "error", "message", "object", "output"}
"""One of these is in every response and in a chunk of every stream."""


@dataclass
class Answer:
    """One answer while its chunks come in.

    Attributes:
        text, reasoning: pieces of each.
        calls: tool calls by number.
        token_ids: of the whole answer, where the server gives them.
    """

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[Any, dict[str, Any]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)

    def add(self, part: Record, where: str) -> None:
        """Add a message, or the delta of one."""
        said = next((part[key] for key in _REASONING_KEYS if part.get(key)), None)
        if said is not None:
            self._reason(said, where)
        content = part["content"] if "content" in part else part.get("text")
        if isinstance(content, list):
            self.text.append(self._parts(content, f"{where}.content"))
        elif content is not None:
            self.text.append(checked_text(content, f"{where}.content"))
        if part.get("refusal"):
            self.text.append(checked_text(part["refusal"], f"{where}.refusal"))
        calls = part.get("tool_calls")
        for i, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                self._call(call.get("index", i), call.get("function", call))
        if part.get("function_call"):
            self._call("function_call", part["function_call"])

    def add_parts(self, parts: list[Any], where: str) -> None:
        """Add the parts of an answer that is made of nothing else."""
        self.text.append(self._parts(parts, where))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was generated."""
        return not (any(self.text) or any(self.reasoning) or self.calls or self.token_ids)

    def message(self, role: str = "assistant") -> dict[str, Any]:
        """The answer as a message: role and content, and what else there is."""
        made: dict[str, Any] = {"role": role, "content": "".join(self.text)}
        if any(self.reasoning):
            made["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            made["tool_calls"] = [
                {"type": "function", "function": call} for call in self.calls.values()
            ]
        return made

    def _parts(self, parts: list[Any], where: str) -> str:
        """Their text. Parts that are not text, such as images, are left out."""
        texts = []
        for i, part in enumerate(parts):
            at = f"{where}[{i}]"
            if not isinstance(part, dict):
                texts.append(checked_text(part, at))
            elif part.get("type") in _CALL_PARTS:
                self._call(len(self.calls), part)
            elif part.get("type") in _REASONING_PARTS:
                keys = ("thinking", "content", "summary", "text")
                self._reason(next((part[key] for key in keys if part.get(key)), ""), at)
            else:
                nested = part["content"] if "content" in part else part.get("text")
                nested = [] if nested is None else nested
                whole = isinstance(nested, list)
                texts.append(self._parts(nested, at) if whole else checked_text(nested, at))
        return "\n".join(text for text in texts if text)

    def _reason(self, said: Any, where: str) -> None:
        if isinstance(said, list):
            inner = Answer()
            inner.add_parts(said, where)
            said = "".join([*inner.reasoning, *inner.text])
        self.reasoning.append(checked_text(said, f"{where}.reasoning"))

    def _call(self, number: Any, function: Any) -> None:
        if not isinstance(function, dict):
            return
        call = self.calls.setdefault(number, {"name": None, "arguments": ""})
        call["name"] = call["name"] or function.get("name")
        given = function.get("arguments", function.get("input"))
        if isinstance(given, str):
            call["arguments"] += given
        elif given is not None:
            call["arguments"] = given


def message_of(data: object, where: str) -> Message:
    """A message with its content as text; keys that a chat template may use are kept."""
    if not isinstance(data, dict):
        raise RecordError(f"{where} must be an object, got {kind(data)}")
    role = data.get("role")
    if not isinstance(role, str):
        raise RecordError(f"{where}.role must be a string, got {kind(role)}")
    made = Answer()
    made.add(data, where)
    kept = {key: data[key] for key in ("name", "tool_call_id") if data.get(key) is not None}
    return {**made.message(role), **kept}


def answers_of(response: object, where: str) -> tuple[list[Answer], tuple[int, ...] | None]:
    """The answers of a response, by number, and the prompt's token ids where it gives them.

    Raises:
        RecordError: the response has no answer; the message says what it has.
    """
    chunks = list(_chunks(response, where))
    answers: dict[int, Answer] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    prompt: Any = None
    failure: Any = None
    for i, chunk in enumerate(chunks):
        at = f"{where}[{i}]" if len(chunks) > 1 else where
        failure = failure or chunk.get("error") or _inner(chunk, "response", "error")
        prompt = prompt or chunk.get("prompt_token_ids")
        choices = chunk.get("choices")
        if isinstance(choices, list):
            for j, choice in enumerate(choices):
                if not isinstance(choice, dict):
                    raise RecordError(f"{at}: choices[{j}] must be an object, got {kind(choice)}")
                answer = answers.setdefault(choice.get("index", j), Answer())
                part = choice.get("delta") or choice.get("message") or choice
                if isinstance(part, dict):
                    answer.add(part, f"{at}: choices[{j}]")
                answer.token_ids += choice.get("token_ids") or ()
                prompt = prompt or choice.get("prompt_token_ids")
        elif isinstance(chunk.get("message"), dict):  # Ollama's, and Anthropic's message_start
            answers.setdefault(0, Answer()).add(chunk["message"], at)
        elif isinstance(chunk.get("output"), list):
            answers.setdefault(0, Answer()).add_parts(chunk["output"], f"{at}: output")
        elif chunk.get("role") == "assistant" or _is_text(chunk):
            answers.setdefault(0, Answer()).add(chunk, at)
        else:
            _follow(chunk, blocks)
    if blocks:
        parts = [_finished(block) for _, block in sorted(blocks.items())]
        answers.setdefault(0, Answer()).add_parts(parts, where)
    found = [answer for _, answer in sorted(answers.items()) if not answer.is_empty]
    if not found:
        _refuse(answers, failure, chunks, where)
    return found, None if prompt is None else token_ids_of(prompt, f"{where}: prompt_token_ids")


def _is_text(chunk: Record) -> bool:
    """A text alone, or a chunk of llama.cpp's server. Events have a type."""
    return "type" not in chunk and ("content" in chunk or "text" in chunk)


def _follow(event: Record, blocks: dict[Any, dict[str, Any]]) -> None:
    """An event of Anthropic's streams or of the Responses API: begins, continues or ends a part."""
    whole = event.get("response")
    if isinstance(whole, dict) and whole.get("output"):
        blocks.clear()
        blocks.update(enumerate(whole["output"]))
    number = event.get("index", event.get("output_index"))
    part = event.get("content_block", event.get("item"))
    delta = event.get("delta")
    if isinstance(part, dict):
        blocks[number] = dict(part)
    elif delta is not None:
        name = event.get("type") if isinstance(delta, str) else delta.get("type")
        key = _DELTAS.get(name or "")
        added = delta if isinstance(delta, str) else delta.get(key, delta.get("partial_json"))
        if key is not None and isinstance(added, str):
            block = blocks.setdefault(number, {})
            before = block.get(key)
            block[key] = (before if isinstance(before, str) else "") + added
            if key == "text":  # of a message, whose content was empty when it began
                block.pop("content", None)


def _inner(data: Record, *keys: str) -> Any:
    """What lies under the keys, one within the other; None if something else does."""
    value: Any = data
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _finished(block: dict[str, Any]) -> dict[str, Any]:
    """A tool's input as the object that a response in one piece has."""
    if isinstance(block.get("input"), str):
        with suppress(ValueError):
            return {**block, "input": json.loads(block["input"])}
    return block


def _refuse(answers: dict[int, Answer], failure: Any, chunks: list[Record], where: str) -> None:
    if failure:
        told = failure.get("message", failure) if isinstance(failure, dict) else failure
        raise RecordError(f"{where}: the response is an error: {told!s:.100}")
    if answers:
        raise RecordError(f"{where}: the answer is empty")
    keys = ", ".join(f'"{key}"' for chunk in chunks[:1] for key in list(chunk)[:6]) or "nothing"
    raise RecordError(f"{where}: the response has no answer, only {keys}")


def _chunks(response: object, where: str) -> Iterable[Record]:
    """The chunks of a response: an object, a list of chunks, either as text, or a text alone."""
    if isinstance(response, str):
        checked_text(response, where)
        found = _decoded(response)
        if found is None:
            return [{"text": response}]
        response = found
    if isinstance(response, list):
        if response and all(isinstance(item, str) for item in response):
            whole = all(_EVENT_LINE.match(item) for item in response)
            return _chunks(("\n\n" if whole else "").join(response), where)
        for i, item in enumerate(response):
            if not isinstance(item, dict):
                raise RecordError(f"{where}[{i}] must be a chunk, got {kind(item)}")
        return response
    if not isinstance(response, dict):
        raise RecordError(f"{where}: the response must be an object, got {kind(response)}")
    status = response.get("status_code", response.get("status"))
    if isinstance(status, int) and status >= 400:
        raise RecordError(f"{where}: the response is an error: HTTP status {status}")
    if "body" in response:
        return _chunks(response["body"], where)
    return [response]


def _decoded(text: str) -> dict[str, Any] | list[Any] | None:
    """JSON, lines of JSON, or server-sent events; None for anything else."""
    for read in (_document, _events, _json_lines):
        with suppress(ValueError, RecursionError):
            values = read(text)
            if len(values) == 1 and isinstance(values[0], list):
                values = values[0]
            # A text may be JSON itself: an answer under a schema.
            if any(isinstance(value, dict) and _RESPONSE_KEYS & value.keys() for value in values):
                return values[0] if len(values) == 1 else values
    return None


def _document(text: str) -> list[Any]:
    return [json.loads(text)]


def _events(text: str) -> list[Any]:
    """The data of server-sent events. Not `splitlines`: it also ends lines at U+2028."""
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
    if not all(_EVENT_LINE.match(line) for line in lines[:-1] if line):
        raise ValueError("something between the events")
    joined: list[list[str]] = [[]]
    for line in lines:
        if not line:
            joined.append([])
        elif line.startswith("data:"):
            joined[-1].append(line[5:])
    data = ["\n".join(of).strip() for of in joined if of]
    values: list[Any] = []
    for i, item in enumerate(data):
        if item == "[DONE]":
            continue
        try:
            values.append(json.loads(item))
        except ValueError:
            if i < len(data) - 1:  # the client may have left in the middle of the last one
                raise
    return values


def _json_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


# Checked values


def checked_text(value: object, where: str) -> str:
    """The value, if it is text that a tokenizer takes."""
    if not isinstance(value, str):
        raise RecordError(f"{where} must be a string, got {kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON allows half of a surrogate pair, which is not valid text: tokenizers reject it.
        raise ReplayError(f"{where}: lone surrogate at character {error.start + 1}") from error
    return value


def token_ids_of(value: object, where: str) -> tuple[int, ...]:
    """The value, if it is a list of token ids."""
    if not isinstance(value, list):
        raise RecordError(f"{where} must be an array of integers, got {kind(value)}")
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RecordError(f"{where}[{i}] must be an integer, got {kind(token)}")
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise ReplayError(f"{where}[{i}] is {token}, outside [0, 2**31)")
    return tuple(value)


def kind(value: object) -> str:
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
