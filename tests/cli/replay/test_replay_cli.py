"""The command: exit codes, streams, output files that are complete or absent."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ngram_npu
import numpy as np
import pytest
from ngram_npu.output import atomic_output, check_writable
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import (
    Conversation,
    InputError,
    ReplayInput,
    ReplayReport,
    ReplayTokenizer,
    Turn,
    format_table,
    replay,
)
from replay_helpers import EXAMPLE_LINE

Write = Callable[..., Path]


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def test_replay_prints_the_table(talk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(talk)]) == 0
    out, err = capsys.readouterr()
    assert "tokens/step" in out
    assert out.splitlines()[3].split()[:4] == ["talk", "1", "12", "2.40"]
    assert err == "", "no progress bar where no terminal is"


def test_replay_writes_json(talk: Path, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    arguments = ["replay", str(talk.parent), "--json", str(target), "--batch-size", "4"]
    assert cli.main(arguments) == 0
    report = ReplayReport.from_dict(json.loads(target.read_text(encoding="utf-8")))
    assert report.total.num_steps == 5
    assert report.command == "ngram-npu " + " ".join(arguments)
    assert report.batch_size == 4
    assert files_in(tmp_path) == ["result.json"]


def test_json_on_stdout_is_nothing_but_json(talk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(talk), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["total"]["num_tokens"] == 12
    assert "tokens/step" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--min-n 1 --max-n 3 --k 7", {"min_n": 1, "max_n": 3, "k": 7}),
        (
            "--prompt-lookup-min 3 --prompt-lookup-max 4 --num-speculative-tokens 2",
            {"min_n": 3, "max_n": 4, "k": 2},
        ),
        ("--match-policy latest --overlap", {"match_policy": "latest", "overlap": True}),
        ("--no-overlap --max-len 100", {"overlap": False, "max_len": 100}),
        ("--sizes ladder", {"sizes": "ladder", "min_n": 1, "max_n": 16, "overlap": True}),
        (
            "--min-draft-probability 0.177 --k 4",
            {"sizes": "ladder", "min_draft_probability": 0.177, "k": 4},
        ),
    ],
)
def test_drafting_options(
    talk: Path, capsys: pytest.CaptureFixture[str], arguments: str, expected: dict[str, Any]
) -> None:
    assert cli.main(["replay", str(talk), "--json", "-", *arguments.split()]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert {name: config[name] for name in expected} == expected


def test_no_figure_depends_on_the_engine(
    write_jsonl: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several conversations in sequence per row, long enough to be worth an index."""
    rng = np.random.default_rng(2)
    phrase = rng.integers(0, 50, 300).tolist()
    lines = []
    for number in range(12):
        start = int(rng.integers(0, 200))
        prompt = rng.integers(0, 5, 40).tolist() + phrase[: start + 90]
        turn = {"prompt_token_ids": prompt, "completion_token_ids": phrase[start : start + 80]}
        lines.append({"id": str(number), "turns": [turn, turn]})
    path = write_jsonl(*lines)
    found = []
    for arguments in ([], ["--engine", "auto"], ["--engine", "index"], ["--engine", "scan"]):
        arguments += ["--batch-size", "3", "--json", "-"]
        assert cli.main(["replay", str(path), *arguments]) == 0
        (figures,) = json.loads(capsys.readouterr().out)["inputs"]
        found.append({k: v for k, v in figures.items() if "time" not in k and "us_per" not in k})
    assert found[0]["num_drafts"] > 100
    assert all(other == found[0] for other in found)


def test_an_index_that_cannot_be(talk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    span = ["--min-n", "1", "--max-n", "9"]
    assert cli.main(["replay", str(talk), *span]) == 0  # reads the contexts
    assert cli.main(["replay", str(talk), *span, "--engine", "index"]) == 2
    assert "expected max_n - min_n <= 7, and no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"{", "talk.jsonl:1: not JSON"), (b"", "talk.jsonl: empty"), (b"{}", ":1: no format has")],
)
def test_bad_input_is_one_line_and_exit_code_2(
    write_jsonl: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: bytes,
    message: str,
) -> None:
    target = tmp_path / "result.json"
    assert cli.main(["replay", str(write_jsonl(line)), "--json", str(target)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ngram-npu replay: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k/--num-speculative-tokens: must be at least 1, got 0"),
        (["--k", "many"], "invalid integer value: 'many'"),
        (["--k", "65"], "k: expected 1 to 64, got 65"),
        (["--min-n", "6"], "min_n: expected 1 to 5, got 6"),
        (["--match-policy", "middle"], "invalid choice"),
        (
            ["--min-draft-probability", "0"],
            "--min-draft-probability: must be above 0 and at most 1, got 0",
        ),
        (["--min-draft-probability", "nan"], "must be above 0 and at most 1, got nan"),
        (["--min-draft-probability", "often"], "invalid number value: 'often'"),
        (["--sizes", "ladder", "--max-n", "8"], "max_n: expected 16 with sizes='ladder', got 8"),
        (["--draft-costs", "{tmp}/own.json"], "costs: expected none without min_draft_probability"),
        (
            ["--draft-costs", "{tmp}/own.json", "--min-draft-probability", "1"],
            "own.json: no table of costs",
        ),
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
    path = write_jsonl({"id": "a", "turns": [{"prompt": "a", "completion": "b"}]})
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert cli.main(["replay", str(path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


# Interruption


def test_interrupted_replay_writes_nothing(
    talk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = iter(range(100))
    step = ngram_npu.NgramProposer.step

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(ngram_npu.NgramProposer, "step", interrupted)
    target = tmp_path / "result.json"
    target.write_text("old")
    assert cli.main(["replay", str(talk), "--json", str(target)]) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "ngram-npu: interrupted\n")
    assert target.read_text() == "old"
    assert files_in(tmp_path) == ["result.json"]


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


def test_atomic_output(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    target.chmod(0o640)
    with atomic_output(target) as scratch:
        scratch.write_text("new")
        assert scratch.parent == target.parent
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640
    with pytest.raises(KeyboardInterrupt):
        _write_half(target)
    assert target.read_text() == "new"
    assert files_in(tmp_path) == ["x"]


def _write_half(target: Path) -> None:
    with atomic_output(target) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt


def test_atomic_output_keeps_links_and_devices(tmp_path: Path) -> None:
    target, link = tmp_path / "x", tmp_path / "link"
    link.symlink_to(target)
    with atomic_output(link) as scratch:
        scratch.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    null = Path(os.devnull)
    check_writable(null)
    with atomic_output(null) as scratch:
        scratch.write_text("gone")
    assert null.is_char_device()


def test_a_failing_write_is_a_replay_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"), atomic_output(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nothing_can_be_planted_where_an_output_is_written(
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


def test_an_output_has_the_permissions_of_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_output(tmp_path / "x") as scratch:
            scratch.write_text("new")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


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


def test_no_bar_without_tqdm(
    talk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert cli.main(["replay", str(talk)]) == 0
    assert terminal.getvalue() == ""
    assert "talk" in capsys.readouterr().out
    assert cli.main(["tune", str(talk), "-c", "0.05", "--progress"]) == 2
    says = '--progress needs tqdm: pip install tqdm (the extra "replay")'
    assert says in terminal.getvalue()


@pytest.mark.parametrize("line", [EXAMPLE_LINE, b"{"], ids=["table", "error"])
def test_no_file_name_steers_the_terminal(
    write_jsonl: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: object,
) -> None:
    path = write_jsonl(line, name="\x1b[2J\n\x9b\u202e\udcff.jsonl")
    cli.main(["replay", str(path)])
    out, err = capsys.readouterr()
    assert "\\x9b\\u202e\\udcff" in out + err
    assert (out + err).replace("\n", "").isprintable()

    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    cli.main(["replay", str(path)])
    assert terminal.getvalue().replace("\r", "").replace("\n", "").isprintable()


def test_no_argument_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's `*` can turn a file name that begins with dashes into an option."""
    assert cli.main(["replay", "--\x1b[2J.jsonl"]) == 2
    err = capsys.readouterr().err
    assert "unrecognized arguments: --\\x1b[2J.jsonl" in err
    assert err.replace("\n", "").isprintable()


def test_no_text_of_an_input_steers_the_terminal() -> None:
    hostile = "\x1b[2J"
    tokenizer = ReplayTokenizer(hostile, "source", None, lambda text: list(text.encode()))
    conversation = Conversation("a", (Turn("p", "completion"),))
    inputs = [ReplayInput(hostile, (conversation,), notes=("note\n",))]
    table = format_table(replay(inputs=inputs, tokenizer=tokenizer))
    assert table.count("\\x1b[2J") == 3, "the caption, the row, its note"
    assert table.replace("\n", "").isprintable()


@pytest.mark.usefixtures("no_torch")
def test_a_closed_pipe_is_no_traceback(talk: Path) -> None:
    command = f'"{sys.executable}" -m ngram_npu_cli replay "{talk}" | true'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
