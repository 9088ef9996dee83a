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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ngram_npu.replay import ReplayReport

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
    _add_tune(commands)
    _add_measure_cost(commands)
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


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"must be at least 0, below 10, got {text}")
    return value


_share.__name__ = "number"


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


def _add_tune(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="find the setting that suits recorded traffic, and say whether it pays",
        description="Search settings over recorded traffic: replays each, weighs the tokens it "
        "yields against the cost of verifying its drafts, and recommends one, as options of vLLM. "
        "Settings are chosen on one half of the conversations; figures are of the other.",
        epilog="Without a cost an example is used, which is said. After Ctrl-C the same command "
        "goes on where it was.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_tune)
    parser.add_argument("paths", nargs="*", metavar="TRAFFIC", type=Path, help=_PATH_HELP)
    cost = parser.add_argument_group("what verifying costs").add_mutually_exclusive_group()
    cost.add_argument(
        "-c",
        dest="share",
        type=_share,
        metavar="C",
        help="a drafted token costs this part of a step, such as 0.05",
    )
    cost.add_argument(
        "--cost",
        default="example-8b-h100",
        metavar="FILE|EXAMPLE",
        help="step times of `ngram-npu measure-cost`, or an example: example-8b-h100, "
        "example-8b-l4, example-70b-4xh100 (default: %(default)s)",
    )
    search = parser.add_argument_group("search")
    search.add_argument(
        "--batch-size",
        type=_count,
        action="append",
        metavar="B",
        help="only this batch size of those that --cost has; may be given several times",
    )
    search.add_argument(
        "--sizes",
        choices=("consecutive", "ladder"),
        help="search only n-grams of consecutive sizes, which every backend has, or only ladders",
    )
    search.add_argument(
        "--against",
        metavar="JSON",
        help="a setting to compare with, as fields of NgramConfig, such as "
        '\'{"prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 3}\' '
        "(default: n-grams of 2 to 5, k = 5)",
    )
    search.add_argument(
        "--sample",
        type=int,
        default=10,
        metavar="MB",
        help="replay a sample of this many million characters where there are more; 0: replay all "
        "(default: %(default)s)",
    )
    search.add_argument(
        "--jobs", type=_count, metavar="N", help="processes (default: one per core)"
    )
    search.add_argument(
        "--cache",
        type=Path,
        metavar="FILE",
        help="keep finished pieces here for later runs (default: only until the run is complete)",
    )
    _add_reading(parser.add_argument_group("input"))
    output = parser.add_argument_group("output")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a report for a browser")
    output.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON; - for stdout (the text then goes to stderr)",
    )
    output.add_argument(
        "--progress", action="store_true", help="show progress though stderr is no terminal"
    )


def _add_measure_cost(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "measure-cost",
        help="measure what verifying costs on your own server, for `tune --cost`",
        description="Time the steps of an OpenAI-compatible server by batch size. Run it once "
        "without speculation and once for each number of draft tokens, with the same FILE; "
        "docs/guides/tune.md shows how.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_measure_cost)
    parser.add_argument("output", metavar="FILE", type=Path, help="JSON; times are added to it")
    parser.add_argument("--url", default="http://localhost:8000", help="default: %(default)s")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument(
        "--batch-sizes",
        default="1,4,16,64",
        metavar="B,...",
        help="requests at once (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens", type=_count, default=1024, help="about; default: %(default)s"
    )
    parser.add_argument("--max-tokens", type=_count, default=128, help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=_count, default=3, help="of each batch size (default: %(default)s)"
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


def _run_tune(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from ngram_npu.replay import ReplayError
    from ngram_npu.replay.bar import Bar
    from ngram_npu.tune import format_report
    from ngram_npu.tune.command import run

    bar = Bar(sys.stderr, wanted=arguments.progress or None)
    try:
        report = run(arguments, shlex.join([PROGRAM, *argv]), bar)
    except ReplayError as error:
        bar.clear()
        print(f"{PROGRAM} tune: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        bar.clear()
        print("finished pieces are kept: the same command goes on from here", file=sys.stderr)
        raise
    if arguments.json == "-":
        print(format_report(report), file=sys.stderr)
        sys.stdout.write(report.to_json())
    else:
        print(format_report(report))
    return EXIT_OK


def _run_measure_cost(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from ngram_npu.replay import ReplayError
    from ngram_npu.replay.output import check_writable
    from ngram_npu.tune.server import measure_cost

    try:
        check_writable(arguments.output)
        measure_cost(
            arguments.output,
            url=arguments.url,
            model=arguments.model,
            batch_sizes=arguments.batch_sizes,
            prompt_tokens=arguments.prompt_tokens,
            max_tokens=arguments.max_tokens,
            rounds=arguments.rounds,
            command=shlex.join([PROGRAM, *argv]),
            report=print,
        )
    except ReplayError as error:
        print(f"{PROGRAM} measure-cost: error: {error}", file=sys.stderr)
        return EXIT_USAGE
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
