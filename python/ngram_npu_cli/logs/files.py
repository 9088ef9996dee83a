"""Reads the records of a file or of standard input: lines of JSON, a JSON document, or a table."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, import_optional, to_one_line

STDIN = Path("-")
_MAX_LINE_BYTES = 64 << 20
"""With this limit, a small compressed file cannot fill the memory."""

Value = tuple[str, Any]
"""The location of a record, such as "logs.jsonl:3", and its value or an InputError."""


def find_files(path: Path) -> list[Path]:
    """Returns the file `path`, or all files in a folder and in the folders in it, sorted by path,
    except hidden files.

    Raises:
        InputError: The path does not exist, or a folder is empty or cannot be read.
    """
    if path == STDIN or path.is_file():
        return [path]
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    if not path.is_dir():  # a pipe
        return [path]
    found = (file for file in path.rglob("*") if file.is_file())
    files = [f for f in found if not any(p[0] == "." for p in f.relative_to(path).parts)]
    if not files:
        raise InputError(f"{path}: no files in this directory")
    return sorted(files)


def read_values(path: Path, advance: Callable[[int], object] = lambda _: None) -> Iterator[Value]:
    """Yields the records of a file. A record that cannot be read is an InputError.

    Args:
        path: The file, or `STDIN`.
        advance: Called with the number of bytes that were read since the last call.

    Raises:
        InputError: The file cannot be read, or not to its end.
    """
    name = "stdin" if path == STDIN else str(path)
    position = 0
    try:
        with _open(path) as (raw, file):
            for where, value in _read(file, path.name, name):
                yield where, value
                if raw.seekable() and (now := raw.tell()) > position:
                    advance(now - position)
                    position = now
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{name}: damaged gzip data: {to_one_line(error)}") from error
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or to_one_line(error)}") from error


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Any]]:
    """Opens a file, and yields it with the file of its decompressed data."""
    if path == STDIN and sys.stdin is None:
        raise OSError("standard input is closed")
    opened: Any = sys.stdin.buffer if path == STDIN else path.open("rb")
    with opened as raw:
        magic = raw.peek(4)[:4]
        if magic[:2] == b"\x1f\x8b":
            yield raw, gzip.GzipFile(fileobj=raw)
        elif magic == b"\x28\xb5\x2f\xfd":
            pyarrow = import_optional("pyarrow", f"{path}: zstd", "logs")
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd")
            yield raw, io.BufferedReader(stream, 1 << 16)
        else:
            yield raw, raw


def _read(file: Any, file_name: str, name: str) -> Iterator[Value]:
    start = file.peek(1 << 16)[: 1 << 16]
    stem = file_name.removesuffix(".gz").removesuffix(".zst")
    has_lines = stem.endswith((".jsonl", ".ndjson"))
    if start[:4] == b"PAR1":
        yield from _read_parquet(file, name)
    elif stem.endswith((".csv", ".tsv")):
        yield from _read_csv(file, start, name)
    elif has_lines or start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"["):
        yield from _read_json(file, has_lines, name)
    else:  # such as a model beside the logs, which may be larger than the memory
        raise InputError(f"{name}: neither JSON, CSV nor Parquet")


def _read_json(file: Any, has_lines: bool, name: str) -> Iterator[Value]:
    """Yields the values of lines of JSON, or the items of a document."""
    for number, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
        where = f"{name}:{number}"
        if len(raw) > _MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raise InputError(f"{where}: the line is longer than {_MAX_LINE_BYTES >> 20} MiB")
        if not raw.strip():
            continue
        value = _parse(raw, where)
        if not has_lines and not isinstance(value, dict):  # a document of many lines, or an array
            value = _parse(raw + file.read(), where)
            if isinstance(value, InputError):
                raise value
            if isinstance(value, list) and not (value and _is_message(value[0])):
                yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
            else:
                yield where, value
            return
        has_lines = True
        yield where, value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and bool({"role", "from"} & value.keys())


def _parse(raw: bytes, where: str) -> Any:
    """Returns the value of a text, or an InputError."""
    try:
        return json.loads(raw.removeprefix(codecs.BOM_UTF8).rstrip())
    except json.JSONDecodeError as error:
        line = f", line {error.lineno} of it" if error.lineno > 1 else ""
        return InputError(f"{where}: not JSON: {error.msg} at column {error.colno}{line}")
    except (ValueError, RecursionError) as error:  # not UTF-8, numbers too long, nesting too deep
        return InputError(f"{where}: not JSON that can be read: {to_one_line(error):.200}")


def _read_csv(file: Any, start: bytes, name: str) -> Iterator[Value]:
    header = start.decode("utf-8-sig", "replace").partition("\n")[0]
    delimiter = max(",;\t|", key=header.count)
    csv.field_size_limit(_MAX_LINE_BYTES)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        columns = next(reader, [])
        if len(set(columns)) < len(columns):
            raise InputError(f"{name}:1: two columns have the same name")
        line = reader.line_num + 1
        for row in reader:
            where = f"{name}:{line}"
            if len(row) == len(columns):
                yield where, {k: value or None for k, value in zip(columns, row, strict=True)}
            elif row:
                reason = f"the row has {len(row)} values for {len(columns)} columns"
                yield where, InputError(f"{where}: {reason}")
            line = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        reason = f"not CSV with the delimiter {delimiter!r}: {to_one_line(error):.200}"
        raise InputError(f"{name}:{reader.line_num + 1}: {reason}") from error


def _read_parquet(file: Any, name: str) -> Iterator[Value]:
    pyarrow = import_optional("pyarrow", f"{name}: Parquet", "logs")
    parquet = import_optional("pyarrow.parquet", f"{name}: Parquet", "logs")
    source = file if file.seekable() else io.BytesIO(file.read())
    number = 0
    try:
        for batch in parquet.ParquetFile(source).iter_batches(256):
            batch.validate(full=True)  # Arrow reads beyond its buffers where offsets are damaged
            # Python has no time of some of Arrow's.
            columns = [
                column.cast(pyarrow.int64()) if pyarrow.types.is_timestamp(column.type) else column
                for column in batch.columns
            ]
            plain = pyarrow.RecordBatch.from_arrays(columns, batch.schema.names)
            for row in plain.to_pylist(maps_as_pydicts="lossy"):
                number += 1
                yield f"{name}:{number}", row
    except (pyarrow.ArrowException, ValueError, OverflowError, TypeError) as error:
        raise InputError(f"{name}: damaged Parquet data: {to_one_line(error):.200}") from error
