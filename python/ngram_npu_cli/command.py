"""Parses the arguments of `ngram-npu`, runs a subcommand, and prints and writes its report.

A subcommand imports the modules that it needs, so `--help` and `--version` load neither torch nor
NumPy. Only this module prints.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

from ngram_npu_cli import options
from ngram_npu_cli.options import add_options, make_options

if TYPE_CHECKING:
    from ngram_npu.step_time import VerificationCost

    from ngram_npu_cli.logs.reader import Progress

__all__ = ["main"]

PROGRAM = "ngram-npu"
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of the process, and returns its exit code.

    Returns:
        0; 1 if a part of the package cannot be loaded, the result cannot be printed, or the doctor
        found a problem; 2 for input or options that cannot be used (one line on stderr states the
        reason); 130 when interrupted.
    """
    if sys.stderr is None:  # closed; print() would write to stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        return _run_safely(list(sys.argv[1:] if argv is None else argv))
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # The disk is full. The exit code still reports the failure.
            _redirect_to_null(sys.stderr)


def _run_safely(arguments: Sequence[str]) -> int:
    try:
        if sys.stdout is None:
            raise OSError("standard output is closed")
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print_error(f"{PROGRAM}: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        _redirect_to_null(sys.stdout)
        return EXIT_FAILED
    except (ImportError, OSError) as error:
        print_error(f"{PROGRAM}: error: {error}")
        if isinstance(error, OSError) and sys.stdout is not None:
            _redirect_to_null(sys.stdout)
        return EXIT_FAILED


def _run(arguments: Sequence[str]) -> int:
    try:
        parsed, unknown = _make_parser().parse_known_args(arguments)
        if unknown:
            parsed.parser.error(_describe_unknown(parsed.parser, unknown))
    except SystemExit as exit_request:  # argparse has printed the message
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_USAGE
    from ngram_npu.errors import InputError

    run: Callable[[argparse.Namespace], int] = parsed.run
    parsed.command_line = shlex.join([PROGRAM, *arguments])
    try:
        return run(parsed)
    except InputError as error:
        print_error(f"{parsed.parser.prog}: error: {error}")
        return EXIT_USAGE


def print_error(text: str) -> None:
    """Prints to stderr. A full disk is ignored, because nothing else can report it."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def _redirect_to_null(stream: TextIO) -> None:
    """Discards a stream's output, which Python would otherwise write, and fail again, at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# Parsing


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exits with a message of one line, in which control characters are escaped: shells expand
        globs to file names that may contain such characters."""
        from ngram_npu.errors import escape_unprintable

        line = f"{self.prog}: error: {message} (see {self.prog} --help)"
        self.exit(EXIT_USAGE, escape_unprintable(line) + "\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from ngram_npu.errors import suggest_similar

            error.message += suggest_similar(str(value), action.choices or ())
            raise


def _describe_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Returns an error message for unknown arguments, which suggests an option."""
    from ngram_npu.errors import suggest_similar

    words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    suggestion = suggest_similar(words[0], parser._option_string_actions) if words else ""
    return f"unrecognized arguments: {' '.join(unknown)}{suggestion}"


class _PrintVersion(argparse.Action):
    """Looks the version up only if requested, because the package's metadata may be missing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata

        try:
            version = importlib.metadata.version("ngram_npu")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
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


def _make_parser() -> argparse.ArgumentParser:
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
    commands: dict[str, Any] = {
        "": parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    }
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group not in commands:
            actions = commands[""].add_parser(group, help=command.help, allow_abbrev=False)
            commands[group] = actions.add_subparsers(
                title="actions", required=True, metavar="ACTION"
            )
        subparser = commands[group].add_parser(
            name,
            help=command.help,
            description=command.description,
            epilog=command.epilog,
            allow_abbrev=False,
        )
        subparser.set_defaults(run=command.run, parser=subparser)
        add_options(subparser, *command.option_classes)
    return parser


def _select_paths(arguments: argparse.Namespace) -> list[str]:
    """Returns the paths of the input; no path with `--demo`. If there is neither a path nor
    `--demo`, returns stdin if it is a pipe or a file.

    Raises:
        InputError: There is no input, or both a path and `--demo`.
    """
    from ngram_npu.errors import InputError

    paths: list[str] = arguments.paths
    if arguments.demo and paths:
        raise InputError(f"--demo: expected no PATH with it, got {paths[0]}")
    if paths or arguments.demo:
        return paths
    with suppress(OSError, ValueError, AttributeError):  # closed, or not a real file
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
            return ["-"]
    raise InputError(
        "PATH: expected a file or a folder of conversations, or a pipe on stdin; try --demo to see "
        "how the command works"
    )


# Reports


def _print_report(
    arguments: argparse.Namespace,
    make_report: Callable[..., Any],
    format_text: Callable[[Any], str],
    *files: tuple[Path | None, Callable[[Any, Path], object]],
    list_notes: Callable[[Any], Iterable[str]],
) -> int:
    """Makes a report, writes it to all files or to no file, and prints it. Notes go to stderr.

    `make_report` gets the paths of the input, and the keywords `progress` and `command`.
    `files` are files besides the JSON: pairs of a path, None if the file is not requested, and of a
    function that writes a report to a path.
    """
    from ngram_npu.errors import escape_unprintable
    from ngram_npu.output import atomic_output, check_writable

    if arguments.json not in (None, "-"):
        files = ((Path(arguments.json), _write_json), *files)
    requested = [(path, write) for path, write in files if path is not None]
    for path, _ in requested:
        check_writable(path)
    report = make_report(
        _select_paths(arguments), progress=_make_progress(), command=arguments.command_line
    )
    # The stack moves the files into place together, after all of them are complete.
    with ExitStack() as stack:
        for path, write in requested:
            write(report, stack.enter_context(atomic_output(path)))
    for note in list_notes(report):
        print_error(escape_unprintable(f"{arguments.parser.prog}: note: {note}"))
    if arguments.json == "-":
        print_error(format_text(report))
        print(_format_json(report))
    else:
        print(format_text(report))
    return EXIT_OK


def _write_json(report: Any, path: Path) -> None:
    path.write_text(_format_json(report) + "\n", encoding="utf-8")


def _format_json(report: Any) -> str:
    return json.dumps(report.to_dict(), indent=2, ensure_ascii=False)


def _make_progress(interval_s: float = 10.0) -> Callable[[Progress], None]:
    """Returns a callback that prints a line to stderr at most every `interval_s` seconds."""
    last_line_time = time.monotonic()

    def show_progress(progress: Progress) -> None:
        from ngram_npu.errors import escape_unprintable

        nonlocal last_line_time
        if time.monotonic() - last_line_time >= interval_s:
            last_line_time = time.monotonic()
            done = f"{progress.done} of {progress.total}" if progress.total else progress.done
            print_error(escape_unprintable(f"{progress.phase} {progress.name}: {done}"))

    return show_progress


# Subcommands


def _run_replay(arguments: argparse.Namespace) -> int:
    from ngram_npu_cli.replay import format_table, replay

    replay_options = make_options(options.ReplayOptions, arguments)
    replay_options = replace(replay_options, **(arguments.lookup or {}))
    return _print_report(
        arguments,
        partial(replay, options=replay_options),
        format_table,
        list_notes=lambda report: (
            f"{figures.name}: {note}" for figures in report.inputs for note in figures.notes
        ),
    )


def _run_tune(arguments: argparse.Namespace) -> int:
    from ngram_npu.errors import import_optional

    from ngram_npu_cli.report import count_usable_cores
    from ngram_npu_cli.tune import CANDIDATES, beside, format_report, tune
    from ngram_npu_cli.tune.candidates import list_candidates, parse_candidate
    from ngram_npu_cli.tune.html import save_html

    if arguments.html is not None:
        import_optional("matplotlib.figure", "--html", "html")
    cost = _parse_cost(arguments.cost)
    if arguments.batch_size:
        cost = cost.select_batch_sizes(arguments.batch_size)
    _check_beside(arguments)
    tune_options = make_options(options.TuneOptions, arguments)
    tune_options = replace(tune_options, jobs=tune_options.jobs or count_usable_cores())
    if arguments.beside is not None:
        return _print_report(
            arguments,
            partial(
                beside.estimate_beside,
                cost=cost,
                mean_accepted=arguments.beside,
                k=arguments.k or 4,
                options=tune_options,
            ),
            beside.format_report,
            list_notes=lambda report: report.traffic["notes"],
        )
    against = None if arguments.against is None else parse_candidate(arguments.against)
    return _print_report(
        arguments,
        partial(
            tune,
            cost=cost,
            options=tune_options,
            candidates=list_candidates(arguments.lookup) if arguments.lookup else CANDIDATES,
            against=against,
        ),
        format_report,
        (arguments.html, save_html),
        list_notes=lambda report: report.traffic["notes"],
    )


def _check_beside(arguments: argparse.Namespace) -> None:
    """Raises an InputError for an option that has no effect with, or without, `--beside`."""
    from ngram_npu.errors import InputError

    has_beside = arguments.beside is not None
    search_options = ("lookup", "runner", "synchronous", "store", "against", "html")
    for name in search_options if has_beside else ("k",):
        if value := getattr(arguments, name):
            preposition = "with" if has_beside else "without"
            raise InputError(f"--{name}: expected none {preposition} --beside, got {value}")


def _parse_cost(text: str) -> VerificationCost:
    """Returns the step times for a number, a file, or the name of an example."""
    from ngram_npu.errors import InputError
    from ngram_npu.step_time import load_cost, share_of_a_step

    with suppress(ValueError):
        share = float(text)
        if not 0 <= share < 10:
            raise InputError(f"--cost: must be at least 0 and below 10, got {text}")
        return share_of_a_step(share)
    return load_cost(text)


def _run_measure_cost(arguments: argparse.Namespace) -> int:
    from ngram_npu.output import check_writable

    from ngram_npu_cli.tune.measure_cost import measure_cost

    check_writable(arguments.output)
    cost_options = make_options(options.MeasureCostOptions, arguments)
    measure_cost(cost_options, command=arguments.command_line, report=print)
    return EXIT_OK


def _run_learn(arguments: argparse.Namespace) -> int:
    from ngram_npu_cli.learn import format_report, learn
    from ngram_npu_cli.learn.learn_report import check_plot, save_plot

    if arguments.plot is not None:
        check_plot(arguments.plot)
    learn_options = make_options(options.LearnOptions, arguments)
    return _print_report(
        arguments,
        partial(learn, output=arguments.output, options=learn_options),
        format_report,
        (arguments.plot, lambda report, path: save_plot(report, path, arguments.plot)),
        list_notes=lambda report: report.notes,
    )


def _run_store_info(arguments: argparse.Namespace) -> int:
    from ngram_npu_cli.learn import describe
    from ngram_npu_cli.learn.learn_report import format_store

    info = describe(arguments.file)
    print(json.dumps(info, indent=2) if arguments.json else format_store(info))
    return EXIT_OK


def _run_doctor(arguments: argparse.Namespace) -> int:
    import ngram_npu

    report = ngram_npu.doctor()
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return EXIT_FAILED if report.problems else EXIT_OK


class Command(NamedTuple):
    """A subcommand. `run` returns the exit code."""

    name: str  # if it has two words, the second is an action of the command group of the first
    run: Callable[[argparse.Namespace], int]
    option_classes: tuple[type, ...]  # the classes that define its options
    help: str
    description: str
    epilog: str | None = None


COMMANDS = (
    Command(
        "replay",
        _run_replay,
        (options.ReplayOptions, options.ReplayCommandOptions),
        "measure drafting on recorded conversations",
        "Replay recorded conversations: the recorded completion takes the place of the target "
        "model's output. Prints one line of drafting results per input.",
    ),
    Command(
        "tune",
        _run_tune,
        (options.TuneOptions, options.TuneCommandOptions),
        "find the best setting for recorded traffic, and whether drafting saves time at all",
        "Search settings over recorded traffic: replays each, weighs the tokens it yields against "
        "the cost of verifying its drafts, and recommends one per runner, as options of vLLM. "
        "Settings are chosen on one half of the conversations and evaluated on the other.",
        "Without --cost the report uses an example cost and states this.",
    ),
    Command(
        "measure-cost",
        _run_measure_cost,
        (options.MeasureCostOptions,),
        "measure the time of verifying drafts on your server, for `tune --cost`",
        "Time the steps of an OpenAI-compatible server by batch size. Run it once without "
        "speculation and once for each number of draft tokens, with the same FILE; "
        "docs/guides/tune.md shows how.",
    ),
    Command(
        "learn",
        _run_learn,
        (options.LearnOptions, options.LearnCommandOptions),
        "fill a store from logs, and measure its gain",
        "Fill a store from logs, and from files of other stores, so that a server drafts from the "
        "first request on. Prints tokens per step and speed-up on the last tenth of the logs, with "
        "none, some or all of the earlier answers in the store. Name the newest logs last. Text of "
        "stores counts as older than all logs.",
        "The file holds text of users as token ids: protect it as you protect the logs.",
    ),
    Command(
        "store info",
        _run_store_info,
        (options.StoreInfoOptions,),
        "describe the file of a store",
        "Print what the file of a store contains, and for which tokenizer.",
    ),
    Command(
        "doctor",
        _run_doctor,
        (options.PrintOptions,),
        "report what is installed and what can be used",
        "Versions, backends built and loadable, instruction set chosen, whether vLLM uses the "
        "plugin, and why something is absent. Exit code 1 if something that the environment asks "
        "for cannot work.",
    ),
)
