"""Reads records from a file or standard input: lines, a JSON document or a table.

Reading has two steps, because parsing takes most of the time and can be done by other processes:
`read_batches` reads lines, and `parse_batch` parses them. A file of lines may have any length,
because only a batch is in memory at a time.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ngram_npu.errors import InputError, RecordError, import_optional, to_one_line

from ngram_npu_cli.logs.presets import is_conversation
from ngram_npu_cli.logs.remote import LogPath, RemotePath
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
    if not path.is_dir():
        if path != STDIN and not path.exists():
            raise InputError(f"{path}: no such file or directory")
        return [path]
    files: list[Any] = []
    folders: list[Any] = [path]
    try:
        for folder in folders:  # the loop appends to this list
            entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
            folders += [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
            files += [entry for entry in entries if entry.is_file()]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
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
        with _convert_errors(path, name, position), _open(path) as file:
            for line in _read_lines(file, path.name, batch, position, is_in_folder):
                if size >= BATCH_BYTES:
                    yield batch
                    batch = Batch(name, batch.first_number + len(batch.lines))
                    size = 0
                batch.lines.append(line)
                size += len(line[1]) if isinstance(line[1], bytes) else _ROW_BYTES
    except InputError as error:
        batch.error = error
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
    pieces = _read_pieces(file, position)
    first_line, first = next(((line, piece) for line, piece in pieces if piece.strip()), (0, b""))
    pieces = chain([(first_line, first)], pieces)
    # Windows editors begin a file with a byte order mark, which JSON does not allow.
    is_json = first.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    if is_json and _is_document(first):
        batch.is_document = True
        yield first_line, _join_pieces((piece for _, piece in pieces), batch.name)
    yield from _select_lines(pieces, batch.name)  # of a document, no piece is left


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


def _read_pieces(file: io.BufferedReader, position: list[int]) -> Iterator[tuple[int, bytes]]:
    """Yields lines with their numbers, and stores the number in `position`. A line that is too long
    is yielded in several pieces."""
    is_new_line = True
    while piece := file.readline((_MAX_LINE_MIB << 20) + 1):
        position[0] += is_new_line
        is_new_line = piece.endswith(b"\n")
        yield position[0], piece


@contextmanager
def _convert_errors(path: LogPath, name: str, position: list[int]) -> Iterator[None]:
    # The packages of remote storage have their own classes of errors.
    read_errors = Exception if isinstance(path, RemotePath) else OSError
    try:
        yield
    except InputError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        # The complete lines before were unpacked, so the damage is in or soon after the next line.
        reason = f"damaged gzip data: {to_one_line(error)}"
        raise InputError(f"{name}:{position[0] + 1}: {reason}") from error
    except read_errors as error:
        reason = getattr(error, "strerror", None) or to_one_line(error)
        raise InputError(f"{name}: {reason}") from error


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


def _select_lines(
    pieces: Iterator[tuple[int, bytes]], name: str
) -> Iterator[tuple[int, bytes | InputError]]:
    """Yields lines that are not blank; an error for a line that is too long."""
    for line, piece in pieces:
        if len(piece) > _MAX_LINE_MIB << 20 and not piece.endswith(b"\n"):
            while not piece.endswith(b"\n"):
                _, piece = next(pieces, (0, b"\n"))
            yield line, InputError(f"{name}:{line}: the line is longer than {_MAX_LINE_MIB} MiB")
        elif piece.strip():
            yield line, piece


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


def _join_pieces(pieces: Iterable[bytes], name: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > _MAX_DOCUMENT_MIB << 20:
            raise InputError(
                f"{name}: the JSON document is longer than {_MAX_DOCUMENT_MIB} MiB; write one "
                "record per line"
            )
    return b"".join(parts)


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
        elif re.search(r"[\s=:][{].*[}]\s*$", text):
            reason += "; remove the text before the JSON: sed 's/^[^{]*//' FILE | ngram-npu ..."
        return RecordError(reason)
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        return RecordError(f"{name}:{first_line}: not JSON that can be read: {to_one_line(error)}")
