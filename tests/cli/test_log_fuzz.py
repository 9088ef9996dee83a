"""Tests that no damaged record or file ends the command with a traceback or a signal."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from log_samples import PRESET_RECORDS, SHAPES
from ngram_npu.errors import InputError
from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.tokenization import Tokenization

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**400, 1.5, 1e308, "", "x", "[]", "{}", "null", "{", "data: x"),
    *([], {}, [1], ["x"], [[]], [{}], [None], {"a": 1}, {"role": 3}, {"type": []}, "\ud800"),
    *([{"role": "assistant", "content": 1}], {"content": {}}, [{"type": "text"}], {"text": [1]}),
)


def list_places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (key,)
        if isinstance(item, (dict, list)):
            yield from ((key, *path) for path in list_places(item))


@pytest.mark.parametrize("name", [*SHAPES, *PRESET_RECORDS])
def test_field_of_any_type_gives_a_conversation_or_a_refusal(name: str, write_jsonl: Any) -> None:
    records = (SHAPES | PRESET_RECORDS)[name]
    tokenization = Tokenization("bytes")
    for number, path in enumerate(list_places(records)):
        for value in VALUES[number % 6 :: 6]:
            changed = copy.deepcopy(records)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
            reader = LogReader([write_jsonl(*changed)])
            try:
                for conversation in reader:
                    tokenization.tokenize(conversation)
            except InputError:
                pass
            assert len(reader.list_notes()) <= 5


def test_flipped_bit_of_a_table_does_not_end_the_process(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    records = [
        {"messages": [{"role": "user", "content": "q" * i}], "answer": "a"} for i in range(9)
    ]
    path = tmp_path / "log.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    good = path.read_bytes()
    child = os.fork()
    if child == 0:  # a signal would end this process only
        generator, code = random.Random(1), 1
        try:
            for _ in range(400):
                damaged = bytearray(good)
                damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
                path.write_bytes(damaged)
                with suppress(InputError):
                    list(LogReader([path]))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_columns_of_any_type_are_read_or_refused(tmp_path: Path) -> None:
    import datetime
    import decimal

    import pyarrow
    import pyarrow.parquet

    values = [
        b"\xff",
        decimal.Decimal("1.5"),
        datetime.datetime(1, 1, 1),
        datetime.timedelta(1),
        {"a": 1},
        [{"role": "user", "content": "x"}],
    ]
    maps = pyarrow.array([[(1, "x")]], pyarrow.map_(pyarrow.int64(), pyarrow.string()))
    times = pyarrow.array([2**62], pyarrow.timestamp("ms"))
    columns = [pyarrow.array([value]) for value in values] + [maps, times]
    for column in columns:
        for key in ("prompt", "completion", "session_id"):
            table = {"prompt": ["q"], "completion": ["a"], key: column}
            pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "log.parquet")
            with suppress(InputError):
                list(LogReader([tmp_path / "log.parquet"]))
