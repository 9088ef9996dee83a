"""Reads conversations from files and folders, and converts them to requests of token ids.

replay and learn read their input with `read_requests`; tune reads it with `read_logs` and converts
only a sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, islice
from os import PathLike
from typing import Generic, Literal, NamedTuple, TypeVar

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.conversations import (
    Conversation,
    stdlib_conversations,
)
from ngram_npu_cli.logs.files import (
    STDIN,
    SUFFIXES,
    Batch,
    find_files,
    read_batches,
    select_shard,
)
from ngram_npu_cli.logs.mapping import OtherKindError, Row, convert_batch, group_rows, parse_map
from ngram_npu_cli.logs.remote import LogPath, make_path
from ngram_npu_cli.logs.tokenization import Tokenization, TokenizedConversation
from ngram_npu_cli.options import ReadingOptions
from ngram_npu_cli.workers import map_in_order

Converted = TypeVar("Converted")

STDLIB_NAME = "python-stdlib"

_MAX_REASONS = 3
_FORMAT_NOTE = "; read as "  # mapping.py appends it and the preset to messages


@dataclass(frozen=True)
class Progress:
    """Progress of a command in one phase of an input. `total` is 0 if it is not known.

    `done` and `total` count conversations in the phases "read" and "tokenize", generated tokens in
    "replay", and answers in "learn".
    """

    name: str
    phase: Literal["read", "tokenize", "replay", "learn"]
    done: int
    total: int


ShowProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """Does nothing; used if no callback is passed."""


@dataclass
class Skipped:
    """Counts the skipped items of an input, and keeps the reasons.

    Attributes:
        items: Plural name of the counted items.
        path: Path of the file, with which reasons begin.
        strict: Whether a skipped item is an error.
        used: Number of items that were not skipped.
        number: Number of skipped items.
        other_kind: Number of records that are not calls of a model, which are not skipped items.
        first_of_other_kind: The message of the first of them.
        reasons: By reason, the first message, with file and line, and the number of items.
    """

    items: str
    path: str = ""
    strict: bool = False
    used: int = 0
    number: int = 0
    other_kind: int = 0
    first_of_other_kind: str = ""
    reasons: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, error: InputError, count: int = 1) -> None:
        """Counts skipped items with the same reason; raises their error if `strict`."""
        if isinstance(error, OtherKindError):
            self.other_kind += count
            self.first_of_other_kind = self.first_of_other_kind or str(error)
            return
        if self.strict:
            raise error
        self.number += count
        # Messages begin with file and line, which are not compared: "chat.jsonl:7: not JSON ..."
        reason = str(error).removeprefix(self.path).partition(": ")[2]
        message = str(error)
        if reason not in self.reasons and len(self.reasons) >= _MAX_REASONS:
            reason = message = "other reasons"
        message, previous = self.reasons.get(reason, (message, 0))
        self.reasons[reason] = message, previous + count

    def list_notes(self) -> tuple[str, ...]:
        """Returns the numbers and the reasons; empty if nothing was skipped.

        Raises:
            RecordError: More items were skipped than used.
        """
        notes = []
        if self.other_kind:
            notes.append(f"{self.other_kind} {self.items} are not calls of a model")
        if not self.number:
            return tuple(notes)
        total = self.number + self.used
        share = f"{self.number} of {total} {self.items} are skipped ({self.number / total:.1%})"
        if self.number > self.used:
            first, _ = next(iter(self.reasons.values()))
            raise RecordError(f"{first}; {share}, which is more than half")
        reasons = [
            f"{message.partition(_FORMAT_NOTE)[0]:.240}{f' ({count}x)' if count > 1 else ''}"
            for message, count in self.reasons.values()
        ]
        return (f"{share}: {'; '.join(reasons)}", *notes)


class InputLog(NamedTuple):
    """An input that was read completely: its short name for tables, and notes about skipped
    records."""

    name: str
    notes: tuple[str, ...]


@dataclass
class BatchResult(Generic[Converted]):
    """The contents of a part of a file.

    Attributes:
        number: Number of the file.
        items: Location and conversion of each conversation, rows that are parts of conversations,
            and the errors of other records, in order.
        error: The rest of the file cannot be read.
    """

    number: int
    items: list[tuple[str, Converted] | Row | InputError] = field(default_factory=list)
    error: InputError | None = None


@dataclass(frozen=True)
class BatchReader(Generic[Converted]):
    """Parses a part of a file and converts its conversations, in any process. The error of a
    conversion is that of the record."""

    options: ReadingOptions
    scope_field: str | None
    convert: Callable[[Conversation], Converted]

    def read(self, numbered_batch: tuple[int, Batch]) -> BatchResult[Converted]:
        """Reads a batch of the file with this number, up to the option `limit`."""
        number, batch = numbered_batch
        result: BatchResult[Converted] = BatchResult(number)
        num_conversations = 0
        try:
            for item in convert_batch(batch, self.options.map, self.scope_field):
                if isinstance(item, (InputError, Row)):
                    result.items.append(item)
                    continue
                try:
                    result.items.append((item.where, self.convert(item)))
                except RecordError as error:
                    result.items.append(error)
                    continue
                num_conversations += 1
                if num_conversations == self.options.limit:
                    break
        except InputError as error:
            result.error = error
        return result


def read_logs(
    paths: Sequence[str | PathLike[str]],
    options: ReadingOptions,
    receive: Callable[[int, Converted], None],
    *,
    convert: Callable[[Conversation], Converted],
    scope_field: str | None = None,
    progress: ShowProgress = ignore_progress,
) -> tuple[list[InputLog], list[str]]:
    """Reads all conversations of files and folders; without a path, the standard library's sources.

    Records that are not conversations are skipped. With several jobs, this process reads the lines
    of the files, and others parse and convert them. The result does not depend on their number.

    Args:
        paths: Files and folders, also URLs of remote storage.
        options: Options for reading.
        receive: Called with the number of the input and each of its conversations, converted.
        convert: Converts a conversation. It is pickled if there are several jobs.
        scope_field: Field of each record that contains the scope; dots separate nested keys.
        progress: Called after each conversation.

    Returns:
        The inputs, and notes on files of folders that are not read.

    Raises:
        InputError: A file or folder is missing, not readable or empty, or more than half of the
            records of a file are not conversations.
    """
    if options.jobs is not None and options.jobs < 1:
        raise InputError(f"jobs: expected at least 1, got {options.jobs}")
    if not paths:
        for option, value in (("scope_field", scope_field), ("shard", options.shard)):
            if value is not None:
                raise InputError(f"{option}: expected none for the standard library's sources")
        conversations, missing = stdlib_conversations(options.limit)
        for conversation in conversations:
            receive(0, convert(conversation))
        note = f"{len(missing)} modules are not installed: {' '.join(missing)}"
        return [InputLog(STDLIB_NAME, (note,) if missing else ())], []
    roots = [make_path(path) for path in paths]
    all_files = [(file, file is not root) for root in roots for file in find_files(root)]
    parse_map(options.map)  # checks the option before any work
    name_counts = Counter(_shorten(file) for file, _ in all_files)
    files = select_shard(all_files, options.shard)
    num_read = [0] * len(files)

    def read_numbered_batches() -> Iterator[tuple[int, Batch]]:
        for number, (file, is_in_folder) in enumerate(files):
            for batch in read_batches(file, is_in_folder=is_in_folder):
                yield number, batch
                if num_read[number] == options.limit:
                    break

    inputs: list[InputLog] = []
    omitted: defaultdict[str, dict[str, str]] = defaultdict(dict)
    reader = BatchReader(options, scope_field, convert)
    batches = read_numbered_batches()
    with closing(map_in_order(reader.read, batches, options.jobs or 1)) as all_results:
        for number, results in groupby(all_results, key=lambda result: result.number):
            file, is_in_folder = files[number]
            # Files of the same name in different folders get different names in tables.
            name = str(file) if name_counts[_shorten(file)] > 1 else _shorten(file)
            skipped = Skipped("records", str(file), options.strict)
            try:
                for item in islice(_iter_items(results, convert, skipped), options.limit):
                    num_read[number] += 1
                    progress(Progress(name, "read", num_read[number], 0))
                    receive(len(inputs), item)
                notes = skipped.list_notes()
                if not skipped.used:
                    empty = f"{file}: empty, no conversation in this file"
                    raise RecordError(skipped.first_of_other_kind or empty)
            except RecordError as error:
                if options.strict or not is_in_folder or skipped.used:
                    raise  # a file found in a folder is left out only if it has no conversation
                omitted[_get_kind(file)][str(file)] = str(error).partition(_FORMAT_NOTE)[0]
            else:
                inputs.append(InputLog(name, notes))
    notes_on_omitted = [_describe_omitted(kind, reasons) for kind, reasons in omitted.items()]
    if not inputs and omitted:
        raise InputError(notes_on_omitted[0])
    return inputs, notes_on_omitted


def _describe_omitted(kind: str, reasons: Mapping[str, str]) -> str:
    """Describes files of a kind that are not read; `reasons` are by file."""
    shown = [f"{reason:.240}" for reason in list(reasons.values())[:_MAX_REASONS]]
    others = ", ".join(list(reasons)[_MAX_REASONS:])
    return f"not read: {len(reasons)} {kind}: {'; '.join(shown)}" + (others and f"; and {others}")


def _get_kind(file: LogPath) -> str:
    """Returns the kind of a file that is not a log."""
    _, separator, suffix = file.name.rpartition(".")
    return f"files of the kind .{suffix}" if separator else "files without a suffix"


def _iter_items(
    results: Iterable[BatchResult[Converted]],
    convert: Callable[[Conversation], Converted],
    skipped: Skipped,
) -> Iterator[Converted]:
    """Yields the conversion of each conversation of a file, and counts the records."""
    rows: list[Row] = []
    previous = None
    for result in results:
        for item in result.items:
            if isinstance(item, InputError):
                skipped.add(item)
            elif isinstance(item, Row):
                rows.append(item)
            else:
                where, conversation = item
                skipped.used += where != previous  # a record may have several answers
                previous = where
                yield conversation
        if result.error is not None:
            raise result.error
    for num_rows, grouped in group_rows(rows):
        if isinstance(grouped, InputError):
            skipped.add(grouped, num_rows)
            continue
        try:
            converted = convert(grouped)
        except RecordError as error:
            skipped.add(error, num_rows)
            continue
        skipped.used += num_rows
        yield converted


def keep_conversation(conversation: Conversation) -> Conversation:
    """Returns the conversation; for `read_logs` without a conversion."""
    return conversation


def read_requests(
    paths: Sequence[str | PathLike[str]],
    options: ReadingOptions,
    tokenization: Tokenization,
    receive: Callable[[int, TokenizedConversation], None],
    *,
    scope_field: str | None = None,
    progress: ShowProgress = ignore_progress,
) -> tuple[list[InputLog], list[str]]:
    """Reads conversations as `read_logs` does, and tokenizes them.

    If a conversation has text, `tokenization` is loaded afterwards.
    """

    def receive_tokenized(number: int, conversation: TokenizedConversation) -> None:
        if conversation.has_text:
            tokenization.load()
        receive(number, conversation)

    return read_logs(
        paths,
        options,
        receive_tokenized,
        convert=tokenization.tokenize,
        scope_field=scope_field,
        progress=progress,
    )


def _shorten(file: LogPath) -> str:
    if file == STDIN:
        return "stdin"
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if file.name.endswith(suffix):
            return file.name[: -len(suffix)]
    return file.name
