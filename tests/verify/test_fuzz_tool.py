"""What is made of a fuzz run's output."""

from __future__ import annotations

import pytest

from tools.verify.fuzz import problems, summary

OUTPUT = """\
#2  INITED cov: 5 ft: 6 corp: 1/1b exec/s: 0 rss: 40Mb
#70 DONE   cov: 711 ft: 2310 corp: 90/9Kb lim: 400 exec/s: 35 rss: 90Mb
Done 70 runs in 2 second(s)
stat::number_of_executed_units: 70
reached page splits: 12
reached slots given up: 3
"""


def test_a_run_in_numbers() -> None:
    assert summary(OUTPUT) == {
        "executions": 70,
        "coverage": {"edges": 711, "features": 2310},
        "reached": {"page splits": 12, "slots given up": 3},
    }
    assert problems(0, OUTPUT) == []


def test_what_was_never_reached_is_a_problem() -> None:
    assert problems(0, OUTPUT.replace("splits: 12", "splits: 0")) == ["page splits: never reached"]


def test_a_finding_is_a_problem() -> None:
    assert len(problems(77, "fuzz_index: num_tokens\n")) == 1


@pytest.mark.parametrize("line", OUTPUT.splitlines()[3:])
def test_output_without_counts_is_refused(line: str) -> None:
    kept = [other for other in OUTPUT.splitlines() if other.split(" ")[0] != line.split(" ")[0]]
    with pytest.raises(ValueError, match="expected libFuzzer's final statistics"):
        problems(0, "\n".join(kept))
