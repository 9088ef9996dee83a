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

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.records import Message

Record = Mapping[str, Any]

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_REASONING_PARTS = ("reasoning", "reasoning_text", "summary_text", "thinking")
_CALL_PARTS = ("tool_use", "server_tool_use", "function_call")
_NOTHING: tuple[Any, ...] = (None, "", [])
_MAX_TOKEN_ID = 2**31 - 1
_EVENT_LINE = re.compile(r"(data|event|id|retry)?:")
_DELTAS = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "text",
    "response.reasoning_text.delta": "thinking",
    "response.reasoning_summary_text.delta": "thinking",
    "response.function_call_arguments.delta": "arguments",
}
"""Of the Responses API: the key of a streamed part that a delta continues, by the event's type."""
_BLOCK_DELTAS = {"text": "text", "thinking": "thinking", "partial_json": "input"}
"""Of Anthropic's streams: the same, by the delta's key."""
_DELTA_KEYS = {*_DELTAS.values(), *_BLOCK_DELTAS.values()}


_RESPONSE_KEYS = {"body", "choices", "content", "delta", "error", "message", "object", "output"}
"""One of these is in every response and in a chunk of every stream."""


@dataclass
class _Call:
    """A tool call while its pieces come in."""

    ident: Any
    index: int | None
    name: str
    arguments: str | dict[str, Any] = ""


@dataclass
class Answer:
    """One answer while its chunks come in.

    Attributes:
        text, reasoning: pieces of each.
        calls: tool calls, in the order in which they began.
        token_ids: of the whole answer, where the server gives them.
        prompt_token_ids: of the prompt that was answered, where the server gives them.
        lacks_ids: whether a piece of text came without its token ids.
    """

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] | None = None
    lacks_ids: bool = False

    def add(self, part: Record, where: str, *, is_delta: bool = False) -> None:
        """Add a message, or the delta of one."""
        self._reason(_first(part, *_REASONING_KEYS), f"{where}.reasoning")
        content = _first(part, "content", "text")
        if isinstance(content, list):
            self.text.append(self._parts(content, f"{where}.content"))
        elif content is not None:
            self.text.append(checked_text(content, f"{where}.content"))
        refusal = _first(part, "refusal")
        if refusal is not None:
            self.text.append(checked_text(refusal, f"{where}.refusal"))
        calls = part.get("tool_calls")
        if not isinstance(calls, (list, type(None))):
            raise RecordError(f"{where}.tool_calls must be an array, got {kind(calls)}")
        for i, call in enumerate(calls or ()):
            self._call(call, f"{where}.tool_calls[{i}]", is_delta)
        if part.get("function_call") is not None:
            self._call(part["function_call"], f"{where}.function_call", is_delta)

    def add_parts(self, parts: list[Any], where: str) -> None:
        """Add the parts of an answer that is made of nothing else."""
        self.text.append(self._parts(parts, where))

    def add_choice(self, choice: Record, where: str) -> None:
        """Add one of a response's choices: a text, a message or the delta of one; its token ids."""
        key = next((key for key in ("delta", "message") if choice.get(key) not in (None, {})), None)
        part = choice if key is None else choice[key]
        if not isinstance(part, dict):
            raise RecordError(f"{where}.{key} must be an object, got {kind(part)}")
        before = len(self.text), len(self.reasoning), len(self.calls)
        self.add(part, where, is_delta=key == "delta")
        if choice.get("token_ids") is not None:
            self.token_ids += token_ids_of(choice["token_ids"], f"{where}.token_ids")
        else:
            self.lacks_ids |= before != (len(self.text), len(self.reasoning), len(self.calls))
        if choice.get("prompt_token_ids") not in _NOTHING:
            ids = token_ids_of(choice["prompt_token_ids"], f"{where}.prompt_token_ids")
            if self.prompt_token_ids not in (None, ids):
                raise RecordError(f"{where}.prompt_token_ids are those of another prompt")
            self.prompt_token_ids = ids

    def remove_echo(self, prompt: str) -> None:
        """Remove the prompt, which a server repeats before the answer if the request says so."""
        self.text = ["".join(self.text).removeprefix(prompt)]
        ids = self.prompt_token_ids or ()
        if tuple(self.token_ids[: len(ids)]) == ids:
            del self.token_ids[: len(ids)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was generated."""
        return not (any(self.text) or any(self.reasoning) or self.calls or self.token_ids)

    @property
    def has_ids(self) -> bool:
        """Whether it is known as token ids, to the last one, and so is its prompt."""
        return bool(self.token_ids) and not self.lacks_ids and self.prompt_token_ids is not None

    def message(self, role: str = "assistant") -> dict[str, Any]:
        """The answer as a message: role and content, and what else there is."""
        made: dict[str, Any] = {"role": role, "content": "".join(self.text)}
        if any(self.reasoning):
            made["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            # A call without arguments has an empty object in every template.
            functions = [{"name": of.name, "arguments": of.arguments or {}} for of in self.calls]
            made["tool_calls"] = [{"type": "function", "function": of} for of in functions]
        return made

    def _parts(self, parts: list[Any], where: str) -> str:
        """Their text. Parts that are not text, such as images, are left out."""
        texts = []
        for i, part in enumerate(parts):
            at = f"{where}[{i}]"
            if not isinstance(part, dict):
                texts.append(checked_text(part, at))
                continue
            said = part.get("type")
            if not isinstance(said, (str, type(None))):
                raise RecordError(f"{at}.type must be a string, got {kind(said)}")
            content = _first(part, "content", "text", "refusal")
            if said in _CALL_PARTS or {"input", "arguments"} & part.keys():
                self._call({"function": part}, at)
            elif said in _REASONING_PARTS or {"thinking", "summary"} & part.keys():
                self._reason(_first(part, "thinking", "content", "summary", "text"), at)
            elif isinstance(content, list):
                texts.append(self._parts(content, at))
            elif content is not None:
                texts.append(checked_text(content, at))
            elif said is None and not {"content", "text", "refusal"} & part.keys():
                raise RecordError(f'{at} must have a "type" or a "text"')
        return "\n".join(text for text in texts if text)

    def _reason(self, said: Any, where: str) -> None:
        if isinstance(said, list):
            inner = Answer()
            inner.add_parts(said, where)
            said = "".join([*inner.reasoning, *inner.text])
        if said is not None:
            self.reasoning.append(checked_text(said, where))

    def _call(self, call: Any, where: str, is_delta: bool = False) -> None:
        """Add a tool call, or the delta of one."""
        function = call["function"] if _inner(call, "function") is not None else call
        if not isinstance(function, dict):
            raise RecordError(f"{where} must be an object, got {kind(function)}")
        name = _first(function, "name")
        name = None if name is None else checked_text(name, f"{where}: name")
        given = _first(function, "arguments", "input")
        if not isinstance(given, (str, dict, type(None))):
            raise RecordError(f"{where}: arguments must be a string or object, got {kind(given)}")
        ident, index = _first(call, "id"), None
        current = None
        if is_delta:
            index = _index(call, f"{where}.index", "index")
            current = self._continued(ident, index, name)
        if current is None:
            if name is None:
                raise RecordError(f"{where}: name must be a string, got {kind(name)}")
            current = _Call(ident, index, name)
            self.calls.append(current)
        if isinstance(given, dict) and not current.arguments:
            current.arguments = given
        elif isinstance(given, str) and isinstance(current.arguments, str):
            current.arguments += given
        elif given is not None:
            raise RecordError(f"{where}: arguments are both text and an object")

    def _continued(self, ident: Any, index: int | None, name: str | None) -> _Call | None:
        """The call that a delta continues: that of its id, else of its index, else the last one.

        Servers also give all calls of an answer one index or none, or the pieces of one call
        several ids or indices; only the first piece of a call has its name (vLLM once repeated it).
        """
        same_id = [call for call in self.calls if ident is not None and call.ident == ident]
        same_index = [call for call in self.calls if index is not None and call.index == index]
        found = [*self.calls, *same_index, *same_id]
        if not found:
            return None
        other_id = ident is not None and ident != found[-1].ident
        other_index = index is not None and index != found[-1].index
        unnamed = ident is None and index is None
        renamed = not same_id and name != found[-1].name
        return None if name and (other_id or other_index or unnamed or renamed) else found[-1]


def message_of(data: object, where: str) -> Message:
    """A message with its content as text; keys that a chat template may use are kept."""
    if not isinstance(data, dict):
        raise RecordError(f"{where} must be an object, got {kind(data)}")
    role = data.get("role")
    if not isinstance(role, str):
        raise RecordError(f"{where}.role must be a string, got {kind(role)}")
    made = Answer()
    made.add(data, where)
    if made.reasoning and role != "assistant":
        raise RecordError(f'{where}: reasoning in a message of the role "{role:.40}"')
    kept = {key: data[key] for key in ("name", "tool_call_id") if data.get(key) is not None}
    return {**made.message(role), **kept}


def answers_of(response: object, where: str) -> dict[int, Answer]:
    """The answers of a response by number; some may be empty.

    Raises:
        RecordError: the response has no answer; the message says what it has.
    """
    chunks = list(_chunks(response, where))
    answers: dict[int, Answer] = {}
    blocks: dict[int, dict[str, Any]] = {}
    prompt: tuple[int, ...] | None = None
    failure: Any = None
    numbered: set[bool] = set()
    for i, chunk in enumerate(chunks):
        at = f"{where}[{i}]" if len(chunks) > 1 else where
        failure = failure or chunk.get("error") or _inner(chunk, "response", "error")
        if chunk.get("prompt_token_ids") not in _NOTHING:
            ids = token_ids_of(chunk["prompt_token_ids"], f"{at}: prompt_token_ids")
            prompt = prompt or ids
        choices, message = chunk.get("choices"), chunk.get("message")
        if not isinstance(choices, (list, type(None))):
            raise RecordError(f"{at}: choices must be an array, got {kind(choices)}")
        if isinstance(choices, list):
            seen: set[int] = set()
            for j, choice in enumerate(choices):
                of = f"{at}: choices[{j}]"
                if not isinstance(choice, dict):
                    raise RecordError(f"{of} must be an object, got {kind(choice)}")
                index = _index(choice, f"{of}.index", "index")
                numbered.add(index is not None)
                number = j if index is None else index
                if number in seen and choice.get("delta") is None:
                    raise RecordError(f"{of}.index is {number}, as that of another choice")
                seen.add(number)
                answers.setdefault(number, Answer()).add_choice(choice, of)
        elif isinstance(message, dict):  # Ollama's, and Anthropic's message_start
            answers.setdefault(0, Answer()).add(message, at)
        elif message is not None:
            raise RecordError(f"{at}: message must be an object, got {kind(message)}")
        elif isinstance(chunk.get("output"), list):
            answers.setdefault(0, Answer()).add_parts(chunk["output"], f"{at}: output")
        elif chunk.get("role") == "assistant" or _is_text(chunk):
            answers.setdefault(0, Answer()).add(chunk, at)
        else:
            _follow(chunk, blocks, at)
    if len(chunks) > 1 and len(answers) > 1 and len(numbered) > 1:
        raise RecordError(f"{where}: some choices of the stream have an index and some have none")
    if blocks:
        parts = [_finished(block) for _, block in sorted(blocks.items())]
        answers.setdefault(0, Answer()).add_parts(parts, where)
    if all(answer.is_empty for answer in answers.values()):
        _refuse(answers, failure, chunks, where)
    for answer in answers.values():
        answer.prompt_token_ids = answer.prompt_token_ids or prompt
    return dict(sorted(answers.items()))


def _is_text(chunk: Record) -> bool:
    """A text alone, or a chunk of llama.cpp's server. Events have a type."""
    return "type" not in chunk and ("content" in chunk or "text" in chunk)


def _follow(event: Record, blocks: dict[int, dict[str, Any]], where: str) -> None:
    """An event of Anthropic's streams or of the Responses API: begins, continues or ends a part."""
    named = event.get("type")
    if not isinstance(named, (str, type(None))):
        raise RecordError(f"{where}: type must be a string, got {kind(named)}")
    whole = _inner(event, "response", "output")
    if isinstance(whole, list) and whole:
        blocks.clear()
        for number, item in enumerate(whole):
            blocks[number] = _object(item, f"{where}: response.output[{number}]")
    part = next((event[key] for key in ("content_block", "item") if event.get(key)), None)
    if part is not None:
        number = _block_number(event, where)
        begun = blocks.get(number)
        blocks[number] = dict(_object(part, f"{where}: the part"))
        is_end = (named or "").endswith("done")
        if begun and not (is_end and all(part.get(k) == begun.get(k) for k in ("id", "type"))):
            raise RecordError(f"{where}: part {number} has begun before")
    delta = event.get("delta")
    if delta is None:
        return
    if isinstance(delta, str):
        if not (named or "").startswith("response."):
            raise RecordError(f"{where}: a delta of an unknown event")
        key, added = _DELTAS.get(named or ""), delta
    else:
        of = next((key for key in _BLOCK_DELTAS if _object(delta, f"{where}: delta").get(key)), "")
        key, added = _BLOCK_DELTAS.get(of), delta.get(of)
    if key is not None:
        block = blocks.setdefault(_block_number(event, where), {})
        if any(block.get(other) for other in _DELTA_KEYS if other != key):
            raise RecordError(f"{where}: text of another kind than the part that it continues")
        before = block.get(key)
        block[key] = (before if isinstance(before, str) else "") + checked_text(added, where)
        if key == "text":  # of a message, whose content was empty when it began
            block.pop("content", None)


def _block_number(event: Record, where: str) -> int:
    number = _index(event, f"{where}: index", "index", "output_index")
    if number is None:
        raise RecordError(f"{where}: missing the index of the part")
    return number


def _inner(data: Record, *keys: str) -> Any:
    """What lies under the keys, one within the other; None if something else does."""
    value: Any = data
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _first(data: Record, *keys: str) -> Any:
    """The first value under one of the keys that is not empty; None if all are."""
    return next((data[key] for key in keys if data.get(key) not in _NOTHING), None)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"{where} must be an object, got {kind(value)}")
    return value


def _index(data: Record, where: str, *keys: str) -> int | None:
    """The number under the first key that has one; None: there is none."""
    value = next((data[key] for key in keys if data.get(key) is not None), None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise RecordError(f"{where} must be 0 or more, got {kind(value)}")
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
        raise InputError(f"{where}: lone surrogate at character {error.start + 1}") from error
    return value


def token_ids_of(value: object, where: str) -> tuple[int, ...]:
    """The value, if it is a list of token ids."""
    if not isinstance(value, list):
        raise RecordError(f"{where} must be an array of integers, got {kind(value)}")
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RecordError(f"{where}[{i}] must be an integer, got {kind(token)}")
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise InputError(f"{where}[{i}] is {token}, outside [0, 2**31)")
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
