"""Joins records that are parts of a conversation, such as one message each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.answers import describe_type
from ngram_npu_cli.logs.conversations import Conversation
from ngram_npu_cli.logs.exchange import make_conversations
from ngram_npu_cli.logs.json_values import is_empty


@dataclass(frozen=True)
class Row:
    """A record that is a part of the conversation `key`, with the values of the mapping's fields.

    `time` orders the rows of a conversation. Without it, they have the order of the file.
    """

    key: str
    time: Any
    where: str
    fields: Mapping[str, Any]


def group_rows(rows: Sequence[Row]) -> Iterator[tuple[int, Conversation | InputError]]:
    """Yields the conversations of rows, or an error, each with its number of rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    for key, group in groups.items():
        where, num_rows = group[0].where, len(group)
        try:
            for conversation in _join_rows(_sort_rows(group), key, where):
                yield num_rows, conversation
                num_rows = 0  # each row is counted once
        except InputError as error:
            yield len(group), locate_error(error, where)


def _sort_rows(rows: list[Row]) -> list[Row]:
    """Returns the rows of a conversation in the order of time, or unchanged without a time."""
    num_missing = sum(row.time in (None, "") for row in rows)
    if num_missing == len(rows):
        return rows
    if num_missing:
        raise RecordError("some rows of the conversation have a time and some have none")
    times = [_parse_time(row.time) for row in rows]
    if len({isinstance(time, datetime) for time in times}) > 1:
        raise RecordError("some times of the conversation are numbers and some are ISO 8601")
    # Rows of equal times keep the order of the file, or its reverse if its times decrease.
    is_reversed = times[0] > times[-1] and times == sorted(times, reverse=True)
    step = -1 if is_reversed else 1
    order = sorted(range(len(rows))[::step], key=times.__getitem__)
    return [rows[i] for i in order]


def _parse_time(value: Any) -> Any:
    """Returns the number or the time of a value, which may be a text of either."""
    while isinstance(value, dict) and len(value) == 1:  # MongoDB's {"$date": {"$numberLong": "1"}}
        (value,) = value.values()
    if isinstance(value, str):
        text = re.sub(r"(\.\d{6})\d+", r"\1", value.strip().replace(" UTC", "Z"))
        try:
            return float(text)
        except ValueError:
            try:
                value = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
            except ValueError as error:
                raise RecordError("the time is neither a number nor ISO 8601") from error
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=timezone.utc)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RecordError(f"the time must be a number or a string, got {describe_type(value)}")
    return value


def _join_rows(rows: list[Row], key: str, where: str) -> list[Conversation]:
    """Joins rows to a conversation. Each row is a message, a whole turn, a request or an answer."""
    all_fields = [{k: v for k, v in row.fields.items() if not is_empty(v)} for row in rows]
    if len({fields.get("scope") for fields in all_fields}) > 1:
        raise RecordError("the rows of the conversation have different scopes")
    if all({"messages", "answer"} <= fields.keys() for fields in all_fields):
        parts = [make_conversations(row.fields, row.where, key) for row in rows]
        if len(rows) > 1 and any(len(part) > 1 for part in parts):
            raise RecordError("a row of the conversation has several answers")
        later = [message for part in parts[1:] for message in part[0].turns[0].messages]
        if any(message["role"] == "assistant" for message in later):
            raise RecordError("the rows repeat earlier turns; use --map without conversation")
        turns = tuple(turn for part in parts for turn in part[0].turns)
        return [parts[0][0]._replace(turns=turns)] if len(rows) > 1 else parts[0]
    contents = [fields["content"] for fields in all_fields if "content" in fields]
    joined: dict[str, Any] = {"messages": contents} if contents else {}
    for fields in all_fields:
        for name in ("answer", "system", "tools", "scope", *(() if contents else ("messages",))):
            if name in fields and joined.setdefault(name, fields[name]) != fields[name]:
                raise RecordError(f'the rows of the conversation have different "{name}"')
    if not contents and not {"messages", "answer"} <= joined.keys():
        missing = "answer" if "messages" in joined else "request"
        raise RecordError(
            f"no {missing} for this id; if requests and answers are in two files, read both as "
            "one: cat FILE FILE | ngram-npu ..."
        )
    return make_conversations(joined, where, key)


def locate_error(error: InputError, location: str, note: str = "") -> InputError:
    """Returns an error whose message begins with the location."""
    return type(error)(f"{location}: {str(error).removeprefix(f'{location}: ')}{note}")
