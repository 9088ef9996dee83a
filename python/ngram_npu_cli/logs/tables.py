"""Reads tables, whose rows become records: CSV, Parquet, and Arrow's files and streams.

A record has no key for a value that is null or empty, also as JSON.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ngram_npu.errors import InputError, RecordError, import_optional, to_one_line

from ngram_npu_cli.logs.presets import PRESETS

_CSV_SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t|"
_FORMATS = {b"PAR1": "Parquet", b"ARRO": "Arrow", b"\xff\xff\xff\xff": "Arrow stream"}
_BATCH_ROWS = 256
_EMPTY = (None, "", "null", "{}", "[]")


def read_table(
    file: io.BufferedReader, start: bytes, file_name: str, name: str, max_field_bytes: int
) -> Iterator[tuple[int, dict[str, Any] | InputError]] | None:
    """Returns the rows of a table with their numbers; None if the file is no table.

    Args:
        start: The beginning of the file.
        file_name: Name of the file, whose suffix may be that of CSV.
        name: Name of the file in messages.
        max_field_bytes: Maximum size of a value in CSV.
    """
    if start[:4] in _FORMATS:
        return _read_arrow(file, _FORMATS[start[:4]], name)
    header = start.decode("utf-8-sig", "replace").lstrip().partition("\n")[0].rstrip()
    delimiter = max(_DELIMITERS, key=header.count)
    columns = [column.strip().strip('"') for column in header.split(delimiter)]
    stem = file_name.removesuffix(".gz").removesuffix(".zst")
    if stem.endswith(_CSV_SUFFIXES) or len(_list_columns() & set(columns)) > 1:
        csv.field_size_limit(max_field_bytes)
        return _read_csv(file, delimiter, name)
    return None


def _drop_empty(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if value not in _EMPTY}


def _list_columns() -> set[str]:
    """Returns the columns by which CSV without its suffix is recognized."""
    return {key for preset in PRESETS.values() for key in re.findall(r"\w+", preset[0])}


def _read_csv(
    file: io.BufferedReader, delimiter: str, name: str
) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        columns = next(reader, [])
        if len(set(columns)) < len(columns):
            raise InputError(f"{name}:1: two columns have the same name")
        line = reader.line_num + 1
        for row in reader:
            if len(row) == len(columns):
                yield line, _drop_empty(zip(columns, row, strict=True))
            elif row:
                reason = f"the row has {len(row)} values for {len(columns)} columns"
                yield line, InputError(f"{name}:{line}: {reason}")
            line = reader.line_num + 1
    except csv.Error as error:
        reason = f"not CSV with the delimiter {delimiter!r}: {to_one_line(error)}"
        raise RecordError(f"{name}:{reader.line_num}: {reason}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name}:{reader.line_num + 1}: not UTF-8: {error.reason}") from error


def _read_arrow(
    file: io.BufferedReader, table_format: str, name: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    pyarrow = import_optional("pyarrow", f"{name}: {table_format}", "logs")
    source: Any = file if file.seekable() else io.BytesIO(file.read())
    number = 0
    try:
        for batch in _open_arrow(pyarrow, source, table_format):
            # A Python object cannot have all times of Arrow; an integer has the same order.
            columns = [
                column.cast(pyarrow.int64()) if pyarrow.types.is_timestamp(column.type) else column
                for column in batch.columns
            ]
            plain = pyarrow.RecordBatch.from_arrays(columns, batch.schema.names)
            for row in plain.to_pylist(maps_as_pydicts="lossy"):
                number += 1
                yield number, _drop_empty(row.items())
    except (pyarrow.ArrowException, ValueError) as error:
        raise InputError(
            f"{name}: damaged {table_format} data: {to_one_line(error):.200}"
        ) from error


def _open_arrow(pyarrow: Any, source: Any, table_format: str) -> Iterator[Any]:
    if table_format == "Parquet":
        parquet = import_optional("pyarrow.parquet", table_format, "logs")
        yield from parquet.ParquetFile(source).iter_batches(_BATCH_ROWS)
    elif table_format == "Arrow":
        reader = pyarrow.ipc.open_file(source)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(source)
