"""Tests logs at URLs, in the storage in memory of fsspec, which universal_pathlib uses."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from cli_helpers import EXAMPLE_LINE, make_conversations
from ngram_npu import NgramStore
from ngram_npu_cli import command as cli
from ngram_npu_cli.learn import LearnOptions, learn
from ngram_npu_cli.logs import files
from ngram_npu_cli.replay import InputError, ReplayOptions, replay


@pytest.fixture
def storage() -> Iterator[Any]:
    """The storage in memory, which processes do not share."""
    storage = fsspec.filesystem("memory")
    yield storage
    storage.rm("/", recursive=True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_remote_folder_is_read_like_a_local_folder(
    storage: Any, tmp_path: Path, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BATCH_BYTES", 500)
    (tmp_path / "logs").mkdir()
    for seed, name in enumerate(("b.jsonl", "a.jsonl.gz", "sub/c.txt")):
        text = "\n".join(map(json.dumps, make_conversations(10, seed, name))).encode()
        data = gzip.compress(text) if name.endswith(".gz") else text
        (tmp_path / "logs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "logs" / name).write_bytes(data)
        storage.pipe(f"/bucket/logs/{name}", data)
    options = LearnOptions(jobs=jobs)
    learn([tmp_path / "logs"], tmp_path / "local.store", options)
    learn(["memory://bucket/logs/"], tmp_path / "remote.store", options)
    assert (tmp_path / "remote.store").read_bytes() == (tmp_path / "local.store").read_bytes()
    report = replay([f"file://{tmp_path}/logs", "memory://bucket/logs"], ReplayOptions())
    assert [item.name for item in report.inputs] == [
        f"file://{tmp_path}/logs/a.jsonl.gz",
        f"file://{tmp_path}/logs/b.jsonl",
        f"file://{tmp_path}/logs/sub/c.txt",
        "memory://bucket/logs/a.jsonl.gz",
        "memory://bucket/logs/b.jsonl",
        "memory://bucket/logs/sub/c.txt",
    ]


def test_command_reads_a_remote_file(storage: Any, capsys: pytest.CaptureFixture[str]) -> None:
    storage.pipe("/talk.jsonl", json.dumps(EXAMPLE_LINE).encode())
    assert cli.main(["replay", "memory://talk.jsonl", "--shard", "1/1", "--jobs", "2"]) == 0
    assert "talk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/none.jsonl", "no such file or directory"),
        ("memory://empty", "no files in this directory"),
        ("nothing://bucket/a.jsonl", "nothing://bucket/a.jsonl: Unsupported filesystem: .nothing"),
        ("memory://a.store", "memory://a.store: expected a local file, because it is a store"),
    ],
)
def test_unusable_url_is_an_error(storage: Any, tmp_path: Path, url: str, message: str) -> None:
    store = tmp_path / "a.store"
    NgramStore(1, 4096).save(store)
    storage.pipe("/a.store", store.read_bytes())
    storage.mkdir("/empty")
    with pytest.raises(InputError, match=message):
        learn([url])


def test_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "upath", None)
    install = 'pip install universal_pathlib (the extra "remote")'
    with pytest.raises(InputError) as error_info:
        replay(["s3://bucket/logs"])
    assert str(error_info.value) == f"s3://bucket/logs needs universal_pathlib: {install}"


def test_error_of_the_storage_while_reading_names_the_file(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ConnectionLostError(Exception):
        pass

    def lose_connection(*_: Any) -> None:
        raise ConnectionLostError("the connection was lost")

    storage.pipe("/talk.jsonl", json.dumps(EXAMPLE_LINE).encode())
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.readinto", lose_connection)
    with pytest.raises(InputError, match=r"memory://talk\.jsonl: the connection was lost"):
        replay(["memory://talk.jsonl"])
