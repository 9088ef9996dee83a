"""The command `ngram-npu`, a package beside `ngram_npu`, whose import loads torch.

So `--help` and `--version` import neither torch nor NumPy; a subcommand imports what it needs.
Only the commands print; `ngram_npu` does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from ngram_npu_cli.command.learn import add_learn, add_store
from ngram_npu_cli.command.options import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    PROGRAM,
    add_command,
    add_drafts,
    add_lookup,
    add_output,
    add_paths,
    add_reading,
    complain,
    count,
    fields_of,
    paths_of,
    reported,
)
from ngram_npu_cli.command.tune import add_measure_cost, add_tune

__all__ = ["main"]

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Returns:
        0; 1 if a part of the package cannot be loaded, the result cannot be printed, or the doctor
        found a problem; 2 for input or options that cannot be used (one line on stderr says why);
        130 when interrupted.
    """
    if sys.stderr is None:  # closed; print() would write to stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # full: the exit code remains
            _discard(sys.stderr)


def _main(arguments: Sequence[str]) -> int:
    try:
        if sys.stdout is None:
            raise OSError("standard output is closed")
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        complain(f"{PROGRAM}: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        _discard(sys.stdout)
        return EXIT_FAILED
    except (ImportError, OSError) as error:
        complain(f"{PROGRAM}: error: {error}")
        if isinstance(error, OSError) and sys.stdout is not None:
            _discard(sys.stdout)
        return EXIT_FAILED


def _run(arguments: Sequence[str]) -> int:
    try:
        parsed, unknown = _parser().parse_known_args(arguments)
        if unknown:
            parsed.parser.refuse(unknown)
    except SystemExit as stop:  # the message is printed
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    from ngram_npu.errors import InputError

    run: Callable[[argparse.Namespace, Sequence[str]], int] = parsed.run
    try:
        return run(parsed, arguments)
    except InputError as error:
        complain(f"{parsed.parser.prog}: error: {error}")
        return EXIT_USAGE


def _discard(stream: TextIO) -> None:
    """Python writes what is left at exit, and would report the error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line. It may contain a file name with control characters: shells expand globs."""
        from ngram_npu.errors import printable

        self.exit(
            EXIT_USAGE, printable(f"{self.prog}: error: {message} (see {self.prog} --help)") + "\n"
        )

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """An error for arguments that no option takes, with the nearest option."""
        import difflib

        options = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


class _Version(argparse.Action):
    """The version, looked up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"{PROGRAM} {_version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="N-gram speculative-decoding drafting.", allow_abbrev=False
    )
    parser.add_argument("--version", nargs=0, action=_Version, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_replay(commands)
    add_tune(commands)
    add_measure_cost(commands)
    add_learn(commands)
    add_store(commands)
    _add_doctor(commands)
    return parser


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("ngram_npu")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _add_replay(commands: Any) -> None:
    parser = add_command(
        commands,
        "replay",
        _run_replay,
        help="measure drafting on recorded conversations",
        description="Replay recorded conversations: the recorded completion takes the place of the "
        "target model's output. Prints one line of drafting results per input.",
    )
    add_paths(parser)
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
    add_output(parser)


def _add_doctor(commands: Any) -> None:
    parser = add_command(
        commands,
        "doctor",
        _run_doctor,
        help="report what is installed and what can be used",
        description="Versions, backends built and loadable, instruction set chosen, whether vLLM "
        "uses the plugin, and why something is absent. Exit code 1 if something that the "
        "environment asks for cannot work.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_doctor(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    import ngram_npu

    report = ngram_npu.doctor()
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return EXIT_FAILED if report.problems else EXIT_OK


def _run_replay(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from ngram_npu_cli.replay import ReplayOptions, format_table, replay

    return reported(
        arguments,
        lambda bar: replay(
            paths_of(arguments),
            ReplayOptions(**fields_of(ReplayOptions, arguments)),
            progress=bar.show,
            command=shlex.join([PROGRAM, *argv]),
        ),
        format_table,
        notes=lambda report: (f"{of.name}: {note}" for of in report.inputs for note in of.notes),
    )
