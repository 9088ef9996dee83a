"""Parses the arguments of `ngram-npu`, runs a subcommand, and prints its result.

A subcommand imports the modules that it needs, so `--help` loads neither torch nor NumPy. Only this
module prints.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ngram_npu_cli.logs.reader import LogReader
    from ngram_npu_cli.replay import Setting
    from ngram_npu_cli.tokenization import Tokenization

__all__ = ["main"]

PROGRAM = "ngram-npu"
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
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
        print_error(f"{PROGRAM}: interrupted, nothing was measured")
        return EXIT_INTERRUPTED
    except (ImportError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe (`| head`)
            print_error(f"{PROGRAM}: error: {error}")
        with suppress(OSError, AttributeError):  # Python would write the rest at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    from ngram_npu.errors import InputError

    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except InputError as error:
        print_error(f"{PROGRAM}: error: {error}")
        return EXIT_USAGE


def print_error(text: str) -> None:
    """Prints to stderr. A full disk is ignored, because nothing else can report it."""
    with suppress(OSError, AttributeError):
        print(text, file=sys.stderr)


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


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, *__: object) -> None:
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs shtab: pip install shtab")
        print(shtab.complete(parser, shell))
        parser.exit()


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 40:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = _Parser(
        prog=PROGRAM, description="N-gram speculative-decoding drafting.", allow_abbrev=False
    )
    parser.add_argument("--version", nargs=0, action=_PrintVersion, help="print the version")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes arguments in a shell, and exit",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str, more: str = "") -> Any:
        description = f"{about[0].upper()}{about[1:]}. {more}"
        added = commands.add_parser(name, help=about, description=description, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    replay = add(
        "replay",
        _run_replay,
        "measure drafts on recorded conversations",
        "The recorded answers take the place of the model's output. No model is needed.",
    )
    _add_input(replay)
    _add_setting(replay)
    replay.add_argument(
        "--compare",
        metavar="SETTING",
        help="replay a second setting, such as 'lookup=ngram k=3 store'; what is not named is that "
        "of the first",
    )
    tune = add(
        "tune",
        _run_tune,
        "find the best setting for recorded traffic, and whether drafting saves time at all",
        "Replays about ten settings, and weighs the tokens that they yield against the time of "
        "verifying their drafts.",
    )
    _add_input(tune)
    tune.add_argument(
        "--cost",
        metavar="C|FILE",
        help="time to verify one more token of a request as a share of a step, such as 0.05; or "
        "step times of your server (docs/guides/tune.md; default: a computed example)",
    )
    tune.add_argument(
        "--store", action="store_true", help="a setting with a store may be recommended"
    )
    _add_drafts(tune)
    _add_store_tokens(tune)
    _add_file(tune, "--plot", help="draw the speed-ups (needs the extra plot)")
    learn = add(
        "learn",
        _run_learn,
        "fill a store with the answers of logs",
        "Name the newest logs last: a full store overwrites its oldest text. Among the paths may be "
        "files of stores, whose text counts as older. The file contains text of users as token "
        "ids: protect it as you protect the logs.",
    )
    _add_input(learn)
    _add_file(learn, "-o", "--output", required=True, help="the file of the store")
    learn.add_argument(
        "--salt-field",
        metavar="KEY",
        help="key of each record (JMESPath) with the request's cache_salt: only requests with this "
        "salt draft from its text; a record without it is skipped (default: requests without salt)",
    )
    _add_store_tokens(learn)
    info = add("store-info", _run_store_info, "describe the file of a store")
    info.add_argument("file", type=Path, help="the file").complete = COMPLETE_FILES
    info.add_argument("--json", action="store_true", help="print JSON")
    doctor = add(
        "doctor",
        _run_doctor,
        "report what is installed and what can be used",
        "Exit code 1 if something that the environment asks for cannot work.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_file(parser: argparse.ArgumentParser, *flags: str, **options: Any) -> None:
    parser.add_argument(*flags, type=Path, metavar="FILE", **options).complete = COMPLETE_FILES  # type: ignore[attr-defined]


def _add_input(parser: argparse.ArgumentParser) -> None:
    paths = parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a log (JSON, JSON Lines, CSV, Parquet, Arrow), a folder of logs, or - for stdin, which "
        "is the default if it is a pipe",
    )
    paths.complete = COMPLETE_FILES  # type: ignore[attr-defined]
    group = parser.add_argument_group("input (docs/guides/logs.md)")
    group.add_argument(
        "--demo", action="store_true", help="read sources of Python's standard library"
    )
    group.add_argument("--limit", type=_count, metavar="N", help="only N conversations per file")
    group.add_argument(
        "--map",
        metavar="FIELD=EXPRESSION,...",
        help="where prompt and answer are, as JMESPath: 'prompt=input.question, answer=output.text'",
    )
    group.add_argument(
        "--strict", action="store_true", help="stop at a record that cannot be read (default: skip)"
    )
    group.add_argument(
        "--tokenizer",
        metavar="NAME|FOLDER",
        help="your model's tokenizer: a Hugging Face folder, or ORG/NAME from the hub's local cache; "
        "or mistral-v1 (default), mistral-v3, bytes",
    )
    group.add_argument(
        "--chat-template",
        choices=("auto", "default", "none"),
        default="auto",
        help="auto: that of the tokenizer's folder; default: USER: ... ASSISTANT: ...; none: texts "
        "as they are",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for stdout"
    ).complete = COMPLETE_FILES  # type: ignore[attr-defined]


def _add_setting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("setting")
    group.add_argument(
        "--lookup",
        default="auto",
        metavar="auto|ngram|MIN-MAX",
        help="n-grams of 1 to 16 tokens (auto), vLLM's of 2 to 5 (ngram), or of MIN to MAX tokens",
    )
    group.add_argument("--k", type=_count, default=5, help="draft tokens per step (default: 5)")
    group.add_argument(
        "--store", action="store_true", help="draft also from the text of other conversations"
    )
    _add_drafts(group)
    group.add_argument(
        "--min-draft-probability",
        type=float,
        metavar="P",
        help="trimmed: end a draft where the probability that all of it is accepted falls below P "
        "(default with --lookup auto: 0.177)",
    )
    _add_store_tokens(group)


def _add_drafts(parser: Any) -> None:
    parser.add_argument(
        "--drafts",
        choices=("padded", "trimmed"),
        default="padded",
        help="padded: K tokens are verified in every step (vLLM's V2 runner, ngram_gpu); trimmed: "
        "only those that were drafted (V1's ngram, the custom class, transformers)",
    )


def _add_store_tokens(parser: Any) -> None:
    parser.add_argument(
        "--store-tokens",
        type=_count,
        default=1 << 20,
        metavar="N",
        help="capacity of the store in tokens (default: 1048576)",
    )


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
            raise InputError(
                "PATH: expected a log, a folder of logs, or a pipe on stdin; try --demo"
            )
    salt_field = getattr(arguments, "salt_field", None)
    return LogReader(paths, arguments.map, arguments.limit, arguments.strict, salt_field)


def _make_tokenization(arguments: argparse.Namespace) -> Tokenization:
    from ngram_npu_cli.tokenization import Tokenization

    return Tokenization(arguments.tokenizer, arguments.chat_template)


def _print_report(arguments: argparse.Namespace, report: Any, text: str) -> int:
    from ngram_npu.errors import escape_unprintable
    from ngram_npu.output import atomic_output

    lines = "\n".join(map(escape_unprintable, text.split("\n")))
    content = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
    if arguments.json == "-":
        print_error(lines)
        print(content)
    else:
        print(lines)
    if arguments.json not in (None, "-"):
        with atomic_output(Path(arguments.json)) as path:
            path.write_text(content + "\n", encoding="utf-8")
    for note in report.notes:
        print_error(escape_unprintable(f"{PROGRAM}: note: {note}"))
    return EXIT_OK


def _run_replay(arguments: argparse.Namespace) -> int:
    from ngram_npu_cli.replay import Setting, format_replay, parse_setting, replay

    first = Setting(
        arguments.lookup,
        arguments.k,
        arguments.store,
        arguments.drafts,
        arguments.min_draft_probability,
    )
    settings: list[Setting] = [first]
    if arguments.compare is not None:
        settings.append(parse_setting(arguments.compare, first))
    report = replay(
        _make_reader(arguments), _make_tokenization(arguments), settings, arguments.store_tokens
    )
    _print_report(arguments, report, format_replay(report))
    return EXIT_OK if report.is_complete else EXIT_INTERRUPTED


def _run_tune(arguments: argparse.Namespace) -> int:
    from ngram_npu.errors import import_optional
    from ngram_npu.output import atomic_output, check_writable

    from ngram_npu_cli.tune import format_tune, load_cost, plot_tune, tune

    if arguments.plot is not None:
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
    _print_report(arguments, report, format_tune(report))
    return EXIT_OK if report.is_complete else EXIT_INTERRUPTED


def _run_learn(arguments: argparse.Namespace) -> int:
    from ngram_npu.output import check_writable

    from ngram_npu_cli.learn import find_stores, format_learn, learn

    check_writable(arguments.output)
    stores = find_stores(arguments.paths)
    has_only_stores = bool(stores) and len(stores) == len(arguments.paths)
    arguments.paths = [path for path in arguments.paths if Path(path) not in stores]
    reader = None if has_only_stores else _make_reader(arguments)
    tokenization = _make_tokenization(arguments)
    report = learn(reader, stores, tokenization, arguments.output, arguments.store_tokens)
    return _print_report(arguments, report, format_learn(report))


def _run_store_info(arguments: argparse.Namespace) -> int:
    from ngram_npu_cli.learn import describe_store, format_store

    info = describe_store(arguments.file)
    print(json.dumps(info, indent=2) if arguments.json else format_store(info))
    return EXIT_OK


def _run_doctor(arguments: argparse.Namespace) -> int:
    import ngram_npu

    report = ngram_npu.doctor()
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return EXIT_FAILED if report.problems else EXIT_OK
