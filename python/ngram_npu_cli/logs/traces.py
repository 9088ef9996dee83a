"""Reads the calls of models from spans of OpenTelemetry, and log records of its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ngram_npu.errors import RecordError

from ngram_npu_cli.logs.json_values import check_list, decode_json, get_first_value, is_empty

_NAME_KEYS = ("eventName", "event_name", "name")
_ID_KEYS = ("spanId", "span_id", "spanID", "SpanId", "traceId", "trace_id", "TraceId")
_CALL_OPERATIONS = ("chat", "text_completion", "generate_content")
_TIME_KEYS = ("timeUnixNano", "time_unix_nano", "observedTimeUnixNano", "timestamp", "time")


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
            known = attributes.get("gen_ai")
            known = known if isinstance(known, dict) else {}
            attributes["gen_ai"] = {**known, **fields["gen_ai"]}
    call = {"messages": messages, "answer": {"choices": choices} if choices else None}
    call = _read_attributes(attributes) | {key: value for key, value in call.items() if value}
    operation = get_first_value([["gen_ai", "operation", "name"]], attributes)
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
        return decode_json(get_first_value([path.split(".") for path in paths], attributes))

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
        text = get_first_value([["ai", "response", key] for key in ("text", "object")], attributes)
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
        values = inner.get("values") if isinstance(inner, dict) else None
        return [unwrap_value(item) for item in values] if isinstance(values, list) else []
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
