"""`ngram-npu learn` and `ngram-npu store`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngram_npu_cli.command.options import (
    EXIT_OK,
    PROGRAM,
    add_command,
    add_output,
    add_paths,
    add_reading,
    count,
    fields_of,
    paths_of,
    probability,
    reported,
    share,
)


def add_learn(commands: Any) -> None:
    parser = add_command(
        commands,
        "learn",
        _run_learn,
        help="fill a store from logs, and see what it would bring",
        description="Fill a store from logs, and from files of other stores, so that a server "
        "drafts from the first request on. Prints tokens per step and speed-up on the last tenth "
        "of the logs, with nothing to all of the rest known. The newest logs come last; stores are "
        "taken as older than logs.",
        epilog="The file holds text of users as token ids: share it as you would the logs.",
    )
    add_paths(parser)
    store = parser.add_argument_group("store")
    store.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the file of the store, replaced atomically (default: none, only the report)",
    )
    store.add_argument(
        "--store-tokens",
        type=count,
        metavar="N",
        help="tokens that it holds (default: the smallest power of two that yields at least 99.8%% "
        "of the tokens per step of a store that holds everything)",
    )
    store.add_argument(
        "--scope-field",
        metavar="KEY[.KEY...]",
        help="field of each record that says who may draft from it, such as request.user; a record "
        "without it is skipped (default: everybody shares)",
    )
    store.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="also fit the costs of draft tokens on the newest conversations, and write them",
    )
    curve = parser.add_argument_group("learning curve")
    curve.add_argument(
        "--k",
        "--num-speculative-tokens",
        type=count,
        default=8,
        metavar="K",
        help="draft tokens per step (default: %(default)s)",
    )
    curve.add_argument(
        "--min-draft-probability",
        type=probability,
        default=0.177,
        metavar="P",
        help="as for replay (default: %(default)s)",
    )
    curve.add_argument(
        "-c",
        "--cost",
        type=share,
        default=0.05,
        metavar="C",
        help="cost of verifying one draft token as a fraction of a step (default: %(default)s)",
    )
    add_reading(parser.add_argument_group("input"))
    add_output(parser).add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the learning curve (needs matplotlib)"
    )


def add_store(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "store", help="look into the file of a store", allow_abbrev=False
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    info = add_command(
        actions,
        "info",
        _run_info,
        help="what is in it, and for which tokenizer",
        description="What is in the file of a store, and for which tokenizer.",
    )
    info.add_argument("file", type=Path, metavar="FILE")
    info.add_argument("--json", action="store_true", help="print JSON")


def _run_learn(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from ngram_npu_cli.learn import LearnOptions, format_report, learn
    from ngram_npu_cli.learn.plot import check_plot, save_plot

    if arguments.plot is not None:
        check_plot(arguments.plot)
    return reported(
        arguments,
        lambda bar: learn(
            paths_of(arguments),
            arguments.output,
            LearnOptions(**fields_of(LearnOptions, arguments)),
            costs=arguments.costs,
            progress=bar.show,
            command=shlex.join([PROGRAM, *argv]),
        ),
        format_report,
        (arguments.plot, lambda report, path: save_plot(report, path, arguments.plot.suffix)),
        notes=lambda report: report.notes,
        checked=[arguments.costs],
    )


def _run_info(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from ngram_npu_cli.learn import describe
    from ngram_npu_cli.learn.learn_report import format_store

    found = describe(arguments.file)
    print(json.dumps(found, indent=2) if arguments.json else format_store(found))
    return EXIT_OK
