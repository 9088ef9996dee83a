"""Reads records from a file or standard input: lines, a JSON document or a table.

Reading has two steps, because parsing takes most of the time and can be done by other processes:
`read_batches` reads lines, and `parse_batch` parses them. A file of lines may have any length,
because only a batch is in memory at a time.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ngram_npu.errors import InputError, RecordError, import_optional, to_one_line

from ngram_npu_cli.logs.presets import is_conversation
from ngram_npu_cli.logs.remote import LogPath, list_errors
from ngram_npu_cli.logs.tables import read_table

File = TypeVar("File")

STDIN = Path("-")
_KINDS = (".jsonl", ".json", ".ndjson", ".log", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
SUFFIXES = tuple(f"{kind}{end}" for kind in _KINDS for end in ("", ".gz", ".zst"))
"""Suffixes that are not part of an input's name."""

# With these limits, a small gzip file cannot fill the memory.
_MAX_LINE_MIB = 64
_MAX_DOCUMENT_MIB = 1024

BATCH_BYTES = 1 << 20
"""Size from which no line is added to a batch, which takes less than a second to tokenize."""

_PEEK_BYTES = 1 << 16
_ROW_BYTES = 4096
_JSON_LINE = re.compile(rb"^(\xef\xbb\xbf)?[ \t]*[\[{]", re.MULTILINE)

Line = bytes | dict[str, Any] | InputError
"""A line, a row of a table, or the error of either."""


@dataclass
class Batch:
    """A part of a file: some of its lines, or one JSON document.

    Attributes:
        name: Name of the file in messages.
        first_number: Number of the first value in the file, from 1.
        lines: Number and text of each line that is not blank; an error if the line is too long. Of
            a table, number and values of each row.
        is_document: Whether the only text is a document, which begins on its line.
        error: The file cannot be read after these lines.
    """

    name: str
    first_number: int = 1
    lines: list[tuple[int, Line]] = field(default_factory=list)
    is_document: bool = False
    error: InputError | None = None


def find_files(path: LogPath) -> list[LogPath]:
    """Returns the file `path`, or all files in a folder and in the folders in it, sorted by path,
    except hidden files.

    Raises:
        InputError: The path does not exist, or a folder is empty or cannot be read.
    """
    files: list[Any] = []
    folders: list[Any] = [path]
    try:
        if path != STDIN and not path.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file or directory")
        # Over HTTP, a file is also a folder, and listing it would download it.
        if path.is_file() or not path.is_dir():
            return [path]
        for folder in folders:  # the loop appends to this list
            entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
            folders += [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
            files += [entry for entry in entries if entry.is_file()]
    except list_errors(path) as error:
        raise _convert_error(path, error) from error
    if not files:
        raise InputError(f"{path}: no files in this directory")
    return sorted(files)


def select_shard(files: Sequence[File], shard: str | None) -> Sequence[File]:
    """Returns the share "I/N" of the files. A share consists of consecutive files, so that the
    shares in the order of I have the files' order.

    Raises:
        InputError: The share is not one of N, or there is no file for it.
    """
    if shard is None:
        return files
    numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    index, count = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= index <= count:
        raise InputError(f"shard: expected I/N with 1 <= I <= N, got {shard}")
    share = files[(index - 1) * len(files) // count : index * len(files) // count]
    if not share:
        raise InputError(f"shard: expected N of at most {len(files)}, one per file, got {shard}")
    return share


def read_batches(path: LogPath, *, is_in_folder: bool = False) -> Iterator[Batch]:
    """Yields the lines of a file, the rows of a table, or a document, in at least one batch.

    An error of the file or of its compressed data is part of the last batch. `is_in_folder` is
    whether the file may also be something else than a log, which is not read to its end.
    """
    name = "stdin" if path == STDIN else str(path)
    batch = Batch(name)
    size = 0
    position = [0]
    try:
        with _open(path) as file:
            for line in _read_lines(file, path.name, batch, position, is_in_folder):
                if size >= BATCH_BYTES:
                    yield batch
                    batch = Batch(name, batch.first_number + len(batch.lines))
                    size = 0
                batch.lines.append(line)
                size += len(line[1]) if isinstance(line[1], bytes) else _ROW_BYTES
    except InputError as error:
        batch.error = error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        # The complete lines before were unpacked, so the damage is in or soon after the next line.
        reason = f"damaged gzip data: {to_one_line(error)}"
        batch.error = InputError(f"{name}:{position[0] + 1}: {reason}")
    except list_errors(path) as error:
        batch.error = _convert_error(name, error)
    yield batch


def _read_lines(
    file: io.BufferedReader, file_name: str, batch: Batch, position: list[int], is_in_folder: bool
) -> Iterator[tuple[int, Line]]:
    """Yields the lines of a file or the rows of a table. If the file is a document, marks the first
    batch, and yields the document as its only line."""
    start = file.peek(_PEEK_BYTES)[:_PEEK_BYTES]
    rows = read_table(file, start, file_name, batch.name, _MAX_LINE_MIB << 20)
    if rows is not None:
        yield from rows
        return
    if is_in_folder and not file_name.endswith(SUFFIXES) and not _JSON_LINE.search(start):
        raise RecordError(f"{batch.name}: neither JSON nor a table")
    lines = _number_lines(file, position)
    first_line, first = next(((line, raw) for line, raw in lines if raw.strip()), (0, b""))
    # Windows editors begin a file with a byte order mark, which JSON does not allow.
    is_json = first.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    if is_json and _is_document(first):
        batch.is_document = True
        document = first + file.read((_MAX_DOCUMENT_MIB << 20) + 1 - len(first))
        if len(document) > _MAX_DOCUMENT_MIB << 20:
            raise InputError(
                f"{batch.name}: the JSON document is longer than {_MAX_DOCUMENT_MIB} MiB; write "
                "one record per line"
            )
        yield first_line, document
        return
    for line, raw in chain([(first_line, first)], lines):
        if _is_too_long(raw):
            reason = f"the line is longer than {_MAX_LINE_MIB} MiB"
            yield line, InputError(f"{batch.name}:{line}: {reason}")
        elif raw.strip():
            yield line, raw


def _number_lines(file: io.BufferedReader, position: list[int]) -> Iterator[tuple[int, bytes]]:
    """Yields lines with their numbers, and stores the number in `position`. Of a line that is too
    long, only the beginning is yielded."""
    size = (_MAX_LINE_MIB << 20) + 1
    while raw := file.readline(size):
        position[0] += 1
        yield position[0], raw
        while _is_too_long(raw):
            raw = file.readline(size)


def _is_too_long(raw: bytes) -> bool:
    return len(raw) > _MAX_LINE_MIB << 20 and not raw.endswith(b"\n")


def parse_batch(batch: Batch) -> Iterator[tuple[int, str, Any]]:
    """Yields the JSON values of a batch with their numbers and locations: one per line
    ("logs.jsonl:3"), or the items of one array ("logs.json[2]").

    For a line that cannot be read, an InputError is yielded instead of a value, so that the caller
    can decide whether to continue.

    Raises:
        InputError: The file or its compressed data cannot be read, or a document is not JSON, so
            that its later items cannot be found. The message names file and line.
    """
    name = batch.name
    for number, (line, raw) in enumerate(batch.lines, start=batch.first_number):
        location = f"{name}:{line}"
        if not isinstance(raw, bytes):  # a row of a table, or an error
            yield number, location, raw
        elif batch.is_document:
            items = _parse_document(_decode(raw, location), name, line)
            yield from ((i, *item) for i, item in enumerate(items, start=1))
        else:
            yield number, location, _parse_line(raw, name, line)
    if batch.error is not None:
        raise batch.error


def _parse_line(raw: bytes, name: str, line: int) -> Any:
    try:
        return _parse(_decode(raw, f"{name}:{line}"), name, line)
    except InputError as error:
        return error


def _convert_error(name: object, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or to_one_line(error) or type(error).__name__
    return InputError(f"{name}: {reason}")


@contextmanager
def _open(path: LogPath) -> Iterator[Any]:
    """Opens a file and decompresses it."""
    if path == STDIN and sys.stdin is None:
        raise OSError("standard input is closed")
    raw: Any = sys.stdin.buffer if path == STDIN else path.open("rb")
    file: Any = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)
    with file:
        magic = file.peek(4)[:4]
        if path.name.endswith(".gz") or magic[:2] == b"\x1f\x8b":
            # Another buffer would report damaged data before the lines that precede it.
            file = gzip.GzipFile(fileobj=file)
        elif path.name.endswith(".zst") or magic == b"\x28\xb5\x2f\xfd":
            pyarrow = import_optional("pyarrow", f"{path}: zstd", "logs")
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd")
            file = io.BufferedReader(stream, _PEEK_BYTES)
        yield file


def _decode(raw: bytes, location: str) -> str:
    try:
        # Concatenated files may each begin with a byte order mark.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start + 1}"
        raise InputError(f"{location}: not UTF-8: {reason}") from error


def _is_document(first: bytes) -> bool:
    """Returns whether the file is one value that begins on this line, and not JSON lines."""
    try:
        value = json.loads(first)
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):  # not UTF-8, numbers too long, nesting too deep
        return first.lstrip()[:1] == b"["
    # The file is one array on one line. An array of messages, however, is one conversation.
    if isinstance(value, dict):
        return _has_columns(value)
    return isinstance(value, list) and not is_conversation(value)


def _parse_document(text: str, name: str, first_line: int) -> Iterator[tuple[str, Any]]:
    """Yields the items of an array, or the only value of a document, with their locations."""
    value = _parse(text, name, first_line)
    if isinstance(value, RecordError):
        raise value
    if isinstance(value, list) and not is_conversation(value):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict) and _has_columns(value):
        for i in next(iter(value.values())):
            yield f"{name}[{i}]", {key: column[i] for key, column in value.items()}
    else:
        yield f"{name}:{first_line}", value


def _has_columns(value: dict[str, Any]) -> bool:
    """Whether an object is the columns of a table, as pandas' `DataFrame.to_json` writes it."""
    first = next(iter(value.values()), None)
    rows = [*first] if isinstance(first, dict) else []
    has_rows = bool(rows) and rows == [str(i) for i in range(len(rows))]
    return has_rows and all(isinstance(c, dict) and [*c] == rows for c in value.values())


def _parse(text: str, name: str, first_line: int) -> Any:
    """Returns the value of a text that begins at a line, or an error."""
    try:
        # With the line end, an error in an unfinished line would be reported for the next line.
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        reason = f"{name}:{line}: not JSON: {error.msg} at column {error.colno}"
        if error.msg == "Extra data" and error.lineno > 1:
            reason += "; if the file has several documents, use jq -c . FILE | ngram-npu ..."
        elif re.match(r"[^{\n]*[\s=:]\{.*\}\s*$", text):
            reason += "; remove the text before the JSON: sed 's/^[^{]*//' FILE | ngram-npu ..."
        return RecordError(reason)
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        return RecordError(f"{name}:{first_line}: not JSON that can be read: {to_one_line(error)}")
