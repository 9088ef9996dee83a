"""`ngram-npu generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngram_npu_command.options import add_command, add_lookup, count, fields_of, reported

if TYPE_CHECKING:
    from ngram_npu.runner.generate import GenerateReport


def add_generate(commands: Any) -> None:
    parser = add_command(
        commands,
        "generate",
        _run_generate,
        help="generate text with a local model, with and without speculation",
        description="Generate text for a file of prompts with a Hugging Face causal LM. Prints the "
        "text, tokens per second with and without speculation, acceptance, and the time of each "
        "part of a step. Needs torch and transformers.",
    )
    need = parser.add_argument_group("model and prompts")
    need.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a local model")
    asked = need.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", metavar="TEXT", help="one prompt, as the model is to read it")
    asked.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="texts, one per line, or JSON: requests, or what `ngram-npu replay` reads, of which "
        "the first prompt is used; also .gz, .zst, or - for stdin",
    )
    need.add_argument(
        "--chat-template",
        choices=("auto", "default", "none"),
        default="auto",
        help="of messages; auto: the model's, else the default; none: their texts as they are "
        "(default: %(default)s)",
    )
    need.add_argument(
        "--draft-model",
        type=Path,
        metavar="FOLDER",
        help="a smaller local model of the same vocabulary: it drafts where n-grams promise less",
    )
    need.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    need.add_argument(
        "--dtype",
        choices=("auto", "float64", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the weights and of computation (default: the model's)",
    )
    add_lookup(parser, "the index on the CPU for contexts beyond 2048 tokens")
    run = parser.add_argument_group("running")
    run.add_argument(
        "--max-tokens", type=count, default=128, metavar="N", help="new tokens per prompt (128)"
    )
    run.add_argument(
        "--batch-size", type=count, default=16, metavar="B", help="requests per step (16)"
    )
    run.add_argument(
        "--synchronous",
        dest="asynchronous",
        action="store_false",
        help="wait for each step before scheduling the next one",
    )
    run.add_argument(
        "--unpadded",
        dest="padded",
        action="store_false",
        help="verify only the drafts that were found, instead of always K",
    )
    run.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)"
    )
    run.add_argument(
        "--seed", type=int, default=0, help="seed of sampling; it alone determines the text (0)"
    )
    run.add_argument(
        "--no-baseline",
        dest="baseline",
        action="store_false",
        help="skip the run without speculation",
    )
    run.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: torch's)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for chrome://tracing or Perfetto"
    )
    output.add_argument(
        "--json", metavar="FILE", help="write texts and figures as JSON; - for stdout"
    )


def _run_generate(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from ngram_npu.replay import ReplayOptions

    ngram = ReplayOptions(**fields_of(ReplayOptions, arguments, complete=False)).config()
    if arguments.prompt is not None:
        arguments.prompts = arguments.prompt

    def make(_: object) -> GenerateReport:
        from ngram_npu.runner.generate import GenerateOptions, generate

        return generate(
            GenerateOptions(**fields_of(GenerateOptions, arguments, complete=False), ngram=ngram)
        )

    def text(report: GenerateReport) -> str:
        from ngram_npu.runner.generate import format_report

        return format_report(report)

    return reported(arguments, make, text, checked=[arguments.trace])
