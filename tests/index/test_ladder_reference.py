"""The ladder's reference, against examples worked by hand."""

from __future__ import annotations

import pytest
from ngram_npu.reference.ladder import candidate, draft, outcome_bytes

FREE = [[0] * 32] * 16
FAR = 1000


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], (0, 0)),
        ([7], (0, 0)),
        ([7, 8], (0, 0)),
        ([7, 7], (1, 1)),
        ([7, 7, 7], (2, 2)),  # the occurrence may overlap the row's end
        ([5, 6, 7, 5, 6], (2, 2)),
        ([5, 1, 5, 2, 5], (3, 1)),  # the latest, not the first
        # 1 2 3 occurred, but three is no size: the latest 2 3 counts, which matches two tokens.
        ([1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3], (7, 2)),
        # Found by two, and then a third token before it agrees.
        ([1, 2, 3, 9, 1, 2, 3], (3, 3)),
        ([*range(20), *range(20)], (20, 16)),
    ],
)
def test_candidate(tokens: list[int], expected: tuple[int, int]) -> None:
    assert candidate(tokens) == expected


def test_outcome_bytes() -> None:
    # 5 6 7 5 6 7: at the second 6 the candidate follows a 5 and is right, at the second 7 one
    # that follows 5 6; then 5 is expected after 5 6 7, and 9 comes.
    assert outcome_bytes([5, 6, 7, 5, 6, 7, 9]) == [0, 0, 0, 0, 3, 5, 6]
    cycle = list(range(20))
    assert outcome_bytes(cycle * 2)[-2:] == [31, 31]


def test_a_draft_reads_the_table_at_match_and_byte() -> None:
    table = [[100 * m + b for b in range(32)] for m in range(16)]
    tokens = [5, 6, 7, 5, 6]  # bytes 0 0 0 0 3, candidate (2, 2)
    assert draft(tokens, 4, table, 10_000, False, FAR) == ([7, 5, 6], [200, 300, 403], 2)
    assert draft(tokens, 4, table, 10_000, True, FAR) == ([7, 5, 6, 7], [200, 300, 403, 500], 2)
    assert draft([7, 7], 20, table, 100_000, True, FAR)[1][13:] == [1400] + [1500] * 6


def test_a_draft_stops_where_it_would_pass_the_limit() -> None:
    table = [[m * 10 for _ in range(32)] for m in range(16)]
    tokens = [5, 6, 7, 5, 6]
    assert draft(tokens, 4, table, 50, False, FAR) == ([7, 5], [20, 30], 2)
    assert draft(tokens, 4, table, 49, False, FAR) == ([7], [20], 2)
    assert draft(tokens, 4, table, 19, False, FAR) == ([], [], 2)


def test_what_else_ends_a_draft() -> None:
    tokens = [5, 6, 7, 5, 6]
    assert draft(tokens, 2, FREE, 0, True, FAR)[0] == [7, 5]
    assert draft(tokens, 4, FREE, 0, True, 6)[0] == [7]
    assert draft(tokens, 4, FREE, 0, True, 5) == ([], [], 2)
    assert draft([1, 2, 3], 4, FREE, 0, True, FAR) == ([], [], 0)


def test_without_a_limit_k_tokens_are_drafted_whatever_they_cost() -> None:
    dear = [[255] * 32] * 16
    assert draft([5, 6, 7, 5, 6], 4, dear, None, True, FAR) == ([7, 5, 6, 7], [0, 0, 0, 0], 2)
