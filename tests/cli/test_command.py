"""Tests the command: options, output, exit codes; and learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from log_samples import ANSWER, SHAPES, USER
from ngram_npu.store import NgramStore, scope_of_request
from ngram_npu_cli import command
from ngram_npu_cli.replay import COMPARE_WORDS
from ngram_npu_cli.tokenization import load_tokenizer
from ngram_npu_cli.tune import SETTINGS

PAIRS = [
    {"prompt": f"{USER} {i}", "completion": f"{ANSWER} {i}", "salt": "ab"[i % 2]} for i in range(8)
]


def run(*arguments: object) -> int:
    return command.main([str(argument) for argument in arguments])


def test_replay_prints_a_table_and_notes(write_jsonl: Any, capsys: Any, tmp_path: Path) -> None:
    path = write_jsonl(*PAIRS, {"a": 1})
    assert run("replay", path, "--json", tmp_path / "out.json") == 0
    output = capsys.readouterr()
    assert output.out.startswith("tokenizer: mistral-v1\n\nsetting ")
    first, second = output.err.splitlines()
    assert first.startswith("ngram-npu: note: 1 of 9 records are skipped: ")
    assert second.startswith("ngram-npu: note: the tokenizer is not your model's")
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["settings"]["lookup=auto k=5"]["requests"] == 8
    assert run("replay", path, "--json", "-", "--tokenizer", "bytes") == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"] == "bytes"


def test_tune_prints_the_recommendation_first(
    write_jsonl: Any, capsys: Any, tmp_path: Path
) -> None:
    path = write_jsonl(*PAIRS)
    options = ("--tokenizer", "bytes", "--cost", "0.05", "--plot", tmp_path / "plot.svg")
    assert run("tune", path, *options) == 0
    assert capsys.readouterr().out.startswith(("Use lookup=", "Do not speculate"))
    drawing = (tmp_path / "plot.svg").read_text()
    assert drawing.count("<!-- lookup=") == len(SETTINGS)
    assert "<!-- requests at once -->" in drawing


def test_learn_saves_the_answers_by_salt(write_jsonl: Any, capsys: Any, tmp_path: Path) -> None:
    path, output = write_jsonl(*PAIRS, {"prompt": "a", "completion": "b"}), tmp_path / "a.store"
    assert (
        run("learn", path, "-o", output, "--salt-field", "salt", "--tokenizer", "mistral-v1") == 0
    )
    assert ": 8 answers with " in (out := capsys.readouterr().out)
    assert " tokens, for 2 salts (field salt)\nThe store holds " in out
    assert "The store is full" not in out
    store = NgramStore.load(output)
    assert {*store.scopes} == {scope_of_request(salt) for salt in "ab"}
    encode = load_tokenizer().encode
    expected = sorted(encode(record["completion"]) for record in PAIRS)
    assert sorted(text.tolist() for _, text in store.texts()) == expected
    assert store.tokenizer
    assert run("learn", path, "-o", output, "--tokenizer", "bytes") == 0
    assert 'for requests without a salt: the server needs "scope": "shared"\n' in (
        capsys.readouterr().out
    )
    assert {*NgramStore.load(output).scopes} == {0}
    assert run("learn", path, "-o", output, "--tokenizer", "bytes", "--store-tokens", 1024) == 0
    assert capsys.readouterr().out.endswith(
        "The store is full (each text takes at least 256 tokens): its oldest text was "
        "overwritten; raise --store-tokens, and store_tokens of the server.\n"
    )


def test_learn_writes_nothing_if_it_fails(write_jsonl: Any, capsys: Any, tmp_path: Path) -> None:
    path = write_jsonl({"prompt": "a", "completion": "b"})
    for extra in ((), ("--store-tokens", 1), ("--salt-field", "none")):
        assert run("learn", path, "-o", tmp_path / "x", "--tokenizer", "bytes", *extra) == 2
    assert not (tmp_path / "x").exists()
    assert run("learn", path, "-o", tmp_path / "no" / "x") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("replay --demo a", "--demo: expected no PATH with it, got a"),
        ("replay no-such-file", "no-such-file: no such file or directory"),
        ("replay --demo --k 0", "argument --k: expected a number of at least 1, got 0"),
        ("replay --demo --k 70", "--k: expected 1 to 64, got 70"),
        ("replay --demo --k 70 --compare k=3", " --k: expected 1 to 64, got 70"),
        ("replay --demo --lookup ladder", "--lookup: expected auto, ngram or MIN-MAX, got ladder"),
        (
            "replay --demo --lookup 5-2",
            "--lookup: expected MIN-MAX with 1 <= MIN <= MAX <= 64, got 5-2",
        ),
        ("replay --demo --compare k=70", "--compare: k: expected 1 to 64, got 70"),
        (
            "tune --demo --cost 5%",
            "--cost: expected a number such as 0.05 or a file with step times; there is no file "
            '"5%"',
        ),
        (
            "tune --demo --plot p.xyz",
            '--plot: expected a name that ends with .png, .svg or .pdf, got "p.xyz"',
        ),
        ("tune --demo --plot no/such/folder.png", "no/such/folder.png"),
        ("learn --demo", "-o"),
        ("measure-cost", "measure-cost"),
        ("", "COMMAND"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    arguments: str, message: str, capsys: Any
) -> None:
    assert run(*arguments.split()) == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith("ngram-npu")
    assert message in last_line


def test_pipe_on_stdin_is_read(capsys: Any, monkeypatch: Any) -> None:
    pipe_out, pipe_in = os.pipe()
    os.write(pipe_in, json.dumps(SHAPES["messages"][0]).encode())
    os.close(pipe_in)
    with open(pipe_out) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert run("replay", "--tokenizer", "bytes") == 0
    assert "lookup=auto k=5         1" in capsys.readouterr().out


def test_help_imports_neither_numpy_nor_the_library() -> None:
    code = (
        "import sys; from ngram_npu_cli.command import main; main(['--help'])\n"
        "main(['tune', '-h']); main(['replay', '-h'])\n"
        "assert not {'numpy', 'torch', 'ngram_npu', 'tqdm'} & sys.modules.keys()"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
    ).stdout
    assert len(SETTINGS) == 11
    assert "Replays eleven settings" in output
    assert COMPARE_WORDS in output


def test_interrupt_prints_what_was_measured(capsys: Any, monkeypatch: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    bar = nullcontext(SimpleNamespace(update=interrupt))
    monkeypatch.setattr("ngram_npu_cli.replay.make_bar", lambda *_: bar)
    assert run("replay", "--demo", "--tokenizer", "bytes") == command.EXIT_INTERRUPTED
    assert "interrupted: the figures are those of the part" in capsys.readouterr().out
    monkeypatch.setattr("ngram_npu_cli.logs.reader.LogReader.__iter__", interrupt)
    assert run("replay", "--demo") == command.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "ngram-npu: interrupted, nothing was measured\n"


def test_completion_and_version_are_printed(capsys: Any) -> None:
    pytest.importorskip("shtab")
    assert run("--print-completion", "bash") == 0
    assert "--salt-field" in capsys.readouterr().out
    assert run("--version") == 0


def test_missing_tqdm_shows_no_bar(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert run("replay", "--demo", "--tokenizer", "bytes") == 0
