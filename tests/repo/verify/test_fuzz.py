"""When a fuzz run is a failure."""

from __future__ import annotations

import pytest

from tools.fuzz import problems

OUTPUT = "Done 70 runs in 2 second(s)\nreached page splits: 12\nreached slots given up: 3\n"


@pytest.mark.parametrize(
    ("status", "output", "says"),
    [
        (0, OUTPUT, []),
        (0, OUTPUT.replace("splits: 12", "splits: 0"), ["page splits: never reached"]),
        (77, "fuzz_index: num_tokens\n", ["the target ended with 77; its output names the input"]),
        (0, "Done 70 runs in 2 second(s)\n", ["the target did not say what it reached"]),
    ],
)
def test_problems(status: int, output: str, says: list[str]) -> None:
    assert problems(status, output) == says
