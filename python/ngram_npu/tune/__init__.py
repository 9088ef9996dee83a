"""Tuning: the best setting for recorded traffic, and its gain at a given verification cost.

    >>> from ngram_npu.tune import share_of_a_step, tune
    >>> report = tune(["traffic.jsonl"], share_of_a_step(0.05))  # doctest: +SKIP
    >>> report.vllm_options  # doctest: +SKIP

Nothing here prints.
"""

from ngram_npu.tune.candidates import BASELINE, CANDIDATES, Candidate, parse_candidate, vllm_options
from ngram_npu.tune.costs import EXAMPLES, VerificationCost, load_cost, share_of_a_step
from ngram_npu.tune.text import format_report
from ngram_npu.tune.traffic import TuneOptions
from ngram_npu.tune.tune_report import TuneReport
from ngram_npu.tune.tuning import tune

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
