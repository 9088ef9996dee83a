"""Learning from traffic: a store filled from logs, and what it would bring.

    >>> from ngram_npu_cli.learn import learn
    >>> report = learn(["yesterday.jsonl"], "learned.store")  # doctest: +SKIP
    >>> report.curve[-1].tokens_per_step  # doctest: +SKIP
    2.87

Nothing here prints.
"""

from ngram_npu_cli.learn.curve import Point
from ngram_npu_cli.learn.learn_report import LearnReport, format_report
from ngram_npu_cli.learn.learning import learn
from ngram_npu_cli.learn.reading import LearnOptions
from ngram_npu_cli.learn.stores import describe

__all__ = ["LearnOptions", "LearnReport", "Point", "describe", "format_report", "learn"]
