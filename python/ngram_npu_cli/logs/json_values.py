"""Finds values in records, whose parts may be JSON as text."""

from __future__ import annotations

import json
from typing import Any

from ngram_npu.errors import RecordError


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


def get_first_value(paths: list[list[str]], record: Any) -> Any:
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


def check_list(items: Any) -> list[dict[str, Any]]:
    """Returns the list if all items are objects."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RecordError("attributes, events and nodes must be lists of objects")
    return items
