"""The command itself: what it is without arguments, its help, its errors, its tables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ngram_npu
import pytest
from ngram_npu_cli import command as cli
from replay_helpers import EXAMPLE_LINE

Write = Callable[..., Path]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ngram-npu {ngram_npu.__version__}\n"


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{ngram_npu.doctor()}\n"
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == ngram_npu.__version__


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["replay", "--help"], ["learn", "--help"], ["store", "info", "-h"], ["--version"]],
)
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from ngram_npu_cli.command import main\n"
        f"code = main({arguments!r})\n"
        "heavy = {'numpy', 'torch', 'ngram_npu'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_installed_command_is_the_light_one() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ngram-npu")
    assert script.value == "ngram_npu_cli.command:main"
    assert cli.main is script.load(), "the public path"


@pytest.mark.parametrize("command", ["replay", "tune", "learn"])
def test_without_a_path(
    command: str, capsys: pytest.CaptureFixture[str], talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = f"ngram-npu {command}: error: PATH: expected a file or a folder of conversations, or a "
    with open(os.devnull) as nothing:
        for stdin in (nothing, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert cli.main([command]) == 2
            error = capsys.readouterr().err
            assert error.startswith(says)
            assert "--demo" in error
            assert error.count("\n") == 1
    assert cli.main([command, str(talk), "--demo"]) == 2
    assert "--demo: expected no PATH with it, got" in capsys.readouterr().err


def test_a_pipe_and_a_redirection_need_no_path(talk: Path) -> None:
    command = f'"{sys.executable}" -m ngram_npu_cli replay --tokenizer ids'
    for line in (f'cat "{talk}" | {command}', f'{command} < "{talk}"'):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert "\nstdin " in done.stdout


def test_the_demonstration(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", "--demo", "--limit", "1", "--tokenizer", "bytes"]
    assert cli.main(arguments) == 0
    assert "\npython-stdlib " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["replay", "x", "--batchsize", "4"], "; did you mean --batch-size?"),
        (["tune", "x", "--min-draft-probability", "0.1"], " (see ngram-npu tune --help)"),
        (["tune", "x", "--runer=gpu"], "; did you mean --runner?"),
        (["measure-cost", "x", "--batch-sizes", "4"], "; did you mean --batch-size?"),
    ],
)
def test_a_wrong_option_is_one_line_with_the_nearest_one(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ngram-npu {arguments[0]}: error: unrecognized arguments: --")
    assert hint in error
    assert error.count("\n") == 1


def test_tables_fit_80_columns(write_jsonl: Write, capsys: pytest.CaptureFixture[str]) -> None:
    many = [{**EXAMPLE_LINE, "id": str(number)} for number in range(60)]
    paths = [str(write_jsonl(*many, name=f"{'long' * 12}-{number}.jsonl")) for number in (1, 2)]
    assert cli.main(["replay", *paths, "--k", "16"]) == 0
    rows = capsys.readouterr().out.split("\n\n")[1].split("\n")
    assert len(rows) == 4
    assert cli.main(["tune", *paths, "--jobs", "1", "--store"]) == 0
    rows += [line for line in capsys.readouterr().out.split("\n") if re.match("  [^-]", line)]
    assert len(rows) > 20
    assert not [line for line in rows if len(line) > 80]
