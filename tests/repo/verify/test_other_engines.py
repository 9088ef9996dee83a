"""What a run of the engines' tests is taken to say."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tools import engines
from tools.engines import add, summary

CASE = '<testcase classname="engine_v2.{}" name="{}">{}</testcase>'


def results(file: Path, *cases: tuple[str, str, str]) -> Path:
    text = "".join(CASE.format(of, name, f"<{how}/>" if how else "") for of, name, how in cases)
    file.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    return file


def test_failures_and_errors_are_named_by_method(tmp_path: Path) -> None:
    file = results(
        tmp_path / "r",
        ("test_v2_engine", "a[async-scan]", ""),
        ("test_v2_engine", "a[sync-scan]", "failure"),
        ("test_v2_engine", "b[sync-index]", ""),
        ("test_v2_ranks", "c[async-index]", "skipped"),
        ("test_v2_store", "d", "error"),
        ("test_beside_engine", "a[draft-sync]", ""),
    )
    assert [[*entry.values()] for entry in summary(file, "v2")] == [
        ["v2", "beside draft_model", "1 passed", []],
        ["v2", "ngram", "1 passed, 1 failed", ["test_v2_engine::a[sync-scan]"]],
        ["v2", "ngram_gpu", "1 passed", []],
        ["v2", "store", "0 passed, 1 failed", ["test_v2_store::d"]],
    ]


@pytest.mark.parametrize(("listed", "newest"), [("vllm (0.33.0)\nAvailable", "0.33.0"), ("", None)])
def test_newest_release_is_the_one_that_pip_names_first(
    monkeypatch: pytest.MonkeyPatch, listed: str, newest: str | None
) -> None:
    monkeypatch.setattr("subprocess.check_output", lambda command, text: listed)
    if newest is None:
        with pytest.raises(SystemExit, match="expected `vllm "):
            engines.newest_release()
    else:
        assert engines.newest_release() == newest


@pytest.mark.parametrize("cases", [(), (("test_v2_store", "a", "skipped"),)])
def test_a_run_without_tests_is_no_success(
    tmp_path: Path, cases: tuple[tuple[str, str, str]]
) -> None:
    with pytest.raises(ValueError, match="expected tests that ran, got none"):
        summary(results(tmp_path / "r", *cases), "v2")


def test_a_method_of_a_release_has_one_entry_for_each_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "METHODS", {"v1": {"ngram": ""}, "v2": {"ngram": "", "store": ""}})
    monkeypatch.setattr(engines, "datetime", Clock)
    file = tmp_path / "engines.json"
    for runner, says in (("v1", "1 passed"), ("v2", "2 passed"), ("v1", "3 passed")):
        given = {"vllm": "1.0", "runner": runner, "method": "ngram", "says": says}
        add(file, [given], ["1.0", "--", "-k", says])
    found = json.loads(file.read_text())
    rows = [(entry["runner"], entry["method"], entry["says"]) for entry in found["results"]]
    assert rows == [
        ("v1", "ngram", "3 passed"),
        ("v2", "ngram", "2 passed"),
        ("v2", "store", "untried"),
    ]
    commands = [found["runs"][entry["run"]]["command"] for entry in found["results"][:2]]
    command = "python -m tools.engines 1.0 -- -k '{} passed'"
    assert commands == [command.format(3), command.format(2)]
    assert len(found["runs"]) == 2, "a run without entries is left out"


class Clock:
    seconds = 0

    @classmethod
    def now(cls, _: object) -> datetime:
        cls.seconds += 1
        return datetime(2026, 1, 1, second=cls.seconds, tzinfo=timezone.utc)


def test_a_run_that_was_broken_off_is_not_written_down(tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    with pytest.raises(SystemExit, match="pytest ended with 4, nothing is written down"):
        engines.tested(python, "--no-such-option")
