"""Finds prompt and answer of a record: by its usual keys, by a preset, or by `--map`.

A preset is a row of a table of JMESPath expressions, as in `--map`. Where an expression selects a
key of a text, the text is decoded as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from ngram_npu.errors import InputError, RecordError, import_optional, suggest_similar, to_one_line

from ngram_npu_cli.logs.values import Record, decode_json, get_only, is_empty, list_keys

GUIDE = "docs/guides/logs.md"

FIELDS = (
    *("prompt", "answer", "system", "tools", "keep"),
    *("content", "conversation", "id", "parent"),
)
"""The fields of a mapping; the second line is those of a record that is one message."""

_ATTRIBUTE = "(attributes.\"{0}\" || (attributes[?key=='{0}'].value.stringValue | [0]))"
_OPERATIONS = '`["chat", "text_completion", "generate_content"]`'
PRESETS: dict[str, tuple[str, str]] = {
    "alpaca": (
        "instruction input output",
        r'prompt=join(`"\n"`, [instruction, input][?@]), answer=output, system=system',
    ),
    "litellm": (
        "call_type response messages|proxy_server_request",
        "prompt=messages || proxy_server_request.body || proxy_server_request, answer=response, "
        "tools=proxy_server_request.body.tools || proxy_server_request.tools",
    ),
    "langfuse": (
        "input output type traceId|trace_id",
        "keep=type == 'GENERATION', prompt=input, answer=output",
    ),
    "opentelemetry": (
        "attributes traceId|trace_id|context",
        f"keep=contains({_OPERATIONS}, {_ATTRIBUTE.format('gen_ai.operation.name')} || ''), "
        f"prompt={_ATTRIBUTE.format('gen_ai.input.messages')}, "
        f"answer={_ATTRIBUTE.format('gen_ai.output.messages')}, "
        f"system={_ATTRIBUTE.format('gen_ai.system_instructions')}, "
        f"tools={_ATTRIBUTE.format('gen_ai.tool.definitions')}",
    ),
    "claude-code": (
        "parentUuid sessionId uuid",
        "content=!isApiErrorMessage && message.model != '<synthetic>' && message || `null`, "
        "conversation=sessionId, id=uuid, parent=parentUuid",
    ),
    "claude-code-notes": ("type sessionId|leafUuid|messageId -message -messages", "keep=`null`"),
    "swe-agent": ("trajectory history info", "prompt=history"),
    "openhands": (
        "messages response kwargs",
        "prompt=messages, answer=response, tools=kwargs.tools",
    ),
}
"""By name, the keys of a tool's records, and their mapping. Of the keys, `a|b` requires one, and
`-a` that there is none."""

_PROMPT_KEYS = (
    *("messages", "conversations", "conversation", "request", "request_body", "requestBody"),
    *("body", "params", "prompt", "question", "query", "input", "instruction", "trajectory"),
)
_ANSWER_KEYS = (
    *("response", "response_body", "responseBody", "completion", "output", "answer", "reply"),
    *("result", "choices", "generated_text", "model_output", "model_response"),
)
_SYSTEM_KEYS = ("system", "system_prompt", "instructions", "systemInstruction")
_TOOLS_KEYS = ("tools", "functions")
_TEXT_KEYS = (
    *("text", "context", "contexts", "history", "documents", "chosen", "rejected", "target"),
    *("reasoning", "reasoning_content", "thinking", "thoughts", "contents", "turns", "outputs"),
    *("inputs", "answers", "responses", "completions", "prompts", "role", "content"),
)
"""Other keys that may be a part of a prompt or of an answer. A record with one is refused."""

_QUOTED = re.compile(r"`(?:\\.|[^`\\])*`|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
_FIELD_START = re.compile(r"(?:^|,)\s*(\w+)\s*=(?!=)")
"""Start of a field. Outside of quotes, JMESPath has no single "="."""

Expression = Callable[[Any], Any]


class OtherKindError(RecordError):
    """A record is not a call of a model, such as another span of a trace."""


def find_fields(record: Record) -> Mapping[str, Any]:
    """Returns the fields of a record without `--map`.

    Raises:
        RecordError: The record is not understood. The message contains its keys.
    """
    name = _find_preset(tuple(record))
    return evaluate(parse_map(PRESETS[name][1]), record) if name else _find_usual_fields(record)


@lru_cache(1024)  # records of a hostile log may all have different keys
def _find_preset(keys: tuple[str, ...]) -> str | None:
    for name, (row, _) in PRESETS.items():
        groups = row.split()
        required = all({*group.split("|")} & {*keys} for group in groups if group[0] != "-")
        if required and not any(group[1:] in keys for group in groups if group[0] == "-"):
            import_optional("jmespath", f"the format {name.removesuffix('-notes')}", "logs")
            return name
    return None


def _find_usual_fields(record: Record) -> Mapping[str, Any]:
    """Returns the fields of a record by the usual names of their keys."""
    fields: Record = {}
    values = {key: value for key, value in record.items() if not is_empty(value)}
    for field, keys in (
        ("prompt", _PROMPT_KEYS),
        ("system", _SYSTEM_KEYS),
        ("tools", _TOOLS_KEYS),
    ):
        key, value = get_only(values, keys, field)
        if key:
            fields[field] = value
    key, answer = get_only(record, _ANSWER_KEYS, "answer")  # an answer may be empty JSON
    if key:
        fields["answer"] = record if key == "choices" else answer
    if "custom_id" in record:  # a part of a batch, or both parts
        fields["custom_id"] = record["custom_id"]
    elif not key and "prompt" in fields and {*_ANSWER_KEYS} & record.keys():
        fields["answer"] = ""
    if not {"prompt", "answer"} & fields.keys():
        raise RecordError(describe_unknown(record))
    for key in _TEXT_KEYS:
        value = values.get(key)
        if isinstance(value, (str, list, dict)):
            raise RecordError(f'the key "{key}" may be a part of the prompt or of the answer')
    return fields


def describe_unknown(record: Record) -> str:
    """Returns the error message for a record that is not understood."""
    return f"the record has the keys {list_keys(record)}; see {GUIDE} for what is read, and --map"


@cache
def parse_map(text: str) -> Mapping[str, Expression]:
    """Returns the expressions of a mapping by field.

    Raises:
        InputError: It is not a list of fields and expressions.
    """
    unquoted = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), text)
    starts = list(_FIELD_START.finditer(unquoted))
    ends = [*(start.start() for start in starts), len(text)][1:]
    texts = {
        start[1]: text[start.end() : end].strip() for start, end in zip(starts, ends, strict=True)
    }
    for field in texts:
        if field not in FIELDS:
            hint = suggest_similar(field, FIELDS).replace("'", '"')
            raise InputError(f'--map: unknown field "{field}"{hint} ({", ".join(FIELDS)})')
    if not starts or starts[0].start() or len(texts) < len(starts) or not all(texts.values()):
        raise InputError(
            f"--map: expected FIELD=EXPRESSION, ... with the fields {', '.join(FIELDS)}, each "
            f'once, got "{text}"; see {GUIDE}'
        )
    return {field: _compile(expression) for field, expression in texts.items()}


def evaluate(mapping: Mapping[str, Expression], record: Record) -> Mapping[str, Any]:
    """Returns the values of a mapping's fields.

    Raises:
        OtherKindError: The record is not a call of a model.
        RecordError: An expression fails.
    """
    if "keep" in mapping and is_empty(mapping["keep"](record)):
        raise OtherKindError("not a call of a model")
    return {field: expression(record) for field, expression in mapping.items() if field != "keep"}


@cache
def _compile(text: str) -> Expression:
    """Returns a function that evaluates a JMESPath expression."""
    jmespath = import_optional("jmespath", f'the expression "{text}"', "logs")
    try:
        parsed = jmespath.compile(text).parsed
    except jmespath.exceptions.JMESPathError as error:
        raise InputError(f'--map: "{text}" is not JMESPath: {to_one_line(error)}') from error
    visit = _make_interpreter(jmespath).visit

    def evaluate_expression(record: Any) -> Any:
        try:
            return visit(parsed, record)
        except jmespath.exceptions.JMESPathError as error:
            reason = to_one_line(error).partition(", received")[0]  # the rest contains values
            raise RecordError(f"an expression fails: {reason:.200}") from error

    return evaluate_expression


@cache
def _make_interpreter(jmespath: Any) -> Any:
    class Interpreter(jmespath.visitor.TreeInterpreter):  # type: ignore[misc]
        def visit_field(self, node: Any, value: Any) -> Any:
            return super().visit_field(node, decode_json(value))

        def visit_or_expression(self, node: Any, value: Any) -> Any:
            left = self.visit(node["children"][0], value)
            return self.visit(node["children"][1], value) if is_empty(left) else left

    return Interpreter()
