"""`ngram-npu learn` from its parsed options to its report."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ngram_npu_command.bar import Bar

from ngram_npu.learn.learn_report import LearnReport
from ngram_npu.learn.learning import LearnOptions, learn
from ngram_npu.learn.plot import save_plot
from ngram_npu.output import atomic_output, check_writable
from ngram_npu.replay.plot import check_plot

__all__ = ["run"]


def run(
    arguments: argparse.Namespace, paths: Sequence[Path], command: str, bar: Bar
) -> LearnReport:
    """Learn with the given options, and write the files of the report.

    Raises:
        ReplayError: options, input or files cannot be used.
    """
    json_path = None if arguments.json in (None, "-") else Path(arguments.json)
    for path in (json_path, arguments.plot, arguments.costs):
        if path is not None:
            check_writable(path)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    # Options and fields have the same names, so a new field needs no line here.
    options = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(LearnOptions)}
    report = learn(
        paths,
        arguments.output,
        LearnOptions(**options),
        costs=arguments.costs,
        progress=bar.show,
        command=command,
    )
    bar.clear()
    with ExitStack() as stack:
        if json_path is not None:
            scratch = stack.enter_context(atomic_output(json_path))
            scratch.write_text(report.to_json(), encoding="utf-8")
        if arguments.plot is not None:
            scratch = stack.enter_context(atomic_output(arguments.plot))
            save_plot(report, scratch, arguments.plot.suffix.lstrip(".").lower())
    return report
