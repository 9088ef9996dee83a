"""`ngram-npu tune` from its parsed options to its report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ngram_npu_command.bar import Bar

from ngram_npu.errors import ReplayError, optional
from ngram_npu.output import atomic_output, check_writable
from ngram_npu.tune.candidates import CANDIDATES, parse_candidate
from ngram_npu.tune.costs import VerificationCost, load_cost, share_of_a_step
from ngram_npu.tune.html import check_html, to_html
from ngram_npu.tune.tune_report import TuneReport
from ngram_npu.tune.tuning import TuneOptions, tune

__all__ = ["run"]


def run(arguments: argparse.Namespace, paths: Sequence[Path], command: str, bar: Bar) -> TuneReport:
    """Tune with the given options and write all files or none.

    Raises:
        ReplayError: options, traffic or files cannot be used.
    """
    json_path = None if arguments.json in (None, "-") else Path(arguments.json)
    for path in (json_path, arguments.html, arguments.cache):
        if path is not None:
            check_writable(path)
    if arguments.html is not None:
        check_html()
    if arguments.progress:
        optional("tqdm", "--progress", "replay")
    cost = _cost(arguments.cost)
    if arguments.batch_size:
        cost = cost.at(arguments.batch_size)
    report = tune(
        paths,
        cost,
        TuneOptions(
            format=arguments.format,
            limit=arguments.limit,
            strict=arguments.strict,
            tokenizer=arguments.tokenizer,
            chat_template=arguments.chat_template,
            sample=arguments.sample * 1_000_000 or None,
            jobs=arguments.jobs,
            cache=arguments.cache,
            runner=arguments.runner,
            synchronous=arguments.synchronous,
            store=arguments.store,
        ),
        candidates=[c for c in CANDIDATES if arguments.sizes in (None, c.config.sizes)],
        against=None if arguments.against is None else parse_candidate(arguments.against),
        progress=bar.show,
        command=command,
    )
    bar.clear()
    with ExitStack() as stack:
        for path, made in ((json_path, TuneReport.to_json), (arguments.html, to_html)):
            if path is not None:
                stack.enter_context(atomic_output(path)).write_text(made(report), encoding="utf-8")
    return report


def _cost(given: str) -> VerificationCost:
    """A share of a step, or what `load_cost` takes."""
    with suppress(ValueError):
        share = float(given)
        if not 0 <= share < 10:
            raise ReplayError(f"--cost: must be at least 0 and below 10, got {given}")
        return share_of_a_step(share)
    return load_cost(given)
