"""`ngram-npu tune` and `ngram-npu measure-cost`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngram_npu_cli.command.options import (
    EXIT_OK,
    PROGRAM,
    add_command,
    add_output,
    add_paths,
    add_reading,
    complain,
    count,
    counts,
    fields_of,
    million,
    paths_of,
    reported,
    share,
)

if TYPE_CHECKING:
    from ngram_npu_cli.command.bar import Bar
    from ngram_npu_cli.tune import VerificationCost


def add_tune(commands: Any) -> None:
    parser = add_command(
        commands,
        "tune",
        _run_tune,
        help="find the best setting for recorded traffic, and whether drafting pays at all",
        description="Search settings over recorded traffic: replays each, weighs the tokens it "
        "yields against the cost of verifying its drafts, and recommends one per runner, as "
        "options of vLLM. Settings are chosen on one half of the conversations; figures are of the "
        "other.",
        epilog="Without --cost the report uses an example cost and says so. After Ctrl-C the same "
        "command continues where it stopped.",
    )
    add_paths(parser)
    cost = parser.add_argument_group("what verifying costs")
    cost.add_argument(
        "-c",
        "--cost",
        default="example-8b-h100",
        metavar="C|FILE|EXAMPLE",
        help="cost of verifying one draft token as a fraction of a step, such as 0.05; step times "
        "of `ngram-npu measure-cost`; or an example: example-8b-h100, example-8b-l4, "
        "example-70b-4xh100 (default: %(default)s)",
    )
    search = parser.add_argument_group("search")
    search.add_argument(
        "--batch-size",
        type=counts,
        metavar="B,...",
        help="use only these batch sizes of --cost",
    )
    search.add_argument(
        "--sizes",
        choices=("consecutive", "ladder"),
        help="search only n-grams of consecutive sizes (every backend has them), or only ladders",
    )
    search.add_argument(
        "--runner",
        choices=("gpu", "host", "ascend"),
        help="where vLLM drafts: on its GPU (ngram_gpu), on the host (custom_class), or beside "
        "vLLM-Ascend (ngram); it says what is verified (default: gpu and host, one recommendation "
        "each)",
    )
    search.add_argument(
        "--synchronous",
        type=share,
        metavar="SHARE",
        help="what a step takes longer without asynchronous scheduling, which host and ascend "
        "lose; 0 on a CPU (default: 0.1, an assumption; 0 with step times of your own)",
    )
    search.add_argument(
        "--store",
        action="store_true",
        help="search stores too, from which requests draft other requests' text",
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
        type=million,
        default=10,
        metavar="MB",
        help="replay a sample of at most this many million characters; 0: replay all "
        "(default: %(default)s)",
    )
    search.add_argument("--jobs", type=count, metavar="N", help="processes (default: one per core)")
    search.add_argument(
        "--cache",
        type=Path,
        metavar="FILE",
        help="keep finished pieces here for later runs (default: delete them after the run)",
    )
    add_reading(parser.add_argument_group("input"))
    output = add_output(parser)
    output.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a report for a browser (needs the extra html)",
    )
    output.add_argument(
        "--progress", action="store_true", help="show progress even if stderr is not a terminal"
    )


def add_measure_cost(commands: Any) -> None:
    parser = add_command(
        commands,
        "measure-cost",
        _run_measure_cost,
        help="measure what verifying drafts costs on your server, for `tune --cost`",
        description="Time the steps of an OpenAI-compatible server by batch size. Run it once "
        "without speculation and once for each number of draft tokens, with the same FILE; "
        "docs/guides/tune.md shows how.",
    )
    parser.add_argument("output", metavar="FILE", type=Path, help="JSON file to add the times to")
    parser.add_argument("--url", default="http://localhost:8000", help="default: %(default)s")
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable that holds the server's API key (default: OPENAI_API_KEY, if it "
        "is set)",
    )
    parser.add_argument(
        "--batch-size",
        default="1,4,16,64",
        metavar="B,...",
        help="batch sizes to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens", type=count, default=1024, help="about; default: %(default)s"
    )
    parser.add_argument("--max-tokens", type=count, default=128, help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=count, default=3, help="rounds per batch size (default: %(default)s)"
    )


def _run_tune(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from ngram_npu.errors import optional

    from ngram_npu_cli.tune import CANDIDATES, TuneOptions, TuneReport, format_report, tune
    from ngram_npu_cli.tune.candidates import parse_candidate
    from ngram_npu_cli.tune.html import check_html, to_html

    if arguments.html is not None:
        check_html()
    if arguments.progress:
        optional("tqdm", "--progress", "replay")
    cost = _cost(arguments.cost)
    if arguments.batch_size:
        cost = cost.at(arguments.batch_size)
    options = fields_of(TuneOptions, arguments) | {"sample": arguments.sample * 1_000_000 or None}

    def make(bar: Bar) -> TuneReport:
        try:
            return tune(
                paths_of(arguments),
                cost,
                TuneOptions(**options),
                candidates=[c for c in CANDIDATES if arguments.sizes in (None, c.config.sizes)],
                against=None if arguments.against is None else parse_candidate(arguments.against),
                progress=bar.show,
                command=shlex.join([PROGRAM, *argv]),
            )
        except KeyboardInterrupt:
            bar.clear()
            complain("finished pieces are kept: the same command continues from here")
            raise

    return reported(
        arguments,
        make,
        format_report,
        (arguments.html, lambda report, path: path.write_text(to_html(report), encoding="utf-8")),
        notes=lambda report: report.traffic["notes"],
        checked=[arguments.cache],
    )


def _cost(given: str) -> VerificationCost:
    """A share of a step, or what `load_cost` takes."""
    from ngram_npu_cli.replay import InputError
    from ngram_npu_cli.tune import load_cost, share_of_a_step

    with suppress(ValueError):
        share = float(given)
        if not 0 <= share < 10:
            raise InputError(f"--cost: must be at least 0 and below 10, got {given}")
        return share_of_a_step(share)
    return load_cost(given)


def _run_measure_cost(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from ngram_npu.output import check_writable

    from ngram_npu_cli.tune.client import measure_cost

    check_writable(arguments.output)
    measure_cost(
        arguments.output,
        url=arguments.url,
        model=arguments.model,
        key_variable=arguments.api_key_env,
        batch_sizes=arguments.batch_size,
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        rounds=arguments.rounds,
        command=shlex.join([PROGRAM, *argv]),
        report=print,
    )
    return EXIT_OK
