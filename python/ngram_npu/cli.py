"""The command `ngram-npu`.

Nothing heavy is imported before a subcommand runs: `--help` and `--version` need neither NumPy nor
torch. This is the only part of the package that prints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from ngram_npu.replay import Progress, ReplayReport

__all__ = ["main"]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

PROGRAM = "ngram-npu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Returns:
        0; 1 if a part of the package cannot be loaded; 2 for input or options that cannot be used
        (one line on stderr says why); 130 when interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parsed = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has said what there is to say
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    run: Callable[[argparse.Namespace, Sequence[str]], int] = parsed.run
    try:
        code = run(parsed, arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`); without this Python complains once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ImportError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_FAILED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """The message may hold a file's name, which a shell put among the options."""
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
    _add_doctor(commands)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("ngram_npu")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _count(text: str) -> int:
    """An option's value that counts something: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


_count.__name__ = "integer"  # argparse names the type in its messages


def _probability(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0, at most 1, got {text}")
    return value


_probability.__name__ = "number"


def _add_replay(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="measure drafting on recorded conversations",
        description="Replay recorded conversations: the recorded completion stands for what the "
        "target model says. Prints a table of what drafting gives on each input.",
        epilog="Without a PATH the sources of the Python standard library are replayed.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_replay)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        type=Path,
        help=_PATH_HELP,
    )
    lookup = parser.add_argument_group("drafting")
    lookup.add_argument(
        "--min-n",
        "--prompt-lookup-min",
        type=_count,
        metavar="N",
        help="shortest n-gram looked up (default: 2)",
    )
    lookup.add_argument(
        "--max-n",
        "--prompt-lookup-max",
        type=_count,
        metavar="N",
        help="longest n-gram looked up (default: 5)",
    )
    lookup.add_argument(
        "--k",
        "--num-speculative-tokens",
        type=_count,
        metavar="K",
        help="draft tokens per step (default: 5, with a ladder 8)",
    )
    lookup.add_argument(
        "--match-policy",
        choices=("earliest", "latest"),
        help="which of equally long matches is continued (default: earliest, with a ladder latest)",
    )
    lookup.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let a draft go on past the end of the context, repeating itself (default: only with "
        "a ladder)",
    )
    lookup.add_argument(
        "--max-len",
        type=_count,
        metavar="LEN",
        help="no draft reaches beyond this context length (default: no limit)",
    )
    lookup.add_argument(
        "--sizes",
        choices=("consecutive", "ladder"),
        help="look up n-grams of --min-n to --max-n tokens, or of 1, 2, 4, 8 and 16 (default: "
        "consecutive, with --min-probability a ladder)",
    )
    lookup.add_argument(
        "--min-probability",
        dest="min_draft_probability",
        type=_probability,
        metavar="P",
        help="draft only as far as a draft as a whole is accepted with this probability; 0.177 is "
        "a good one (default: K tokens)",
    )
    lookup.add_argument(
        "--costs",
        metavar="FILE",
        help="a table of `python -m tools.fit_costs`, for --min-probability (default: the "
        "package's)",
    )
    lookup.add_argument(
        "--engine",
        choices=["index", "scan", "auto"],
        default="auto",
        help="look drafts up in an index, or by reading each context; drafts are the same "
        "(default: the index, unless max_n - min_n exceeds 7)",
    )
    lookup.add_argument(
        "--threads", type=_count, metavar="N", help="most CPU threads (default: the library's)"
    )
    data = parser.add_argument_group("input")
    data.add_argument(
        "--batch-size",
        type=_count,
        default=32,
        metavar="B",
        help="conversations at once (default: %(default)s)",
    )
    _add_reading(data)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON; - for stdout (the table then goes to stderr)",
    )
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the result (needs matplotlib)"
    )


_PATH_HELP = (
    "a file of conversations (.jsonl or .json, also .gz or .zst), a folder of them, or - for stdin"
)


def _add_reading(data: argparse._ArgumentGroup) -> None:
    """Options that say how conversations are read."""
    data.add_argument(
        "--limit", type=_count, metavar="N", help="only the first N conversations of each input"
    )
    data.add_argument(
        "--format",
        choices=("turns", "log", "fastchat", "messages", "sharegpt", "pairs"),
        help="of the files (default: told by their content)",
    )
    data.add_argument(
        "--tokenizer",
        default="mistral-v1",
        metavar="NAME|FOLDER",
        help="mistral-v1, mistral-v3, tekken, bytes, a local Hugging Face folder, or ids: only "
        "recorded token ids (default: %(default)s)",
    )
    data.add_argument(
        "--chat-template",
        choices=("auto", "default", "none"),
        default="auto",
        help="auto: the folder's of --tokenizer, else the default; none: texts as they are "
        "(default: %(default)s)",
    )


def _add_doctor(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="say what is installed and what can be used",
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
    from ngram_npu.replay.output import check_writable
    from ngram_npu.replay.plot import check_plot

    bar = _Bar(sys.stderr)
    try:
        json_path = None if arguments.json in (None, "-") else Path(arguments.json)
        if json_path is not None:
            check_writable(json_path)
        if arguments.plot is not None:
            check_plot(arguments.plot)
            check_writable(arguments.plot)
        # The options' names are the fields' names, so that a new field needs no line here.
        options = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(ReplayOptions)}
        report = replay(
            arguments.paths,
            ReplayOptions(**options),
            progress=bar.show if bar.wanted else None,
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
    if arguments.json == "-":
        print(format_table(report), file=sys.stderr)
        sys.stdout.write(report.to_json())
    else:
        print(format_table(report))
    return EXIT_OK


def _write_files(report: ReplayReport, json_path: Path | None, plot_path: Path | None) -> None:
    """Write all of the files or none: each is complete before the first takes its place."""
    from ngram_npu.replay.output import atomic_output
    from ngram_npu.replay.plot import save_plot

    with ExitStack() as stack:
        if json_path is not None:
            scratch = stack.enter_context(atomic_output(json_path))
            scratch.write_text(report.to_json(), encoding="utf-8")
        if plot_path is not None:
            scratch = stack.enter_context(atomic_output(plot_path))
            save_plot(report, scratch, plot_path.suffix.lstrip(".").lower())


class _Bar:
    """A one-line progress bar, shown only on a terminal."""

    WIDTH = 24
    INTERVAL_S = 0.1

    def __init__(self, stream: TextIO) -> None:
        self.wanted = stream.isatty()
        self._stream = stream
        self._next_at = 0.0
        self._length = 0

    def show(self, progress: Progress) -> None:
        """Draw, at most ten times a second."""
        from ngram_npu.replay.errors import printable

        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + self.INTERVAL_S
        share = progress.done / progress.total if progress.total else 1.0
        filled = "#" * round(share * self.WIDTH)
        name = printable(progress.name)
        line = f"{progress.phase:8} [{filled:<{self.WIDTH}}] {share:4.0%} {name}"
        # One line only: a wrapped one could not be drawn over.
        line = line[: max(20, _terminal_columns(self._stream) - 1)]
        self._write(line)
        self._length = len(line)

    def clear(self) -> None:
        """Remove the bar, so that what follows starts on an empty line."""
        if self._length:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()
            self._length = 0

    def _write(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._length))
        self._stream.flush()


def _terminal_columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
