"""Evaluates JMESPath expressions on records, and adds functions for traces and trees of messages.

Where an expression selects a key of a text, the text is decoded as JSON. Key paths such as
`input.text || text`, which most presets consist of, need no package and are evaluated fastest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from ngram_npu.errors import InputError, RecordError, import_optional, to_one_line

Expression = Callable[[Any], Any]

_KEY_PATH = re.compile(r"@|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME_KEYS = ("eventName", "event_name", "name")
_ID_KEYS = ("spanId", "span_id", "spanID", "SpanId", "traceId", "trace_id", "TraceId")
_CALL_OPERATIONS = ("chat", "text_completion", "generate_content")
_CONTENT_KEYS = ("parts", "text", "thoughts", "result", "user_profile", "user_instructions")
_TIME_KEYS = ("timeUnixNano", "time_unix_nano", "observedTimeUnixNano", "timestamp", "time")


def decode_json(value: Any) -> Any:
    """Returns the value of a text that is a JSON object or array, and other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def is_empty(value: Any) -> bool:
    """Whether JMESPath treats a value as false: null, false, or an empty text, list or object."""
    return not value and (value is None or value is False or isinstance(value, (str, list, dict)))


@cache
def compile_expression(text: str) -> Expression:
    """Returns a function that evaluates a JMESPath expression.

    Raises:
        InputError: The expression is not valid, or the package `jmespath` is missing.
    """
    parts = [part.strip() for part in text.split("||")]
    if all(_KEY_PATH.fullmatch(part) for part in parts):
        return partial(_get_first, [part.split(".") if part != "@" else [] for part in parts])
    jmespath = import_optional("jmespath", f'the expression "{text}"', "logs")
    try:
        parsed = jmespath.compile(text).parsed
    except jmespath.exceptions.JMESPathError as error:
        raise InputError(f'map: "{text}" is not JMESPath: {to_one_line(error)}') from error
    visit = _make_interpreter(jmespath).visit

    def evaluate(record: Any) -> Any:
        try:
            return visit(parsed, record)
        except jmespath.exceptions.JMESPathError as error:
            reason = to_one_line(error).partition(", received")[0]  # the rest contains values
            raise RecordError(f'the expression "{text}" fails: {reason}') from error

    return evaluate


def _get_first(paths: list[list[str]], record: Any) -> Any:
    """Returns the value at the first path with a value that is not empty, else the first that is
    not null."""
    first = None
    for path in paths:
        value = record
        for key in path:
            if isinstance(value, str):
                value = decode_json(value)
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and not is_empty(value):
            return value
        first = value if first is None else first
    return first


@cache
def _make_interpreter(jmespath: Any) -> Any:
    functions = {
        f"_func_{name}": jmespath.functions.signature(*[{"types": []}] * count)(
            lambda _, *arguments, function=function: function(*arguments)
        )
        for name, (function, count) in _FUNCTIONS.items()
    }

    class Interpreter(jmespath.visitor.TreeInterpreter):  # type: ignore[misc]
        def visit_field(self, node: Any, value: Any) -> Any:
            return super().visit_field(node, decode_json(value))

    table = type(jmespath.functions.Functions)(
        "Functions", (jmespath.functions.Functions,), functions
    )
    return Interpreter(jmespath.Options(custom_functions=table()))


# Functions of expressions


def list_thread(nodes: Any, last: Any) -> list[Any] | None:
    """Returns the messages of a tree from the root to the node `last`."""
    messages: list[Any] = []
    nodes = decode_json(nodes)
    if isinstance(nodes, list):
        nodes = {str(node.get("id")): node for node in check_list(nodes)}
    seen = set()
    while isinstance(nodes, dict) and isinstance(last, str) and last not in seen:
        seen.add(last)
        node = nodes.get(last)
        if not isinstance(node, dict):
            raise RecordError(f"the tree of messages has no node for {len(seen)} of the thread")
        message = node.get("message") if "message" in node else node
        if message is not None:
            messages[:0] = _read_message(message)
        parent = node.get("ancestors")
        if isinstance(parent, list):
            parent = parent[-1] if parent else None
        last = node.get("parent", node.get("parentId", parent))
    if last is not None:
        raise RecordError("the tree of messages has no root")
    return messages or None


def _read_message(message: Any) -> list[Any]:
    """Returns a message of a tree; nothing if it is an empty system message or not the model's."""
    if not isinstance(message, dict):
        return [message]
    content = message.get("content")
    if isinstance(content, dict):  # of ChatGPT, with a key for each type of content
        kind = content.get("content_type")
        values = [content[key] for key in _CONTENT_KEYS if content.get(key)]
        if kind == "reasoning_recap":
            return []
        if not values and kind != "text":
            raise RecordError(f"no text in a message whose content is of the type {kind!r:.40}")
        content = [
            {"type": part.get("content_type"), **part} if isinstance(part, dict) else part
            for value in values
            for part in (value if isinstance(value, list) else [value])
        ]
        message = {**message, "content": content}
    role = _get_first([["from"], ["role"], ["author", "role"]], message)
    return [] if role == "system" and content in ("", [], [""]) else [message]


def list_tree(node: Any, key: str) -> list[Any]:
    """Returns a node and all nodes below it, which are in a list at `key` of each node."""
    children = node.get(key) if isinstance(node, dict) else None
    children = check_list(decode_json(children) or [])
    return [node, *(below for child in children for below in list_tree(child, key))]


def make_dialog(texts: Any) -> list[dict[str, Any]]:
    """Returns the messages of texts, of which every second is an answer."""
    texts = list(texts) if isinstance(texts, list) else []
    while texts and texts[-1] is None:  # of a table's row
        texts.pop()
    if not texts or len(texts) % 2 or not all(isinstance(text, str) for text in texts):
        raise RecordError("a dialog must be a list of texts, of which every second is an answer")
    return [{("user", "assistant")[i % 2]: text} for i, text in enumerate(texts)]


def read_span(span: Any) -> dict[str, Any]:
    """Returns the call of a model that a span of OpenTelemetry records in its attributes and its
    events, or the part of a call that a log record of OpenTelemetry is."""
    attributes = unflatten(span.get("attributes") or span.get("tags") or span.get("SpanAttributes"))
    events = check_list(decode_json(span.get("events") or span.get("logs")) or [])
    if "body" in span:
        body = unwrap_value(decode_json(span["body"]))
        name = next((span[key] for key in _NAME_KEYS if span.get(key)), None)
        event = attributes.get("event")
        name = event.get("name") if name is None and isinstance(event, dict) else name
        fields = body if isinstance(body, dict) else span.get("attributes")
        events = [{"name": name, "attributes": fields}]
    messages: list[Any] = []
    choices: list[Any] = []
    for event in events:
        fields = unflatten(event.get("attributes") or event.get("fields"))
        _, _, kind = str(event.get("name") or fields.get("event")).partition("gen_ai.")
        if kind == "choice":
            message = decode_json(fields.get("message"))
            message = {"role": "assistant", **(message if isinstance(message, dict) else fields)}
            choices.append({"index": fields.get("index"), "message": message})
        elif kind.endswith(".message"):
            messages.append({**fields, "role": kind.removesuffix(".message")})
        elif isinstance(fields.get("gen_ai"), dict):
            attributes["gen_ai"] = {**(attributes.get("gen_ai") or {}), **fields["gen_ai"]}
    call = {"messages": messages, "answer": {"choices": choices} if choices else None}
    call = _read_attributes(attributes) | {key: value for key, value in call.items() if value}
    operation = _get_first([["gen_ai", "operation", "name"]], attributes)
    if not call or operation not in (None, *_CALL_OPERATIONS):
        # An agent's span repeats the calls of the spans below it. The keys are for messages.
        return {key: span[key] for key in span if key not in ("messages", "answer")}
    return {
        **call,
        "id": next((span[key] for key in _ID_KEYS if span.get(key)), None),
        "time": next((span[key] for key in _TIME_KEYS if span.get(key)), None),
    }


def _read_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns messages, answer, tools and system text of the attributes of GenAI, OpenLLMetry and
    OpenInference."""

    def get(*paths: str) -> Any:
        return decode_json(_get_first([path.split(".") for path in paths], attributes))

    messages = get("gen_ai.input.messages", "gen_ai.prompt", "llm.input_messages")
    answers = get("gen_ai.output.messages", "gen_ai.completion", "llm.output_messages")
    if isinstance(answers, list):
        answers = {"choices": [{"message": answer} for answer in answers]}
    elif str(get("ai.operationId")).endswith((".doGenerate", ".doStream")):  # of the AI SDK
        messages = get("ai.prompt.messages")
        calls = [
            {"name": call.get("toolName"), "arguments": call.get("args", call.get("input"))}
            for call in check_list(get("ai.response.toolCalls") or [])
        ]
        text = _get_first([["ai", "response", key] for key in ("text", "object")], attributes)
        answers = {"choices": [{"message": {"content": text, "tool_calls": calls}}]}
    elif str(get("mlflow.spanType")).strip('"') in ("CHAT_MODEL", "LLM"):
        messages, answers = get("mlflow.spanInputs"), get("mlflow.spanOutputs")
    result = {
        "messages": messages,
        "answer": answers,
        "tools": get("gen_ai.tool.definitions", "llm.request.functions", "llm.tools"),
        "system": get("gen_ai.system_instructions"),
    }
    return {key: value for key, value in result.items() if not is_empty(value)}


def unwrap_value(value: Any) -> Any:
    """Returns the value of OTLP's `{"stringValue": ...}`, also of nested lists and objects."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [unwrap_value(item) for item in (inner or {}).get("values", ())]
    if kind == "kvlistValue":
        return _make_dict((inner or {}).get("values"))
    if kind == "intValue" and isinstance(inner, str):
        return int(inner) if inner.isdecimal() else inner
    return inner if kind in ("stringValue", "intValue", "doubleValue", "boolValue") else value


def _make_dict(items: Any) -> dict[str, Any]:
    """Returns the object of a list of keys and values."""
    result = {}
    for item in check_list(items):
        if not isinstance(item.get("key"), str):
            raise RecordError("an attribute has no key")
        result[item["key"]] = unwrap_value(item.get("value"))
    return result


def check_list(items: Any) -> list[dict[str, Any]]:
    """Returns the list if it is one of objects."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RecordError("the attributes or events must be a list of objects")
    return items


def unflatten(attributes: Any) -> dict[str, Any]:
    """Returns attributes as nested objects: of `a.0.b`, a list at `a` with an object with `b`."""
    attributes = decode_json(attributes) or {}
    if isinstance(attributes, list):
        attributes = _make_dict(attributes)
    if not isinstance(attributes, dict):
        raise RecordError("the attributes must be an object or a list of keys and values")
    nested: dict[str, Any] = {}
    for key, value in attributes.items():
        parent, parts = nested, str(key).split(".")
        for part in parts[:-1]:
            child = parent.setdefault(part, {})
            if not isinstance(child, dict):  # `a` and `a.b` both have a value
                child = parent[part] = {"": child}
            parent = child
        parent[parts[-1]] = value
    return {key: _make_lists(value) for key, value in nested.items()}


def _make_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = {key: _make_lists(item) for key, item in value.items()}
    if made and all(key.isdecimal() for key in made):
        return [made[key] for key in sorted(made, key=int)]
    return made


_FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "json": (decode_json, 1),
    "span": (read_span, 1),
    "thread": (list_thread, 2),
    "tree": (list_tree, 2),
    "dialog": (make_dialog, 1),
}
"""By name in expressions, a function and its number of arguments."""
