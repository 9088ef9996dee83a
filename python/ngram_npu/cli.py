"""The command `ngram-npu`.

NumPy and torch are imported only when a subcommand needs them, not for `--help` or `--version`.
Only the commands print; the rest of the package does not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ngram_npu.cli_generate import add_generate
from ngram_npu.cli_options import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    PATH_HELP,
    PROGRAM,
    add_drafts,
    add_lookup,
    add_reading,
    count,
    print_notes,
)
from ngram_npu.cli_tune import add_measure_cost, add_tune

if TYPE_CHECKING:
    from ngram_npu.replay import ReplayReport

__all__ = ["main"]

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Returns:
        0; 1 if a part of the package cannot be loaded or the result cannot be printed; 2 for input
        or options that cannot be used (one line on stderr says why); 130 when interrupted.
    """
    if sys.stderr is None:  # closed; print() would write to stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        if sys.stdout is None:
            raise OSError("standard output is closed")
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        _discard_stdout()
        return EXIT_FAILED
    except (ImportError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        if isinstance(error, OSError) and sys.stdout is not None:
            _discard_stdout()
        return EXIT_FAILED


def _run(arguments: Sequence[str]) -> int:
    try:
        parsed = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has printed the message
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    run: Callable[[argparse.Namespace, Sequence[str]], int] = parsed.run
    return run(parsed, arguments)


def _discard_stdout() -> None:
    """Python writes what is left at exit, and would report the error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """The message may contain a file name with control characters: shells expand globs."""
        from ngram_npu.replay.errors import printable

        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="N-gram speculative-decoding drafting.", allow_abbrev=False
    )
    parser.add_argument(
        "--version", action="version", version=f"{PROGRAM} {_version()}", help="print the version"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_replay(commands)
    add_generate(commands)
    add_tune(commands)
    add_measure_cost(commands)
    _add_doctor(commands)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("ngram_npu")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _add_replay(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="measure drafting on recorded conversations",
        description="Replay recorded conversations: the recorded completion takes the place of the "
        "target model's output. Prints one line of drafting results per input.",
        epilog="Without a PATH the sources of the Python standard library are replayed.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_replay)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        type=Path,
        help=PATH_HELP,
    )
    lookup = add_lookup(parser, "the index, unless max_n - min_n exceeds 7")
    add_drafts(lookup, "trimmed", "trimmed")
    lookup.add_argument(
        "--generated-only",
        action="store_true",
        help="with --store: replay each turn as a request, so that only completions are stored",
    )
    lookup.add_argument(
        "--threads", type=count, metavar="N", help="maximum CPU threads (default: no limit)"
    )
    data = parser.add_argument_group("input")
    data.add_argument(
        "--batch-size",
        type=count,
        metavar="B",
        help="conversations replayed together (default: 32; 1 with --store)",
    )
    add_reading(data)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON; - for stdout (the table then goes to stderr)",
    )
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the result (needs matplotlib)"
    )


def _add_doctor(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="report what is installed and what can be used",
        description="Version, backends built and loadable, instruction set chosen, and why a "
        "backend is absent.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_doctor)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_doctor(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    import ngram_npu

    report = ngram_npu.doctor()
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return EXIT_OK


def _run_replay(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    import dataclasses

    from ngram_npu.replay import ReplayError, ReplayOptions, format_table, replay
    from ngram_npu.replay.bar import Bar
    from ngram_npu.replay.output import check_writable
    from ngram_npu.replay.plot import check_plot

    bar = Bar(sys.stderr)
    try:
        json_path = None if arguments.json in (None, "-") else Path(arguments.json)
        if json_path is not None:
            check_writable(json_path)
        if arguments.plot is not None:
            check_plot(arguments.plot)
            check_writable(arguments.plot)
        # Options and fields have the same names, so a new field needs no line here.
        options = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(ReplayOptions)}
        report = replay(
            arguments.paths,
            ReplayOptions(**options),
            progress=bar.show,
            command=shlex.join([PROGRAM, *argv]),
        )
        bar.clear()
        _write_files(report, json_path, arguments.plot)
    except ReplayError as error:
        bar.clear()
        print(f"{PROGRAM} replay: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        bar.clear()
        raise
    print_notes("replay", (f"{of.name}: {note}" for of in report.inputs for note in of.notes))
    if arguments.json == "-":
        print(format_table(report), file=sys.stderr)
        sys.stdout.write(report.to_json())
    else:
        print(format_table(report))
    return EXIT_OK


def _write_files(report: ReplayReport, json_path: Path | None, plot_path: Path | None) -> None:
    """Write all files or none: every file is complete before the first one is moved into place."""
    from ngram_npu.replay.output import atomic_output
    from ngram_npu.replay.plot import save_plot

    with ExitStack() as stack:
        if json_path is not None:
            scratch = stack.enter_context(atomic_output(json_path))
            scratch.write_text(report.to_json(), encoding="utf-8")
        if plot_path is not None:
            scratch = stack.enter_context(atomic_output(plot_path))
            save_plot(report, scratch, plot_path.suffix.lstrip(".").lower())
