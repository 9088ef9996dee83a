"""Suggests a mapping for records that no preset reads, from their keys and kinds of values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import islice
from typing import Any

from ngram_npu_cli.logs.answers import Record
from ngram_npu_cli.logs.json_values import decode_json
from ngram_npu_cli.logs.presets import is_conversation

_MAX_DEPTH = 6
_MAX_NESTED = 16
_QUESTION = ("prompt", r"\bask|question|query|input|instruction|request|user|message|^text")
_ANSWER = (
    r"answer|output|response|completion|reply|assistant|generat|result|target|chosen|sampled|resps|"
    r"predict|\bout\b|bot$",
)
_OTHER = "(id|tokens|length|count|cost|time|type|model|name|version|code|status)$"
"""Paths of a question, of an answer, and of values that are neither."""
_ROW = (
    "(role|sender|speaker|author|who|from)(_?type)?$",
    "(content|text|msg|message|body|value|words)$",
    "conv|chat|session|thread|dialog|ticket|talk|tree",
    "(time|timestamp|date|_at|createdAt|sent|turn|index|idx|pos|position|seq|order|ts|step)$",
)
"""Of a message per record, the paths of role, content, conversation and time."""
_DIALOG = "dialog|conv|chat|turn|history|utterance|^data$"
_REQUEST_KEYS = {"messages", "contents", "chat_history", "role", "from"}
_RESPONSE_KEYS = {"choices", "candidates", "stop_reason", "done"}
_BODY_KEYS = _REQUEST_KEYS | _RESPONSE_KEYS | {"content", "text", "parts"}


def describe_unknown(record: Record, nested: Sequence[Record], tried: Iterable[str]) -> str:
    """Describes a record that no preset reads, without values, and a mapping to complete: that of
    the record, or of one of its nested objects if only these have question and answer."""
    records = [record, *nested[:_MAX_NESTED]]
    if len(nested) > 1 and len({frozenset(item) for item in nested}) == 1:
        records.insert(0, nested[0])  # the record is a list of records with the same keys
    complete = (text for text in map(suggest_map, records) if "=KEY" not in text)
    best = next(complete, None) or suggest_map(record)
    return f"no preset reads this record; {best} (tried: {', '.join(tried)})"


def suggest_map(record: Record) -> str:
    """Returns the keys of a record, without values, and a mapping to complete."""
    values = dict(islice(_iter_values(record), 100))
    paths = ", ".join([*values][:24]) or "(none)"
    return f"complete --map '{_make_example(values)}' with the record's keys {paths}"


def _make_example(values: Mapping[str, Any]) -> str:
    """Returns a mapping of the paths that fit best, with KEY for those that are not found."""
    items = {path: _get_first_item(value) for path, value in values.items()}
    texts = {
        path: item
        for path, item in items.items()
        if item and not _matches(_OTHER, path)
        if isinstance(item, str) or (isinstance(item, dict) and _BODY_KEYS & item.keys())
    }
    system = _find_path(texts, ("system(_?prompt|_?message|_?instructions?)?$",))
    texts.pop(system, None)
    question = _find_path(texts, _QUESTION, _REQUEST_KEYS)
    request = texts.pop(question, None)
    answer = _find_path(texts, _ANSWER, _RESPONSE_KEYS)
    answer = _find_blocks(values) if answer == "KEY" else answer
    if answer == "KEY":
        role, content, chat, time = (_find_path(values, (pattern,)) for pattern in _ROW)
        if sum(map(is_conversation, values.values())) > 1:
            return "records=*, messages=@"
        if isinstance(request, dict):
            return f"messages={question}"
        if "KEY" not in (role, content):
            return f"role={role}, content={content}, conversation={chat}, time={time}"
    if question == answer == "KEY" and "columns" not in values:
        for path, item in items.items():
            if isinstance(values[path], list) and (texts_path := _find_texts(path, item)):
                return f"messages=dialog({texts_path})"
    names = {re.sub(r"\d", "", path) for path in (question, answer)}
    numbered = [path for path in values if re.sub(r"\d", "", path) in names]
    if len(numbered) > 2:  # question1, answer1, question2, ...
        return f"messages=dialog([{', '.join(numbered)}])"
    if isinstance(values.get(answer), list) and isinstance(items[answer], str):
        answer = f"{{choices: {answer}[].{{text: @}}}}"
    example = f"prompt={question}, answer={answer}"
    return example if system == "KEY" else f"{example}, system={system}"


def _find_blocks(values: Mapping[str, Any]) -> str:
    """Returns an expression for the joined texts of an answer that is a list of objects, or KEY."""
    for path, value in values.items():
        item = _get_first_item(value)
        if isinstance(value, list) and isinstance(item, dict) and _matches(_ANSWER[0], path):
            texts = [k for k, v in item.items() if isinstance(v, str) and not _matches(_OTHER, k)]
            if len(texts) == 1:
                return f'join(`"\\n"`, {path}[].{texts[0]})'
    return "KEY"


def _find_texts(path: str, item: Any) -> str | None:
    """Returns an expression for the texts of a list of texts or pairs, of which `item` is one."""
    if isinstance(item, dict):
        texts = {key: text for key, text in item.items() if isinstance(text, str)}
        pair = [_find_path(texts, patterns) for patterns in (_QUESTION, _ANSWER)]
        return None if "KEY" in pair else f"{path}[].[{', '.join(pair)}][]"
    return f"{path}[]" if isinstance(item, str) and _matches(_DIALOG, path) else None


def _get_first_item(value: Any) -> Any:
    """Returns the first item of a list, also of nested lists, or another value itself."""
    while value and isinstance(value, list):
        value = value[0]
    return value


def _find_path(
    items: Mapping[str, Any], patterns: Sequence[str], keys: Set[str] = frozenset()
) -> str:
    """Returns the path of an object with one of the keys; else the first path that matches the
    first possible pattern, or KEY."""
    for path, item in items.items():
        if isinstance(item, dict) and keys & item.keys():
            return path
    return next((p for pattern in patterns for p in items if _matches(pattern, p)), "KEY")


@lru_cache(4096)  # many records have the same paths
def _matches(pattern: str, path: str) -> bool:
    return re.search(pattern, path, re.IGNORECASE) is not None


def _iter_values(record: Record, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields path and value of each value of a record that is not an object, or is a request or a
    response."""
    for key, encoded in record.items():
        path = prefix + (key if re.fullmatch(r"[A-Za-z_]\w*", key) else json.dumps(key))
        value = decode_json(encoded)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
            item = decode_json(value[0])
            path, value = (f"{path}[0]", item) if isinstance(item, dict) else (path, value)
        if isinstance(value, dict) and value and depth < _MAX_DEPTH and not _is_body(value):
            yield from _iter_values(value, f"{path}.", depth + 1)
        else:
            yield path, value


def _is_body(value: Mapping[str, Any]) -> bool:
    """Whether an object is a request, a response, or a column of a table."""
    is_column = all(key.isdecimal() for key in value)
    return is_column or (
        bool((_REQUEST_KEYS | _RESPONSE_KEYS) & value.keys()) and [*value] != ["messages"]
    )
