"""The index of a ladder: its outcomes and candidates follow the definition after any history of its
rows, and the integrity check finds wrong ones. The reference passes examples worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from core.index.words import HEADER, Harm, Int32Array, check_told, page_of, put, random_tokens
from core.index.words import slot_of as _slot
from ngram_npu import _C, IntegrityError, NgramIndex
from ops.reference.ladder import candidate, draft, outcome_bytes
from ops.specs.store import text_rows

LENGTH, CANDIDATE, OUTCOME_PAGES, OUTCOME_ROOT = 1, 6, 7, 32
ROOT_PAGES, PAGE_BYTES = 16, 4096
LADDER: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "ladder": True}
COSTS = np.full((16, 32), 5, np.uint8)


def _tokens(rows: int = 3, length: int = 400, alphabet: int = 5) -> Int32Array:
    return random_tokens(rows, length, alphabet)


def _ladder(num_slots: int, token_capacity: int) -> NgramIndex:
    sizes: Any = {"sizes": "ladder", "outcomes": True, "any_data": True}
    return NgramIndex(num_slots, token_capacity, min_n=1, max_n=16, **sizes)


def _at_once(tokens: Int32Array) -> NgramIndex:
    rows, length = tokens.shape
    index = _ladder(rows, tokens.size)
    index.append(tokens, np.full(rows, length, np.int32))
    return index


def _outcomes(index: NgramIndex, slot: int) -> list[int]:
    """The slot's outcomes, one byte per indexed token."""
    words = index.tensor
    state = _slot(words, slot)
    pages = state[OUTCOME_ROOT:][: state[OUTCOME_PAGES]]
    if state[OUTCOME_PAGES] > ROOT_PAGES:
        pages = page_of(words, state[OUTCOME_ROOT])[: state[OUTCOME_PAGES]]
    kept = [page_of(words, page).view(np.uint8) for page in pages]
    found: list[int] = np.concatenate([np.empty(0, np.uint8), *kept])[: state[LENGTH]].tolist()
    return found


def _step(index: NgramIndex, tokens: Int32Array, lengths: Int32Array, sampled: Int32Array) -> Any:
    return _C.ngram_index_step_(
        tokens, lengths, sampled, index.tensor, k=4, costs=COSTS, **LADDER,
    )  # fmt: skip


@pytest.mark.parametrize("alphabet", [1, 2, 5, 60])
def test_outcomes_and_candidates_are_the_definitions(alphabet: int) -> None:
    """In pieces of all sizes, some of them walked by steps."""
    tokens = _tokens(2, 400, alphabet)
    tokens[1, 200:] = tokens[1, :200]
    index = _ladder(2, tokens.size)
    lengths = np.zeros(2, np.int32)
    for length in (1, 2, 5, 14, 15, 16, 17, 40, 41, 300):
        lengths[:] = length
        index.append(tokens, lengths)
        _step(index, tokens, lengths, tokens[:, length : length + 3].copy())
        index.check_integrity({row: tokens[row, : lengths[row]] for row in (0, 1)})
    assert lengths.tolist() == [303, 303]
    for row in (0, 1):
        live = tokens[row, :303].tolist()
        q, match = candidate(live)
        assert _slot(index.tensor, row)[CANDIDATE] == q << 5 | match
        assert _outcomes(index, row) == outcome_bytes(live)
    index.reset(np.array([0, 1], np.int32))
    assert index.statistics.pages_in_use == 0
    index.check_integrity()


def _another_outcome(words: Int32Array) -> None:
    page_of(words, _slot(words, 0)[OUTCOME_ROOT]).view(np.uint8)[333] ^= 1


def _anothers_page(words: Int32Array) -> None:
    _slot(words, 0)[OUTCOME_ROOT] = _slot(words, 1)[OUTCOME_ROOT]


def _no_page(words: Int32Array) -> None:
    _slot(words, 0)[OUTCOME_ROOT] = words[2]


OTHER_CANDIDATE = "slot 0: the slot's candidate is not that of its row"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_another_outcome, "slot 0: a token's outcome is not that of its row"),
        (put(HEADER + CANDIDATE, lambda word: word ^ 1), OTHER_CANDIDATE),  # the match's length
        (put(HEADER + CANDIDATE, lambda word: word - 32), OTHER_CANDIDATE),  # its place
        (put(HEADER + CANDIDATE, lambda _: 0), OTHER_CANDIDATE),
        (_anothers_page, "belongs to another slot"),
        (_no_page, "belongs to another slot"),
        (put(HEADER + OUTCOME_PAGES, lambda n: n - 1), "number of pages does not match its pages"),
    ],
)
def test_a_broken_index_is_told(harm: Harm, message: str) -> None:
    tokens = _tokens()
    check_told(_at_once(tokens), tokens, harm, message)


def test_a_row_whose_outcomes_take_a_directory() -> None:
    """Caught up over steps or appended at once, page by page: the bytes are the same, and all pages
    are given back."""
    length = ROOT_PAGES * PAGE_BYTES + 5000
    tokens = _tokens(1, length + 5, 50)
    once, grown = _at_once(tokens[:, :length]), _ladder(1, length + 5)
    lengths = np.full(1, length - 3, np.int32)
    _step(grown, tokens, lengths, np.array([[-1]], np.int32))  # nothing sampled: nothing is built
    for i in range(3):
        _step(grown, tokens, lengths, tokens[:, length - 3 + i :][:, :1].copy())
    statistics = grown.statistics
    assert (statistics.rows_scanned_catching_up, statistics.rows_indexed) == (2, 1)
    assert _outcomes(grown, 0) == _outcomes(once, 0)
    assert len(_outcomes(grown, 0)) == length
    assert _slot(grown.tensor, 0)[CANDIDATE] == _slot(once.tensor, 0)[CANDIDATE] > 0
    for index in (once, grown):
        assert _slot(index.tensor, 0)[OUTCOME_PAGES] == ROOT_PAGES + 2
        index.check_integrity()
        index.reset(np.zeros(1, np.int32))
        assert index.statistics.pages_in_use == 0
        index.check_integrity()


def test_a_page_of_a_directory_that_is_anothers_is_told() -> None:
    tokens = _tokens(1, ROOT_PAGES * PAGE_BYTES + 1, 50)
    index = _at_once(tokens)
    ids = page_of(index.tensor, _slot(index.tensor, 0)[OUTCOME_ROOT])
    ids[ROOT_PAGES] = index.tensor[2]
    with pytest.raises(IntegrityError, match="belongs to another slot"):
        index.check_integrity()


@pytest.mark.parametrize("by_step", [False, True], ids=["append", "step"])
def test_a_row_cut_short_is_as_one_built_at_once(by_step: bool) -> None:
    tokens = _tokens(1, 9000, 20)
    index = _ladder(1, 9000)
    lengths = np.full(1, 9000, np.int32)
    index.append(tokens, lengths)
    pages = index.statistics.pages_in_use
    tokens[0, 300:] = tokens[0, :8700].copy()  # and goes on otherwise
    lengths[:] = 300
    if by_step:
        _step(index, tokens, lengths, tokens[:, 300:303].copy())
    else:
        lengths[:] = 303
        index.append(tokens, lengths)
    assert index.statistics.rebuilds_shorter == 1
    assert index.statistics.pages_in_use < pages
    once = _at_once(tokens[:, :303])
    assert _outcomes(index, 0) == _outcomes(once, 0) == outcome_bytes(tokens[0, :303].tolist())
    index.check_integrity({0: tokens[0, :303]})


def test_costs_where_there_were_none_build_a_slot_anew() -> None:
    tokens = _tokens(1, 300)
    index = _ladder(1, 300)
    lengths = np.full(1, 290, np.int32)
    one = np.ones((1, 1), np.int32)
    _C.ngram_index_step_(tokens, lengths, one, index.tensor, k=4, **LADDER)
    assert _outcomes(index, 0) == []
    _step(index, tokens, lengths, one)
    assert index.statistics.rebuilds_options == 1
    assert _outcomes(index, 0) == outcome_bytes(tokens[0, :292].tolist())


def test_a_row_without_room_is_indexed_once_there_is_some() -> None:
    """What it had is given back, the pages of outcomes too."""
    tokens = _tokens(2, 9000, 40)
    room = _at_once(tokens).statistics.pages_in_use
    index = _ladder(2, 0)
    index._words = index.tensor = np.zeros(_C.index_words(2, room * 4 // 5), np.int32)
    _C.index_init(index.tensor, 2)
    lengths = np.full(2, 8990, np.int32)
    index.append(tokens, lengths, slot_indices=np.array([1, 0], np.int32))
    assert index.statistics.slots_given_up == 1
    assert _slot(index.tensor, 0)[OUTCOME_PAGES] == 0
    assert _slot(index.tensor, 1)[OUTCOME_PAGES] == 3
    index.check_integrity()
    index.reset(np.array([1], np.int32))
    assert index.statistics.pages_in_use == 0
    lengths[0] = 0
    index.append(tokens, lengths, slot_indices=np.array([1, 0], np.int32))
    assert index.statistics.slots_given_up == 1
    assert _outcomes(index, 0) == _outcomes(_at_once(tokens[1:, :8990]), 0)
    index.check_integrity()


@pytest.mark.parametrize("by_step", [False, True], ids=["propose", "step"])
@pytest.mark.parametrize("fill", [False, True])
def test_rows_that_are_behind_draft_as_if_they_had_caught_up(fill: bool, by_step: bool) -> None:
    """Of 40,000 tokens a call indexes 32,768. Such a row is scanned, as is one without a slot, and
    yet drafts end where the outcomes of the whole row say."""
    rows, length = 5, 40_000
    tokens = text_rows(np.random.default_rng(8), rows, length + 1, 30)
    table = np.random.default_rng(9).integers(0, 60, (16, 32), np.uint8)
    no_outcomes = np.repeat(table[:, :1], 32, axis=1)
    lengths = np.full(rows, length, np.int32)

    def drafts(index: NgramIndex, costs: npt.NDArray[np.uint8], slots: list[int]) -> list[Any]:
        paid = np.zeros((rows, 8), np.uint8)
        options = {"k": 8, "costs": costs, "cost_limit": 99, "draft_costs": paid, "fill": fill}
        options |= {"slot_indices": np.array(slots, np.int32), "overlap": True, **LADDER}
        if by_step:
            new = tokens[:, length:].copy()
            made = _C.ngram_index_step_(tokens, lengths.copy(), new, index.tensor, **options)[2:]
        else:
            made = _C.ngram_index_propose_(tokens, lengths + 1, index.tensor, **options)
        return [*made, paid]

    caught_up, behind = _ladder(rows, tokens.size), _ladder(rows, tokens.size)
    caught_up.append(tokens, lengths)
    expected = drafts(caught_up, table, list(range(rows)))
    assert caught_up.statistics.rows_indexed == rows
    assert expected[1].min() < expected[1].max()
    for slots in (list(range(rows)), [-1] * rows):
        for mine, truth in zip(drafts(behind, table, slots), expected, strict=True):
            assert np.array_equal(mine, truth)
        # The outcomes do decide.
        assert not np.array_equal(drafts(behind, no_outcomes, slots)[3], expected[3])
    assert behind.statistics.rows_scanned_catching_up >= rows
    assert behind.statistics.rows_scanned_other == 2 * rows


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
