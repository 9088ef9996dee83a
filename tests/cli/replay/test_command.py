"""Tests the command: help, exit codes, streams, and output files, which are complete or absent."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import ngram_npu
import pytest
from cli_helpers import EXAMPLE_LINE
from ngram_npu.output import atomic_output, check_writable
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import (
    InputError,
    Progress,
    ReplayTokenizer,
    format_table,
    replay,
)

Writer = Callable[..., Path]


def test_version_and_doctor_print_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ngram-npu {ngram_npu.__version__}\n"
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{ngram_npu.doctor()}\n"
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == ngram_npu.__version__
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["learn", "--help"], ["store", "info", "-h"], ["--version"]],
)
def test_help_imports_neither_torch_nor_numpy(arguments: list[str]) -> None:
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


@pytest.mark.parametrize(
    ("words", "completed"), [("tune --runner h", "host"), ("learn -o tal", "talk.jsonl")]
)
def test_bash_completes_values_and_files(example: Path, words: str, completed: str) -> None:
    pytest.importorskip("shtab")
    script = (
        f'eval "$("{sys.executable}" -m ngram_npu_cli --print-completion bash)"\n'
        f'COMP_WORDS=(ngram-npu {words}) COMP_CWORD=3; _shtab_ngram_npu; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=example.parent
    )
    assert done.stdout == f"{completed}\n"


def test_installed_command_calls_main_of_command_module() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ngram-npu")
    assert script.value == "ngram_npu_cli.command:main"
    assert cli.main is script.load(), "the entry point is the public function"


@pytest.mark.parametrize("command", ["replay", "tune", "learn"])
def test_missing_path_is_an_error_that_names_demo(
    command: str, capsys: pytest.CaptureFixture[str], example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = (
        f"ngram-npu {command}: error: PATH: expected a file or a folder of conversations, or a "
    )
    with open(os.devnull) as empty_stream:
        for stdin in (empty_stream, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert cli.main([command]) == 2
            error = capsys.readouterr().err
            assert error.startswith(message)
            assert "--demo" in error
            assert error.count("\n") == 1
    assert cli.main([command, str(example), "--demo"]) == 2
    assert "--demo: expected no PATH with it, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("replay x --batchsize 4", "replay: error: --batchsize 4; did you mean '--batch-size'?"),
        ("tune x --hmtl=r.html", "tune: error: --hmtl=r.html; did you mean '--html'?"),
        ("store info x --qqq", "store info: error: --qqq"),
        ("doctor more", "doctor: error: more"),
    ],
)
def test_unknown_argument_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, error: str
) -> None:
    assert cli.main(arguments.split()) == 2
    command, _, rest = error.partition(": error: ")
    message = f"ngram-npu {command}: error: unrecognized arguments: {rest}"
    assert capsys.readouterr().err == f"{message} (see ngram-npu {command} --help)\n"


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("replay - <&-", 2, " replay: error: stdin: standard input is closed"),
        ("replay {path} --json /dev/full", 2, " replay: error: /dev/full: cannot be written: No s"),
        ("replay {path} > /dev/full", 1, ": error: [Errno 28] No space left on device"),
        ("replay {path} >&-", 1, ": error: standard output is closed"),
        ("replay {path} > /dev/full 2> /dev/full", 1, None),
        ("replay {path} --kk 2> /dev/full", 2, None),
        ("--version > /dev/full", 1, ": error: [Errno 28] No space left on device"),
        ("replay {path} | true", 0, None),
    ],
)
def test_closed_or_full_stream_is_reported_in_one_line(
    write_jsonl: Writer, line: str, code: int, error: str | None
) -> None:
    path = write_jsonl(*[{**EXAMPLE_LINE, "id": str(i)} for i in range(4)])
    done = _run_in_shell(line.format(path=path))
    assert (done.returncode, done.stdout) == (code, "")
    expected = "" if error is None else rf"ngram-npu{re.escape(error)}.*\n"
    assert re.fullmatch(expected, done.stderr)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    "line", ["replay {path} --json - <&- 2>&-", "replay --json - < {path} 2>&-", "replay --json -"]
)
def test_replay_reads_path_redirection_or_pipe(example: Path, line: str) -> None:
    done = _run_in_shell(line.format(path=example), piped=example)
    assert done.returncode == 0
    assert json.loads(done.stdout)["total"]["num_tokens"] == 12


def _run_in_shell(line: str, piped: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -m ngram_npu_cli'
    # If PYTHONUNBUFFERED is set, argparse ignores a failed write.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        ["bash", "-c", f"ulimit -v 16000000; {command} {line}"],
        input=None if piped is None else piped.read_text(),
        capture_output=True,
        text=True,
        env=environment,
    )


def list_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def test_replay_writes_json(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    arguments = ["replay", str(example.parent), "--json", str(target), "--batch-size", "4"]
    arguments += ["--lookup", "2-6"]
    assert cli.main(arguments) == 0
    assert "tokens/step" in capsys.readouterr().out
    report = json.loads(target.read_text(encoding="utf-8"))
    assert (report["total"]["num_steps"], report["batch_size"]) == (5, 4)
    assert (report["config"]["min_n"], report["config"]["max_n"]) == (2, 6)
    assert report["command"] == "ngram-npu " + " ".join(arguments)
    assert list_files(tmp_path) == ["result.json"]
    assert cli.main(["replay", str(example), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["total"]["num_tokens"] == 12
    assert "tokens/step" in err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("replay {path} --k 0", "--k: must be at least 1, got 0"),
        ("replay {path} --k many", "invalid integer value: 'many'"),
        ("replay {path} --k 65", "k: expected 1 to 64, got 65"),
        ("replai {path}", "did you mean 'replay'?"),
        ("replay {path} --match-policy latst", "'latest'); did you mean 'latest'?"),
        ("replay {path} --map lanfuse", "got \"lanfuse\"; did you mean 'langfuse'?"),
        ("replay {path} --lookup 5-2", "--lookup: expected MIN-MAX, such as 1-16, or ladder, got"),
        ("replay {path} --lookup 2-5 --min-draft-probability 0.1", "min_n: expected 1 with sizes="),
        ("replay {path} --min-draft-probability nan", "must be above 0 and at most 1, got nan"),
        ("replay {path} --draft-costs own.json", "costs: expected none without min_draft_probab"),
        ("replay {path} --json no/such/result.json", "no/such does not exist"),
        ("replay {path} --json .", "is a directory"),
        ("replay {path} --tokenizer gpt", '"gpt" is neither one of mistral-v1, '),
        ("tune none.jsonl -c -1", "--cost: must be at least 0 and below 10, got -1"),
        ("tune none.jsonl --cost nan", "--cost: must be at least 0 and below 10, got nan"),
        ("tune none.jsonl --cost none.json", "none.json: not a file of step times"),
        ("tune none.jsonl --cost example-8b-l5", "; did you mean 'example-8b-l4'?"),
        ("tune none.jsonl --batch-size 1,3", "batch size 3: "),
        ("tune none.jsonl --against {{", "expected a setting such as"),
        ("tune none.jsonl --html no/such.html", "does not exist"),
        ("tune none.jsonl --sample -1", "--sample: must be at least 0, got -1"),
        ("tune none.jsonl --html r.html", "--html needs matplotlib: pip install matplotlib"),
    ],
)
def test_invalid_options_return_exit_code_2(
    write_jsonl: Writer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    message: str,
) -> None:
    path = write_jsonl({"prompt": "a", "completion": "b"})
    monkeypatch.chdir(tmp_path)
    if command.endswith(" r.html"):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(command.format(path=path).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


# Output files


def test_atomic_output_replaces_the_file_completely(tmp_path: Path) -> None:
    target, link = tmp_path / "x", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with atomic_output(link) as scratch:
        scratch.write_text("new")
        assert scratch.parent == target.parent
        assert target.read_text() == "old"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    with pytest.raises(KeyboardInterrupt):
        _write_half(target)
    assert target.read_text() == "new"
    assert list_files(tmp_path) == ["link", "x"]


def _write_half(target: Path) -> None:
    with atomic_output(target) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt


def test_atomic_output_keeps_device_file_and_applies_umask(tmp_path: Path) -> None:
    null = Path(os.devnull)
    check_writable(null)
    with atomic_output(null) as scratch:
        scratch.write_text("gone")
    assert null.is_char_device()
    with pytest.raises(InputError, match="cannot be written"), atomic_output(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    old_umask = os.umask(0o027)
    try:
        with atomic_output(tmp_path / "x") as scratch:
            scratch.write_text("new")
    finally:
        os.umask(old_umask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640, "permissions of a new file"


def test_atomic_output_does_not_follow_planted_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, victim = tmp_path / "x", tmp_path / "victim"
    victim.write_text("theirs")
    with atomic_output(target) as first_scratch, atomic_output(target) as second_scratch:
        assert first_scratch != second_scratch
    # An attacker may even guess the name.
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    link = tmp_path / ".guessed.tmp"
    link.symlink_to(victim)
    with pytest.raises(InputError, match="cannot be written: File exists"):
        _write_half(target)
    assert victim.read_text() == "theirs"
    assert link.is_symlink()


# Control characters and progress


@pytest.mark.parametrize("line", [EXAMPLE_LINE, b"{"], ids=["table", "error"])
def test_control_characters_of_file_names_are_escaped(
    write_jsonl: Writer, capsys: pytest.CaptureFixture[str], line: object
) -> None:
    path = write_jsonl(line, name="\x1b[2J\n\x9b\u202e\udcff.jsonl")
    cli.main(["replay", str(path)])
    output = "".join(capsys.readouterr())
    assert "\\x9b\\u202e\\udcff" in output
    assert output.replace("\n", "").isprintable()


def test_progress_is_printed_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 9.9, 10.1, 10.1, 11.0, 20.2, 20.2])
    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    show_progress = cli._make_progress()
    for progress in (
        Progress("talk", "read", 5, 0),
        Progress("talk", "read", 6, 0),
        Progress("\x1b", "tokenize", 1, 9),
        Progress("\x1b", "tokenize", 4, 9),
    ):
        show_progress(progress)
    assert capsys.readouterr().err == "read talk: 6\ntokenize \\x1b: 4 of 9\n"


def test_control_characters_of_arguments_are_escaped(
    write_jsonl: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell's `*` can turn a file name that begins with dashes into an option."""
    assert cli.main(["replay", "--\x1b[2J.jsonl"]) == 2
    assert "unrecognized arguments: --\\x1b[2J.jsonl" in capsys.readouterr().err
    tokenizer = ReplayTokenizer("\x1b[2J", "source", None, lambda text: list(text.encode()))
    path = write_jsonl({"prompt": "p", "completion": "completion"}, b"{", name="\x1b[2J.jsonl")
    table = format_table(replay([path], tokenizer=tokenizer))
    assert table.count("\\x1b[2J") == 4, "in the caption, in the row, in its note and its reason"
    assert table.replace("\n", "").isprintable()
