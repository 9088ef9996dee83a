"""Finds the fields of records with a mapping: a preset, or the expressions of `--map`.

docs/guides/logs.md describes mappings and presets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from ngram_npu.errors import InputError, RecordError, suggest_similar

from ngram_npu_cli.logs.answers import Record, check_success, check_text, check_type, describe_type
from ngram_npu_cli.logs.conversations import Conversation
from ngram_npu_cli.logs.exchange import make_conversations
from ngram_npu_cli.logs.expressions import Expression, compile_expression
from ngram_npu_cli.logs.files import Batch, parse_batch
from ngram_npu_cli.logs.json_values import decode_json, is_empty
from ngram_npu_cli.logs.presets import PRESETS, is_conversation
from ngram_npu_cli.logs.rows import Row, locate_error
from ngram_npu_cli.logs.suggestions import describe_unknown, suggest_map

FIELDS = (
    *("prompt", "messages", "answer", "system", "tools", "content", "role", "turns"),
    *("conversation", "time", "id", "records", "keep"),
)
"""The fields of a mapping. `prompt` is another name of `messages`."""

_ENVELOPES = (
    *("data", "body", "payload", "event", "log", "message", "@message", "value", "json", "record"),
    *("item", "_source", "hits", "result", "results", "jsonPayload", "log_processed", "line"),
    *("row", "after", "properties"),
)
"""Keys of objects that may contain a record. An object may also contain one if it is the only
object of its parent, or if the parent contains nothing but objects: records by their ids."""
_CALL_KEYS = {
    *("request", "response", "responses", "choices", "completion", "input", "output", "prompt"),
    *("messages", "conversations", "tools", "turns"),
}
"""A record with one of these keys is a call of a model. It is not searched for nested records."""
_TURNS_KEY = re.compile("dialog|turn|exchange|histor|round", re.IGNORECASE)
"""Of a list with the turns of one conversation, which are not records."""
_MAX_DEPTH = 6


class OtherKindError(RecordError):
    """A record is not a call of a model, such as a span of another kind in a trace."""


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
                f"{suggest_similar(part, PRESETS)}"
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
            yield locate_error(error, location, self._describe_preset(mapping, data))

    def _select_mapping(self, data: Record) -> FieldMapping | None:
        if self.mapping is None or self.mapping.name:
            preset = find_preset(data)
            return preset if self.mapping in (None, preset) else None
        fields = ("messages", "content", "turns", "records")
        values = [self.mapping.evaluate(field, data) for field in fields]
        has_value = any(v is not None and v != {"role": None, "content": None} for v in values)
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
            yield InputError(f"{location}: {self._describe_unread(data)}")

    def _describe_unread(self, data: Record) -> str:
        """Describes a record in which the mapping or the presets find nothing."""
        if self.mapping is not None and not self.mapping.name:
            return f"the expressions of --map select nothing; {suggest_map(data)}"
        nested = [value for _, value in _list_nested(data) if isinstance(value, dict)]
        tried = PRESETS if self.mapping is None else [self.mapping.name]
        return describe_unknown(data, nested, tried)

    def _read_records(
        self, data: Record, mapping: FieldMapping, location: str, number: str
    ) -> Iterator[Item]:
        records = check_type(mapping.evaluate("records", data), list, f"{location}: records")
        for i, record in enumerate(records):
            where = location if len(records) == 1 else f"{location}[{i}]"
            try:
                yield from self._read_one(record, mapping, where, number)
            except InputError as error:
                yield locate_error(error, where, self._describe_preset(mapping, data))

    def _describe_preset(self, mapping: FieldMapping, data: Record) -> str:
        """Returns a note on a preset that was not chosen by the user and may be the wrong one."""
        if self.mapping is not None:
            return ""
        return f"; read as {mapping.name}; for another format, {suggest_map(data)}"

    def _read_one(
        self, record: Any, mapping: FieldMapping, location: str, number: str
    ) -> Sequence[Item]:
        expressions = mapping.expressions
        if "keep" in expressions and is_empty(expressions["keep"](record)):
            raise OtherKindError(f"{location}: not a call of a model")
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
        elif _TURNS_KEY.search(key) or is_conversation(value):
            continue
        elif all(isinstance(item, dict) for item in value):
            nested += [(f"{key}[{i}]", item) for i, item in enumerate(value)]
    return nested


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
