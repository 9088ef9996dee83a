"""Each peer's behaviour as a mode of our operators, with expected results computed by hand.

The contexts are short enough to check with a pencil; what each peer does is documented in its own
project (vLLM's `ngram`, V1 `ngram_gpu`, V2 speculator; vLLM-Ascend's n-gram kernel).
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import FRONT_ENDS, Backend
from ngram_npu import NgramConfig, NgramProposer

UNLIMITED = 2**63 - 1


def _propose(
    front_end: Backend,
    context: list[int],
    *,
    n: tuple[int, int],
    k: int,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
    match_costs: list[int] | None = None,
    fill: bool = False,
) -> list[int]:
    tokens = np.full((1, 32), -7, np.int32)
    tokens[0, : len(context)] = context
    lengths = np.array([len(context)], np.int32)
    table = None if match_costs is None else np.array(match_costs, np.uint8)
    args = (tokens, lengths, None, None, *n, k, match_policy, overlap, max_len, table, 40, fill)
    draft, count, _ = front_end.call("ngram_propose", args)
    if fill:
        return draft[0].tolist()
    assert list(draft[0, count[0] :]) == [-1] * (k - count[0])
    return draft[0, : count[0]].tolist()


@pytest.fixture(params=FRONT_ENDS, ids=lambda b: b.name)
def front_end(request: pytest.FixtureRequest) -> Backend:
    return request.param


class TestVllmNgram:
    """Longest match within [min_n, max_n], the earliest of them, short drafts, max_len clamp."""

    def test_longest_wins_over_earlier(self, front_end: Backend) -> None:
        # "2 3" first at 0, "1 2 3" at 4: the longer one decides.
        assert _propose(front_end, [2, 3, 50, 9, 1, 2, 3, 60, 8, 1, 2, 3], n=(2, 3), k=2) == [60, 8]

    def test_earliest_of_equals(self, front_end: Backend) -> None:
        assert _propose(front_end, [1, 2, 70, 1, 2, 80, 1, 2], n=(2, 2), k=1) == [70]

    def test_too_short_a_match_drafts_nothing(self, front_end: Backend) -> None:
        assert _propose(front_end, [5, 2, 3, 9, 7, 2, 3], n=(3, 4), k=3) == []

    def test_draft_stops_at_the_rows_end(self, front_end: Backend) -> None:
        assert _propose(front_end, [1, 2, 3, 1, 2], n=(2, 2), k=5) == [3, 1, 2]

    def test_max_model_len_clamps(self, front_end: Backend) -> None:
        context = [1, 2, 3, 4, 1, 2]
        assert _propose(front_end, context, n=(2, 2), k=4, max_len=8) == [3, 4]
        assert _propose(front_end, context, n=(2, 2), k=4, max_len=6) == []

    def test_match_may_overlap_the_suffix(self, front_end: Backend) -> None:
        assert _propose(front_end, [4, 4, 4], n=(2, 2), k=3) == [4]


class TestVllmNgramGpuV1AndAscend:
    """The same without the clamp: a draft may lead past max_model_len."""

    def test_no_clamp(self, front_end: Backend) -> None:
        assert _propose(front_end, [1, 2, 3, 4, 1, 2], n=(2, 2), k=4) == [3, 4, 1, 2]


class TestVllmV2:
    """The latest match; the last token fills the places behind a draft."""

    def test_latest_of_equals(self, front_end: Backend) -> None:
        context = [1, 2, 70, 1, 2, 80, 1, 2]
        assert _propose(front_end, context, n=(2, 2), k=3, match_policy=1) == [80, 1, 2]

    def test_longest_still_wins(self, front_end: Backend) -> None:
        context = [1, 2, 3, 60, 9, 2, 3, 50, 1, 2, 3]
        assert _propose(front_end, context, n=(2, 3), k=2, match_policy=1) == [60, 9]

    def test_the_last_token_fills_the_places_behind(self, front_end: Backend) -> None:
        context = [7, 9, 7, 8]
        assert _propose(front_end, [9, 8, 9], n=(1, 1), k=3, match_policy=1, fill=True) == [8, 9, 9]
        assert _propose(front_end, context, n=(1, 1), k=3, match_policy=1, fill=True) == [8] * 3


class TestOverlap:
    """Not a peer's mode: a draft that reaches the row's end continues into itself."""

    def test_period_continues(self, front_end: Backend) -> None:
        draft = _propose(front_end, [7, 1, 2, 3, 1, 2, 3], n=(2, 3), k=8, overlap=True)
        assert draft == [1, 2, 3, 1, 2, 3, 1, 2]

    def test_run_of_one_token(self, front_end: Backend) -> None:
        assert _propose(front_end, [4, 4, 4], n=(2, 2), k=5, overlap=True) == [4] * 5


class TestCosts:
    """Not a peer's mode: token j costs what the table says of its match, which is j longer."""

    CONTEXT = (1, 2, 3, 4, 5, 1, 2)

    def test_a_draft_ends_before_the_limit_is_exceeded(self, front_end: Backend) -> None:
        context = list(self.CONTEXT)
        table = [99, 99, 15, 25, 1, *[99] * 11]  # 15, 40, 41
        assert _propose(front_end, context, n=(2, 2), k=4, match_costs=table) == [3, 4]
        assert _propose(front_end, context, n=(2, 2), k=4, match_costs=[20] * 16) == [3, 4]
        assert _propose(front_end, context, n=(2, 2), k=4, match_costs=[41] * 16) == []

    def test_the_last_row_is_for_all_longer_matches(self, front_end: Backend) -> None:
        context = [4] * 30
        table = [0] * 15 + [13]
        draft = _propose(front_end, context, n=(14, 14), k=9, overlap=True, match_costs=table)
        assert draft == [4] * 4  # 0, 13, 26, 39

    def test_the_fill_continues_whatever_it_costs(self, front_end: Backend) -> None:
        context = list(self.CONTEXT)
        for table in (None, [20] * 16, [41] * 16):
            filled = _propose(front_end, context, n=(2, 2), k=7, match_costs=table, fill=True)
            assert filled == [3, 4, 5, 1, 2, 2, 2]
            longest = _propose(
                front_end, context, n=(2, 2), k=7, max_len=8, overlap=True, match_costs=table,
                fill=True,
            )  # fmt: skip
            assert longest == [3, 4, 5, 1, 2, 3, 4]
        at_its_end = _propose(front_end, context, n=(2, 2), k=3, max_len=7, overlap=True, fill=True)
        assert at_its_end == [2] * 3


class TestAcceptance:
    """ngram_step_ with a rejection sampler's results in the form that vLLM's runners pass."""

    def test_run_ends_at_the_first_rejected(self) -> None:
        tokens = np.zeros((2, 12), np.int32)
        tokens[0, :6] = [1, 2, 3, 9, 1, 2]
        lengths = np.array([6, 0], np.int32)
        sampled = np.array([[3, 9, -1], [-1, -1, -1]], np.int32)
        step = NgramProposer(NgramConfig(min_n=2, max_n=3, k=2)).step(tokens, lengths, sampled)
        assert step.next_token_ids.tolist() == [9, 0]
        assert step.num_sampled.tolist() == [2, 0]
        assert step.draft_token_ids.tolist() == [[1, 2], [-1, -1]]
        assert step.num_draft_tokens.tolist() == [2, 0]
        assert lengths.tolist() == [8, 0]
        assert tokens[0, :8].tolist() == [1, 2, 3, 9, 1, 2, 3, 9]

    def test_next_is_taken_before_the_capacity_clamp(self) -> None:
        """vLLM-Ascend takes it after: a known difference."""
        tokens = np.array([[5, 6, 7, 8]], np.int32)
        lengths = np.array([3], np.int32)
        sampled = np.array([[1, 2, 3]], np.int32)
        step = NgramProposer(NgramConfig(min_n=1, max_n=1, k=1)).step(tokens, lengths, sampled)
        assert tokens.tolist() == [[5, 6, 7, 1]]
        assert lengths.tolist() == [4]
        assert step.next_token_ids.tolist() == [3]
        assert step.num_sampled.tolist() == [3]

    def test_discarded_rows_draft_nothing(self) -> None:
        tokens = np.array([[5, 6, 5, 0]], np.int32)
        lengths = np.array([3], np.int32)
        sampled = np.array([[6]], np.int32)
        proposer = NgramProposer(NgramConfig(min_n=1, max_n=2, k=1))
        step = proposer.step(tokens, lengths, sampled, discard=np.array([True]))
        assert step.num_draft_tokens.tolist() == [0]
        assert step.next_token_ids.tolist() == [5]
        assert lengths.tolist() == [3]

    def test_a_runner_may_own_its_lengths(self) -> None:
        tokens = np.array([[5, 6, 5, 0]], np.int32)
        lengths = np.array([3], np.int32)
        sampled = np.array([[6]], np.int32)
        proposer = NgramProposer(NgramConfig(min_n=1, max_n=2, k=2))
        step = proposer.step(tokens, lengths, sampled, advance=False)
        assert lengths.tolist() == [3]
        assert tokens.tolist() == [[5, 6, 5, 6]]
        assert step.draft_token_ids.tolist() == [[5, 6]]

    def test_ids_beyond_the_vocabulary_end_the_run(self) -> None:
        tokens = np.zeros((1, 4), np.int32)
        lengths = np.array([0], np.int32)
        sampled = np.array([[3, 100, 3]], np.int32)
        proposer = NgramProposer(NgramConfig(vocab_size=100))
        assert proposer.step(tokens, lengths, sampled).num_sampled.tolist() == [1]
