"""Reads JSON values from a file or standard input: lines or one array, possibly compressed.

A file of lines may have any length, because only one line is in memory at a time.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, RecordError, to_one_line

STDIN = Path("-")
SUFFIXES = tuple(
    f"{kind}{compressed}"
    for kind in (".jsonl", ".json", ".ndjson", ".log")
    for compressed in ("", ".gz")
)

# With these limits, a small gzip file cannot fill the memory.
_MAX_LINE_MIB = 64
_MAX_DOCUMENT_MIB = 1024


def find_files(path: Path) -> list[Path]:
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


def read_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the JSON values of a file with their locations: one per line ("logs.jsonl:3"), or the
    items of one array ("logs.json[2]").

    For a line that cannot be read, an InputError is yielded instead of a value, so that the caller
    can decide whether to continue.

    Raises:
        InputError: The file or its compressed data cannot be read, or a document is not JSON, so
            that its later items cannot be found. The message names file and line.
    """
    name = "stdin" if path == STDIN else str(path)
    pieces = _read_pieces(path, name)
    first_line, first = next(((line, piece) for line, piece in pieces if piece.strip()), (0, b""))
    first_pieces = [(first_line, first)]
    # Windows editors begin a file with a byte order mark, which JSON does not allow.
    is_json = first.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    if is_json and _is_document(first):
        document = _join_pieces((piece for _, piece in chain(first_pieces, pieces)), name)
        yield from _parse_document(_decode(document, f"{name}:{first_line}"), name, first_line)
        return
    for line, text in _decode_lines(chain(first_pieces, pieces), name):
        yield f"{name}:{line}", text if isinstance(text, InputError) else _parse(text, name, line)


def _read_pieces(path: Path, name: str) -> Iterator[tuple[int, bytes]]:
    """Yields lines with their numbers. A line that is too long is yielded in several pieces."""
    line = 0
    is_new_line = True
    try:
        with _open(path) as compressed:
            is_gzip = path.name.endswith(".gz") or compressed.peek(2)[:2] == b"\x1f\x8b"
            file: Any = gzip.GzipFile(fileobj=compressed) if is_gzip else compressed
            while piece := file.readline((_MAX_LINE_MIB << 20) + 1):
                line += is_new_line
                is_new_line = piece.endswith(b"\n")
                yield line, piece
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        # The complete lines before were unpacked, so the damage is in or soon after the next line.
        raise InputError(f"{name}:{line + 1}: damaged gzip data: {to_one_line(error)}") from error
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from error


def _open(path: Path) -> io.BufferedReader:
    if path == STDIN and sys.stdin is None:
        raise OSError("standard input is closed")
    raw: Any = sys.stdin.buffer if path == STDIN else path.open("rb")
    return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)


def _decode_lines(
    pieces: Iterator[tuple[int, bytes]], name: str
) -> Iterator[tuple[int, str | InputError]]:
    """Yields lines that are not blank, as text or as an error."""
    for line, piece in pieces:
        if len(piece) > _MAX_LINE_MIB << 20 and not piece.endswith(b"\n"):
            while not piece.endswith(b"\n"):
                _, piece = next(pieces, (0, b"\n"))
            yield line, InputError(f"{name}:{line}: the line is longer than {_MAX_LINE_MIB} MiB")
        elif piece.strip():
            try:
                yield line, _decode(piece, f"{name}:{line}")
            except InputError as error:
                yield line, error


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
