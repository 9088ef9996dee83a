"""Reads the conversations of files and folders, and counts what is skipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.demo import list_demo_conversations
from ngram_npu_cli.logs.files import find_files, read_values
from ngram_npu_cli.logs.mapping import (
    OtherKindError,
    describe_unknown,
    evaluate,
    find_fields,
    parse_map,
)
from ngram_npu_cli.logs.records import Row, join_batch, join_rows, make_conversations, read_turns
from ngram_npu_cli.logs.values import Conversation, is_empty
from ngram_npu_cli.progress import make_bar

_SESSION_KEYS = (
    *("session_id", "sessionId", "conversation_id", "conversationId", "thread_id", "chat_id"),
)


@dataclass
class LogReader:
    """Iterates over conversations.

    Attributes:
        paths: Files and folders; `STDIN`; none: sources of Python's standard library.
        map: The option `--map`.
        strict: Whether a record that cannot be read is an error; otherwise it is skipped.
        salt_field: JMESPath of the record's salt; a record without it is skipped.
        other_notes: Notes of the command, which `list_notes` adds.
    """

    paths: Sequence[str | PathLike[str]]
    map: str | None = None
    strict: bool = False
    salt_field: str | None = None
    other_notes: list[str] = field(default_factory=list)
    _num_used: int = 0
    _num_rows: int = 0
    _num_other: int = 0
    _reasons: Counter[str] = field(default_factory=Counter)
    _first_of_reason: dict[str, str] = field(default_factory=dict)
    _unread_files: list[str] = field(default_factory=list)
    _rows: dict[tuple[str, str], list[Row]] = field(default_factory=dict)
    """The parts of conversations, by file and conversation, or by "" and the batch's custom_id."""
    _damaged_files: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[Conversation]:
        """Yields the conversations.

        Raises:
            InputError: A path cannot be read or has no conversation, or more than half of all
                records cannot be read.
        """
        if not self.paths:
            yield from list_demo_conversations()
            return
        self._mapping = parse_map(self.map) if self.map else None
        self._salt = parse_map(f"prompt={self.salt_field}")["prompt"] if self.salt_field else None
        roots = [Path(path) for path in self.paths]
        files = [(file, file is not root) for root in roots for file in find_files(root)]
        size = sum(file.stat().st_size for file, _ in files if file.is_file())
        with make_bar("read", size, "B") as bar:
            for file, is_in_folder in files:
                yield from self._read_file(file, is_in_folder, bar.update)
        yield from self._join_rows()
        num_skipped = sum(self._reasons.values())
        if num_skipped > self._num_used or not self._num_used:
            first = [*self._first_of_reason.values(), *self._unread_files, "no conversation"][0]
            raise RecordError(f"{first}; {num_skipped} of {num_skipped + self._num_used} records")

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
            reasons = [
                f"{self._first_of_reason[reason]:.300}" + (f" ({count}x)" if count > 1 else "")
                for reason, count in self._reasons.most_common(2)
            ]
            if len(self._reasons) > 2:
                reasons.append(f"and {len(self._reasons) - 2} other reasons")
            total = num_skipped + self._num_used
            notes.append(f"{num_skipped} of {total} records are skipped: {'; '.join(reasons)}")
        if self._num_other:
            notes.append(f"{self._num_other} records are not calls of a model")
        if self._unread_files:
            num_others = len(self._unread_files) - 1
            others = f"; and {num_others} other files" if num_others else ""
            notes.append(f"not read: {self._unread_files[0]:.300}{others}")
        return notes + self.other_notes

    def _read_file(
        self, file: Path, is_in_folder: bool, advance: Callable[[int], object]
    ) -> Iterator[Conversation]:
        num_before = self._num_used + self._num_rows
        try:
            for where, value in read_values(file, advance):
                yield from self._read_record(value, where, file)
        except InputError as error:  # the conversations before the damage are used
            if self.strict or not is_in_folder:
                raise
            self._unread_files.append(str(error))
            return
        if num_before == self._num_used + self._num_rows:
            first = next((e for e in self._first_of_reason.values() if e.startswith(str(file))), "")
            reason = first or f"{file}: no conversation"
            if not is_in_folder:
                raise RecordError(reason)
            self._unread_files.append(reason)

    def _read_record(self, value: Any, where: str, file: Path) -> Iterable[Conversation]:
        """Returns the conversations of a record. A part of a conversation is kept for the end."""
        try:
            if isinstance(value, InputError):
                raise value
            value = {"messages": value} if isinstance(value, list) else value
            if not isinstance(value, dict):
                raise RecordError(f"a record must be an object, got {type(value).__name__}")
            if self._mapping is None and ("turns" in value or "completion_token_ids" in value):
                made = [read_turns(value, where)]
            else:
                mapping = self._mapping
                fields = find_fields(value) if mapping is None else evaluate(mapping, value)
                if self._keep_row(Row(where, fields), file):
                    return []
                if not {"prompt", "answer"} & fields.keys():
                    raise RecordError(describe_unknown(value))
                made = make_conversations(fields, where)
            names = [value[key] for key in _SESSION_KEYS if not is_empty(value.get(key))]
            session = names[0] if names else ""
            session = session if isinstance(session, str) else json.dumps(session, default=str)
            salt = self._find_salt(value)
        except RecursionError:
            self._damaged_files.add(str(file))
            self.skip(RecordError(f"{where}: nested too deeply"))
        except OtherKindError as error:
            self.skip(error)
        except InputError as error:
            self._damaged_files.add(str(file))
            self.skip(RecordError(f"{where}: {str(error).removeprefix(f'{where}: ')}"))
        else:
            self._num_used += 1
            return [conversation._replace(session=session, salt=salt) for conversation in made]
        return []

    def _keep_row(self, row: Row, file: Path) -> bool:
        """Returns whether a record is a part of a conversation, and keeps it."""
        is_message = "conversation" in row.fields
        if not is_message and (
            "custom_id" not in row.fields or {"prompt", "answer"} <= row.fields.keys()
        ):
            return False
        if self._salt is not None:
            raise RecordError("the salt of a part of a conversation cannot be read")
        key = row.fields["conversation" if is_message else "custom_id"]
        if is_empty(key):
            raise RecordError("the row names no conversation")
        # The requests and the results of a batch may be in two files.
        place = str(file) if is_message else ""
        self._num_rows += 1
        self._rows.setdefault((place, json.dumps(key, default=str)), []).append(row)
        return True

    def _join_rows(self) -> Iterator[Conversation]:
        """Yields the conversations of rows."""
        for (place, key), rows in self._rows.items():
            try:
                if place in self._damaged_files and "id" not in rows[0].fields:
                    raise RecordError("another row of the file, maybe of this conversation, is bad")
                conversations = join_rows(rows) if place else join_batch(rows)
            except RecordError as error:
                self.skip(RecordError(f"{rows[0].where}: {error}"), len(rows))
                continue
            empty = [r for r in rows if "content" in r.fields and is_empty(r.fields["content"])]
            self._num_other += len(empty)
            self._num_used += len(rows) - len(empty)
            yield from (conversation._replace(session=key) for conversation in conversations)

    def _find_salt(self, record: Any) -> str | None:
        """Returns the record's salt. A record without it is an error: its text would be shared."""
        if self._salt is None:
            return None
        salt = self._salt(record)
        if salt is None:
            raise RecordError(f'the record has no salt field "{self.salt_field}"')
        if not isinstance(salt, str) or not salt:
            raise RecordError(f'the salt field "{self.salt_field}" is not a text')
        return salt
