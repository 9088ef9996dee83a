"""Parses the arguments of `ngram-npu`, runs a subcommand, and prints its result.

A subcommand imports the modules that it needs, so `--help` loads neither torch nor NumPy. Only this
module prints.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ngram_npu_cli.logs.reader import LogReader
    from ngram_npu_cli.tokenization import Tokenization

__all__ = ["main"]

PROGRAM = "ngram-npu"
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
IMPORT_S = 120
"""Time limit for the import of torch from a slow disk."""
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
COMPLETE_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of the process, and returns its exit code.

    Returns:
        0; 1 if a part of the package cannot be loaded, the result cannot be printed, or the doctor
        found a problem; 2 for input or options that cannot be used (one line on stderr states the
        reason); 130 when interrupted.
    """
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except SystemExit as exit_request:  # argparse has printed the message
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_USAGE
    except KeyboardInterrupt:
        print_error("interrupted, nothing was measured")
        return EXIT_INTERRUPTED
    except (ImportError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe (`| head`)
            print_error(f"error: {error}")
        with suppress(OSError, AttributeError):  # Python would write the rest at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    if arguments.run is _run_doctor:
        # By default, torch imports torch_npu, which may end the process. The doctor tests this.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        if "ngram_npu" not in sys.modules and (reason := _explain_abort()):
            print_error(f"error: {reason}")
            return EXIT_FAILED
    from ngram_npu.errors import InputError

    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except InputError as error:
        print_error(f"error: {error}")
        return EXIT_USAGE


def print_error(text: str) -> None:
    """Prints to stderr. A full disk is ignored, because nothing else can report it."""
    with suppress(OSError, AttributeError):
        print(f"{PROGRAM}: {text}", file=sys.stderr)


# Arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exits with a message of one line. File names may contain control characters."""
        line = f"{self.prog}: error: {message} (see {self.prog} --help)"
        escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        self.exit(EXIT_USAGE, escaped + "\n")


class _PrintVersion(argparse.Action):
    """Looks the version up only if requested, because the package's metadata may be missing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata

        version = "(not installed)"
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("ngram_npu")
        print(f"{PROGRAM} {version}")
        parser.exit()


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 40:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


_COUNT = {"type": _count, "metavar": "N"}
_SWITCH = {"action": "store_true"}
_FILE = {"type": Path, "metavar": "FILE"}
_MODES = {"choices": ("padded", "trimmed"), "default": "padded"}

Option = tuple[str, dict[str, Any], str]
"""The flags of an option, the other arguments of `add_argument`, and its help text."""

_INPUT: tuple[Option, ...] = (
    ("paths", {"nargs": "*", "metavar": "PATH"}, "log (JSON, JSON Lines, CSV, Parquet), folder of "
     "logs, or - for stdin, which is the default if it is a pipe"),
    ("--demo", _SWITCH, "read sources of Python's standard library"),
    ("--map", {"metavar": "FIELD=EXPRESSION,..."}, "where prompt and answer are, as JMESPath, such "
     "as 'prompt=input.question, answer=output.text' (docs/guides/logs.md)"),
    ("--strict", _SWITCH, "stop at a record that cannot be read (default: skip and count it)"),
    ("--tokenizer", {"metavar": "NAME|FOLDER"}, "your model's tokenizer: a Hugging Face folder, or "
     "ORG/NAME from the hub's local cache; or mistral-v1 (default), bytes"),
    ("--chat-template", {"choices": ("auto", "default"), "default": "auto"}, "auto: that of the "
     "tokenizer; default: USER: ... ASSISTANT: ..."),
    ("--json", {"metavar": "FILE"}, "write the result as JSON; - for stdout"),
)  # fmt: skip
_STORE_TOKENS: Option = (
    "--store-tokens", _COUNT | {"default": 1 << 20}, "capacity of the store (default: 1048576)",
)  # fmt: skip
_DRAFTS: Option = (
    "--drafts", _MODES, "padded: K tokens are verified in every step (vLLM's V2 runner, ngram_gpu)"
    "; trimmed: only those that were drafted (V1's ngram, the custom class, transformers)",
)  # fmt: skip
_REPLAY: tuple[Option, ...] = (
    *_INPUT,
    ("--lookup", {"default": "auto", "metavar": "auto|ngram|MIN-MAX"}, "n-grams of 1 to 16 tokens "
     "(auto), vLLM's of 2 to 5 (ngram), or of MIN to MAX tokens"),
    ("--k", _COUNT | {"default": 5}, "draft tokens per step (default: 5)"),
    ("--store", _SWITCH, "draft also from the text of other conversations"),
    _STORE_TOKENS,
    _DRAFTS,
    ("--compare", {"metavar": "SETTING"}, "replay a second setting, in words of 'lookup=L k=K "
     "store padded trimmed', such as 'lookup=ngram k=3'; what is not named is that of the first, "
     "so --store applies to both"),
)  # fmt: skip
_TUNE: tuple[Option, ...] = (
    *_INPUT,
    ("--cost", {"metavar": "C|FILE"}, "time to verify one more token of a request as a share of a "
     "step, such as 0.05; or step times of your server (docs/guides/logs.md; default: an example)"),
    ("--store", _SWITCH, "a setting with a store may be recommended"),
    _STORE_TOKENS,
    _DRAFTS,
    ("--plot", _FILE, "draw the speed-ups, as .png, .svg or .pdf (needs the extra plot)"),
)  # fmt: skip
_LEARN: tuple[Option, ...] = (
    *_INPUT,
    ("-o --output", _FILE | {"required": True}, "the file of the store"),
    ("--salt-field", {"metavar": "KEY"}, "key of each record (JMESPath) with the request's "
     "cache_salt: only requests with this salt draft from its text; a record without it is skipped "
     "(default: requests without a salt)"),
    _STORE_TOKENS,
)  # fmt: skip
_DOCTOR: tuple[Option, ...] = (
    ("--json", _SWITCH, "print JSON"),
    ("--pid", _COUNT, "check the settings of this process, such as a vLLM server, instead of those "
     "of this shell"),
    ("--self-test", _SWITCH, "run every operator with each instruction set of the CPU and on each "
     "device with kernels, and compare the results with the scalar CPU kernels'"),
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = _Parser(
        prog=PROGRAM, description="N-gram speculative-decoding drafting.", allow_abbrev=False
    )
    parser.add_argument("--version", nargs=0, action=_PrintVersion, help="print the version")
    with suppress(ImportError):
        import shtab

        shtab.add_argument_to(parser, help="print a completion for a shell")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, options, about, more in COMMANDS:
        description = f"{about[0].upper()}{about[1:]}. {more}"
        command = commands.add_parser(name, help=about, description=description, allow_abbrev=False)
        command.set_defaults(run=run)
        for flags, arguments, text in options:
            added: Any = command.add_argument(*flags.split(), help=text, **arguments)
            if added.metavar in ("FILE", "PATH"):
                added.complete = COMPLETE_FILES
    return parser


# Commands


def _make_reader(arguments: argparse.Namespace) -> LogReader:
    from ngram_npu.errors import InputError

    from ngram_npu_cli.logs.reader import LogReader

    paths: list[str] = arguments.paths
    if arguments.demo and paths:
        raise InputError(f"--demo: expected no PATH with it, got {paths[0]}")
    if not paths and not arguments.demo:
        with suppress(OSError, ValueError, AttributeError):  # stdin is closed, or not a file
            mode = os.fstat(sys.stdin.fileno()).st_mode
            paths = ["-"] if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else []
        if not paths:
            raise InputError("PATH: expected a log, a folder of logs, or a pipe; or try --demo")
    salt_field = getattr(arguments, "salt_field", None)
    return LogReader(paths, arguments.map, arguments.strict, salt_field)


def _make_tokenization(arguments: argparse.Namespace) -> Tokenization:
    from ngram_npu_cli.tokenization import Tokenization

    return Tokenization(arguments.tokenizer, arguments.chat_template)


def _print_report(arguments: argparse.Namespace, report: Any, text: str) -> int:
    from ngram_npu.errors import escape_unprintable
    from ngram_npu.output import atomic_output

    lines = "\n".join(map(escape_unprintable, text.split("\n")))
    content = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
    print(lines, file=sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json == "-":
        print(content)
    elif arguments.json is not None:
        with atomic_output(Path(arguments.json)) as path:
            path.write_text(content + "\n", encoding="utf-8")
    for note in report.notes:
        print_error(escape_unprintable(f"note: {note}"))
    return EXIT_OK if report.is_complete else EXIT_INTERRUPTED


def _run_replay(arguments: argparse.Namespace) -> int:
    from ngram_npu_cli.replay import Setting, format_replay, parse_setting, replay

    settings = [Setting(arguments.lookup, arguments.k, arguments.store, arguments.drafts)]
    if arguments.compare is not None:
        settings[0].make_config()  # raises an error that names --lookup or --k
        settings.append(parse_setting(arguments.compare, settings[0]))
    reader, tokenization = _make_reader(arguments), _make_tokenization(arguments)
    report = replay(reader, tokenization, settings, arguments.store_tokens)
    return _print_report(arguments, report, format_replay(report))


def _run_tune(arguments: argparse.Namespace) -> int:
    from ngram_npu.errors import InputError, import_optional
    from ngram_npu.output import atomic_output, check_writable

    from ngram_npu_cli.tune import format_tune, load_cost, plot_tune, tune

    if arguments.plot is not None:
        if arguments.plot.suffix.lower() not in PLOT_SUFFIXES:
            raise InputError(
                f'--plot: expected a name that ends with .png, .svg or .pdf, got "{arguments.plot}"'
            )
        import_optional("matplotlib", "--plot", "plot")
        check_writable(arguments.plot)
    report = tune(
        _make_reader(arguments),
        _make_tokenization(arguments),
        load_cost(arguments.cost),
        drafts=arguments.drafts,
        allow_store=arguments.store,
        store_tokens=arguments.store_tokens,
    )
    if arguments.plot is not None:
        with atomic_output(arguments.plot) as path:
            plot_tune(report, path, arguments.plot.suffix[1:])
    return _print_report(arguments, report, format_tune(report))


def _run_learn(arguments: argparse.Namespace) -> int:
    from ngram_npu.output import check_writable

    from ngram_npu_cli.learn import format_learn, learn

    check_writable(arguments.output)
    reader, tokenization = _make_reader(arguments), _make_tokenization(arguments)
    report = learn(reader, tokenization, arguments.output, arguments.store_tokens)
    return _print_report(arguments, report, format_learn(report))


def _run_doctor(arguments: argparse.Namespace) -> int:
    import ngram_npu
    from ngram_npu.errors import InputError

    try:
        report = ngram_npu.doctor(self_test=arguments.self_test, pid=arguments.pid)
    except ValueError as error:
        raise InputError(str(error)) from error
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return EXIT_FAILED if report.problems else EXIT_OK


def _explain_abort() -> str:
    """Imports the package in a child process. Returns why the import ends the process, as a broken
    torch or CUDA library may do, or that it takes too long; empty if it does neither."""
    command = [sys.executable, "-c", "import ngram_npu"]
    try:
        child = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"import ngram_npu (and torch) takes more than {IMPORT_S} s"
    if child.returncode >= 0:
        return ""
    name = signal.Signals(-child.returncode).name
    end = f"import ngram_npu (and torch) ends the process with {name}"
    return ": ".join([end, *child.stderr.splitlines()[-1:]])


COMMANDS: tuple[tuple[str, Callable[[argparse.Namespace], int], tuple[Option, ...], str, str], ...]
COMMANDS = (
    ("replay", _run_replay, _REPLAY, "measure drafts on recorded conversations",
     "The recorded answers take the place of the model's output, so no model is needed."),
    ("tune", _run_tune, _TUNE, "find the best setting, and whether drafting saves time at all",
     "Replays eleven settings, and weighs the tokens that they yield against the time of "
     "verifying their drafts."),
    ("learn", _run_learn, _LEARN, "fill a store with the answers of logs",
     "Name the newest logs last: a full store overwrites its oldest text. The file contains text "
     "of users as token ids: protect it as you protect the logs."),
    ("doctor", _run_doctor, _DOCTOR, "report what is installed and what can be used",
     "Exit code 1 if something that the environment asks for cannot work, or if a result of the "
     "self-test is wrong."),
)  # fmt: skip
