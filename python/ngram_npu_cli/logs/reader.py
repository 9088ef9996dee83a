"""Reads the conversations of files and folders, and counts what is skipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.demo import DEMO_NAME, list_demo_conversations
from ngram_npu_cli.logs.files import STDIN, find_files, read_values
from ngram_npu_cli.logs.mapping import (
    OtherKindError,
    describe_unknown,
    evaluate,
    find_fields,
    parse_map,
)
from ngram_npu_cli.logs.records import (
    Row,
    find_session,
    group_rows,
    is_empty_answer,
    join_batch,
    make_conversations,
    read_token_ids,
)
from ngram_npu_cli.logs.values import Conversation, check_list, describe_type, is_empty
from ngram_npu_cli.progress import make_bar

_MAX_NESTED = 4


@dataclass
class LogReader:
    """Iterates over conversations, with the name of their input.

    Attributes:
        paths: Files and folders; `STDIN`; none: sources of Python's standard library.
        map: The option `--map`: a mapping, or the name of a preset.
        limit: Maximum number of conversations per file.
        strict: Whether a record that cannot be read is an error; otherwise it is skipped.
        salt_field: JMESPath of the record's salt; a record without it is skipped.
        other_notes: Notes of the command, which `list_notes` adds.
    """

    paths: Sequence[str | PathLike[str]]
    map: str | None = None
    limit: int | None = None
    strict: bool = False
    salt_field: str | None = None
    other_notes: list[str] = field(default_factory=list)
    _num_used: int = 0
    _num_other: int = 0
    _reasons: Counter[str] = field(default_factory=Counter)
    _first_of_reason: dict[str, str] = field(default_factory=dict)
    _unread_files: list[str] = field(default_factory=list)
    _batch: dict[str, list[Row]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Conversation]]:
        """Yields the name of each conversation's file, and the conversation.

        Raises:
            InputError: A path cannot be read or has no conversation, or more than half of all
                records cannot be read.
        """
        if not self.paths:
            for conversation in list_demo_conversations():
                yield DEMO_NAME, conversation
            return
        mapping = parse_map(self.map) if self.map else None
        parse_map(f"prompt={self.salt_field}" if self.salt_field else "prompt=@")  # checks it early
        roots = [Path(path) for path in self.paths]
        files = [(file, file is not root) for root in roots for file in find_files(root)]
        sizes = [file.stat().st_size for file, _ in files if file.is_file()]
        with make_bar("read", sum(sizes), "B") as bar:
            for file, is_in_folder in files:
                yield from self._read_file(file, is_in_folder, mapping, bar.update)
        yield from self._join_batches()
        self._check_share()

    def skip(self, error: InputError, count: int = 1) -> None:
        """Counts records that cannot be used; raises the error if `strict`."""
        if isinstance(error, OtherKindError):
            self._num_other += count
            return
        if self.strict:
            raise error
        # A message begins with file and line: "chat.jsonl:7: ...".
        reason = str(error).partition(": ")[2]
        self._reasons[reason] += count
        self._first_of_reason.setdefault(reason, str(error))

    def list_notes(self) -> list[str]:
        """Returns at most three lines about what was skipped, and the other notes."""
        notes = []
        if num_skipped := sum(self._reasons.values()):
            total = num_skipped + self._num_used
            reasons = [
                f"{self._first_of_reason[reason]:.300}" + (f" ({count}x)" if count > 1 else "")
                for reason, count in self._reasons.most_common(2)
            ]
            if len(self._reasons) > 2:
                reasons.append(f"and {len(self._reasons) - 2} other reasons (--strict shows one)")
            notes.append(f"{num_skipped} of {total} records are skipped: {'; '.join(reasons)}")
        if self._num_other:
            notes.append(f"{self._num_other} records are not calls of a model")
        if self._unread_files:
            more = len(self._unread_files) - 1
            notes.append(
                f"not read: {self._unread_files[0]}" + (f"; and {more} files" * (more > 0))
            )
        return notes + self.other_notes

    def _read_file(
        self, file: Path, is_in_folder: bool, mapping: Any, advance: Callable[[int], object]
    ) -> Iterator[tuple[str, Conversation]]:
        name = "stdin" if file == STDIN else file.name
        count, num_before = 0, self._num_used
        num_pending = len(self._batch)
        rows: list[Row] = []
        error: InputError | None = None
        try:
            for where, value in read_values(file, is_in_folder=is_in_folder, advance=advance):
                for conversation in self._read_record(value, where, mapping, rows):
                    yield name, conversation
                    count += 1
                if count == self.limit:
                    break
        except InputError as read_error:  # the conversations before the damage are used
            if self.strict or not is_in_folder:
                raise
            error = read_error
        for num_rows, grouped in group_rows(rows):
            if isinstance(grouped, InputError):
                self.skip(grouped, num_rows)
            elif count != self.limit:
                self._num_used += num_rows
                count += 1
                yield name, grouped
        is_used = self._num_used > num_before or len(self._batch) > num_pending
        if error or not is_used:
            first = next(iter(self._first_of_reason.values()), "")
            reason = first if first.startswith(f"{file}") else f"{file}: no conversation"
            if not is_in_folder:
                raise error or RecordError(reason)
            self._unread_files.append(f"{error or reason:.300}" if error else f"{reason:.300}")

    def _read_record(
        self, value: Any, where: str, mapping: Any, rows: list[Row], depth: int = 0
    ) -> list[Conversation]:
        """Returns the conversations of a record; adds a row of a conversation to `rows`."""
        try:
            if isinstance(value, InputError):
                raise value
            if isinstance(value, list):
                value = {"messages": value}
            if not isinstance(value, dict):
                raise RecordError(f"expected an object, got {describe_type(value)}")
            if mapping is None and ("turns" in value or "completion_token_ids" in value):
                conversations = [read_token_ids(value, where)]
            else:
                fields = find_fields(value) if mapping is None else evaluate(mapping, value)
                if "records" in fields and depth < _MAX_NESTED:
                    return self._read_nested(value, fields, where, mapping, rows, depth)
                if row := _make_row(fields, where):
                    if "custom_id" in fields:
                        self._batch.setdefault(row.key, []).append(row)
                    elif is_empty(fields.get("content")) and "content" in fields:
                        self._num_other += 1  # it may be a node of the tree of messages
                        rows.append(row)
                    else:
                        rows.append(row)
                    return []
                if not {"messages", "answer"} & fields.keys():
                    raise RecordError(describe_unknown(value))
                conversations = make_conversations(fields, where)
                session = find_session(value)
                conversations = [c._replace(session=session) for c in conversations]
            conversations = [c._replace(scope=self._find_salt(value)) for c in conversations]
        except RecursionError:
            self.skip(RecordError(f"{where}: nested too deeply"))
        except OtherKindError as error:
            self.skip(error)
        except InputError as error:
            self.skip(RecordError(f"{where}: {str(error).removeprefix(f'{where}: ')}"))
        else:
            self._num_used += 1
            return conversations
        return []

    def _read_nested(
        self, value: Any, fields: Any, where: str, mapping: Any, rows: list[Row], depth: int
    ) -> list[Conversation]:
        inner = {k: v for k, v in (mapping or {}).items() if k != "records"} or None
        conversations = []
        for i, item in enumerate(check_list(fields["records"] or [], "records")):
            location = f"{where}[{i}]"
            conversations += self._read_record(item, location, inner, rows, depth + 1)
        return conversations

    def _find_salt(self, record: Any) -> str | None:
        """Returns the record's salt. A record without it is an error: its text would be shared."""
        if self.salt_field is None:
            return None
        salt = parse_map(f"prompt={self.salt_field}")["messages"](record)
        if isinstance(salt, bool) or not isinstance(salt, (str, int)) or salt == "":
            raise RecordError(
                f'the salt field "{self.salt_field}" is {describe_type(salt)}, expected a text'
            )
        return str(salt)

    def _join_batches(self) -> Iterator[tuple[str, Conversation]]:
        """Yields the conversations of batches, whose requests and results may be in two files."""
        for rows in self._batch.values():
            try:
                for conversation in join_batch(rows):
                    yield "batch", conversation
                self._num_used += len(rows)
            except RecordError as error:
                self.skip(RecordError(f"{rows[0].where}: {error}"), len(rows))

    def _check_share(self) -> None:
        num_skipped = sum(self._reasons.values())
        if num_skipped > self._num_used:
            total = num_skipped + self._num_used
            first = next(iter(self._first_of_reason.values()))
            raise RecordError(f"{first}; {num_skipped} of {total} records cannot be read")
        if not self._num_used:
            raise RecordError(self._unread_files[0] if self._unread_files else "no conversation")


def _make_row(fields: Mapping[str, Any], where: str) -> Row | None:
    """Returns the row if the record is a part of a conversation, else None."""
    if "conversation" in fields:
        key = fields["conversation"]
    elif "custom_id" in fields and (
        "messages" not in fields or is_empty_answer(fields.get("answer"))
    ):
        key = fields["custom_id"]
    else:
        return None
    if is_empty(key):
        raise RecordError("the row names no conversation")
    return Row(key if isinstance(key, str) else json.dumps(key, default=str), where, fields)
