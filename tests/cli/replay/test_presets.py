"""Tests that the same conversations have the same figures in every preset and container."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from ngram_npu_cli.replay import ReplayOptions, replay
from preset_samples import CONVERSATIONS, SHAPES, Record, make_records

Figures = tuple[int, int, int, int]


def count(path: Path, map_text: str | None = None) -> Figures:
    total = replay([path], ReplayOptions(tokenizer="bytes", strict=True, map=map_text)).total
    return total.num_requests, total.num_prompt_tokens, total.num_tokens, total.num_steps


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    path = tmp_path_factory.mktemp("messages") / "talk.jsonl"
    path.write_bytes(as_lines(make_records("messages")))
    counts = count(path)
    assert counts[0] == len(CONVERSATIONS)
    assert counts[2] / counts[3] > 1.5, "expected texts that repeat themselves"
    return counts


def as_lines(records: list[Record]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def as_table(records: list[Record]) -> dict[str, list[Any]]:
    """Returns the columns of a table in which nested values are JSON."""
    keys = dict.fromkeys(key for record in records for key in record)
    return {
        key: [encode(record[key]) if key in record else None for record in records] for key in keys
    }


def encode(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_csv(records: list[Record]) -> bytes:
    columns = as_table(records)
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=";")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode("utf-8-sig")


def as_arrow(records: list[Record], write: Callable[[Any, Any], None]) -> bytes:
    sink = io.BytesIO()
    write(pyarrow.table(as_table(records)), sink)
    return sink.getvalue()


def as_arrow_stream(records: list[Record]) -> bytes:
    sink, table = io.BytesIO(), pyarrow.table(as_table(records))
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


CONTAINERS: dict[str, Callable[[list[Record]], bytes]] = {
    "talk.jsonl": as_lines,
    "talk.txt.zst": lambda r: pyarrow.compress(as_lines(r), "zstd", asbytes=True),
    "talk": lambda r: gzip.compress(as_lines(r)),
    "array.json": lambda r: json.dumps(r, indent=1).encode("utf-8-sig"),
    "data.json": lambda r: json.dumps({"meta": {"page": 1}, "data": r}).encode(),
    "hits.json": lambda r: json.dumps({"hits": {"hits": [{"_source": x} for x in r]}}).encode(),
    "body.jsonl": lambda r: as_lines([{"time": 1, "body": x} for x in r]),
    "message.jsonl": lambda r: as_lines([{"level": "info", "message": json.dumps(x)} for x in r]),
    "talk.csv": as_csv,
    "talk.parquet": lambda r: as_arrow(r, pyarrow.parquet.write_table),
    "talk.feather": lambda r: as_arrow(r, pyarrow.feather.write_feather),
    "talk.arrow": as_arrow_stream,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("container", CONTAINERS)
def test_figures_are_equal_in_every_preset_and_container(
    tmp_path: Path, figures: Figures, shape: str, container: str
) -> None:
    path = tmp_path / container
    path.write_bytes(CONTAINERS[container](make_records(shape)))
    assert count(path) == figures
