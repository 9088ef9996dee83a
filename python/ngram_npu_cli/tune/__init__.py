"""Tuning: the best setting for recorded traffic, and its gain at a given verification cost.

    >>> from ngram_npu_cli.tune import share_of_a_step, tune
    >>> report = tune(["traffic.jsonl"], share_of_a_step(0.05))  # doctest: +SKIP
    >>> report.vllm_options  # doctest: +SKIP

Nothing here prints.
"""

from ngram_npu.step_time import EXAMPLES, VerificationCost, load_cost, share_of_a_step

from ngram_npu_cli.tune.candidates import (
    BASELINE,
    CANDIDATES,
    Candidate,
    parse_candidate,
    vllm_options,
)
from ngram_npu_cli.tune.text import format_report
from ngram_npu_cli.tune.traffic import TuneOptions
from ngram_npu_cli.tune.tune_report import TuneReport
from ngram_npu_cli.tune.tuning import tune

__all__ = [
    "BASELINE",
    "CANDIDATES",
    "EXAMPLES",
    "Candidate",
    "TuneOptions",
    "TuneReport",
    "VerificationCost",
    "format_report",
    "load_cost",
    "parse_candidate",
    "share_of_a_step",
    "tune",
    "vllm_options",
]
