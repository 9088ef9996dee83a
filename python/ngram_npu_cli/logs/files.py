"""Reads JSON values from a file or standard input: lines or one array, possibly compressed.

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
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ngram_npu.errors import InputError, RecordError, to_one_line

from ngram_npu_cli.logs.remote import LogPath, RemotePath

File = TypeVar("File")

STDIN = Path("-")
SUFFIXES = tuple(
    f"{kind}{compressed}"
    for kind in (".jsonl", ".json", ".ndjson", ".log")
    for compressed in ("", ".gz")
)

# With these limits, a small gzip file cannot fill the memory.
_MAX_LINE_MIB = 64
_MAX_DOCUMENT_MIB = 1024

BATCH_BYTES = 1 << 20
"""Size from which no line is added to a batch, which takes less than a second to tokenize."""


@dataclass
class Batch:
    """A part of a file: some of its lines, or one JSON document.

    Attributes:
        name: Name of the file in messages.
        first_number: Number of the first value in the file, from 1.
        lines: Number and text of each line that is not blank; an error if the line is too long.
        is_document: Whether the only text is a document, which begins on its line.
        error: The file cannot be read after these lines.
    """

    name: str
    first_number: int = 1
    lines: list[tuple[int, bytes | InputError]] = field(default_factory=list)
    is_document: bool = False
    error: InputError | None = None


def find_files(path: LogPath) -> list[LogPath]:
    """Returns the file `path`, or the files with one of `SUFFIXES` in a folder, sorted by name.

    Folders are not searched recursively.

    Raises:
        InputError: The path does not exist, or the folder has no such file.
    """
    if not path.is_dir():
        if path != STDIN and not path.exists():
            raise InputError(f"{path}: no such file or directory")
        return [path]
    try:
        files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.is_file())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if not files:
        raise InputError(
            f"{path}: no replay files (*.jsonl, *.json, *.log, also .gz) in this directory"
        )
    return files


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


def read_batches(path: LogPath) -> Iterator[Batch]:
    """Yields the lines of a file, or its document, in at least one batch.

    An error of the file or of its compressed data is part of the last batch.
    """
    name = "stdin" if path == STDIN else str(path)
    batch = Batch(name)
    size = 0
    try:
        pieces = _read_pieces(path, name)
        first_line, first = next(
            ((line, piece) for line, piece in pieces if piece.strip()), (0, b"")
        )
        pieces = chain([(first_line, first)], pieces)
        # Windows editors begin a file with a byte order mark, which JSON does not allow.
        is_json = first.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
        if is_json and _is_document(first):
            batch.is_document = True
            batch.lines.append((first_line, _join_pieces((piece for _, piece in pieces), name)))
        for line in _select_lines(pieces, name):  # of a document, no piece is left
            if size >= BATCH_BYTES:
                yield batch
                batch = Batch(name, batch.first_number + len(batch.lines))
                size = 0
            batch.lines.append(line)
            size += len(line[1]) if isinstance(line[1], bytes) else 0
    except InputError as error:
        batch.error = error
    yield batch


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
        if isinstance(raw, InputError):
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


def _read_pieces(path: LogPath, name: str) -> Iterator[tuple[int, bytes]]:
    """Yields lines with their numbers. A line that is too long is yielded in several pieces."""
    line = 0
    is_new_line = True
    # The packages of remote storage have their own classes of errors.
    read_errors = Exception if isinstance(path, RemotePath) else OSError
    try:
        with _open(path) as compressed:
            is_gzip = path.name.endswith(".gz") or compressed.peek(2)[:2] == b"\x1f\x8b"
            file: Any = gzip.GzipFile(fileobj=compressed) if is_gzip else compressed
            while piece := file.readline((_MAX_LINE_MIB << 20) + 1):
                line += is_new_line
                is_new_line = piece.endswith(b"\n")
                yield line, piece
    except InputError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        # The complete lines before were unpacked, so the damage is in or soon after the next line.
        raise InputError(f"{name}:{line + 1}: damaged gzip data: {to_one_line(error)}") from error
    except read_errors as error:
        reason = getattr(error, "strerror", None) or to_one_line(error)
        raise InputError(f"{name}: {reason}") from error


def _open(path: LogPath) -> io.BufferedReader:
    if path == STDIN and sys.stdin is None:
        raise OSError("standard input is closed")
    raw: Any = sys.stdin.buffer if path == STDIN else path.open("rb")
    return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)


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
    return isinstance(value, list) and not _is_message(value)


def _is_message(value: list[Any]) -> bool:
    first = value[0] if value else None
    return isinstance(first, dict) and bool({"role", "from"} & first.keys())


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
    if isinstance(value, list) and not _is_message(value):  # messages are one conversation
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    else:
        yield f"{name}:{first_line}", value


def _parse(text: str, name: str, first_line: int) -> Any:
    """Returns the value of a text that begins at a line, or an error."""
    try:
        # With the line end, an error in an unfinished line would be reported for the next line.
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        return RecordError(f"{name}:{line}: not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        return RecordError(f"{name}:{first_line}: not JSON that can be read: {to_one_line(error)}")
