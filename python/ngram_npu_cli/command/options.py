"""Exit codes and options that the subcommands of `ngram-npu` share."""

from __future__ import annotations

import argparse
import dataclasses
import os
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngram_npu_cli.command.bar import Bar

    Written = tuple[Path | None, Callable[..., object]]
    """A file, None if it is not asked for, and what writes a report to a path."""

PROGRAM = "ngram-npu"
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def add_command(
    commands: Any, name: str, run: Callable[..., int], **texts: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, allow_abbrev=False, **texts)
    parser.set_defaults(run=run, parser=parser)
    return parser


def _checked(kind: type, name: str, holds: Callable[[Any], bool], expected: str) -> Any:
    """A parser of numbers for argparse."""

    def parsed(text: str) -> Any:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")
        return value

    parsed.__name__ = name  # argparse names the type in its messages
    return parsed


count = _checked(int, "integer", lambda value: value >= 1, "at least 1")
million = _checked(int, "integer", lambda value: value >= 0, "at least 0")
probability = _checked(float, "number", lambda value: 0 < value <= 1, "above 0 and at most 1")
share = _checked(float, "number", lambda value: 0 <= value < 10, "at least 0 and below 10")


def counts(text: str) -> list[int]:
    """Parse integers of at least 1, separated by commas."""
    return sorted({count(word) for word in text.split(",")})


counts.__name__ = "list of integers"


def add_lookup(parser: argparse.ArgumentParser, default_engine: str) -> Any:
    """Add the options that `ReplayOptions.config` reads, and `--engine`."""
    lookup = parser.add_argument_group("drafting")
    lookup.add_argument(
        "--min-n",
        "--prompt-lookup-min",
        type=count,
        metavar="N",
        help="shortest n-gram looked up (default: 2)",
    )
    lookup.add_argument(
        "--max-n",
        "--prompt-lookup-max",
        type=count,
        metavar="N",
        help="longest n-gram looked up (default: 5)",
    )
    lookup.add_argument(
        "--k",
        "--num-speculative-tokens",
        type=count,
        metavar="K",
        help="draft tokens per step (default: 5; 8 with a ladder)",
    )
    lookup.add_argument(
        "--match-policy",
        choices=("earliest", "latest"),
        help="which of equally long matches to follow (default: earliest; latest with a ladder)",
    )
    lookup.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let a draft that reaches the end of the context continue into itself (default: only "
        "with a ladder)",
    )
    lookup.add_argument(
        "--max-len",
        type=count,
        metavar="LEN",
        help="no draft reaches beyond this context length (default: no limit)",
    )
    lookup.add_argument(
        "--sizes",
        choices=("consecutive", "ladder"),
        help="look up n-grams of --min-n to --max-n tokens, or of 1, 2, 4, 8 and 16 (default: "
        "consecutive, with --min-draft-probability a ladder)",
    )
    lookup.add_argument(
        "--min-draft-probability",
        type=probability,
        metavar="P",
        help="end a draft where the probability that all of it is accepted falls below P; 0.177 is "
        "a good value (default: draft K tokens)",
    )
    lookup.add_argument(
        "--draft-costs",
        dest="costs",
        metavar="FILE",
        help="costs fitted on your logs (ngram_npu.Costs), or a table of "
        "`python -m tools.fit_costs`, for --min-draft-probability (default: the package's)",
    )
    lookup.add_argument(
        "--store",
        choices=("live", "finish"),
        help="with --min-draft-probability: draft also from other requests' text, at once or after "
        "they have finished (default: only from each request's own text)",
    )
    lookup.add_argument(
        "--store-tokens",
        type=count,
        default=1_000_000,
        metavar="N",
        help="tokens that the store holds (default: %(default)s)",
    )
    lookup.add_argument(
        "--engine",
        choices=["index", "scan", "auto"],
        default="auto",
        help="find drafts with an index or by scanning each context; the drafts are the same "
        f"(default: {default_engine})",
    )
    return lookup


def add_drafts(group: argparse._ArgumentGroup, default: str | None, without: str) -> None:
    """The option that says what the runner verifies."""
    group.add_argument(
        "--drafts",
        choices=("padded", "trimmed"),
        default=default,
        help="what the runner verifies: the tokens found (trimmed: V1's ngram and custom_class) or "
        f"K tokens, filled up (padded: V2, V1's ngram_gpu) (default: {without})",
    )


def add_paths(parser: argparse.ArgumentParser) -> None:
    """What is read: files and folders, a pipe, or the demonstration."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        type=Path,
        help="a file of conversations or a log (.jsonl, .json, .log, also .gz or .zst), a folder "
        "of them, or - for stdin, which a pipe may leave out",
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="instead: sources of Python's standard library, to see how it works",
    )


def paths_of(arguments: argparse.Namespace) -> list[Path]:
    """The paths given; none with `--demo`; stdin if that is a pipe or a file.

    Raises:
        InputError: nothing is given, or both.
    """
    from ngram_npu_cli.replay import InputError

    given: list[Path] = arguments.paths
    if arguments.demo and given:
        raise InputError(f"--demo: expected no PATH with it, got {given[0]}")
    if given or arguments.demo:
        return given
    with suppress(OSError, ValueError, AttributeError):  # closed, or not a real file
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
            return [Path("-")]
    raise InputError(
        "PATH: expected a file or a folder of conversations, or a pipe on stdin; --demo shows how "
        "it works"
    )


def add_reading(data: argparse._ArgumentGroup) -> None:
    """Options that say how conversations are read."""
    data.add_argument(
        "--limit", type=count, metavar="N", help="only the first N conversations of each input"
    )
    data.add_argument(
        "--format",
        choices=("turns", "log", "fastchat", "messages", "sharegpt", "pairs"),
        help="of the files (default: told by their content)",
    )
    data.add_argument(
        "--strict",
        action="store_true",
        help="a record that is not a conversation is an error (default: it is skipped and counted)",
    )
    data.add_argument(
        "--tokenizer",
        metavar="NAME|FOLDER",
        help="your model's: a local Hugging Face folder, or ORG/NAME from the hub's local cache; "
        "or mistral-v1, mistral-v3, tekken, bytes; ids: only recorded token ids (default: "
        "mistral-v1, with a warning)",
    )
    data.add_argument(
        "--chat-template",
        choices=("auto", "default", "none"),
        default="auto",
        help="auto: the folder's of --tokenizer, else the default; none: texts as they are "
        "(default: %(default)s)",
    )


def add_output(parser: argparse.ArgumentParser) -> Any:
    """Adds `--json`; returns the group, for the options of other files."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON; - for stdout (the text then goes to stderr)",
    )
    return output


def fields_of(kind: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that have the names of a data class's fields: a new field needs no line here."""
    return {field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)}


def reported(
    arguments: argparse.Namespace,
    make: Callable[[Bar], Any],
    text: Callable[[Any], str],
    *files: Written,
    notes: Callable[[Any], Iterable[str]] = lambda report: (),
    checked: Sequence[Path | None] = (),
) -> int:
    """Makes a report, writes it to all files or to none, and prints it.

    Every file is complete before the first one is moved into place. `notes` of the report go to
    stderr too: what the reader should know even if the report goes to a file. `checked` are files
    that `make` writes.

    Raises:
        InputError: `make` fails, or a file cannot be written, which is known before any work.
    """
    from ngram_npu.errors import printable
    from ngram_npu.output import atomic_output, check_writable

    from ngram_npu_cli.command.bar import Bar

    if arguments.json not in (None, "-"):
        files = ((Path(arguments.json), _write_json), *files)
    for path in (*(path for path, _ in files), *checked):
        if path is not None:
            check_writable(path)
    with Bar(sys.stderr, getattr(arguments, "progress", None) or None) as bar:
        report = make(bar)
    with ExitStack() as stack:
        for path, write in files:
            if path is not None:
                write(report, stack.enter_context(atomic_output(path)))
    for note in notes(report):
        complain(printable(f"{arguments.parser.prog}: note: {note}"))
    if arguments.json == "-":
        complain(text(report))
        sys.stdout.write(report.to_json())
    else:
        print(text(report))
    return EXIT_OK


def _write_json(report: Any, path: Path) -> None:
    path.write_text(report.to_json(), encoding="utf-8")


def complain(text: str) -> None:
    """Print to stderr; where that is full, nobody can be told."""
    with suppress(OSError):
        print(text, file=sys.stderr)
