"""The command: help, exit codes, streams, and output files that are complete or absent."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import json
import os
import re
import secrets
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ngram_npu
import pytest
from cli_helpers import EXAMPLE_LINE, make_talk
from ngram_npu.output import atomic_output, check_writable
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import (
    Conversation,
    InputError,
    ReplayInput,
    ReplayTokenizer,
    Turn,
    format_table,
    replay,
)

Write = Callable[..., Path]


def test_commands_that_only_print(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_installed_command_is_the_light_entry_module() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ngram-npu")
    assert script.value == "ngram_npu_cli.command:main"
    assert cli.main is script.load(), "the public path"


@pytest.mark.parametrize("command", ["replay", "tune", "learn"])
def test_missing_path_is_an_error_that_names_demo(
    command: str, capsys: pytest.CaptureFixture[str], talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = (
        f"ngram-npu {command}: error: PATH: expected a file or a folder of conversations, or a "
    )
    with open(os.devnull) as nothing:
        for stdin in (nothing, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert cli.main([command]) == 2
            error = capsys.readouterr().err
            assert error.startswith(message)
            assert "--demo" in error
            assert error.count("\n") == 1
    assert cli.main([command, str(talk), "--demo"]) == 2
    assert "--demo: expected no PATH with it, got" in capsys.readouterr().err


def test_pipe_and_redirection_need_no_path(talk: Path) -> None:
    command = f'"{sys.executable}" -m ngram_npu_cli replay --tokenizer ids'
    for line in (f'cat "{talk}" | {command}', f'{command} < "{talk}"'):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert "\nstdin " in done.stdout


def test_unknown_option_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "x", "--batchsize", "4"]) == 2
    error = capsys.readouterr().err
    assert (
        error == "ngram-npu: error: unrecognized arguments: --batchsize 4 (see ngram-npu --help)\n"
    )


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


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("replay - <&-", 2, " replay: error: stdin: standard input is closed"),
        ("replay {talk} --json /dev/full", 2, " replay: error: /dev/full: cannot be written: No s"),
        ("replay {talk} > /dev/full", 1, ": error: [Errno 28] No space left on device"),
        ("replay {talk} >&-", 1, ": error: standard output is closed"),
        ("replay {talk} > /dev/full 2> /dev/full", 1, None),
        ("replay {talk} --kk 2> /dev/full", 2, None),
        ("tune {talk} -c 0.05 --jobs 1 --sizes ladder > /dev/full", 1, ": error: [Errno 28] No sp"),
        ("doctor >&-", 1, ": error: standard output is closed"),
        ("--version > /dev/full", 1, ": error: [Errno 28] No space left on device"),
        ("replay {talk} | true", 0, None),
    ],
)
def test_closed_or_full_stream_is_reported_in_one_line(
    request: pytest.FixtureRequest, write_jsonl: Write, line: str, code: int, error: str | None
) -> None:
    if not line.startswith("doctor"):
        request.getfixturevalue("no_torch")
    talk = write_jsonl(*[{**EXAMPLE_LINE, "id": str(i)} for i in range(4)])
    done = _shell(line.format(talk=talk))
    assert (done.returncode, done.stdout) == (code, "")
    expected = "" if error is None else rf"ngram-npu{re.escape(error)}.*\n"
    assert re.fullmatch(expected, done.stderr)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    "line", ["replay {talk} --json - <&- 2>&-", "replay --json - < {talk} 2>&-", "replay --json -"]
)
def test_replay_reads_path_redirection_or_pipe(talk: Path, line: str) -> None:
    done = _shell(line.format(talk=talk), piped=talk)
    assert done.returncode == 0
    assert json.loads(done.stdout)["total"]["num_tokens"] == 12


def _shell(line: str, piped: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = Path(sysconfig.get_path("scripts")) / "ngram-npu"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # else argparse ignores a failing write
    return subprocess.run(
        ["bash", "-c", f"ulimit -v 16000000; {command} {line}"],
        input=None if piped is None else piped.read_text(),
        capture_output=True,
        text=True,
        env=environment,
    )


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def test_replay_writes_json(talk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    arguments = ["replay", str(talk.parent), "--json", str(target), "--batch-size", "4"]
    assert cli.main(arguments) == 0
    assert "tokens/step" in capsys.readouterr().out
    report = json.loads(target.read_text(encoding="utf-8"))
    assert (report["total"]["num_steps"], report["batch_size"]) == (5, 4)
    assert report["command"] == "ngram-npu " + " ".join(arguments)
    assert files_in(tmp_path) == ["result.json"]
    assert cli.main(["replay", str(talk), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["total"]["num_tokens"] == 12
    assert "tokens/step" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--min-n 1 --max-n 3 --k 7 --overlap", {"min_n": 1, "max_n": 3, "k": 7, "overlap": True}),
        ("--match-policy latest --max-len 100", {"match_policy": "latest", "max_len": 100}),
        ("--sizes ladder --no-overlap", {"sizes": "ladder", "max_n": 16, "overlap": False}),
        ("--min-draft-probability 0.177", {"sizes": "ladder", "min_draft_probability": 0.177}),
    ],
)
def test_drafting_options(
    talk: Path, capsys: pytest.CaptureFixture[str], arguments: str, expected: dict[str, Any]
) -> None:
    assert cli.main(["replay", str(talk), "--json", "-", *arguments.split()]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert {name: config[name] for name in expected} == expected


def test_engine_changes_no_figure(write_jsonl: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(*make_talk(12))
    results = []
    for arguments in ([], ["--engine", "auto"], ["--engine", "index"], ["--engine", "scan"]):
        arguments += ["--batch-size", "3", "--json", "-"]
        assert cli.main(["replay", str(path), *arguments]) == 0
        (figures,) = json.loads(capsys.readouterr().out)["inputs"]
        results.append({k: v for k, v in figures.items() if "time" not in k and "us_per" not in k})
    assert results[0]["num_drafts"] > 100
    assert all(other == results[0] for other in results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-n", "10", "--engine", "index"], "expected max_n - min_n <= 7, and no"),
        (["--k", "0"], "--k: must be at least 1, got 0"),
        (["--k", "many"], "invalid integer value: 'many'"),
        (["--k", "65"], "k: expected 1 to 64, got 65"),
        (["--match-policy", "middle"], "invalid choice"),
        (["--min-draft-probability", "nan"], "must be above 0 and at most 1, got nan"),
        (["--min-draft-probability", "often"], "invalid number value: 'often'"),
        (["--draft-costs", "{tmp}/own.json"], "costs: expected none without min_draft_probability"),
        (["--batch-size", "0"], "--batch-size: must be at least 1"),
        (["--json", "{tmp}/no/such/result.json"], "no/such does not exist"),
        (["--json", "{tmp}"], "is a directory"),
        (["--tokenizer", "gpt"], '"gpt" is neither one of mistral-v1, '),
    ],
)
def test_bad_options_are_exit_code_2(
    write_jsonl: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    path = write_jsonl({"prompt": "a", "completion": "b"})
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert cli.main(["replay", str(path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


# Interruption


@pytest.mark.usefixtures("no_torch")
def test_sigint_ends_the_process_with_130(talk: Path, tmp_path: Path) -> None:
    # The process sends itself the signal from within a step, so the timing is deterministic. It
    # sets the handler because a shell starts background jobs with the signal ignored.
    script = (
        "import signal, sys\n"
        "import ngram_npu\n"
        "from ngram_npu_cli import command as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "step = ngram_npu.NgramProposer.step\n"
        "def interrupted(*args, **kwargs):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    return step(*args, **kwargs)\n"
        "ngram_npu.NgramProposer.step = interrupted\n"
        f"sys.exit(cli.main(['replay', {str(talk)!r}, '--json', {str(tmp_path / 'x.json')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "ngram-npu: interrupted\n"
    assert files_in(tmp_path) == []


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
    assert files_in(tmp_path) == ["link", "x"]


def _write_half(target: Path) -> None:
    with atomic_output(target) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt


def test_atomic_output_keeps_devices_and_the_user_s_permissions(tmp_path: Path) -> None:
    null = Path(os.devnull)
    check_writable(null)
    with atomic_output(null) as scratch:
        scratch.write_text("gone")
    assert null.is_char_device()
    with pytest.raises(InputError, match="cannot be written"), atomic_output(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    before = os.umask(0o027)
    try:
        with atomic_output(tmp_path / "x") as scratch:
            scratch.write_text("new")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640, "those of a new file"


def test_atomic_output_does_not_follow_planted_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, victim = tmp_path / "x", tmp_path / "victim"
    victim.write_text("theirs")
    with atomic_output(target) as one, atomic_output(target) as two:
        assert one != two
    # Even if an attacker guesses the name.
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    link = tmp_path / ".guessed.tmp"
    link.symlink_to(victim)
    with pytest.raises(InputError, match="cannot be written: File exists"):
        _write_half(target)
    assert victim.read_text() == "theirs"
    assert link.is_symlink()


# The rest of the command


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_on_a_terminal(talk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["replay", str(talk)]) == 0
    drawn = terminal.getvalue().split("\r")
    assert any(line.startswith("tokenize talk:   0%|") for line in drawn)
    assert any(line.startswith("replay talk:   0%|") for line in drawn)
    assert drawn[-1] == ""
    assert drawn[-2].strip() == "", "the bar is wiped away at the end"


def test_progress_without_tqdm_shows_no_bar(
    talk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert cli.main(["replay", str(talk)]) == 0
    assert terminal.getvalue() == ""
    assert "talk" in capsys.readouterr().out


@pytest.mark.parametrize("line", [EXAMPLE_LINE, b"{"], ids=["table", "error"])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_of_file_names_are_escaped(
    write_jsonl: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: object,
    is_terminal: bool,
) -> None:
    path = write_jsonl(line, name="\x1b[2J\n\x9b\u202e\udcff.jsonl")
    terminal = _Terminal()
    if is_terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
    cli.main(["replay", str(path)])
    shown = "".join([*capsys.readouterr(), terminal.getvalue()])
    assert "\\x9b\\u202e\\udcff" in shown
    assert shown.replace("\r", "").replace("\n", "").isprintable()


def test_control_characters_of_arguments_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's `*` can turn a file name that begins with dashes into an option."""
    assert cli.main(["replay", "--\x1b[2J.jsonl"]) == 2
    assert "unrecognized arguments: --\\x1b[2J.jsonl" in capsys.readouterr().err
    hostile = "\x1b[2J"
    tokenizer = ReplayTokenizer(hostile, "source", None, lambda text: list(text.encode()))
    conversation = Conversation("a", (Turn("p", "completion"),))
    inputs = [ReplayInput(hostile, (conversation,), notes=("note\n",))]
    table = format_table(replay(inputs=inputs, tokenizer=tokenizer))
    assert table.count("\\x1b[2J") == 3, "the caption, the row, its note"
    assert table.replace("\n", "").isprintable()
