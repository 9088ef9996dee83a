"""Streams that are closed or full: the installed command, as a shell starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_helpers import EXAMPLE_LINE

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("replay - <&-", 2, " replay: error: stdin: standard input is closed"),
        ("tune - <&-", 2, " tune: error: stdin: standard input is closed"),
        ("replay {talk} --json /dev/full", 2, " replay: error: /dev/full: cannot be written: No s"),
        ("tune {talk} -c 0.05 --cache /dev/full", 2, " tune: error: /dev/full: cannot be written"),
        # Reading what is there already would not end.
        (
            "measure-cost /dev/full --url http://localhost:1",
            2,
            " measure-cost: error: http://local",
        ),
        ("replay {talk} > /dev/full", 1, ": error: [Errno 28] No space left on device"),
        ("replay {talk} >&-", 1, ": error: standard output is closed"),
        ("replay {talk} > /dev/full 2> /dev/full", 1, None),
        ("replay nowhere.jsonl 2> /dev/full", 2, None),
        ("replay {talk} --kk 2> /dev/full", 2, None),
        ("tune {talk} -c 0.05 --jobs 1 --sizes ladder > /dev/full", 1, ": error: [Errno 28] No sp"),
        ("tune {talk} -c 0.05 --json /dev/full", 2, " tune: error: /dev/full: cannot be written"),
        ("doctor > /dev/full", 1, ": error: [Errno 28] No space left on device"),
        ("doctor >&-", 1, ": error: standard output is closed"),
        ("--version > /dev/full", 1, ": error: [Errno 28] No space left on device"),
    ],
)
def test_a_stream_that_is_closed_or_full_is_one_line(
    request: pytest.FixtureRequest, write_jsonl: Write, line: str, code: int, message: str | None
) -> None:
    if not line.startswith("doctor"):
        request.getfixturevalue("no_torch")
    talk = write_jsonl(*[{**EXAMPLE_LINE, "id": str(i)} for i in range(4)])
    done = _shell(line.format(talk=talk))
    assert (done.returncode, done.stdout) == (code, "")
    if message is None:  # nowhere to say it
        assert done.stderr == ""
        return
    assert done.stderr.startswith(f"ngram-npu{message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_torch")
def test_nothing_is_lacking_where_the_unused_streams_are_closed(write_jsonl: Write) -> None:
    talk = write_jsonl(EXAMPLE_LINE)
    done = _shell(f"replay {talk} --json - <&- 2>&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["total"]["num_tokens"] == 12


def _shell(line: str) -> subprocess.CompletedProcess[str]:
    command = Path(sysconfig.get_path("scripts")) / "ngram-npu"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # else argparse ignores a failing write
    return subprocess.run(
        ["bash", "-c", f"ulimit -v 16000000; exec {command} {line}"],
        capture_output=True,
        text=True,
        env=environment,
    )
