"""Finds the fields of records with a mapping: a preset, or the expressions of `--map`.

docs/guides/logs.md describes mappings and presets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NamedTuple

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.answers import Record, check_success, check_text, check_type, describe_type
from ngram_npu_cli.logs.conversations import Conversation
from ngram_npu_cli.logs.exchange import make_conversations
from ngram_npu_cli.logs.expressions import Expression, compile_expression, decode_json, is_empty
from ngram_npu_cli.logs.files import Batch, parse_batch
from ngram_npu_cli.logs.presets import PRESETS, is_conversation

FIELDS = (
    *("prompt", "messages", "answer", "system", "tools", "content", "role", "turns"),
    *("conversation", "time", "id", "records", "keep"),
)
"""The fields of a mapping. `prompt` is another name of `messages`."""

_ENVELOPES = (
    *("data", "body", "payload", "event", "log", "message", "@message", "value", "json", "record"),
    *("item", "_source", "hits", "result", "results"),
)
"""Keys of objects that may contain a record. An object may also contain one if it is the only
object of its parent, or if the parent contains nothing but objects: records by their ids."""
_CALL_KEYS = {
    *("request", "response", "responses", "choices", "completion", "input", "output", "prompt"),
    *("messages", "conversations", "tools", "turns"),
}
"""A record with one of these keys is a call of a model. It is not searched for nested records."""
_MAX_DEPTH = 6
_QUESTION = r"(prompt|\bask|question|query|input|instruction|request|user|message)(?!.*id$)"
_ANSWER = "(answer|output|response|completion|reply|assistant|generat|result|target)(?!.*id$)"


class OtherKindError(RecordError):
    """A record is not a call of a model, such as a span of another kind in a trace."""


@dataclass(frozen=True)
class Row:
    """A record that is a part of the conversation `key`, with the values of the mapping's fields.

    `time` orders the rows of a conversation. Without it, they have the order of the file.
    """

    key: str
    time: Any
    where: str
    fields: Mapping[str, Any]


Item = Conversation | Row | InputError
"""A conversation, a part of a conversation, or the error of a record that is neither."""


class FieldMapping(NamedTuple):
    """The expressions of a preset, or of `--map`, which has no name."""

    name: str
    expressions: Mapping[str, Expression]

    def evaluate(self, field: str, record: Any) -> Any:
        return self.expressions[field](record) if field in self.expressions else None


@cache
def parse_map(text: str | None) -> FieldMapping | None:
    """Returns the mapping of the option `map`; None if it is None.

    Raises:
        InputError: It is neither a preset nor a list of fields and expressions.
    """
    if text is None:
        return None
    name = text if text in PRESETS else ""
    if name:  # a|b and a^b have the same meaning in a preset's expressions as in its keys
        text = re.sub(r"(?<=\w)[|^](?=\w)", " || ", PRESETS[name][1])
    texts: dict[str, str] = {}
    for part in re.split(rf",\s*(?=(?:{'|'.join(FIELDS)})\s*=(?!=))", text):
        field, _, expression = (word.strip() for word in part.partition("="))
        if not expression or field not in FIELDS or field in texts:
            raise InputError(
                f"map: expected a preset ({', '.join(PRESETS)}) or FIELD=EXPRESSION, ... with the "
                f'fields {", ".join(FIELDS)}, each once, got "{part}"'
            )
        texts[field] = expression
    if "prompt" in texts:
        texts["messages"] = texts.pop("prompt")
    if "role" in texts:
        texts["content"] = f"{{role: {texts.pop('role')}, content: {texts.get('content', '@')}}}"
    if not name and not {"messages", "content", "turns"} & texts.keys():
        raise InputError(f'map: expected one of "prompt", "messages" and "content", got "{text}"')
    return FieldMapping(name, {field: compile_expression(texts[field]) for field in texts})


@lru_cache(4096)
def _list_candidates(record_keys: tuple[str, ...]) -> list[tuple[FieldMapping, list[list[str]]]]:
    """Returns the presets that a record with these keys may have, each with its conflicts: groups
    of keys of which at most one may have a value. A key that must have no value is grouped with "",
    which always counts as a value."""
    candidates = []
    for name, (keys, _) in PRESETS.items():
        required = [re.split(r"[|^]", group) for group in keys.split() if group[0] != "-"]
        conflicts = [["", g[1:]] if g[0] == "-" else g.split("^") for g in keys.split()]
        present = [[key for key in group if key in ("", *record_keys)] for group in conflicts]
        if not all(set(group) & {*record_keys} for group in required):
            continue  # and its expressions, which may need jmespath, are not compiled
        if mapping := parse_map(name):
            candidates.append((mapping, [group for group in present if len(group) > 1]))
    return candidates


def find_preset(record: Record) -> FieldMapping | None:
    """Returns the first preset that reads a record without ambiguity."""
    for preset, conflicts in _list_candidates(tuple(record)):
        if all(sum(not k or not is_empty(record[k]) for k in group) < 2 for group in conflicts):
            return preset
    return None


def convert_batch(
    batch: Batch, map_text: str | None = None, scope_field: str | None = None
) -> Iterator[Item]:
    """Yields the items of a part of a file.

    Args:
        map_text: The option `map`; None: the first preset that matches each record.
        scope_field: Expression for the conversation's scope.
    """
    reader = _RecordReader(parse_map(map_text), scope_field)
    for number, location, data in parse_batch(batch):
        if isinstance(data, InputError):
            yield data
        else:
            yield from reader.read(data, location, str(number))


@dataclass(frozen=True)
class _RecordReader:
    """Reads records with a mapping, or with presets."""

    mapping: FieldMapping | None
    scope_field: str | None

    def read(self, data: Any, location: str, number: str, depth: int = 0) -> Iterator[Item]:
        """Yields the items of one record; `number` is its id if it has none."""
        data = data if isinstance(data, dict) else decode_json(data)
        if is_conversation(data):
            if self.mapping is not None and "content" in self.mapping.expressions:
                for i, item in enumerate(data):
                    yield from self.read(item, f"{location}[{i}]", f"{number}.{i}", depth + 1)
                return
            data = {"messages": data}
        if not isinstance(data, dict):
            yield InputError(f"{location}: expected an object, got {describe_type(data)}")
            return
        mapping = self._select_mapping(data)
        if mapping is None:
            yield from self._read_nested(data, location, number, depth)
            return
        try:
            if "records" in mapping.expressions:
                yield from self._read_records(data, mapping, location, number)
            else:
                yield from self._read_one(data, mapping, location, number)
        except RecursionError:
            yield InputError(f"{location}: nested too deeply to be read")
        except InputError as error:
            note = f"; read as {mapping.name}; for another format, {_suggest_map(data)}"
            note = note if mapping.name and self.mapping is None else ""
            yield _locate(error, location, note)

    def _select_mapping(self, data: Record) -> FieldMapping | None:
        if self.mapping is None or self.mapping.name:
            preset = find_preset(data)
            return preset if self.mapping in (None, preset) else None
        fields = ("messages", "content", "turns", "records")
        has_value = any(self.mapping.evaluate(field, data) is not None for field in fields)
        return self.mapping if has_value else None

    def _read_nested(self, data: Record, location: str, number: str, depth: int) -> Iterator[Item]:
        """Yields the items of the records that are nested in an object. If none of them can be
        read, yields only one error."""
        nested = _list_nested(data) if depth < _MAX_DEPTH else []
        errors: list[InputError] | None = []
        for key, value in nested:
            for item in self.read(value, f"{location}.{key}", f"{number}.{key}", depth + 1):
                if errors is not None and isinstance(item, InputError):
                    errors.append(item)
                    continue
                yield from errors or ()
                errors = None
                yield item
        if errors and len({key.partition("[")[0] for key, _ in nested}) == 1:
            yield errors[0]
        elif errors is not None:
            yield InputError(f"{location}: {_describe_unknown(data, self.mapping)}")

    def _read_records(
        self, data: Record, mapping: FieldMapping, location: str, number: str
    ) -> Iterator[Item]:
        records = check_type(mapping.evaluate("records", data), list, f"{location}: records")
        for i, record in enumerate(records):
            where = location if len(records) == 1 else f"{location}[{i}]"
            try:
                yield from self._read_one(record, mapping, where, number)
            except InputError as error:
                yield _locate(error, where)

    def _read_one(
        self, record: Any, mapping: FieldMapping, location: str, number: str
    ) -> Sequence[Item]:
        expressions = mapping.expressions
        if "keep" in expressions and is_empty(expressions["keep"](record)):
            raise OtherKindError(f"{location}: not a call of a model; {_suggest_map(record)}")
        if "answer" in expressions and isinstance(record, dict):
            check_success(record, location)
            if record.get("error"):
                reason = json.dumps(record["error"], default=str)
                raise RecordError(f"{location}: the request failed: {reason:.100}")
        fields = {field: expression(record) for field, expression in expressions.items()}
        if self.scope_field is not None:
            value = compile_expression(self.scope_field)(record)
            fields["scope"] = _check_scope(value, f'{location}: scope field "{self.scope_field}"')
        if not is_empty(fields.get("conversation")):
            key = fields["conversation"]
            key = key if isinstance(key, str) else json.dumps(key, default=str)
            return [Row(key, fields.get("time"), location, fields)]
        if "conversation" in fields:
            raise RecordError(f"{location}: the row has no conversation")
        if "id" not in fields:
            fields["id"] = _get_default_id(record)
        return make_conversations(fields, location, number)


_get_default_id = compile_expression("id || conversation_id || custom_id || request_id")


def _locate(error: InputError, location: str, note: str = "") -> InputError:
    """Returns an error whose message begins with the location."""
    return type(error)(f"{location}: {str(error).removeprefix(f'{location}: ')}{note}")


def _list_nested(record: Record) -> list[tuple[str, Any]]:
    """Returns the key and value of each nested object that may be a record: the items of lists, and
    the envelopes."""
    decoded = {key: decode_json(value) for key, value in record.items()}
    objects = {key: value for key, value in decoded.items() if isinstance(value, (dict, list))}
    is_envelope = any(isinstance(objects.get(key), dict) for key in _ENVELOPES)
    has_ids = not is_envelope and all(isinstance(value, dict) for value in decoded.values())
    nested: list[tuple[str, Any]] = []
    for key, value in () if _CALL_KEYS & record.keys() else objects.items():
        if isinstance(value, dict) and (key in _ENVELOPES or len(objects) == 1 or has_ids):
            nested.append((key, value))
        elif not is_conversation(value) and all(isinstance(item, dict) for item in value):
            nested += [(f"{key}[{i}]", item) for i, item in enumerate(value)]
    return nested


def _describe_unknown(record: Record, mapping: FieldMapping | None) -> str:
    """Describes the keys of a record that no preset reads, and a mapping to complete."""
    if mapping is not None and not mapping.name:
        return f"the expressions of --map select nothing; {_suggest_map(record)}"
    tried = ", ".join(PRESETS) if mapping is None else mapping.name
    return f"no preset reads this record; {_suggest_map(record)} (tried: {tried})"


def _suggest_map(record: Record) -> str:
    """Returns the keys of a record, without values, and a mapping to complete."""
    paths = list(islice(_iter_paths(record), 24))
    example = "role=role, content=content, conversation=KEY, time=KEY"
    if not {"role", "content"} <= record.keys():
        question, answer = (
            next((path for path in paths if re.search(pattern, path, re.IGNORECASE)), "KEY")
            for pattern in (_QUESTION, _ANSWER)
        )
        example = f"prompt={question}, answer={answer}"
    return f"complete --map '{example}' with the record's keys {', '.join(paths) or '(none)'}"


def _iter_paths(record: Record, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yields the path of each value of a record that is not an object."""
    for key, encoded in record.items():
        name = key if re.fullmatch(r"[A-Za-z_]\w*", key) else json.dumps(key)
        value = decode_json(encoded)
        if isinstance(value, dict) and value and depth < _MAX_DEPTH:
            yield from _iter_paths(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}"


def _check_scope(value: Any, location: str) -> str | int:
    """Returns the scope of a record. A record without a scope is an error: with a default scope,
    its text would be shared with all requests of that scope."""
    if isinstance(value, str):
        return check_text(value, location)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
        return value
    raise InputError(
        f"{location}: expected a string or an integer below 2**62, got {describe_type(value)}"
    )


# Rows that are parts of a conversation


def group_rows(rows: Sequence[Row]) -> Iterator[tuple[int, Conversation | InputError]]:
    """Yields the conversations of rows, or an error, each with its number of rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    for key, group in groups.items():
        where = group[0].where
        try:
            for conversation in _join_rows(_sort_rows(group), key, where):
                yield len(group), conversation
        except InputError as error:
            yield len(group), _locate(error, where)


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
    step = -1 if times == sorted(times, reverse=True) else 1
    order = sorted(range(len(rows))[::step], key=times.__getitem__)
    return [rows[i] for i in order]


def _parse_time(value: Any) -> Any:
    """Returns the number or the time of a value, which may be a text of either."""
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
